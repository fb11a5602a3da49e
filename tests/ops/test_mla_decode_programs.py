"""`mla_decode_programs` says what `mla_decode` plans for where it is given no plan, from shapes alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_attn.ops.mla_decode.mosaic_sm90 as mosaic_sm90
import pallas_attn.ops.mla_decode.mosaic_swap_ab as mosaic_swap_ab
from pallas_attn import DecodePlan, dispatch, mla_decode, mla_decode_programs, plan_decode
from pallas_attn.mosaic import basics
from tests.ops import harness
from tests.ops.mla_case import SM_SCALE, Inputs, MlaCase

MULTIPROCESSORS = 12


def shapes(heads: int, queries: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    case = MlaCase((5, 9), heads=heads, queries=queries, page_size=16, pages_per_row=2, num_pages=8, dtype=dtype)
    arguments = Inputs.draw(case, harness.fresh_rng()).arguments()
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, arguments))


def programs(arguments: dict[str, Any], **static: Any) -> int:
    return mla_decode_programs(*(arguments[name] for name in ("q_latent", "q_rope", "cache")), **static)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Programs of the plans that kernels traced here make for themselves."""
    numbers: list[int] = []

    def plan(*args: Any, num_programs: int, **kwargs: Any) -> DecodePlan:
        numbers.append(num_programs)
        return plan_decode(*args, num_programs=num_programs, **kwargs)

    for part in (mosaic_sm90, mosaic_swap_ab):
        monkeypatch.setattr(part, "plan_decode", plan)
    monkeypatch.setattr(basics, "multiprocessors", lambda: MULTIPROCESSORS)
    with harness.interpreting(capsys):
        yield numbers


@pytest.mark.parametrize(
    ("heads", "queries", "out_dtype", "expected"),
    [
        (32, 1, None, None),  # columns: as many as fit
        (9, 3, "float32", MULTIPROCESSORS),  # wider outputs leave room for fewer columns
        (64, 1, None, MULTIPROCESSORS),
        (20, 8, None, MULTIPROCESSORS // 3),
        (128, 8, None, 1),
    ],
)
def test_as_many_as_the_kernel_plans_for_itself(
    planned: list[int], heads: int, queries: int, out_dtype: str | None, expected: int | None
) -> None:
    arguments = shapes(heads, queries)
    call = functools.partial(mla_decode, sm_scale=SM_SCALE, out_dtype=out_dtype, implementation="mosaic")
    jax.eval_shape(call, **arguments)
    assert planned == [programs(arguments, out_dtype=out_dtype)]
    assert expected is None or planned == [expected]


def test_one_where_no_plan_is_followed(planned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    few = shapes(16)
    assert programs(few) >= MULTIPROCESSORS
    assert programs(few, implementation="xla") == programs(few, implementation="reference") == 1
    assert programs(shapes(16, dtype="float32")) == 1
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert programs(few) == 1


def test_refuses_what_the_call_would(unchecked_shapes: None) -> None:
    arguments = shapes(16)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        programs(arguments, implementation="mosaic")
    with pytest.raises(ValueError, match="q_rope: expected shape"):
        programs(arguments | {"q_rope": jax.ShapeDtypeStruct((1, 1, 16, 32), jnp.bfloat16)})
