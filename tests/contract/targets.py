"""Small valid calls of every operation, for tests of properties that all operations have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import (
    FULL,
    HeadWindow,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    SlotRange,
    gather_latent,
    index_scores,
    index_top_k,
    mla_decode,
    mla_sparse,
    paged_decode,
    paged_prefill,
    ragged_attention,
    select_top_k,
    write_index_keys,
    write_kv,
    write_latent,
)
from tests.contract import backends
from tests.contract.backends import BACKENDS, Backend
from tests.kit import harness

B, Q, P, PS, N, HKV, HQ, D = 3, 2, 4, 16, 12, 2, 4, 64
"""Sizes of the calls: sequences, queries per sequence in decode, pages per sequence, page size, pages of the pool, KV
heads, query heads, head dimension.
"""

REFERENCE = next(backend for backend in BACKENDS if backend.name == "reference")

type Change = tuple[str, int, int]
"""Name of an array argument, flat index in the array (modulo its size), and the number to store there."""


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """An operation with valid arguments.

    Attributes:
      function: the operation.
      arrays: array arguments by name.
      metadata: names of the arguments that tests fill with invalid numbers: lengths, block tables, slots, "window" for
      both arrays of a `HeadWindow`, and names such as "slots.first" for an array of a `SlotRange`.
      static: other arguments by name.
      exact: whether all implementations must return the same bits.
      unsupported: ids of the backends that do not support the call.
    """

    function: Callable[..., Any]
    arrays: Mapping[str, Any]
    metadata: tuple[str, ...]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = False
    unsupported: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        return self.function.__name__

    def supports(self, backend: Backend) -> bool:
        """Return whether a backend of the operation supports the call."""
        return backend.id not in self.unsupported

    def changed(self, changes: list[Change]) -> dict[str, Any]:
        arrays = dict(self.arrays)
        for name, place, value in changes:
            if name == "window":
                fields = [np.array(x) for x in (arrays[name].window, arrays[name].sink_tokens)]
                fields[place % 2].flat[place // 2 % HKV] = value
                arrays[name] = HeadWindow(*map(jnp.asarray, fields))
                continue
            if "." in name:
                name, field = name.split(".")
                changed = np.array(getattr(arrays[name], field))
                changed.flat[place % changed.size] = value
                arrays[name] = dataclasses.replace(arrays[name], **{field: changed})
                continue
            arrays[name] = np.array(arrays[name])
            arrays[name].flat[place % arrays[name].size] = value
        return arrays

    def run(self, backend: Backend, arrays: Mapping[str, Any]) -> Any:
        static = dict(self.static)
        if backend is REFERENCE and not self.exact:
            static["out_dtype"] = "float32"
        if backend.plans and self.op.endswith("_decode"):
            plan = backends.plan_of(backend, arrays, num_programs=3, mode="balanced")
            arrays = {**arrays, "plan": plan}
        return jax.tree.map(np.asarray, backends.call(self.function, backend, arrays, **static))


def values(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> Any:
    drawn = harness.HALF_SCALE * np.random.default_rng((*shape, seed)).standard_normal(shape)
    return jnp.asarray(drawn.astype(dtype))  # a cast by jax would compile for each shape


def ints(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


TABLES = ints([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 3])
HEAD_TABLES = np.random.default_rng(0).permutation(N * HKV)[: B * HKV * P].reshape(B, HKV, P).astype(np.int32)
KV_LENS, CU_Q_LENS = ints(37, 64, 2), ints(0, 5, 5, 7)
KV = PagedKV(values(N, HKV, PS, D), values(N, HKV, PS, D, seed=1))
SCALES = jnp.asarray(np.random.default_rng(1).uniform(0.002, 0.03, (N, HKV, 4)), jnp.float32)
INT8 = PagedKV(
    k=jnp.asarray(100 * KV.k.astype(jnp.float32), jnp.int8),
    v=jnp.asarray(100 * KV.v.astype(jnp.float32), jnp.int8),
    k_scale=SCALES,
    v_scale=SCALES,
)
LATENTS = PagedLatent(values(N, PS, 160))
LATENTS_8BIT = PagedLatent(
    pages=values(N, PS, 256, seed=1, dtype=jnp.float32).astype(jnp.float8_e4m3fn),
    scale=jnp.asarray(np.random.default_rng(2).uniform(0.5, 2.0, (N, PS, 2)), jnp.float32),
    rope=values(N, PS, 32, seed=2),
)
# Every kernel of `mla_sparse` supports these widths. Scales are powers of two, so that 16-bit floats represent the
# dequantised latents exactly.
CHOSEN = PagedLatent(values(N, PS, 192))
CHOSEN_8BIT = PagedLatent(
    pages=LATENTS_8BIT.pages,
    scale=jnp.asarray(2.0 ** np.random.default_rng(2).integers(-1, 2, (N, PS, 2)), jnp.float32),
    rope=values(N, PS, 64, seed=2),
)
RECORDS = PagedLatent(
    pages=values(N, PS, 128, seed=1, dtype=jnp.float32).astype(jnp.float8_e4m3fn),
    scale=jnp.asarray(2.0 ** np.random.default_rng(2).integers(-1, 2, (N, PS, 2)), jnp.float8_e8m0fnu),
    rope=values(N, PS, 64, seed=2),
)
# Small integers: scores are exact in any order of summation, so all implementations must select the same keys.
INDEX = PagedIndexKeys(jnp.asarray(np.random.default_rng(3).integers(-3, 4, (N, PS, 32)), jnp.bfloat16))
INDEX_8BIT = PagedIndexKeys(
    INDEX.keys.astype(jnp.float8_e4m3fn), jnp.asarray(2.0 ** np.random.default_rng(4).integers(-1, 2, (N, PS, 1)), "f4")
)
DECODE = {"q": 8 * values(B, Q, HQ, D), "kv": KV, "block_tables": TABLES, "kv_lens": KV_LENS, "q_lens": ints(2, 1, 2)}
LENGTHS = ("block_tables", "kv_lens", "q_lens")
SUMS = ("block_tables", "kv_lens", "cu_q_lens")
PREFILL = {"q": 8 * values(9, HQ, D), "kv": KV, "block_tables": TABLES, "cu_q_lens": CU_Q_LENS, "kv_lens": KV_LENS}
WINDOWS = {
    "block_tables": HEAD_TABLES,
    "window": HeadWindow(jnp.asarray([FULL, 20], jnp.int32), jnp.asarray([0, 3], jnp.int32)),
}
LSE = {"return_lse": True}
SLOTS = ints(*range(17, 26))


def mla(heads: int, cache: PagedLatent = LATENTS) -> dict[str, Any]:
    q_latent, q_rope = 8 * values(B, Q, heads, cache.width - 32), 8 * values(B, Q, heads, 32)
    return {**DECODE, "q_latent": q_latent, "q_rope": q_rope, "cache": cache}


def latent_prefill(cache: PagedLatent) -> dict[str, Any]:
    """Return the arguments of `mla_prefill` in float32, without block tables and lengths."""
    width = cache.width - 32
    return {
        "q_nope": values(9, 2, 32, dtype=jnp.float32),
        "q_rope": values(9, 2, 32, seed=1, dtype=jnp.float32),
        "latent_new": values(9, cache.width, dtype=jnp.float32),
        "cache": cache,
        "w_uk": values(2, 32, width, dtype=jnp.float32),
        "w_uv": values(2, 16, width, seed=1, dtype=jnp.float32),
    }


LATENTS_F32 = PagedLatent(LATENTS.pages.astype(jnp.float32))


def indexed(index: PagedIndexKeys) -> dict[str, Any]:
    """Return arguments of `index_scores` and `index_top_k` that are small integers, so that scores are exact."""
    q, weights = (np.random.default_rng(5).integers(-3, 4, shape) for shape in ((9, HQ, 32), (9, HQ)))
    arrays = {"q": jnp.asarray(q, jnp.bfloat16), "weights": jnp.asarray(weights, jnp.float32), "index": index}
    return arrays | {name: PREFILL[name] for name in SUMS}


def chosen(cache: PagedLatent) -> dict[str, Any]:
    """Return arguments of `mla_sparse` with 20 slots per token, some of which are -1 (no token)."""
    width, rng = cache.width - 64, np.random.default_rng(6)
    slots = np.stack([rng.permutation(N * PS)[:20] for _ in range(9)]).astype(np.int32)
    slots[3], slots[5, 7:], slots[6, ::3] = -1, -1, -1
    return {"q_latent": 8 * values(9, HQ, width), "q_rope": 8 * values(9, HQ, 64), "cache": cache, "slots": slots}


def chosen_of_two(cache: PagedLatent) -> dict[str, Any]:
    """Return arguments of `mla_sparse` with a second cache of two pages less, 17 slots of it per token, and sinks. Some
    of these slots are outside the second pool, but not outside the first."""
    rng, extra_cache = np.random.default_rng(7), jax.tree.map(lambda x: x[2:], cache)
    extra_slots = np.stack([rng.permutation((N - 2) * PS)[:17] for _ in range(9)]).astype(np.int32)
    extra_slots[2], extra_slots[6], extra_slots[7, ::2], extra_slots[4, ::5] = -1, -1, -1, N * PS - 1
    sinks = values(HQ, dtype=jnp.float32)
    return {**chosen(cache), "extra_cache": extra_cache, "extra_slots": extra_slots, "sinks": sinks}


def ranges_of_two(cache: PagedLatent) -> dict[str, Any]:
    """Return the arguments of `chosen_of_two` with ranges of keys. The second cache has pages of 4 tokens."""
    arrays = chosen_of_two(cache)
    arrays["extra_cache"] = jax.tree.map(lambda x: x.reshape(-1, 4, x.shape[-1]), arrays["extra_cache"])
    sequence, first = ints(0, 0, 0, 0, 0, 2, 2, 1, 1), ints(0, 1, 17, 40, 63, 5, 0, 30, 31)
    extra = np.random.default_rng(8).permutation((N - 2) * 4)[: 3 * 8].reshape(3, 8).astype(np.int32)
    fields: Any = {
        "slots": (TABLES, sequence, first, ints(20, 20, 20, 20, 1, 9, 0, 3, 20)),
        "extra_slots": (extra, sequence, first // 4, ints(17, 17, 5, 0, 0, 1, 0, 16, 17)),
    }
    for name, (tables, *tokens) in fields.items():
        arrays[name] = SlotRange(tables, *tokens, size=int(tokens[-1].max()))
    return arrays


RANGES = tuple(
    f"{name}.{field}" for name in ("slots", "extra_slots") for field in ("block_tables", "sequence", "first", "count")
)


def without(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name not in names}


TARGETS = {
    "decode": Target(paged_decode, DECODE, LENGTHS, LSE),
    "decode of heads": Target(paged_decode, {**DECODE, **WINDOWS}, (*LENGTHS, "window"), LSE),
    "decode, int8": Target(paged_decode, {**DECODE, "kv": INT8}, LENGTHS, LSE),
    "latents, few heads": Target(mla_decode, without(mla(4), "q", "kv"), LENGTHS, {"sm_scale": 0.125, **LSE}),
    "latents, many heads": Target(mla_decode, without(mla(40), "q", "kv"), LENGTHS, {"sm_scale": 0.125, **LSE}),
    "latents, 8 bits": Target(
        mla_decode,
        without(mla(4, LATENTS_8BIT), "q", "kv"),
        LENGTHS,
        {"sm_scale": 0.125, **LSE},
        unsupported=("mosaic_sm100",),
    ),
    "prefill": Target(paged_prefill, PREFILL, SUMS, LSE),
    "prefill of heads": Target(paged_prefill, {**PREFILL, **WINDOWS}, (*SUMS, "window"), LSE),
    "prefill, int8": Target(paged_prefill, {**PREFILL, "kv": INT8}, SUMS, LSE),
    "ragged": Target(
        ragged_attention,
        {
            "q": 8 * values(9, HQ, D),
            "k": values(70, HKV, D),
            "v": values(70, HKV, D, seed=1),
            "cu_q_lens": CU_Q_LENS,
            "cu_kv_lens": ints(0, 31, 40, 66),
        },
        ("cu_q_lens", "cu_kv_lens"),
        LSE,
    ),
    "gather": Target(
        gather_latent,
        {"cache": LATENTS, "latent_new": values(9, 160), **without(PREFILL, "q", "kv")},
        SUMS,
        {"length": 80},
        exact=True,
    ),
    "gather, 8 bits": Target(
        gather_latent,
        {"cache": LATENTS_8BIT, "latent_new": values(9, 288), **without(PREFILL, "q", "kv")},
        SUMS,
        {"length": 80},
        exact=True,
        unsupported=("mosaic", "mosaic_sm100"),
    ),
    "write": Target(
        write_kv,
        {"kv": KV, "k": values(9, HKV, D, seed=2), "v": values(9, HKV, D), "slots": SLOTS},
        ("slots",),
        exact=True,
    ),
    "write of heads, int8": Target(
        write_kv,
        {"kv": INT8, "k": values(9, HKV, D, seed=2), "v": values(9, HKV, D), "slots": np.stack([SLOTS, SLOTS + 70], 1)},
        ("slots",),
        exact=True,
    ),
    "write of latents": Target(
        write_latent, {"cache": LATENTS, "latent": values(9, 160, seed=2), "slots": SLOTS}, ("slots",), exact=True
    ),
    "write of latents, 8 bits": Target(
        write_latent,
        {"cache": LATENTS_8BIT, "latent": values(9, 288, seed=2), "slots": SLOTS},
        ("slots",),
        exact=True,
        unsupported=("mosaic", "mosaic_sm100"),
    ),
    "index scores": Target(index_scores, indexed(INDEX), SUMS, {"sm_scale": 0.5}, exact=True),
    "choice of keys": Target(index_top_k, indexed(INDEX), SUMS, {"sm_scale": 0.5, "top_k": 20}, exact=True),
    "choice of keys, 8 bits": Target(
        index_top_k, indexed(INDEX_8BIT), SUMS, {"sm_scale": 0.5, "top_k": 20}, exact=True
    ),
    "choice": Target(select_top_k, {"scores": values(9, 70, dtype=jnp.float32)}, (), {"top_k": 20}, exact=True),
    "chosen latents": Target(mla_sparse, chosen(CHOSEN), ("slots",), {"sm_scale": 0.125, **LSE}),
    "chosen latents, 8 bits": Target(mla_sparse, chosen(CHOSEN_8BIT), ("slots",), {"sm_scale": 0.125, **LSE}),
    "chosen latents of two caches": Target(
        mla_sparse, chosen_of_two(CHOSEN), ("slots", "extra_slots"), {"sm_scale": 0.125, **LSE}
    ),
    "chosen records of two caches": Target(
        mla_sparse,
        {**without(chosen_of_two(RECORDS), "q_rope"), "q_latent": 8 * values(9, HQ, 192)},
        ("slots", "extra_slots"),
        {"q_rope": None, "sm_scale": 0.125, **LSE},
    ),
    "ranges of two caches": Target(mla_sparse, ranges_of_two(CHOSEN), RANGES, {"sm_scale": 0.125, **LSE}),
    "ranges of records of two caches": Target(
        mla_sparse,
        {**without(ranges_of_two(RECORDS), "q_rope"), "q_latent": 8 * values(9, HQ, 192)},
        RANGES,
        {"q_rope": None, "sm_scale": 0.125, **LSE},
    ),
    "write of index keys": Target(
        write_index_keys, {"index": INDEX, "keys": values(9, 32), "slots": SLOTS}, ("slots",), exact=True
    ),
    "write of index keys, 8 bits": Target(
        write_index_keys, {"index": INDEX_8BIT, "keys": values(9, 32), "slots": SLOTS}, ("slots",), exact=True
    ),
}
