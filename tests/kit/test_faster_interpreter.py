"""Tests of the patches of jax's interpreter: results are correct, and races, errors and bad reads are detected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax._src.pallas.mosaic.interpret import race_detection_state, vector_clock
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kit import faster_interpreter, harness

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels are compiled on a GPU")
known_jax_only = pytest.mark.skipif(
    jax.__version__ != faster_interpreter.WRITTEN_FOR,
    reason=f"needs jax {faster_interpreter.WRITTEN_FOR}",
)
ROWS = jnp.arange(2 * 128.0).reshape(2, 128)


def reversed_rows(x: jax.Array, in_step: bool) -> jax.Array:
    """Return x [2, 128] with its rows swapped, computed by a kernel with two warpgroups.

    Each warpgroup copies one row to shared memory and then stores the row that the other warpgroup copied. Without
    `in_step`, no barrier separates copy and store, so the warpgroups race.
    """

    def body(x_gmem: Any, out_gmem: Any, rows_smem: Any, barrier: Any) -> None:
        mine = jax.lax.axis_index("wg")
        rows_smem[mine] = x_gmem[mine]
        if in_step:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        out_gmem[mine] = rows_smem[1 - mine]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=2)],
        num_threads=2,
        thread_name="wg",
    )(x)


@known_jax_only
def test_patches_apply_to_the_known_jax() -> None:
    assert faster_interpreter.apply()
    assert callbacks.io_callback_impl is faster_interpreter.run_callback
    assert race_detection_state.RaceDetectionState.check_write is faster_interpreter.check_write


@known_jax_only
def test_race_reports_equal_those_of_jax(capsys: pytest.CaptureFixture[str]) -> None:
    """The patched and the original race detector report the same races for random ranges and vector clocks."""
    rng = np.random.default_rng(0)
    ours, theirs = (race_detection_state.RaceDetectionState(1) for _ in range(2))
    reports: dict[str, list[str]] = {"read": [], "write": []}
    for i in range(300):
        clock = vector_clock.NpVectorClock(3)
        clock.clock += i // 5 + rng.integers(0, 2, 3, np.int32)
        start = int(rng.integers(40))
        access = "wg", clock, "buffer", (slice(start, start + 3),)
        kind = "read" if rng.integers(2) else "write"
        getattr(ours, f"check_{kind}")(*access)
        found = capsys.readouterr().out
        getattr(faster_interpreter, f"CHECK_{kind.upper()}")(theirs, *access)
        assert capsys.readouterr().out == found
        reports[kind].append(found)
    assert all(5 < sum(map(bool, found)) < len(found) - 10 for found in reports.values())
    assert ours.races_found


def test_kernel_without_race(capsys: pytest.CaptureFixture[str]) -> None:
    with harness.interpreting(capsys):
        np.testing.assert_array_equal(reversed_rows(ROWS, in_step=True), ROWS[::-1])


@known_jax_only
def test_error_in_one_thread_ends_the_wait_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """One warpgroup raises an error in a callback of the test, and the other waits for a barrier that never completes.
    Without the patch, jax ends the wait only for errors in the interpreter's callbacks.
    """

    def fail(_: Any) -> None:
        raise RuntimeError("failed on purpose")

    def body(x_gmem: Any, out_gmem: Any, barrier: Any) -> None:
        first = jax.lax.axis_index("wg") == 0
        jax.lax.cond(first, lambda: io_callback(fail, None, x_gmem[0, 0]), lambda: plgpu.barrier_wait(barrier))
        out_gmem[...] = x_gmem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
        scratch_types=[plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
    )
    with harness.interpreting(capsys), pytest.raises(Exception, match="failed on purpose"):
        jax.block_until_ready(kernel(ROWS))


def test_race_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """jax 0.11 prints the race, and `harness.interpreting` raises AssertionError. jax 0.12 raises JaxRuntimeError."""
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught, harness.interpreting(capsys):
        jax.block_until_ready(reversed_rows(ROWS, in_step=False))
    assert "RACE DETECTED" in capsys.readouterr().out + str(caught.value)


def test_out_of_bounds_read_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    def body(x_gmem: Any, i_gmem: Any, out_gmem: Any) -> None:
        out_gmem[...] = x_gmem[i_gmem[0]]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    with harness.interpreting(capsys), pytest.raises(Exception, match="Out-of-bounds read"):
        jax.block_until_ready(kernel(ROWS, jnp.array([2], jnp.int32)))


def test_callbacks_of_users_get_jax_arrays() -> None:
    seen: list[Any] = []
    jax.jit(lambda x: io_callback(seen.append, None, x))(ROWS)
    jax.effects_barrier()
    assert isinstance(seen[0], jax.Array)


def test_unknown_jax_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "io_callback_impl", faster_interpreter.ORIGINAL)
    monkeypatch.setattr(faster_interpreter, "KNOWN", {faster_interpreter.ORIGINAL: "hash of another source"})
    assert not faster_interpreter.apply()
    assert callbacks.io_callback_impl is faster_interpreter.ORIGINAL
