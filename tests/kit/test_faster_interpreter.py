"""The interpreter finds what it is there to find, with its callbacks as the tests replace them."""

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

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there kernels are compiled")
of_that_jax = pytest.mark.skipif(
    jax.__version__ != faster_interpreter.WRITTEN_FOR, reason=f"of jax {faster_interpreter.WRITTEN_FOR} alone"
)
ROWS = jnp.arange(2 * 128.0).reshape(2, 128)


def reversed_rows(x: jax.Array, in_step: bool) -> jax.Array:
    """Each of two warpgroups stores the row that the other one has put into shared memory."""

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


@of_that_jax
def test_the_functions_of_this_jax_are_the_known_ones() -> None:
    assert faster_interpreter.apply()
    assert callbacks.io_callback_impl is faster_interpreter.run_callback
    assert race_detection_state.RaceDetectionState.check_write is faster_interpreter.check_write


@of_that_jax
def test_races_are_those_that_jax_finds(capsys: pytest.CaptureFixture[str]) -> None:
    """Accesses of random ranges at random times, compared with all earlier ones one by one and at once."""
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


def test_a_sound_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with harness.interpreting(capsys):
        np.testing.assert_array_equal(reversed_rows(ROWS, in_step=True), ROWS[::-1])


@of_that_jax
def test_an_error_of_one_thread_ends_the_waits_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is not raised by the interpreter's own callbacks, for which jax sees to it."""

    def refuse(_: Any) -> None:
        raise RuntimeError("refused")

    def body(x_gmem: Any, out_gmem: Any, barrier: Any) -> None:
        first = jax.lax.axis_index("wg") == 0
        jax.lax.cond(first, lambda: io_callback(refuse, None, x_gmem[0, 0]), lambda: plgpu.barrier_wait(barrier))
        out_gmem[...] = x_gmem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype),
        scratch_types=[plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
    )
    with harness.interpreting(capsys), pytest.raises(Exception, match="refused"):
        jax.block_until_ready(kernel(ROWS))


def test_a_race_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed by jax 0.11, raised by jax 0.12."""
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught, harness.interpreting(capsys):
        jax.block_until_ready(reversed_rows(ROWS, in_step=False))
    assert "RACE DETECTED" in capsys.readouterr().out + str(caught.value)


def test_reading_past_an_array_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    def body(x_gmem: Any, i_gmem: Any, out_gmem: Any) -> None:
        out_gmem[...] = x_gmem[i_gmem[0]]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    with harness.interpreting(capsys), pytest.raises(Exception, match="Out-of-bounds read"):
        jax.block_until_ready(kernel(ROWS, jnp.array([2], jnp.int32)))


def test_other_callbacks_get_arrays_of_jax() -> None:
    seen: list[Any] = []
    jax.jit(lambda x: io_callback(seen.append, None, x))(ROWS)
    jax.effects_barrier()
    assert isinstance(seen[0], jax.Array)


def test_another_jax_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "io_callback_impl", faster_interpreter.ORIGINAL)
    monkeypatch.setattr(faster_interpreter, "KNOWN", {faster_interpreter.ORIGINAL: "of another text"})
    assert not faster_interpreter.apply()
    assert callbacks.io_callback_impl is faster_interpreter.ORIGINAL
