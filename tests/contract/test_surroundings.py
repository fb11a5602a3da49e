"""Calls inside `jax.shard_map`, with `jax_enable_x64`, with 64-bit integers, with lists and with empty batches return
the same result as plain calls. Gradients and symbolic sizes raise errors of this library.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_attn import Rope, merge_states, mla_prefill, paged_decode, paged_prefill, plan_decode, write_kv
from pallas_attn.runtime import dispatch
from tests.contract import backends, targets
from tests.contract.backends import BACKENDS, Backend, all_but, in_every_run
from tests.contract.targets import (
    CU_Q_LENS,
    KV_LENS,
    LATENTS_8BIT,
    LATENTS_F32,
    REFERENCE,
    TABLES,
    TARGETS,
    Target,
    ints,
    values,
)
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

XLA = next(backend for backend in BACKENDS if backend.name == "xla")
NEW = ("q", "q_latent", "q_rope", "k", "v", "latent", "latent_new", "keys", "scores")
"""Names of arguments that `sharded` splits over the mesh by default. Tables, lengths and caches are replicated."""


def params(wanted: Any = lambda backend: True) -> pytest.MarkDecorator:
    """Parametrize a test over the test calls of tests/contract/targets.py and their supported, `wanted` backends."""
    return pytest.mark.parametrize(
        ("backend", "name"),
        [
            pytest.param(backend, name, id=f"{backend.id}-{name}")
            for name, target in TARGETS.items()
            for backend in backends.backends_of(target.op, wanted)
            if target.supports(backend)
        ],
        indirect=["backend"],
    )


def call(target: Target, backend: Backend) -> Any:
    """Return the operation as a function of a dictionary of its array arguments."""

    def function(arrays: dict[str, Any]) -> Any:
        with backend.variant.settings():
            return target.function(**arrays, **target.static, implementation=backend.name)

    return function


def sharded(function: Any, own: tuple[str, ...] = NEW) -> Any:
    """Return the function inside `jax.shard_map` on a mesh of one device. The arguments `own` are split over its axis,
    and the other arguments are replicated. `jax.shard_map` checks varying axes by default.
    """
    mesh, spec = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec
    specs = (spec("x"), spec())

    def run(arrays: dict[str, Any]) -> Any:
        parts = [{k: v for k, v in arrays.items() if (k in own) == mine} for mine in (True, False)]
        shard = jax.shard_map(lambda mine, same: function(mine | same), mesh=mesh, in_specs=specs, out_specs=spec("x"))
        return shard(*parts)

    return run


# --- jax.shard_map


@slow_cases("write of heads, int8-xla")
@pytest.mark.parametrize("backend", [REFERENCE, XLA], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["decode", "ragged", "gather", "write of heads, int8", "choice of keys"])
@in_every_run(xla=["gather", "write of heads, int8"])
def test_inside_a_shard_map(backend: Backend, name: str) -> None:
    target = TARGETS[name]
    arrays = jax.tree.map(jnp.asarray, dict(target.arrays))
    function = call(target, backend)
    harness.assert_same_bits(jax.jit(sharded(function))(arrays), jax.jit(function)(arrays))


@pytest.mark.parametrize(
    "own", [NEW, ("kv", "cache", "k", "index"), ("block_tables", "slots", "cu_q_lens"), ("kv_lens", "cu_kv_lens")]
)
@params(lambda backend: not backend.kernels)
@in_every_run(
    xla=all_but(
        "decode-own2", "decode-own3", "decode of heads-own0", "decode of heads-own1", "decode of heads-own2",
        "decode of heads-own3", "prefill-own0", "prefill-own1", "prefill-own2", "prefill of heads-own0",
        "prefill of heads-own2", "prefill, int8-own1", "prefill, int8-own2", "prefill, int8-own3",
        "ragged-own0", "ragged-own1", "ragged-own2", "ragged-own3", "write of heads, int8-own0",
        "write of heads, int8-own1", "write of heads, int8-own2", "write of heads, int8-own3",
        "index scores-own0", "index scores-own2", "choice of keys-own2", "chosen latents-own0",
        "chosen latents-own2",
    ),
)  # fmt: skip
def test_whatever_varies(backend: Backend, name: str, own: tuple[str, ...]) -> None:
    """Tracing succeeds if only the arguments `own` vary over the mesh axis: queries and new tokens, caches, tables, or
    lengths.
    """
    target = TARGETS[name]
    arrays = jax.tree.map(jnp.asarray, dict(target.arrays))
    jax.eval_shape(sharded(call(target, backend), own), arrays)


@slow_cases("mosaic-prefill, int8")
@slow_cases("triton-decode", "mosaic-prefill of heads")
@params(lambda backend: backend.kernels)
@in_every_run(
    mosaic=all_but(
        "decode", "decode of heads", "decode, int8", "latents, few heads", "latents, many heads",
        "latents, 8 bits", "prefill",
    ),
    triton=all_but("decode of heads", "decode, int8", "latents, few heads"),
)  # fmt: skip
def test_kernels_are_traced_inside_a_shard_map(backend: Backend, name: str) -> None:
    """Results of kernels have the same shapes as outside `jax.shard_map`, and vary over the mesh axis. `jax.shard_map`
    therefore rejects output specs without the axis.
    """
    target = TARGETS[name]
    arrays, function = jax.tree.map(jnp.asarray, dict(target.arrays)), call(target, backend)
    types: list[Any] = []

    def recording(arrays: dict[str, Any]) -> Any:
        out = function(arrays)
        types.extend(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(out))
        return out

    assert jax.tree.map(jnp.shape, jax.eval_shape(sharded(recording), arrays)) == jax.tree.map(
        jnp.shape, jax.eval_shape(function, arrays)
    )
    assert types
    assert all("x" in varying for varying in types)


@slow_cases("mosaic")
@backends.every_backend("gather_latent", lambda backend: backend.kernels)
@in_every_run("mosaic", "triton")
def test_a_kernel_runs_inside_a_shard_map(backend: Backend) -> None:
    target = TARGETS["gather"]
    arrays, function = jax.tree.map(jnp.asarray, dict(target.arrays)), call(target, backend)
    harness.assert_same_bits(jax.jit(sharded(function))(arrays), jax.jit(function)(arrays))


METADATA = {"block_tables": TABLES, "cu_q_lens": CU_Q_LENS, "kv_lens": KV_LENS}
LATENT_PREFILL, LATENT_PREFILL_8BIT = (
    targets.latent_prefill(cache) | jax.tree.map(jnp.asarray, METADATA) for cache in (LATENTS_F32, LATENTS_8BIT)
)


def latent_prefill(arrays: dict[str, Any], implementation: str | None = None) -> Any:
    return mla_prefill(**arrays, sm_scale=0.2, implementation=implementation)


@pytest.mark.parametrize("arrays", [LATENT_PREFILL, LATENT_PREFILL_8BIT], ids=["float32", "8 bits"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_of_latents_inside_a_shard_map(implementation: str, arrays: dict[str, Any]) -> None:
    function = functools.partial(latent_prefill, implementation=implementation)
    for own in (("q_nope", "q_rope"), ("cache",), ("kv_lens",)):
        jax.eval_shape(sharded(function, own), arrays)


# --- 64 bits


@slow_cases("ragged-xla")
@pytest.mark.parametrize("backend", [REFERENCE, XLA], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", ["decode", "ragged"])
@in_every_run("xla")
def test_64_bits_of_a_scale_are_none_of_the_result(backend: Backend, name: str) -> None:
    target = TARGETS[name]
    static = {"sm_scale": 0.125, "soft_cap": 20.0} if name == "decode" else {"sm_scale": 0.125}
    arrays = jax.tree.map(jnp.asarray, dict(target.arrays))

    def run(**static: Any) -> Any:
        return jax.jit(functools.partial(target.function, implementation=backend.name, return_lse=True, **static))(
            **arrays
        )

    want = run(**static)
    with jax.enable_x64(True):
        got = run(**{name: np.float64(value) for name, value in static.items()})
    harness.assert_same_bits(got, want)


@pytest.mark.slow
def test_64_bits_of_an_epsilon_are_none_of_a_norm() -> None:
    target = TARGETS["write"]
    arrays = jax.tree.map(jnp.asarray, dict(target.arrays))
    cos, norm = jnp.ones((9, 8)), jnp.ones((64,))

    def run(eps: Any) -> Any:
        return write_kv(**arrays, rope=Rope(cos, cos, k_norm=norm, norm_eps=eps), implementation="xla")

    want = run(1e-5)
    with jax.enable_x64(True):
        harness.assert_same_bits(run(np.float64(1e-5)), want)


# --- gradients and symbolic sizes


@slow_cases("triton-gather, 8 bits")
@params()
@in_every_run(
    "triton",
    xla=[
        "decode, int8", "latents, many heads", "prefill", "prefill, int8", "gather", "write of heads, int8",
        "write of latents, 8 bits", "choice of keys, 8 bits", "chosen latents",
        "chosen latents of two caches", "write of index keys",
    ],
    mosaic=["decode"],
)  # fmt: skip
def test_gradients_are_refused_by_name(backend: Backend, name: str) -> None:
    target = TARGETS[name]
    floats = [n for n, x in target.arrays.items() if n in NEW]
    arrays, function = jax.tree.map(jnp.asarray, dict(target.arrays)), call(target, backend)

    def loss(x: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(function(arrays | {floats[0]: x}))
        return jnp.stack([jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves]).sum()

    for of in (loss, jax.jit(loss)):
        with pytest.raises(NotImplementedError, match=f"^{target.op} has no gradient"):
            jax.grad(of)(arrays[floats[0]])


def test_gradients_of_compositions_are_refused_by_name() -> None:
    def loss(q_nope: jax.Array) -> jax.Array:
        return latent_prefill(LATENT_PREFILL | {"q_nope": q_nope}).sum()

    with pytest.raises(NotImplementedError, match="^mla_prefill has no gradient"):
        jax.grad(loss)(LATENT_PREFILL["q_nope"])
    with pytest.raises(NotImplementedError, match="^merge_states has no gradient"):
        jax.grad(lambda outs: merge_states(outs, jnp.zeros((2, 3)))[0].sum())(jnp.ones((2, 3, 4)))


@pytest.mark.slow
def test_a_constant_has_the_gradient_of_a_constant() -> None:
    target = TARGETS["decode"]
    arrays, decode = jax.tree.map(jnp.asarray, dict(target.arrays)), call(target, XLA)

    def loss(q: jax.Array) -> jax.Array:
        out, _ = decode(arrays | {"q": jax.lax.stop_gradient(q)})
        return out.astype(jnp.float32).sum() + q.astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(loss)(arrays["q"]), np.ones(arrays["q"].shape))


@pytest.mark.usefixtures("unchecked_shapes")
def test_symbolic_sizes_are_refused_by_name() -> None:
    target, (batch,) = TARGETS["decode"], export.symbolic_shape("b")
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, dict(target.arrays)))
    for name in ("q", "block_tables", "kv_lens", "q_lens"):
        shapes[name] = jax.ShapeDtypeStruct((batch, *shapes[name].shape[1:]), shapes[name].dtype)
    with pytest.raises(NotImplementedError, match="^q: got symbolic sizes b; .* export one module for each size"):
        export.export(jax.jit(paged_decode))(**shapes)


# --- forms of arguments


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "name", ["decode", "latents, few heads", "prefill", "ragged", "gather", "write", "choice of keys", "chosen latents"]
)
def test_lists_and_numpy_integers_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata may be lists, or NumPy arrays of int16 or int64. Implementations receive int32 arrays."""
    target, calls = TARGETS[name], []
    arrays = jax.tree.map(jnp.asarray, dict(target.arrays))
    monkeypatch.setattr(dispatch, "run", lambda call, implementation: calls.append(call) or (None, None))
    for form in (jnp.asarray, np.ndarray.tolist, lambda x: x.astype(np.int64), lambda x: x.astype(np.int16)):
        target.function(**arrays | {key: form(np.asarray(arrays[key])) for key in target.metadata}, **target.static)
    assert len(calls) == 4
    for call in calls[1:]:
        harness.assert_same_bits(call, calls[0])


@pytest.mark.usefixtures("unchecked_shapes")
def test_numbers_of_any_class_are_taken() -> None:
    arrays = jax.tree.map(jnp.asarray, dict(TARGETS["decode"].arrays))
    want = paged_decode(**arrays, sm_scale=0.125, soft_cap=8.0, window=7)
    classes: list[Any] = [np.float64, np.float32, jnp.float32, np.array]
    for number in classes:
        numbers: dict[str, Any] = {"sm_scale": number(0.125), "soft_cap": number(8.0), "window": np.int64(7)}
        harness.assert_same_bits(paged_decode(**arrays, **numbers), want)
    with pytest.raises(
        ValueError, match="^sm_scale: expected a number that is known while tracing, got a traced array"
    ):
        jax.jit(lambda scale: paged_decode(**arrays, sm_scale=scale))(0.125)


# --- empty batches


def empty(name: str, **sizes: int) -> dict[str, Any]:
    """Return the arguments of a call without sequences (B=0) or without queries (Q=0)."""
    arrays = jax.tree.map(jnp.asarray, dict(TARGETS[name].arrays))
    for key in ("q", "q_latent", "q_rope", "block_tables", "kv_lens", "q_lens"):
        if key in arrays and "B" in sizes:
            arrays[key] = arrays[key][:0]
        if key in ("q", "q_latent", "q_rope") and key in arrays and "Q" in sizes:
            arrays[key] = arrays[key][:, :0]
    return arrays


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Q": 0}], ids=["B = 0", "Q = 0"])
@pytest.mark.parametrize("name", ["decode", "decode of heads", "latents, few heads", "latents, many heads"])
@pytest.mark.parametrize("implementation", dispatch.implementations("paged_decode"))
def test_an_empty_decode(name: str, sizes: dict[str, int], implementation: str) -> None:
    target, arrays = TARGETS[name], empty(name, **sizes)
    queries = arrays["q"] if "q" in arrays else (arrays["q_latent"], arrays["q_rope"])
    shape = queries[0].shape if isinstance(queries, tuple) else queries.shape
    options = {key: arrays[key] for key in ("q_lens", "window") if key in arrays}
    cache = arrays["kv"] if "kv" in arrays else arrays["cache"]
    for mode in ("balanced", "fixed"):
        plan = plan_decode(
            queries, cache, arrays["block_tables"], arrays["kv_lens"], **options, mode=mode, num_programs=3
        )
        rows = arrays["kv_lens"].shape[0] * plan.made_for.num_kv_heads
        np.testing.assert_array_equal(plan.merged_rows, np.arange(rows + 1))
        assert (plan.num_pages.shape, plan.cta_row.shape) == ((rows,), (4,))
        assert not plan.split_indptr.any()
        out, lse = target.function(**arrays, **target.static, plan=plan, implementation=implementation)
        assert (out.shape, out.dtype, lse.shape) == (shape, jnp.bfloat16, shape[:3])


@pytest.mark.parametrize("name", ["prefill", "ragged", "gather"])
@pytest.mark.parametrize("implementation", dispatch.implementations("paged_prefill"))
def test_tokens_of_no_sequence(name: str, implementation: str) -> None:
    """In a call without sequences (S = 0), all tokens are padding, with output 0 and LSE -inf."""
    target, arrays = TARGETS[name], jax.tree.map(jnp.asarray, dict(TARGETS[name].arrays))
    arrays = arrays | {key: arrays[key][:1] for key in ("cu_q_lens", "cu_kv_lens") if key in arrays}
    arrays = arrays | {key: arrays[key][:0] for key in ("block_tables", "kv_lens") if key in arrays}
    result = target.function(**arrays, **target.static, implementation=implementation)
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert not out.any()
    assert lse is None or np.all(np.isneginf(lse))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
def test_more_programs_than_a_card_holds_are_refused() -> None:
    arrays = TARGETS["decode"].arrays
    plan = functools.partial(plan_decode, *(arrays[key] for key in ("q", "kv", "block_tables", "kv_lens")))
    for wrong, message in (
        (10**9, "at most 16384"),
        (0, "at least 1"),
        (2.0, "an int of at least 1"),
        (True, "an int"),
    ):
        for implementation in (None, "xla", "reference"):
            with pytest.raises(ValueError, match=f"^num_programs: expected {message}"):
                plan(num_programs=wrong, implementation=implementation)
    assert plan(num_programs=np.int64(3)).cta_row.shape == (4,)


def test_a_table_of_no_rows_still_has_pages() -> None:
    with pytest.raises(ValueError, match="^block_tables: expected P of at least 1"):
        paged_prefill(
            values(4, 4, 64),
            TARGETS["decode"].arrays["kv"],
            jnp.zeros((0, 0), jnp.int32),
            jnp.asarray(ints(0)),
            jnp.zeros((0,), jnp.int32),
        )
