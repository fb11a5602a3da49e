"""Tests of the number of CTAs in plans for `mla_decode`: `plan_decode` derives it from shapes, and it must equal the
number in the plan that the kernel makes itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_attn.ops.mla_decode.mosaic_sm90 as mosaic_sm90
from pallas_attn import DecodePlan, mla_decode, plan_decode
from pallas_attn.mosaic.primitives import basics
from pallas_attn.ops.plan_decode import planned as planned_call
from pallas_attn.runtime import dispatch
from tests.contract.mla_case import SM_SCALE, Inputs, MlaCase
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

MULTIPROCESSORS = 12


def shapes(heads: int, queries: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    case = MlaCase((5, 9), heads=heads, queries=queries, page_size=16, pages_per_row=2, num_pages=8, dtype=dtype)
    arguments = Inputs.draw(case, harness.fresh_rng()).arguments()
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, arguments))


def plan(arguments: dict[str, Any], **static: Any) -> DecodePlan:
    queries = arguments["q_latent"], arguments["q_rope"]
    of_lens = functools.partial(plan_decode, queries, arguments["cache"], arguments["block_tables"], **static)
    return jax.eval_shape(of_lens, arguments["kv_lens"])


def programs(arguments: dict[str, Any], **static: Any) -> int:
    return plan(arguments, **static).cta_row.shape[0] - 1


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a list to which each traced kernel that makes its plan itself adds the plan's number of CTAs."""
    numbers: list[int] = []

    def recording(call: Any, implementation: str, num_programs: int) -> tuple[Any, DecodePlan]:
        numbers.append(num_programs)
        return planned_call(call, implementation, num_programs)

    monkeypatch.setattr(mosaic_sm90, "planned", recording)
    monkeypatch.setattr(basics, "multiprocessors", lambda: MULTIPROCESSORS)
    with harness.interpreting(capsys):
        yield numbers


@slow_cases("9-3-float32-12")
@pytest.mark.parametrize(
    ("heads", "queries", "out_dtype", "expected"),
    [
        # swap-AB kernel with several CTAs per SM; not in `make test`, because (9, 3) tests this kernel
        pytest.param(32, 1, None, None, marks=pytest.mark.slow),
        (9, 3, "float32", MULTIPROCESSORS),  # swap-AB kernel with float32 output: one CTA per SM
        # two-warpgroup kernel with 1 and 16 blocks of query rows; not in `make test`, because (20, 8) tests 3 blocks
        pytest.param(64, 1, None, MULTIPROCESSORS, marks=pytest.mark.slow),
        (20, 8, None, MULTIPROCESSORS // 3),
        pytest.param(128, 8, None, 1, marks=pytest.mark.slow),
    ],
)
def test_shared_plan_has_the_kernels_number_of_programs(
    planned: list[int], heads: int, queries: int, out_dtype: str | None, expected: int | None
) -> None:
    arguments = shapes(heads, queries)
    call = functools.partial(mla_decode, sm_scale=SM_SCALE, out_dtype=out_dtype, implementation="mosaic")
    jax.eval_shape(call, **arguments)
    assert planned == [programs(arguments, out_dtype=out_dtype)]
    assert expected is None or planned == [expected]


def test_num_programs_argument(planned: list[int]) -> None:
    assert programs(shapes(64), num_programs=7) == 7


@pytest.mark.slow
def test_one_program_for_implementations_without_plans(planned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    few = shapes(16)
    assert programs(few) >= MULTIPROCESSORS
    assert plan(few).implementation == "mosaic_sm90"
    assert programs(few, implementation="xla") == programs(few, implementation="reference") == 1
    assert programs(shapes(16, dtype="float32")) == 1
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert programs(few) == 1
    assert plan(few).implementation == "reference"


def test_raises_the_errors_of_the_call(unchecked_shapes: None) -> None:
    arguments = shapes(16)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        programs(arguments, implementation="mosaic")
    with pytest.raises(ValueError, match="q_rope: expected shape"):
        programs(arguments | {"q_rope": jax.ShapeDtypeStruct((1, 1, 16, 32), jnp.bfloat16)})
