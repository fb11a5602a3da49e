"""The replaced functions of jax's layout inference find what jax's own do, and only known ones are replaced."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.lib import mosaic_gpu_dialect as mosaic_gpu
from jax.experimental.mosaic.gpu import constraints, layouts
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem, RegisterLayout, Unsatisfiable, Variable
from jaxlib.mlir import ir

from pallas_attn.mosaic import faster_lowering
from pallas_attn.mosaic.faster_lowering import REPLACEMENTS

JAX = {replacement.name: replacement.original for replacement in REPLACEMENTS}


@dataclasses.dataclass(frozen=True)
class Key:
    """Identifies a variable; printing it is cheap, unlike that of an MLIR operation."""

    number: int
    shape: tuple[int, ...] = (128,)
    memory_space: constraints.MemorySpace = constraints.MemorySpace.REG


VARIABLES = [Variable(Key(i)) for i in range(12)]
LAYOUTS = (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT, fa.WGMMA_COL_LAYOUT, fa.TCGEN05_LAYOUT, fa.TMEM_NATIVE_LAYOUT)


def system(pairs: list[tuple[int, int]]) -> ConstraintSystem:
    equal = [constraints.Equals(VARIABLES[a], VARIABLES[b]) for a, b in pairs]
    return ConstraintSystem(constraints=[*equal, constraints.Divides(VARIABLES[0], (64,))])


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch):
    """Starts from jax's own functions, whatever ran before."""
    faster_lowering.apply.cache_clear()
    for replacement in REPLACEMENTS:
        monkeypatch.setattr(replacement.place, replacement.name, replacement.original)
    yield
    faster_lowering.apply.cache_clear()


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=16))
def test_same_classes_as_jax(pairs: list[tuple[int, int]]) -> None:
    ours = faster_lowering.equal_variables(system(pairs))
    theirs = JAX["compute_transitively_equal_vars"](system(pairs))
    assert {v: set(others) for v, others in ours.items()} == {v: set(others) for v, others in theirs.items()}
    assert all(len(others) == len(set(others)) for others in ours.values())


def test_order_is_that_of_the_constraints() -> None:
    orders = {
        tuple(v.key.number for v in faster_lowering.equal_variables(system([(3, 7), (5, 1), (7, 5)])))
        for _ in itertools.repeat(None, 3)
    }
    assert orders == {(3, 7, 5, 1)}


assignments = st.dictionaries(
    st.sampled_from(VARIABLES), st.sampled_from([RegisterLayout(x) for x in LAYOUTS]), max_size=6
)


@given(assignments, assignments, st.booleans())
def test_two_systems_together_are_those_of_jax(first: dict, second: dict, no_second: bool) -> None:
    one = ConstraintSystem(assignments=first, constraints=[constraints.Divides(VARIABLES[0], (64,))])
    other = Unsatisfiable() if no_second else ConstraintSystem(assignments=second, constraints=[])
    ours, theirs = faster_lowering.both_systems(one, other), JAX["__and__"](one, other)
    assert type(ours) is type(theirs)
    if isinstance(ours, ConstraintSystem):
        assert ours == theirs
        assert list(ours.assignments) == list(theirs.assignments)


def test_assignments_are_those_of_jax() -> None:
    """Compares layouts of variables that are known, equal to known ones, and guessed, in the order they are given."""
    known = ConstraintSystem(
        assignments={VARIABLES[3]: RegisterLayout(fa.WGMMA_ROW_LAYOUT)},
        constraints=[
            constraints.Equals(VARIABLES[1], VARIABLES[3]),
            constraints.Relayout(VARIABLES[2], VARIABLES[3], bitwidth=32),
        ],
    )
    find, unknowns = JAX["find_assignments_for"], [VARIABLES[i] for i in (3, 1, 2)]
    theirs = find(unknowns, known, fuel=9, arch=(9, 0))
    ours = faster_lowering.looking_up_quickly(find)(unknowns, known, fuel=9, arch=(9, 0))
    assert ours == theirs
    assert list(ours[0]) == list(theirs[0])
    assert len(ours[0]) == 3


def test_layouts_are_those_of_jax() -> None:
    """Also in a second MLIR context, for which nothing is built again."""
    built = []

    def build(attribute: ir.Attribute) -> fa.TiledLayout:
        built.append(attribute)
        return JAX["_from_tiled_layout_attr"](attribute)

    quickly = faster_lowering.keeping_by_text(build)
    for _ in range(2):
        with ir.Context() as context, ir.Location.unknown():
            mosaic_gpu.register_dialect(context)
            assert [quickly(layouts.to_layout_attr(layout)) for layout in LAYOUTS] == list(LAYOUTS)
    assert len(built) == len(LAYOUTS)


@pytest.mark.usefixtures("unpatched")
def test_known_functions_are_replaced() -> None:
    known = [r.name for r in REPLACEMENTS if faster_lowering.fingerprint(r.original) == r.source]
    assert faster_lowering.apply() == tuple(known)
    assert all((getattr(r.place, r.name) is r.original) == (r.name not in known) for r in REPLACEMENTS)
    if jax.__version__ == "0.11.2":
        assert known == list(JAX)


@pytest.mark.usefixtures("unpatched")
def test_another_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args, **kwargs):
        raise NotImplementedError

    for replacement in REPLACEMENTS:
        monkeypatch.setattr(replacement.place, replacement.name, other)
    assert faster_lowering.apply() == ()
    assert all(getattr(r.place, r.name) is other for r in REPLACEMENTS)


@pytest.mark.usefixtures("unpatched")
def test_the_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster_lowering.ENVIRONMENT_VARIABLE, "0")
    assert faster_lowering.apply() == ()
    assert all(getattr(r.place, r.name) is r.original for r in REPLACEMENTS)


@pytest.mark.usefixtures("unpatched")
def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faster_lowering.ENVIRONMENT_VARIABLE, "yes")
    with pytest.raises(ValueError, match="PALLAS_ATTN_PATCH_JAX: expected 0 or 1, got 'yes'"):
        faster_lowering.apply()
