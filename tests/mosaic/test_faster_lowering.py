"""The replaced function of jax's layout inference gives the same classes, and only a known one is replaced."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.mosaic.gpu import constraints

from pallas_attn.mosaic import faster_lowering


@dataclasses.dataclass(frozen=True)
class Key:
    """Identifies a variable; printing it is cheap, unlike that of an MLIR operation."""

    number: int
    shape: tuple[int, ...] = (128,)
    memory_space: constraints.MemorySpace = constraints.MemorySpace.REG


def system(pairs: list[tuple[int, int]]) -> constraints.ConstraintSystem:
    variables = [constraints.Variable(Key(i)) for i in range(12)]
    equal = [constraints.Equals(variables[a], variables[b]) for a, b in pairs]
    return constraints.ConstraintSystem(constraints=[*equal, constraints.Divides(variables[0], (64,))])


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch):
    """Starts from jax's own function, whatever ran before."""
    faster_lowering.apply.cache_clear()
    monkeypatch.setattr(constraints, faster_lowering.NAME, faster_lowering.ORIGINAL)
    yield
    faster_lowering.apply.cache_clear()


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=16))
def test_same_classes_as_jax(pairs: list[tuple[int, int]]) -> None:
    assert faster_lowering.ORIGINAL is not None
    ours, theirs = faster_lowering.equal_variables(system(pairs)), faster_lowering.ORIGINAL(system(pairs))
    assert {v: set(others) for v, others in ours.items()} == {v: set(others) for v, others in theirs.items()}
    assert all(len(others) == len(set(others)) for others in ours.values())


def test_order_is_that_of_the_constraints() -> None:
    orders = {
        tuple(v.key.number for v in faster_lowering.equal_variables(system([(3, 7), (5, 1), (7, 5)])))
        for _ in itertools.repeat(None, 3)
    }
    assert orders == {(3, 7, 5, 1)}


@pytest.mark.usefixtures("unpatched")
def test_the_known_function_is_replaced() -> None:
    assert faster_lowering.apply() == (faster_lowering.fingerprint(faster_lowering.ORIGINAL) in faster_lowering.KNOWN)
    if jax.__version__ == "0.11.2":
        assert getattr(constraints, faster_lowering.NAME) is faster_lowering.equal_variables


@pytest.mark.usefixtures("unpatched")
def test_another_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(system):
        return {}

    monkeypatch.setattr(constraints, faster_lowering.NAME, other)
    assert not faster_lowering.apply()
    assert getattr(constraints, faster_lowering.NAME) is other


@pytest.mark.usefixtures("unpatched")
def test_the_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster_lowering.ENVIRONMENT_VARIABLE, "0")
    assert not faster_lowering.apply()
    assert getattr(constraints, faster_lowering.NAME) is faster_lowering.ORIGINAL


@pytest.mark.usefixtures("unpatched")
def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster_lowering.ENVIRONMENT_VARIABLE, "yes")
    with pytest.raises(ValueError, match="PALLAS_ATTN_PATCH_JAX: expected 0 or 1, got 'yes'"):
        faster_lowering.apply()
