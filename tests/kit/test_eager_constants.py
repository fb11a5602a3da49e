"""Tests that `eager_constants` changes no bit and no property of constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CASES: dict[str, Callable[[], jax.Array]] = {
    "zeros": lambda: jnp.zeros((3, 4)),
    "no elements": lambda: jnp.zeros((0, 4)),
    "negative zeros": lambda: jnp.full((2,), -0.0),
    "NaN": lambda: jnp.full((2, 2), jnp.nan, jnp.bfloat16),
    "largest int32": lambda: jnp.full((3,), 2**31 - 1),
    "weak type": lambda: jnp.asarray(3),
    "broadcast along the first axis": lambda: jnp.broadcast_to(jnp.arange(3), (2, 3)),
    "broadcast along the last axis": lambda: jnp.broadcast_to(jnp.arange(3)[:, None], (3, 2)),
    "fp8": lambda: jnp.ones((2, 3), jnp.float8_e4m3fn),
    "from NumPy": lambda: jnp.asarray(np.arange(5, dtype=np.float32)),
    "from NumPy in 64 bits": lambda: jnp.asarray(np.arange(5)),
    "wider integers": lambda: jnp.full((4,), -7, jnp.int8).astype(jnp.int32),
    "bool to int": lambda: jnp.ones((2,), bool).astype(jnp.int32),
    "bfloat16 to float32": lambda: jnp.full((4,), 1.1, jnp.bfloat16).astype(jnp.float32),
    "subnormal": lambda: jnp.asarray(np.array([2**-127, -(2**-149), 1], np.float32)),
    "subnormal and repeated": lambda: jnp.full((3,), 2**-127),
    "reshaped": lambda: jnp.arange(6).reshape(2, 3),
    "rounded": lambda: jnp.full((4,), 1.1).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_constants_equal_compiled_ones(make: Callable[[], jax.Array]) -> None:
    eager, compiled = make(), jax.jit(make)()
    for name in ("shape", "dtype", "weak_type", "sharding", "committed"):
        assert getattr(eager, name) == getattr(compiled, name), name
    assert np.asarray(eager).tobytes() == np.asarray(compiled).tobytes()


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr("jax._src.interpreters.pxla.MeshComputation.compile", fail)
    jnp.zeros((3, 5, 7, 11))
    jnp.asarray(np.ones((3, 5, 7, 13), np.float32))
    jnp.asarray(np.ones((3, 5, 7, 17), np.int8)).astype(jnp.int32)


def test_arrays_are_copies_that_can_be_donated() -> None:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(20):  # jax may copy after it has returned
        mine = np.zeros(1000, np.float32)
        theirs, reshaped = jnp.asarray(mine), jnp.asarray(mine).reshape(10, 100)
        mine[:] = 1
        address = theirs.unsafe_buffer_pointer()
        changed = add(theirs)
        assert changed.unsafe_buffer_pointer() == address
        assert theirs.is_deleted()
        np.testing.assert_array_equal(changed, np.ones(1000))
        np.testing.assert_array_equal(reshaped, np.zeros((10, 100)))
