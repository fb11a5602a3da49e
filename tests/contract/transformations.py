"""Assertions that jax transformations do not change the result of an attention operation: `scan` with a donated cache,
`vmap`, `jax.export`; also that repeated calls are equal, and that new values cause no new trace.

The argument `call` is an operation of `harness.compiled` that returns output and LSE. `arrays` are its arguments by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tests.kit import harness
from tests.kit.harness import Jitted, Tolerance, Variant

type Arrays = dict[str, Any]


def assert_repeats(call: Jitted, arrays: Arrays, times: int = 100) -> None:
    """Assert that `times` calls return the same bits."""
    first = call(**arrays)
    for _ in range(times - 1):
        harness.assert_same_bits(call(**arrays), first)


def assert_scans(
    call: Jitted, arrays: Arrays, tolerances: tuple[Tolerance, Tolerance], *, cache: str = "kv", over: str = "q"
) -> None:
    """Assert that a `jax.lax.scan` over three values of the argument `over`, with the donated cache as carry, returns
    the results of single calls and does not change the cache.
    """
    rest = {name: jax.tree.map(jnp.asarray, value) for name, value in arrays.items() if name not in (cache, over)}
    steps = jnp.stack([jnp.asarray(factor * arrays[over]) for factor in (1, 2, -1)])
    want = [call(**arrays | {over: step}) for step in steps]

    def step(carried: Any, x: jax.Array) -> tuple[Any, Any]:
        return carried, call(**rest, **{cache: carried, over: x})

    before = jax.tree.map(np.array, arrays[cache])
    loop = jax.jit(lambda carried, steps: jax.lax.scan(step, carried, steps), donate_argnums=0)
    after, got = loop(jax.tree.map(jnp.array, arrays[cache]), steps)
    harness.assert_same_bits(after, before)
    harness.assert_attention_close(got, _stacked(want), tolerances)


def assert_vmaps(call: Jitted, arrays: Sequence[Arrays], tolerances: tuple[Tolerance, Tolerance], *, over: str) -> None:
    """Assert that `jax.vmap` over all arguments, and over the argument `over` alone, returns the results of single
    calls.
    """
    stacked = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(each) for each in x]), *arrays)
    got = jax.jit(jax.vmap(lambda each: call(**each)))(stacked)
    harness.assert_attention_close(got, _stacked([call(**each) for each in arrays]), tolerances)
    fixed = {name: jax.tree.map(jnp.asarray, value) for name, value in arrays[0].items() if name != over}
    got = jax.jit(jax.vmap(lambda each: call(**fixed, **{over: each})))(stacked[over])
    want = [call(**arrays[0] | {over: each[over]}) for each in arrays]
    harness.assert_attention_close(got, _stacked(want), tolerances)


def _stacked(results: Sequence[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    out, lse = zip(*results, strict=True)
    return np.stack(out), np.stack(lse)


def assert_exports(call: Jitted, arrays: Arrays) -> None:
    """Assert that the call returns the same bits after it was exported, serialised and deserialised."""
    arrays = jax.tree.map(jnp.asarray, arrays)
    harness.assert_same_bits(harness.exported(call, arrays)(**arrays), call(**arrays))


def assert_traced_once(op: Callable[..., Any], variant: Variant, calls: Sequence[Arrays]) -> None:
    """Assert that calls whose arguments have the same shapes and dtypes are traced once."""

    def traced(**arrays: Any) -> Any:
        with variant.settings():
            return op(**arrays, implementation=variant.implementation)

    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(traced, n=1))
    for arrays in calls:
        jax.block_until_ready(jitted(**arrays))


def inside_a_shard_map(function: Callable[[Arrays], Any], arrays: Arrays, split: Collection[str]) -> Callable[..., Any]:
    """Return `function` inside `jax.shard_map` on one device, with its default check of varying axes. Assert that it
    can be traced. The arguments `split` and the results are split.
    """
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: PartitionSpec("x") if name in split else PartitionSpec() for name in arrays}
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("x"))
    jax.eval_shape(mapped, arrays)
    return mapped
