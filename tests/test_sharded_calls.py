"""Operations on arrays that are split over devices, outside `jax.shard_map`: results are those of one device and stay
split, nothing is exchanged, and what would make XLA copy a cache is refused."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn import sharded_calls
from tests.ops import harness

DATA, TENSOR = 2, 4
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
N, PS, HKV, HQ, D, L, R, B = 16, 4, 4, 8, 16, 12, 4, 4
KV_LENS = np.array([3, 16, 7, 0], np.int32)
CU_Q_LENS = np.array([0, 2, 5, 6, 6], np.int32)
T = int(CU_Q_LENS[-1])
SLOTS = np.array([3, 9, -1, 40, 41, 42], np.int32)


def mesh_of(kind: str, **axes: int) -> jax.sharding.Mesh:
    sizes = axes or {"data": DATA, "tensor": TENSOR}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(TYPES[kind],) * len(sizes))


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def kv_of(scales: Any = None) -> pa.PagedKV:
    sizes: dict[str, Any] = {"num_pages": N, "page_size": PS, "num_kv_heads": HKV, "head_dim": D}
    if scales is None:
        return pa.PagedKV(values(N, HKV, PS, D), values(N, HKV, PS, D) + 1)
    spec = pa.kv_cache_spec(**sizes, dtype=jnp.int8, scales=scales)
    slots = jnp.arange(N * PS, dtype=jnp.int32)
    return pa.write_kv(pa.PagedKV.allocate(spec), values(N * PS, HKV, D), values(N * PS, HKV, D), slots)


def latents() -> pa.PagedLatent:
    return pa.PagedLatent(values(N, PS, L + R))


def index_keys() -> pa.PagedIndexKeys:
    return pa.PagedIndexKeys(values(N, PS, D))


TABLES = np.random.default_rng(0).permutation(N).reshape(B, N // B).astype(np.int32)
PACKED: dict[str, Any] = {"block_tables": TABLES, "cu_q_lens": CU_Q_LENS, "kv_lens": KV_LENS}
HEADS, KV_HEADS, BATCH = P(None, None, "tensor"), P(None, "tensor"), P("data")
BOTH = P("data", None, "tensor")


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation's arguments, and how arrays are split: a spec for each argument, or for each array of it.

    Attributes:
      results: specs of the results.
      pools: name of an argument that is written, which is donated.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    specs: Mapping[str, Any]
    results: Any
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: str | None = None


def of_kv(kv: pa.PagedKV) -> pa.PagedKV:
    return pa.parallel.kv_partition(kv, heads="tensor")


DECODE = {"q": values(B, 1, HQ, D), "kv": kv_of(), "block_tables": TABLES, "kv_lens": KV_LENS}
LATENT_DECODE = {
    **{"q_latent": values(B, 2, HQ, L), "q_rope": values(B, 2, HQ, R), "cache": latents()},
    **{"block_tables": TABLES, "kv_lens": KV_LENS, "q_lens": np.array([1, 2, 2, 0], np.int32)},
}
WRITE = {"kv": kv_of(), "k": values(T, HKV, D), "v": values(T, HKV, D), "slots": SLOTS}
NEW = {"q": values(T, HQ, D), "k": values(T, HKV, D), "v": values(T, HKV, D), "kv": kv_of()}
OF_NEW = {"q": KV_HEADS, "k": KV_HEADS, "v": KV_HEADS, "kv": of_kv(kv_of())}
LSE = {"return_lse": True}
SCALED = {"sm_scale": 0.2}
WINDOWS = pa.HeadWindow(jnp.array([3, 5, pa.FULL, 9], jnp.int32), jnp.array([0, 1, 0, 2], jnp.int32))


def decode_case(q: P, batch: P, results: P, *, kv: Any = None, **more: Any) -> Case:
    kv = kv_of() if kv is None else kv
    arguments = {**DECODE, "kv": kv, **more}
    specs = {"q": q, "kv": of_kv(kv), "block_tables": batch, "kv_lens": batch}
    return Case(pa.paged_decode, arguments, specs, (results, results), LSE)


def write_case(scales: Any) -> Case:
    kv = kv_of(scales)
    specs = {"kv": of_kv(kv), "k": KV_HEADS, "v": KV_HEADS}
    return Case(pa.write_kv, {**WRITE, "kv": kv}, specs, specs["kv"], written="kv")


def latent_case(q: P, batch: P) -> Case:
    specs = {"q_latent": q, "q_rope": q, "block_tables": batch, "kv_lens": batch, "q_lens": batch}
    return Case(pa.mla_decode, LATENT_DECODE, specs, (q, q), {**SCALED, **LSE})


CASES: dict[str, Case] = {
    "decode, heads and sequences": decode_case(BOTH, BATCH, BOTH),
    "decode, sequences by their lengths": Case(
        pa.paged_decode, DECODE, {"kv_lens": P("tensor")}, (P("tensor"), P("tensor")), LSE
    ),
    "decode, a KV head on two devices": decode_case(
        P(None, None, ("tensor", "data")), P(), P(None, None, ("tensor", "data"))
    ),
    "decode, windows and scales of heads, sinks": decode_case(
        HEADS, P(), HEADS, kv=kv_of("head"), window=WINDOWS, sinks=values(HQ)
    ),
    "latents, heads": latent_case(HEADS, P()),
    "latents, heads and sequences": latent_case(BOTH, BATCH),
    "prefill": Case(
        pa.paged_prefill,
        {"q": NEW["q"], "kv": kv_of(2), **PACKED},
        {"q": KV_HEADS, "kv": of_kv(kv_of(2))},
        (KV_HEADS, KV_HEADS),
        LSE,
    ),
    "packed sequences": Case(
        pa.ragged_attention,
        {name: NEW[name] for name in "qkv"} | {"cu_q_lens": CU_Q_LENS, "cu_kv_lens": CU_Q_LENS},
        {name: KV_HEADS for name in "qkv"},
        (KV_HEADS, KV_HEADS),
        LSE,
    ),
    "write": write_case(None),
    "write, scales of groups": write_case(2),
    "write, rope and queries": Case(
        pa.write_kv,
        {**WRITE, "q": NEW["q"], "rope": pa.Rope(values(T, D // 2), values(T, D // 2))},
        {"kv": of_kv(kv_of()), "k": KV_HEADS, "v": KV_HEADS, "q": KV_HEADS},
        (of_kv(kv_of()), KV_HEADS),
        written="kv",
    ),
    "latents written": Case(
        pa.write_latent, {"cache": latents(), "latent": values(T, L + R), "slots": SLOTS}, {}, pa.PagedLatent(P()), written="cache"
    ),
    "latents gathered": Case(
        pa.gather_latent, {"cache": latents(), "latent_new": values(T, L + R), **PACKED}, {}, P(), {"length": 32}
    ),
    "index keys written": Case(
        pa.write_index_keys, {"index": index_keys(), "keys": values(T, D), "slots": SLOTS}, {}, pa.PagedIndexKeys(P()), written="index"
    ),
    "scores": Case(
        pa.index_scores,
        {"q": values(T, 2, D), "weights": values(T, 2), "index": index_keys(), **PACKED},
        {},
        P(),
    ),
    "choice of keys": Case(
        pa.index_top_k,
        {"q": values(T, 2, D), "weights": values(T, 2), "index": index_keys(), **PACKED},
        {},
        P(),
        {"top_k": 3},
    ),
    "choice by scores": Case(pa.select_top_k, {"scores": values(8, 32)}, {"scores": BATCH}, BATCH, {"top_k": 3}),
    "chosen latents": Case(
        pa.mla_sparse,
        {"q_latent": values(4, HQ, L), "q_rope": values(4, HQ, R), "cache": latents(), "slots": TABLES * PS},
        {"q_latent": P("data", "tensor"), "q_rope": P("data", "tensor"), "slots": BATCH},
        (P("data", "tensor"), P("data", "tensor")),
        {**SCALED, **LSE},
    ),
    "a shared prefix": Case(
        pa.cascade_decode,
        {**DECODE, "block_tables": np.where(np.arange(4) < 1, 5, TABLES).astype(np.int32)},
        {"q": BOTH, "kv": of_kv(kv_of()), "block_tables": BATCH, "kv_lens": BATCH},
        (BOTH, BOTH),
        LSE,
    ),
    "a step of both": Case(
        pa.ragged_paged_attention,
        {**NEW, "kv_lens": KV_LENS, "page_indices": TABLES, "cu_q_lens": CU_Q_LENS},
        OF_NEW,
        (KV_HEADS, of_kv(kv_of())),
        written="kv",
    ),
    "a step of both over latents": Case(
        pa.mla_ragged_paged_attention,
        {
            **{"q_latent": values(T, HQ, L), "q_rope": values(T, HQ, R), "cache": latents()},
            **{"new_latent": values(T, L), "new_rope": values(T, R)},
            **{"kv_lens": KV_LENS, "page_indices": TABLES, "cu_q_lens": CU_Q_LENS},
        },
        {"q_latent": KV_HEADS, "q_rope": KV_HEADS},
        (KV_HEADS, pa.PagedLatent(P())),
        SCALED,
        written="cache",
    ),
    "prefill of latents": Case(
        pa.mla_prefill,
        {
            **{"q_nope": values(T, HQ, 6), "q_rope": values(T, HQ, R), "latent_new": values(T, L + R)},
            **{"cache": latents(), "w_uk": values(HQ, 6, L), "w_uv": values(HQ, 5, L), **PACKED},
        },
        {"q_nope": KV_HEADS, "q_rope": KV_HEADS, "w_uk": P("tensor"), "w_uv": P("tensor")},
        (KV_HEADS, KV_HEADS),
        {**SCALED, **LSE},
    ),
}
IN_EVERY_RUN = {
    "auto": ("decode, heads and sequences", "latents, heads and sequences", "write, scales of groups"),
    "explicit": ("decode, a KV head on two devices", "a step of both", "chosen latents"),
}
"""The others differ from these in the operation alone, whose arrays `test_splits_of_every_operation` looks at."""


def placed(case: Case, mesh: jax.sharding.Mesh, **others: Any) -> dict[str, Any]:
    """The arguments on the mesh, copies of what a test may donate."""
    specs = {**case.specs, **others}

    def put(name: str, value: Any) -> Any:
        spec = specs.get(name, P())
        arrays = jax.tree.map(jnp.copy, value)
        if isinstance(spec, P):
            return jax.device_put(arrays, NamedSharding(mesh, spec))
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), arrays, spec)

    return {name: put(name, value) for name, value in case.arguments.items()}


def collectives(text: str) -> list[str]:
    """What devices exchange in a compiled module."""
    return re.findall(r"= \S+ (all-[a-z-]+|collective-[a-z-]+|reduce-scatter|ragged-all-to-all)[a-z-]*\(", text)


def jitted(case: Case, implementation: str | None = "xla") -> Any:
    function = functools.partial(case.function, **case.static, implementation=implementation)
    return jax.jit(function, donate_argnames=case.written)


def params(kinds: Mapping[str, tuple[str, ...]] = IN_EVERY_RUN) -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if name in kinds[kind] else pytest.mark.slow)
        for kind in TYPES
        for name in CASES
    ]


@pytest.mark.parametrize(("kind", "name"), params())
def test_results_are_those_of_one_device_and_stay_split(kind: str, name: str) -> None:
    case, mesh = CASES[name], mesh_of(kind)
    want = jitted(case)(**jax.tree.map(jnp.array, dict(case.arguments)))
    arguments = placed(case, mesh)
    compiled = jitted(case).lower(**arguments).compile()
    assert collectives(compiled.as_text()) == []
    got = compiled(**arguments)
    for array, spec in zip(jax.tree.leaves(got), jax.tree.leaves(case.results), strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), got, want)
    if case.written:  # in place, and nothing of a pool's size beside it
        pools = jax.tree.leaves(case.arguments[case.written])
        on_device = compiled.memory_analysis().alias_size_in_bytes
        assert on_device >= sum(x.nbytes for x in pools) // (TENSOR if case.specs else 1)
