"""Tests of `faster_lowering`, a context that replaces functions of JAX by faster functions.

Replacements return the same results as the functions of JAX. A function is replaced only if its source is known, and
only inside the context.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import constraints, core
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem, RegisterLayout, Unsatisfiable, Variable
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_attn.jax_patches import faster_lowering as patches
from pallas_attn.jax_patches.faster_lowering import REPLACEMENTS, faster_lowering

JAX = {replacement.title: getattr(replacement.place, replacement.name) for replacement in REPLACEMENTS}
"""The original functions of JAX by name. They are not replaced while pytest imports this file."""


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a variable of a constraint system. JAX uses MLIR operations as keys, which are slow to print."""

    number: int
    shape: tuple[int, ...] = (128,)
    memory_space: constraints.MemorySpace = constraints.MemorySpace.REG


VARIABLES = [Variable(Key(i)) for i in range(12)]
LAYOUTS = (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT, fa.WGMMA_COL_LAYOUT, fa.TCGEN05_LAYOUT, fa.TMEM_NATIVE_LAYOUT)


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the replacements, also if an environment variable of the test run disables them."""
    monkeypatch.delenv(patches.ENVIRONMENT_VARIABLE, raising=False)


def current() -> dict[str, Any]:
    return {replacement.title: getattr(replacement.place, replacement.name) for replacement in REPLACEMENTS}


# --- replacements


def system(pairs: list[tuple[int, int]]) -> ConstraintSystem:
    equal = [constraints.Equals(VARIABLES[a], VARIABLES[b]) for a, b in pairs]
    return ConstraintSystem(constraints=[*equal, constraints.Divides(VARIABLES[0], (64,))])


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=16))
def test_equal_variables_are_the_same_as_in_jax(pairs: list[tuple[int, int]]) -> None:
    ours = patches.equal_variables(system(pairs))
    theirs = JAX["constraints.compute_transitively_equal_vars"](system(pairs))
    assert {v: set(others) for v, others in ours.items()} == {v: set(others) for v, others in theirs.items()}
    assert all(len(others) == len(set(others)) for others in ours.values())


def test_equal_variables_are_ordered_by_first_occurrence() -> None:
    variables = patches.equal_variables(system([(3, 7), (5, 1), (7, 5)]))
    assert [v.key.number for v in variables] == [3, 7, 5, 1]


assignments = st.dictionaries(
    st.sampled_from(VARIABLES), st.sampled_from([RegisterLayout(x) for x in LAYOUTS]), max_size=6
)


@given(assignments, assignments, st.booleans())
def test_conjunction_of_systems_is_the_same_as_in_jax(first: dict, second: dict, unsatisfiable: bool) -> None:
    one = ConstraintSystem(assignments=first, constraints=[constraints.Divides(VARIABLES[0], (64,))])
    other = Unsatisfiable() if unsatisfiable else ConstraintSystem(assignments=second, constraints=[])
    ours, theirs = patches.both_systems(one, other), JAX["ConstraintSystem.__and__"](one, other)
    assert type(ours) is type(theirs)
    if isinstance(ours, ConstraintSystem):
        assert ours == theirs
        assert list(ours.assignments) == list(theirs.assignments)


def test_assignments_are_the_same_as_in_jax() -> None:
    """Find layouts for a variable with a given layout, a variable that must be equal to it, and a variable whose layout
    JAX has to guess.
    """
    known = ConstraintSystem(
        assignments={VARIABLES[3]: RegisterLayout(fa.WGMMA_ROW_LAYOUT)},
        constraints=[
            constraints.Equals(VARIABLES[1], VARIABLES[3]),
            constraints.Relayout(VARIABLES[2], VARIABLES[3], bitwidth=32),
        ],
    )
    find, unknowns = JAX["layout_inference.find_assignments_for"], [VARIABLES[i] for i in (3, 1, 2)]
    theirs = find(unknowns, known, fuel=9, arch=(9, 0))
    ours = patches.find_in_dictionary(find)(unknowns, known, fuel=9, arch=(9, 0))
    assert ours == theirs
    assert list(ours[0]) == list(theirs[0])
    assert len(ours[0]) == 3


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which Mosaic appends the text of each MLIR module that it lowers."""
    texts: list[str] = []
    lower_module = core.lower_mgpu_module

    def record(module: ir.Module, *args: Any, **kwargs: Any) -> None:
        lower_module(module, *args, **kwargs)
        texts.append(re.sub(r"body_\d+", "body", str(module)))  # JAX numbers functions differently in each module

    monkeypatch.setattr(core, "lower_mgpu_module", record)
    return texts


def test_first_branch_is_lowered_once(modules: list[str]) -> None:
    """JAX lowers the innermost branch of three nested conditions eight times. The replacement lowers it once, and the
    MLIR module is the same.
    """
    lowered: list[int] = []

    def body(x_gmem: Any, out_gmem: Any) -> None:
        @plgpu.inline_mgpu()
        def count(_: Any) -> None:
            lowered.append(1)

        def nested(depth: int, x: jax.Array) -> jax.Array:
            if not depth:
                count()
                return x * 2
            return jax.lax.cond(x_gmem[depth] > 0, lambda x: x, functools.partial(nested, depth - 1), x)

        out_gmem[...] = nested(3, x_gmem[...])

    def module() -> str:
        lowered.clear()
        kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
        checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        exporting = jax.export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=checks)
        exporting(jax.ShapeDtypeStruct((128,), jnp.float32))
        return modules.pop()

    theirs = module()
    assert len(lowered) == 8
    with faster_lowering():
        assert module() == theirs
    assert len(lowered) == 1
    assert module() == theirs
    assert len(lowered) == 8


# --- contexts and threads


def rules() -> list[dict[Any, Any]]:
    return [dict(table) for table in lowering.mosaic_lowering_rules.values()]


def test_known_functions_are_replaced_within_the_context() -> None:
    known = [r.title for r in REPLACEMENTS if r.is_known()]
    if jax.__version__ == "0.11.2":
        assert known == list(JAX)
    before = rules()
    with faster_lowering() as titles:
        assert list(titles) == known
        assert all((function is JAX[title]) == (title not in known) for title, function in current().items())
        assert (rules() != before) == ("lowering._cond_lowering_rule" in known)
    assert current() == JAX
    assert rules() == before


def test_nested_contexts() -> None:
    with faster_lowering() as outer:
        with faster_lowering() as inner:
            assert inner == outer
        assert current() != JAX
    assert current() == JAX


def test_functions_are_restored_after_an_exception() -> None:
    before = rules()
    with pytest.raises(KeyError), faster_lowering():
        raise KeyError
    assert current() == JAX
    assert rules() == before


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return a list to which each call of `ConstraintSystem.__and__` appends "ours" if it is
    replaced, and else "jax".
    """
    called: list[str] = []

    def ours(first: Any, second: Any) -> None:
        called.append("ours")

    def theirs(first: Any, second: Any) -> None:
        called.append("jax")

    monkeypatch.setattr(ConstraintSystem, "__and__", theirs)
    replacement = patches.Replacement(ConstraintSystem, "__and__", patches.fingerprint(theirs), lambda _: ours)
    monkeypatch.setattr(patches, "REPLACEMENTS", (replacement,))
    yield called
    assert ConstraintSystem.__and__ is theirs


def conjunction() -> None:
    ConstraintSystem() & ConstraintSystem()  # pyrefly: ignore[unused-expression]


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_other_threads_call_jax(recorded: list[str]) -> None:
    with faster_lowering():
        conjunction()
        in_thread(conjunction)
    conjunction()
    assert recorded == ["ours", "jax", "jax"]


def test_contexts_of_several_threads_overlap(recorded: list[str]) -> None:
    """If contexts of two threads overlap, the context that is closed last restores the function of JAX."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with faster_lowering():
            entered.set()
            leave.wait()
            conjunction()

    thread = threading.Thread(target=other)
    with faster_lowering():
        thread.start()
        entered.wait()
    conjunction()
    leave.set()
    thread.join()
    assert recorded == ["jax", "ours"]


def test_unknown_functions_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    for replacement in REPLACEMENTS:
        monkeypatch.setattr(replacement.place, replacement.name, other)
    with faster_lowering() as titles:
        assert titles == ()
        assert all(function is other for function in current().values())


def test_environment_variable_disables_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.ENVIRONMENT_VARIABLE, "0")
    with faster_lowering() as titles:
        assert titles == ()
        assert current() == JAX


def test_invalid_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.ENVIRONMENT_VARIABLE, "yes")
    with (
        pytest.raises(ValueError, match="PALLAS_ATTN_PATCH_JAX: expected 0 or 1, got 'yes'"),
        faster_lowering(),
    ):
        pass
