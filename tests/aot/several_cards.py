"""Compiles decode over contexts split over two cards; prints, for each kind of cache, what the cards exchange.

python -m tests.aot.several_cards  # in the environment of tests/aot/environment.py
"""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_attn import PagedKV, PagedLatent, kv_cache_spec, latent_cache_spec, mla_decode, paged_decode, parallel
from tests.aot import device

SPLIT, WHOLE = PartitionSpec("context"), PartitionSpec()


def mesh() -> Mesh:
    """Two H200s."""
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x2", target_config=device.H200)
    return Mesh(np.array(described.devices), ("context",))


def exchanges(cards: Mesh, operation: Any, queries: list[Any], cache: Any, **options: Any) -> list[str]:
    """Collective operations of the compiled call, in the order of its text."""

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
    text = str(jax.jit(run).lower(of_queries, split, *metadata).compile().as_text())
    if "mosaic_gpu" not in text:
        raise ValueError("expected a kernel in the compiled call, found none")
    found = re.findall(r" (all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\(", text)
    return [name.removesuffix("-start") for name in found if not name.endswith("-done")]


def main() -> None:
    cards, dtype = mesh(), jnp.bfloat16
    heads = kv_cache_spec(num_pages=1024, page_size=64, num_kv_heads=8, head_dim=128, dtype=dtype)
    latents = latent_cache_spec(num_pages=1024, page_size=64, latent_dim=512, rope_dim=64, dtype=dtype)
    kv, cache = jax.eval_shape(lambda: (PagedKV.allocate(heads), PagedLatent.allocate(latents)))
    q, *q_of_latents = (jax.ShapeDtypeStruct((64, 1, *dims), dtype) for dims in ((32, 128), (16, 512), (16, 64)))
    found = {
        "heads": exchanges(cards, paged_decode, [q], kv),
        "latents": exchanges(cards, mla_decode, q_of_latents, cache, sm_scale=0.1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
