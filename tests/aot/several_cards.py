"""Compile programs for two H200s, without GPUs, and print the collective operations of each as JSON.

python -m tests.aot.several_cards contexts|plain|steps

- contexts: decode with the tokens of each sequence split over the GPUs.
- plain: operations in a `jax.jit` without `shard_map`, on arrays whose heads or sequences are split.
- steps: engine steps of models whose heads or experts are split.

The process needs the variables of tests/aot/environment.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_attn import (
    PagedKV,
    PagedLatent,
    kv_cache_spec,
    latent_cache_spec,
    mla_decode,
    paged_decode,
    parallel,
    write_kv,
)
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, over_mesh, split_model
from pallas_attn.models.decoder.mesh import DATA, HEADS, TENSOR, cache_partition, normal_mesh, num_devices
from pallas_attn.models.engine.compile_options import gpu_options
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.group_sizes import group_sizes
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import StepOutputs, forward
from tests.aot import device, engine

SPLIT, WHOLE = PartitionSpec("context"), PartitionSpec()


def mesh(axis: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh of two H200s with one axis."""
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x2", target_config=device.H200)
    return Mesh(np.array(described.devices), (axis,), axis_types=(kind,))


def collectives(text: str) -> list[str]:
    """Return the names of the collective operations of a compiled program, in the order of its text.

    Raises:
      ValueError: the program has no Mosaic or Triton kernel, so the check would be meaningless.

    """
    if not re.search("mosaic_gpu|triton_kernel_call", text):
        raise ValueError("expected a kernel in the compiled call, found none")
    found = re.findall(r" (all-[a-z-]+|ragged-all-to-all[a-z-]*|reduce-scatter[a-z-]*|collective-[a-z-]+)\(", text)
    return [name.removesuffix("-start") for name in found if not name.endswith("-done")]


def exchanges(cards: Mesh, operation: Any, queries: list[Any], cache: Any, **options: Any) -> list[str]:
    """Return the collective operations of `parallel.decode_over_contexts`. The cache is split, all other arguments are
    replicated.
    """

    def shape(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(cards, spec))

    def decode(queries: Any, cache: Any, block_tables: Any, kv_lens: Any) -> Any:
        return parallel.decode_over_contexts(
            operation, queries, cache, block_tables, kv_lens, axis="context", implementation="mosaic", **options
        )

    whole = (queries, jax.ShapeDtypeStruct((64, 16), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32))
    of_queries, *metadata = jax.tree.map(lambda x: shape(x, WHOLE), whole)
    split = jax.tree.map(lambda x: shape(x, SPLIT), cache)
    specs = (WHOLE, SPLIT, WHOLE, WHOLE)
    run = jax.shard_map(decode, mesh=cards, in_specs=specs, out_specs=PartitionSpec(None, None, "context"))
    return collectives(str(jax.jit(run).lower(of_queries, split, *metadata).compile().as_text()))


def exchanges_of_step(config: ModelConfig, bucket: Bucket, axis: str = TENSOR) -> dict[str, int]:
    """Return the number of collective operations, by name, in the forward program of a step on two GPUs along the mesh
    axis `axis`."""
    cards, settings, sizes = normal_mesh(mesh(axis)), AttentionSettings(implementation="mosaic"), engine.SIZES
    whole, model = (
        nnx.eval_shape(lambda over=over: Decoder(config, settings, jnp.bfloat16, over)) for over in (None, cards)
    )
    groups = group_sizes(
        model.part,
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        max_model_len=sizes.table_pages * sizes.page_size,
        max_num_seqs=sizes.max_num_seqs,
        step_tokens=sizes.prefill_buckets[-1],
        recycling=True,
    )
    sizes = dataclasses.replace(sizes, groups=groups)
    pages = sizes.layer_pages(config.num_hidden_layers)
    caches = cache_partition(model.part, [model.cache_spec(n, sizes.page_size) for n in pages], model.contexts)

    def shape(own: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        axes = [
            size * num_devices(cards, (axes,) if isinstance(axes, str) else axes or ())
            for size, axes in zip(own.shape, [*spec, *[None] * own.ndim], strict=False)
        ]
        return jax.ShapeDtypeStruct(axes, own.dtype, sharding=NamedSharding(cards, spec))

    leaves = zip(*(jax.tree.leaves(nnx.state(m)) for m in (whole, model)), strict=True)
    specs = [PartitionSpec(HEADS) if one.shape != own.shape else WHOLE for one, own in leaves]
    run, _ = split_model(model)
    weights = jax.tree.leaves(nnx.state(model))
    arguments = (specs, caches, WHOLE, WHOLE)
    own = (
        weights,
        jax.eval_shape(lambda: model.allocate_caches(pages, sizes.page_size)),
        jax.ShapeDtypeStruct((sizes.max_num_seqs,), jnp.int32),
        jax.ShapeDtypeStruct((PackedStep.size(sizes, bucket),), jnp.int32),
    )

    def step(*given: Any) -> Any:
        return forward(run, sizes, bucket, *given)

    split = over_mesh(step, cards, arguments, (StepOutputs(*[WHOLE] * len(StepOutputs._fields)), caches))
    lowered = jax.jit(split, donate_argnums=1).lower(*jax.tree.map(shape, own, arguments))
    return dict(Counter(collectives(str(lowered.compile(gpu_options(on_mesh=True)).as_text()))))


STEPS: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (dataclasses.replace(engine.GPT_OSS, windows=(engine.HEADS, None)), engine.MIXED),
    "v2-lite": (engine.V2_LITE, engine.MIXED),
    "v2-lite, experts of data ranks": (engine.V2_LITE, engine.MIXED, DATA),
}
"""Arguments of `exchanges_of_step` by name: model, bucket and mesh axis."""


def contexts() -> dict[str, list[str]]:
    """Return the collective operations of decode with split contexts, for keys and values ("heads") and for latents."""
    cards, dtype = mesh("context"), jnp.bfloat16
    heads = kv_cache_spec(num_pages=1024, page_size=64, num_kv_heads=8, head_dim=128, dtype=dtype)
    latents = latent_cache_spec(num_pages=1024, page_size=64, latent_dim=512, rope_dim=64, dtype=dtype)
    kv, cache = jax.eval_shape(lambda: (PagedKV.allocate(heads), PagedLatent.allocate(latents)))
    q, *q_of_latents = (jax.ShapeDtypeStruct((64, 1, *dims), dtype) for dims in ((32, 128), (16, 512), (16, 64)))
    return {
        "heads": exchanges(cards, paged_decode, [q], kv),
        "latents": exchanges(cards, mla_decode, q_of_latents, cache, sm_scale=0.1),
    }


def plain() -> dict[str, Any]:
    """Compile operations in a `jax.jit` without `shard_map`, on arrays whose heads or sequences are split.

    Return, for each implementation, type of mesh axes and operation, the collective operations and the copies of a
    GPU's part of the cache.
    """
    dtype, found = jnp.bfloat16, {}
    spec = kv_cache_spec(num_pages=1024, page_size=64, num_kv_heads=8, head_dim=128, dtype=dtype)
    kv = jax.eval_shape(lambda: PagedKV.allocate(spec))
    latents = latent_cache_spec(num_pages=1024, page_size=64, latent_dim=512, rope_dim=64, dtype=dtype)
    cache = jax.eval_shape(lambda: PagedLatent.allocate(latents))
    tables, lens, slots = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 16), (64,), (64,)))
    q, q_latent, q_rope, new = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in ((64, 1, 32, 128), (64, 1, 128, 512), (64, 1, 128, 64), (64, 8, 128))
    )
    heads, kv_heads = PartitionSpec(None, None, "context"), PartitionSpec(None, "context")
    latent = [q_latent, q_rope, cache, tables, lens]
    calls: dict[str, tuple[Any, list[Any], list[PartitionSpec], dict[str, Any]]] = {
        "decode": (paged_decode, [q, kv, tables, lens], [heads, kv_heads, WHOLE, WHOLE], {}),
        "latents": (mla_decode, latent, [heads, heads, WHOLE, WHOLE, WHOLE], {"sm_scale": 0.1}),
        "latents, sequences": (mla_decode, latent, [SPLIT, SPLIT, WHOLE, SPLIT, SPLIT], {"sm_scale": 0.1}),
        "write": (write_kv, [kv, new, new, slots], [kv_heads, kv_heads, kv_heads, WHOLE], {}),
    }
    for implementation, kind in itertools.product(("mosaic", "triton"), (AxisType.Auto, AxisType.Explicit)):
        cards = mesh("context", kind)
        for name, (operation, arrays, specs, static) in calls.items():

            def place(tree: Any, spec: PartitionSpec, cards: Mesh = cards) -> Any:
                sharding = NamedSharding(cards, spec)
                return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

            run = jax.jit(
                functools.partial(operation, **static, implementation=implementation),
                donate_argnums=0 if name == "write" else (),
            )
            text = str(run.lower(*map(place, arrays, specs)).compile().as_text())
            copies = re.findall(r"= bf16\[1024,\d+,64,128\]\S* copy\(", text)
            found[f"{implementation}, {kind.name}, {name}"] = [*collectives(text), *copies]
    return found


def steps() -> dict[str, dict[str, int]]:
    return {name: exchanges_of_step(*step) for name, step in STEPS.items()}


if __name__ == "__main__":
    print(json.dumps({"contexts": contexts, "plain": plain, "steps": steps}[sys.argv[1]]()))
