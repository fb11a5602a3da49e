"""Tests that barriers of the Blackwell kernels order accesses to tensor memory (TMEM).

Pallas barriers have the option `orders_tensor_core`. Without it, a thread can read TMEM before the tensor core has
written it, or the reverse. Neither the interpreter nor the compiler reports a missing option. The rule: every barrier
of a kernel with TMEM must have the option, except barriers at which TMA copies arrive. The tests trace calls and
do not run them. The calls are the cases of tests/aot, which compiles kernels without a GPU (the compile gate).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.runtime import device
from tests.aot.cases import CASES, IN_EVERY_RUN, MODULES
from tests.kit.slow_cases import slow_cases

MULTIPLYING = [
    name
    for name in CASES
    if name.startswith("sm100-") and MODULES[name] not in ("writes", "plans", "latent") and not name.endswith("-export")
]
"""Names of the compile gate's cases whose kernels use the tensor core. Exported calls are left out, because they cannot
be interpreted; their kernels are in other cases.
"""


@contextlib.contextmanager
def recorded_barriers() -> Iterator[tuple[list[Any], list[Any]]]:
    """Return a context that yields two lists, which tracing fills: the barriers of kernels with TMEM, and the barriers
    at which a TMA copy arrives.
    """
    barriers: list[Any] = []
    copied_to: list[Any] = []
    kernel, signals = plgpu.kernel, (plgpu.copy_gmem_to_smem, plgpu.try_cluster_cancel)

    def recording_kernel(body: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(body)
        def traced(*refs: Any, **named: Any) -> None:
            leaves = jax.tree.leaves((refs, named))
            if any(has_tensor_memory(ref) for ref in leaves):
                barriers.extend(ref for ref in leaves if orders(ref) is not None)
            body(*refs, **named)

        return kernel(traced, *args, **kwargs)

    def recording(signal: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copied_to.extend(base(x) for x in (*args, *kwargs.values()) if orders(base(x)) is not None)
            return signal(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(plgpu, "kernel", recording_kernel))
        for signal in signals:
            stack.enter_context(mock.patch.object(plgpu, signal.__name__, recording(signal)))
        yield barriers, copied_to


def base(ref: Any) -> Any:
    """Return the ref without transforms such as indexing."""
    return getattr(ref, "ref", ref)


def has_tensor_memory(ref: Any) -> bool:
    """Return whether a ref is in TMEM. Barriers of kernels without TMEM do not need the option."""
    return getattr(getattr(base(ref), "aval", None), "memory_space", None) == plgpu.TMEM


def orders(ref: Any) -> bool | None:
    """Return the option `orders_tensor_core` of a barrier; None for refs that are not barriers."""
    aval = getattr(ref, "aval", None)
    return getattr(getattr(getattr(aval, "inner_aval", None), "dtype", None), "orders_tensor_core", None)


def unordered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, list[Any]]:
    """Trace a call. Return the number of barriers of its kernels, and the barriers that violate the rule."""
    with (
        mock.patch.dict("os.environ", {device.INTERPRET_VARIABLE: "10.0"}),
        plgpu.force_gpu_interpret_mode(),
        recorded_barriers() as (barriers, copied_to),
    ):
        jax.eval_shape(function, *args, **kwargs)
    return len(barriers), [ref for ref in barriers if not orders(ref) and not any(ref is other for other in copied_to)]


@slow_cases("sm100-ragged-192-128", "sm100-paged-prefill-fp8-token-d128-p16")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in IN_EVERY_RUN else pytest.mark.slow) for n in MULTIPLYING]
)
@pytest.mark.usefixtures("unchecked_shapes")  # the weights of engine cases are shapes, not arrays
def test_barriers_order_the_tensor_core(name: str) -> None:
    barriers, wrong = unordered(CASES[name].function, **CASES[name].arguments)
    assert barriers
    assert not wrong


@pytest.mark.parametrize(("ordered", "wrong"), [(True, 0), (False, 1)])
def test_unordered_barrier_is_found(ordered: bool, wrong: int) -> None:
    """The search finds a barrier without the option. The kernel has two barriers. A TMA copy arrives at the first
    barrier, so only the second barrier needs the option.
    """

    def body(x: Any, out: Any, tile: Any, _: Any, full: Any, read: Any) -> None:
        plgpu.copy_gmem_to_smem(x.at[0], tile.at[0], full.at[0])
        plgpu.barrier_wait(full.at[0])
        plgpu.barrier_arrive(read)
        plgpu.barrier_wait(read)
        out[...] = tile[0]

    def call(x: jax.Array) -> jax.Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128,), x.dtype),
            scratch_types=[
                plgpu.SMEM((1, 128), x.dtype),
                plgpu.TMEM((128, 128), jnp.float32),
                plgpu.Barrier(num_barriers=1),
                plgpu.Barrier(orders_tensor_core=ordered),
            ],
        )(x)

    barriers, found = unordered(call, jax.ShapeDtypeStruct((1, 128), jnp.float32))
    assert (barriers, len(found)) == (2, wrong)
