"""Tests of operations on split arrays outside `jax.shard_map`.

Results equal the results of one device and are split like the arguments. Devices exchange nothing. A split for which
XLA would gather the cache raises an error.
"""

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
from pallas_attn.runtime import sharded_calls
from tests.kit.slow_cases import slow_cases

DATA, TENSOR = 2, 4
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
N, PS, HKV, HQ, D, L, R, B = 16, 4, 4, 8, 16, 12, 4, 4
KV_LENS = jnp.array([3, 16, 7, 0], jnp.int32)
CU_Q_LENS = jnp.array([0, 2, 5, 6, 6], jnp.int32)
T = int(CU_Q_LENS[-1])
SLOTS = jnp.array([3, 9, -1, 40, 41, 42], jnp.int32)


def mesh_of(kind: str, **axes: int) -> jax.sharding.Mesh:
    sizes = axes or {"data": DATA, "tensor": TENSOR}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(TYPES[kind],) * len(sizes))


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape, np.float32))


write = jax.jit(pa.write_kv)  # the module makes its cases when it is imported; without jit, this took 3 s


def kv_of(scales: Any = None) -> pa.PagedKV:
    sizes: dict[str, Any] = {"num_pages": N, "page_size": PS, "num_kv_heads": HKV, "head_dim": D}
    if scales is None:
        return pa.PagedKV(values(N, HKV, PS, D), values(N, HKV, PS, D) + 1)
    spec = pa.kv_cache_spec(**sizes, dtype=jnp.int8, scales=scales)
    slots = jnp.arange(N * PS, dtype=jnp.int32)
    return write(pa.PagedKV.allocate(spec), values(N * PS, HKV, D), values(N * PS, HKV, D), slots)


def latents() -> pa.PagedLatent:
    return pa.PagedLatent(values(N, PS, L + R))


def index_keys() -> pa.PagedIndexKeys:
    return pa.PagedIndexKeys(values(N, PS, D))


TABLES = jnp.asarray(np.random.default_rng(0).permutation(N).reshape(B, N // B), jnp.int32)
PACKED: dict[str, Any] = {"block_tables": TABLES, "cu_q_lens": CU_Q_LENS, "kv_lens": KV_LENS}
HEADS, KV_HEADS, BATCH = P(None, None, "tensor"), P(None, "tensor"), P("data")
BOTH = P("data", None, "tensor")


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of an operation, and their partition specs: one per argument, or one per array of an argument.

    Attributes:
      results: partition specs of the results.
      pools: name of an argument that is written and donated.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    specs: Mapping[str, Any]
    results: Any
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: str | None = None


def halves(k: Any, v: Any) -> pa.PagedKV:
    return pa.PagedKV(k, v)


def latents_as(spec: P) -> pa.PagedLatent:
    return jax.tree.map(lambda _: spec, latents())


def keys_as(spec: P) -> pa.PagedIndexKeys:
    return jax.tree.map(lambda _: spec, index_keys())


LATENTS, KEYS = latents_as(P()), keys_as(P())


def range_of(block_tables: Any, each: Any, size: int) -> pa.SlotRange:
    """Return a range whose sequences, positions and counts are equal, or its partition specs."""
    return pa.SlotRange(block_tables, each, each, each, size)


def of_kv(kv: pa.PagedKV) -> pa.PagedKV:
    return pa.parallel.kv_partition(kv, heads="tensor")


DECODE = {"q": values(B, 1, HQ, D), "kv": kv_of(), "block_tables": TABLES, "kv_lens": KV_LENS}
LATENT_DECODE = {
    "q_latent": values(B, 2, HQ, L),
    "q_rope": values(B, 2, HQ, R),
    "cache": latents(),
    "block_tables": TABLES,
    "kv_lens": KV_LENS,
    "q_lens": jnp.array([1, 2, 2, 0], jnp.int32),
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
    "decode, fused": decode_case(BOTH, BATCH, BOTH, kv=pa.PagedKV(values(N, HKV, PS, 2 * D))),
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
        dict.fromkeys("qkv", KV_HEADS),
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
        pa.write_latent, {"cache": latents(), "latent": values(T, L + R), "slots": SLOTS}, {}, LATENTS, written="cache"
    ),
    "latents gathered": Case(
        pa.gather_latent, {"cache": latents(), "latent_new": values(T, L + R), **PACKED}, {}, P(), {"length": 32}
    ),
    "index keys written": Case(
        pa.write_index_keys, {"index": index_keys(), "keys": values(T, D), "slots": SLOTS}, {}, KEYS, written="index"
    ),
    "compressed entries": Case(
        pa.compress_and_write,
        {
            "state": pa.PagedLatent(values(N, PS, 4 * D)),
            "entries": index_keys(),
            "rows": values(T, 4 * D),
            "norm": values(D),
            "cos": values(T, 2),
            "sin": values(T, 2) + 1,
            "state_tables": TABLES,
            "entry_tables": TABLES[:, :2],
            "cu_q_lens": CU_Q_LENS,
            "kv_lens": KV_LENS,
        },
        {},
        (LATENTS, KEYS),
        {"ratio": 3},
        written="state",
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
    "weights of streams": Case(
        pa.hyper_connection_weights,
        {"logits": values(8, 24), "inverse_rms": values(8) + 1, "scale": values(3), "base": values(24)},
        {"logits": BATCH, "inverse_rms": BATCH},
        (BATCH, BATCH, BATCH),
    ),
    "choice by scores": Case(pa.select_top_k, {"scores": values(8, 32)}, {"scores": BATCH}, BATCH, {"top_k": 3}),
    "chosen latents": Case(
        pa.mla_sparse,
        {"q_latent": values(4, HQ, L), "q_rope": values(4, HQ, R), "cache": latents(), "slots": TABLES * PS},
        {"q_latent": P("data", "tensor"), "q_rope": P("data", "tensor"), "slots": BATCH},
        (P("data", "tensor"), P("data", "tensor")),
        {**SCALED, **LSE},
    ),
    "chosen latents of two caches": Case(
        pa.mla_sparse,
        {
            "q_latent": values(4, HQ, L + R),
            "q_rope": None,
            "cache": latents(),
            "slots": TABLES * PS,
            "extra_cache": pa.PagedLatent(values(3, PS, L + R)),
            "extra_slots": TABLES % 3,
            "sinks": values(HQ),
        },
        {"q_latent": P("data", "tensor"), "slots": BATCH, "extra_slots": BATCH, "sinks": P("tensor")},
        (P("data", "tensor"), P("data", "tensor")),
        {**SCALED, **LSE},
    ),
    "ranges of two caches": Case(
        pa.mla_sparse,
        {
            "q_latent": values(4, HQ, L + R),
            "q_rope": None,
            "cache": latents(),
            "slots": range_of(TABLES, jnp.array([1, 3, 0, 2], jnp.int32), 3),
            "extra_cache": pa.PagedLatent(values(3, PS, L + R)),
            "extra_slots": range_of(TABLES % 3, jnp.array([0, 2, 1, 3], jnp.int32), 4),
            "sinks": values(HQ),
        },
        {
            "q_latent": P("data", "tensor"),
            "slots": range_of(P(), BATCH, 3),
            "extra_slots": range_of(P(), BATCH, 4),
            "sinks": P("tensor"),
        },
        (P("data", "tensor"), P("data", "tensor")),
        {**SCALED, **LSE},
    ),
    "a shared prefix": Case(
        pa.cascade_decode,
        {**DECODE, "block_tables": TABLES.at[:, 0].set(5)},
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
            "q_latent": values(T, HQ, L),
            "q_rope": values(T, HQ, R),
            "cache": latents(),
            "new_latent": values(T, L),
            "new_rope": values(T, R),
            "kv_lens": KV_LENS,
            "page_indices": TABLES,
            "cu_q_lens": CU_Q_LENS,
        },
        {"q_latent": KV_HEADS, "q_rope": KV_HEADS},
        (KV_HEADS, LATENTS),
        SCALED,
        written="cache",
    ),
    "prefill of latents": Case(
        pa.mla_prefill,
        {
            "q_nope": values(T, HQ, 6),
            "q_rope": values(T, HQ, R),
            "latent_new": values(T, L + R),
            "cache": latents(),
            "w_uk": values(HQ, 6, L),
            "w_uv": values(HQ, 5, L),
            **PACKED,
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
"""Cases of `make test` for each type of mesh axes, except cases that `slow_cases` marks. The other cases run the same
code for other operations, whose arrays `test_annotations_give_all_axes` checks.
"""


def placed(case: Case, mesh: jax.sharding.Mesh, **others: Any) -> dict[str, Any]:
    """Return copies of the arguments, split over the mesh. Tests may donate the copies."""
    specs = {**case.specs, **others}

    def put(name: str, value: Any) -> Any:
        spec = specs.get(name, P())
        arrays = jax.tree.map(jnp.copy, value)
        if isinstance(spec, P):
            return jax.device_put(arrays, NamedSharding(mesh, spec))
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), arrays, spec)

    return {name: put(name, value) for name, value in case.arguments.items()}


def collectives(text: str) -> list[str]:
    """Return the names of the collective operations in the text of a compiled program."""
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


@slow_cases(
    "auto-latents, heads and sequences", "explicit-decode, a KV head on two devices",
    "auto-decode, heads and sequences", "auto-write, scales of groups", "explicit-a step of both",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "name"), params())
def test_results_equal_one_device_and_stay_split(kind: str, name: str) -> None:
    case, mesh = CASES[name], mesh_of(kind)
    want = jitted(case)(**jax.tree.map(jnp.copy, dict(case.arguments)))
    arguments = placed(case, mesh)
    compiled = jitted(case).lower(**arguments).compile()
    assert collectives(str(compiled.as_text())) == []
    got = compiled(**arguments)
    for array, spec in zip(jax.tree.leaves(got), jax.tree.leaves(case.results), strict=True):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), got, want)
    if case.written:  # the pool is updated in place
        pools = jax.tree.leaves(case.arguments[case.written])
        on_device = compiled.memory_analysis().alias_size_in_bytes
        assert on_device >= sum(x.nbytes for x in pools) // (TENSOR if case.specs else 1)


@slow_cases("auto-reference", "explicit-reference")
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "reference"])
@pytest.mark.parametrize("kind", TYPES)
def test_eager_calls_and_other_implementations(kind: str, implementation: str) -> None:
    """Calls outside `jax.jit` find the splits of their arrays, too. Other tests run `xla` inside `jax.jit`."""
    case, mesh = CASES["decode, heads and sequences"], mesh_of(kind)
    function = functools.partial(case.function, **case.static, implementation=implementation)
    got = function(**placed(case, mesh))
    for array in got:
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, BOTH), array.ndim)
    want = function(**case.arguments)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), got, want)


def test_cache_is_gathered_without_sharded_calls() -> None:
    """Without the code for split arrays, XLA gathers the cache. The test shows that `collectives` finds this, so other
    tests can fail.
    """
    case, mesh = CASES["decode, heads and sequences"], mesh_of("auto")
    with mock.patch.object(sharded_calls, "mesh_of", return_value=None):
        compiled = jitted(case).lower(**placed(case, mesh)).compile()
    assert "all-gather" in collectives(str(compiled.as_text()))


# --- arrays that are not split


@pytest.mark.parametrize("kind", TYPES)
def test_numpy_arrays_under_a_mesh(kind: str) -> None:
    """NumPy arrays are replicated over the current mesh. All devices compute the whole result."""
    case, mesh = CASES["latents gathered"], mesh_of(kind)
    want = jitted(case)(**case.arguments)
    with jax.set_mesh(mesh):
        got = jitted(case)(**case.arguments)
    assert got.sharding.is_fully_replicated
    assert len(got.sharding.device_set) == mesh.size
    np.testing.assert_array_equal(got, want)


def lowered(name: str, put: Callable[[Any], Any] = lambda x: x) -> str:
    case = CASES[name]
    return str(jitted(case).lower(**jax.tree.map(put, dict(case.arguments))).as_text())


@pytest.mark.parametrize("name", ["decode, heads and sequences", "write", "latents gathered"])
def test_one_device_program_is_unchanged(name: str) -> None:
    """A call without split arrays lowers to the same program as without the code for split arrays, also on a mesh of
    one device.
    """
    mesh = mesh_of("auto", data=1)
    ours = lowered(name), lowered(name, lambda x: jax.device_put(x, NamedSharding(mesh, P())))
    with mock.patch.object(sharded_calls, "mesh_of", return_value=None):
        assert ours == (lowered(name), lowered(name, lambda x: jax.device_put(x, NamedSharding(mesh, P()))))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_program_inside_shard_map_is_unchanged(kind: str, check_vma: bool) -> None:
    case, mesh = CASES["decode, heads and sequences"], mesh_of(kind)
    names = list(case.arguments)
    specs = tuple(case.specs.get(name, P()) for name in names)

    def part(*arrays: Any) -> Any:
        return case.function(**dict(zip(names, arrays, strict=True)), **case.static, implementation="xla")

    run: Any = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=BOTH, check_vma=check_vma))
    arrays = list(placed(case, mesh).values())
    ours = run.lower(*arrays).as_text()
    with mock.patch.object(sharded_calls, "mesh_of", return_value=None):
        run.clear_cache()
        assert run.lower(*arrays).as_text() == ours


# --- inside other transformations


@slow_cases("auto-whole", "auto-split", "explicit-whole", "explicit-split")
@pytest.mark.parametrize("over", [None, "data"], ids=["whole", "split"])
@pytest.mark.parametrize("kind", TYPES)
def test_under_vmap(kind: str, over: str | None) -> None:
    """A vmap over split queries equals the result on one device. The axis of the vmap may be split, too."""
    mesh = mesh_of(kind)
    q = jnp.stack([DECODE["q"], DECODE["q"] + 1])
    q_split = jax.device_put(q, NamedSharding(mesh, P(over, None, None, "tensor")))
    rest = [DECODE[name] for name in ("kv", "block_tables", "kv_lens")]
    kv = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, KV_HEADS)), rest[0])

    def decode(q: Any, kv: Any, *metadata: Any) -> Any:
        return jax.vmap(lambda q: pa.paged_decode(q, kv, *metadata, implementation="xla"))(q)

    compiled = jax.jit(decode).lower(q_split, kv, *rest[1:]).compile()
    assert collectives(str(compiled.as_text())) == []
    got = compiled(q_split, kv, *rest[1:])
    assert got.sharding.is_equivalent_to(q_split.sharding, got.ndim)
    np.testing.assert_allclose(got, decode(q, *rest), atol=2e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_scan_writes_in_place(kind: str) -> None:
    """A scan that writes a donated, split cache three times copies neither the cache nor the part of a device."""
    case, mesh = CASES["write"], mesh_of(kind)
    arguments = placed(case, mesh)
    kv = arguments.pop("kv")

    def layers(kv: pa.PagedKV, new: dict[str, Any]) -> pa.PagedKV:
        def layer(kv: pa.PagedKV, _: None) -> tuple[pa.PagedKV, None]:
            return pa.write_kv(kv, **new, implementation="xla"), None

        return jax.lax.scan(layer, kv, length=3)[0]

    compiled: Any = jax.jit(layers, donate_argnums=0).lower(kv, arguments).compile()
    assert collectives(str(compiled.as_text())) == []
    copied = re.findall(rf"f32\[{N},\d+,{PS},{D}\]\S* copy\(", str(compiled.as_text()))
    assert copied == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * kv.k.nbytes // TENSOR


def test_gradient_error_names_the_operation() -> None:
    arguments: dict[str, Any] = placed(CASES["decode, heads and sequences"], mesh_of("auto"))
    with pytest.raises(NotImplementedError, match="^paged_decode has no gradient"):
        jax.grad(lambda q: jnp.sum(pa.paged_decode(**arguments | {"q": q}, return_lse=True)[0]))(arguments["q"])


# --- unsupported splits

POOL = jax.tree.map(lambda _: P("data"), kv_of())
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pages": ("decode, heads and sequences", {"kv": POOL, "q": P()}, r"paged_decode .*kv\.k \[N, Hkv, ps, D\] is"),
    "pages, written": ("write", {"kv": POOL}, r"write_kv .*kv\.k .*'data' along N; it may be split along Hq, Hkv"),
    "latents' pages": ("latents, heads", {"cache": latents_as(P("tensor"))}, r"cache\.pages .* along N"),
    "index keys' pages": ("scores", {"index": keys_as(P("data"))}, r"index\.keys .*along no axis"),
    "latents' pages, gathered": ("latents gathered", {"cache": latents_as(P("data"))}, r"cache\.pages"),
    "a step's pages": ("a step of both", {"kv": POOL}, r"ragged_paged_attention on .*kv\.k .* along N"),
    "columns": ("decode, heads and sequences", {"q": P(None, None, None, "tensor")}, r"q \[B, Q, Hq, D\] .* along D"),
    "packed tokens": ("prefill", {"q": P("data", "tensor")}, r"q \[T, Hq, D\] is split over 'data' along T"),
    "whole KV heads": (
        "decode, heads and sequences",
        {"kv": jax.tree.map(lambda _: P(), kv_of())},
        r"query heads are split over 'tensor', and 4 KV heads are replicated",
    ),
    "keys split, values not": (
        "decode, heads and sequences",
        {"kv": halves(KV_HEADS, P())},
        r"kv\.v is replicated",
    ),
    "heads over other axes": (
        "decode, heads and sequences",
        {"q": P(None, None, "data")},
        r"query heads are split over 'data', KV heads over 'tensor'|one axis",
    ),
    "one axis for two": ("latents, heads and sequences", {"q_latent": P(None, None, "data")}, r"mla_decode .*data"),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_splits(kind: str, what: str) -> None:
    """An unsupported split raises an error. Axes of type Explicit are part of array types, so the error is raised while
    the call is traced. With Auto axes, it is raised when XLA compiles the program.
    """
    name, specs, message = REFUSED[what]
    case, mesh = CASES[name], mesh_of(kind)
    arguments = placed(case, mesh, **specs)
    call = functools.partial(jitted(case).trace, **arguments)
    if kind == "auto":
        call = jitted(case).lower(**arguments).compile
    with pytest.raises(NotImplementedError, match=rf"{message}.*inside jax.shard_map") as failure:
        call()
    assert "\n" not in str(failure.value)
    assert failure.value.__cause__ is None  # the internal error of XLA is not printed
    assert failure.value.__suppress_context__ == (kind == "auto")


@pytest.mark.parametrize("mesh", ["auto", "explicit"])
def test_unsupported_split_of_concrete_arrays(mesh: str) -> None:
    """A call outside `jax.jit` raises the error, too."""
    case = CASES["write"]
    arguments = placed(case, mesh_of(mesh), kv=POOL)
    with pytest.raises(NotImplementedError, match="^write_kv on arrays that are split over devices: kv") as failure:
        case.function(**arguments)
    assert "\n" not in str(failure.value)


def test_other_errors_of_compilation_are_not_replaced() -> None:
    text = f'File "{sharded_calls.__file__}"\nNotImplementedError: why\n'
    for other in (
        f"RESOURCE_EXHAUSTED: {text}",
        "INTERNAL: custom_partitioner: NotImplementedError: of another library",
        f"INTERNAL: custom_partitioner: {text}\nThe above exception was the direct cause: ...\nValueError: the last",
    ):
        sharded_calls._raise_refusal(jax.errors.JaxRuntimeError(other))
    with pytest.raises(NotImplementedError, match="^why$"):
        sharded_calls._raise_refusal(jax.errors.JaxRuntimeError(f"INTERNAL: custom_partitioner: {text}"))


def plan() -> pa.DecodePlan:
    """Return a plan of zeros. The call raises an error before a kernel uses the plan."""
    plan = jax.eval_shape(pa.plan_decode, *(DECODE[name] for name in ("q", "kv", "block_tables", "kv_lens")))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan)


@pytest.mark.parametrize(
    ("name", "others", "message"),
    [
        ("decode, heads and sequences", {"plan": plan}, "plan is for one device: make it inside jax.shard_map"),
        (
            "decode, heads and sequences",
            {"block_tables": lambda: jnp.zeros((B, HKV, 4), jnp.int32)},
            "block_tables has row ids of all KV heads, which are split over 'tensor'",
        ),
        ("write", {"slots": lambda: jnp.zeros((T, HKV), jnp.int32)}, "slots has row ids of all KV heads"),
        ("decode, sequences by their lengths", {"out": lambda: values(9, HQ, D)}, "out is packed"),
    ],
    ids=["plan", "tables of heads", "slots of heads", "packed output"],
)
def test_arguments_that_refer_to_all_devices(name: str, others: dict[str, Any], message: str) -> None:
    case, mesh = CASES[name], mesh_of("explicit")
    arguments = placed(case, mesh) | {
        key: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), make()) for key, make in others.items()
    }
    with pytest.raises(NotImplementedError, match=message):
        jitted(case).trace(**arguments)


def test_heads_not_divisible_by_devices() -> None:
    """A constraint may split 3 KV heads over 2 devices, because XLA supports parts of unequal size.
    Operations do not.
    """
    mesh = mesh_of("auto", tensor=2)
    kv = pa.PagedKV(values(N, 3, PS, D), values(N, 3, PS, D))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, KV_HEADS))

    def decode(q: Any, kv: Any) -> Any:
        kv = jax.tree.map(constrain, kv)
        return pa.paged_decode(q, kv, TABLES, KV_LENS, implementation="xla")

    arrays = jax.device_put((values(B, 1, 3, D), kv), NamedSharding(mesh, P()))
    with pytest.raises(NotImplementedError, match="2 devices of 'tensor' do not divide 3 along H"):
        jax.jit(decode).lower(*arrays).compile()


def test_shard_map_over_some_axes() -> None:
    case, mesh = CASES["decode, sequences by their lengths"], mesh_of("auto")
    arrays = placed(case, mesh, kv_lens=P())

    def part(arrays: Any) -> Any:
        return case.function(**arrays, implementation="xla")

    run = jax.shard_map(part, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
    with pytest.raises(NotImplementedError, match="inside jax.shard_map over 'data' only; name all axes"):
        jax.jit(run).trace(arrays)


def test_interpreted_kernels_in_custom_partitioning() -> None:
    """Interpreted kernels on Auto axes raise an error, because XLA would crash if
    `custom_partitioning` contained them.
    """
    pytest.importorskip("triton")
    case, mesh = CASES["latents gathered"], mesh_of("auto")
    with pytest.raises(
        NotImplementedError, match="runs interpreted; interpreted kernels support arrays that are split"
    ):
        jitted(case, "triton").trace(**placed(case, mesh))


# --- coverage of operations and arrays


@pytest.mark.parametrize("name", CASES)
def test_annotations_give_all_axes(name: str) -> None:
    """The type annotations of an operation name the axes of all of its arrays, so all splits can be checked."""
    case = CASES[name]
    held: list[sharded_calls._SplitCall] = []

    def record(call: Any, mesh: Any, arrays: Any) -> Any:
        held.append(call)
        raise NotImplementedError

    with mock.patch.object(sharded_calls._SplitCall, "run", record), pytest.raises(NotImplementedError):
        jitted(case).trace(**placed(case, mesh_of("auto")))
    (call,) = held
    assert not [operand.name for operand in call.operands if "?" in operand.dims]
    assert [o.name.split(".")[0] for o in call.operands if o.owner is pa.PagedKV] == ["kv"] * sum(
        len(jax.tree.leaves(value)) for value in case.arguments.values() if isinstance(value, pa.PagedKV)
    )


def test_every_operation_has_a_case() -> None:
    of_cases = {case.function.__name__ for case in CASES.values()}
    assert of_cases | {"plan_decode"} == set(sharded_calls.OPERATIONS)
