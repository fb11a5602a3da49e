"""The replaced functions of jax's layout inference find what jax's own do, and only known ones are replaced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect as mosaic_gpu
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.state.indexing import NDIndexer, Slice
from jax.experimental.mosaic.gpu import constraints, core, layouts, utils
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu.constraints import ConstraintSystem, RegisterLayout, Unsatisfiable, Variable
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_attn.jax_patches import faster_lowering
from pallas_attn.jax_patches.faster_lowering import REPLACEMENTS

JAX = {replacement.title: replacement.original for replacement in REPLACEMENTS}


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
    monkeypatch.setattr(utils, "thread_idx", getattr(utils.thread_idx, "__wrapped__", utils.thread_idx))
    for rules in lowering.mosaic_lowering_rules.values():
        for primitive, rule in rules.items():
            monkeypatch.setitem(rules, primitive, inspect.unwrap(rule))
    yield
    faster_lowering.apply.cache_clear()


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=16))
def test_same_classes_as_jax(pairs: list[tuple[int, int]]) -> None:
    ours = faster_lowering.equal_variables(system(pairs))
    theirs = JAX["constraints.compute_transitively_equal_vars"](system(pairs))
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
    ours, theirs = faster_lowering.both_systems(one, other), JAX["ConstraintSystem.__and__"](one, other)
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
    find, unknowns = JAX["layout_inference.find_assignments_for"], [VARIABLES[i] for i in (3, 1, 2)]
    theirs = find(unknowns, known, fuel=9, arch=(9, 0))
    ours = faster_lowering.looking_up_quickly(find)(unknowns, known, fuel=9, arch=(9, 0))
    assert ours == theirs
    assert list(ours[0]) == list(theirs[0])
    assert len(ours[0]) == 3


REGISTERS = [RegisterLayout(x) for x in (*LAYOUTS, fa.WGSplatFragLayout((128,)))]
expressions = st.sampled_from([*VARIABLES[:5], *REGISTERS])
some_constraints = st.one_of(
    st.builds(constraints.Equals, expressions, expressions),
    st.builds(constraints.Relayout, expressions, expressions, st.just(32), st.booleans()),
    st.builds(constraints.NotOfType, expressions, st.just(fa.WGSplatFragLayout)),
    st.builds(constraints.Divides, expressions, st.sampled_from([(64,), (32,), (16, 8)])),
    st.builds(constraints.OneOf, expressions, st.lists(st.sampled_from(REGISTERS), min_size=1).map(tuple)),
    st.builds(
        lambda e, other: constraints.Equals(constraints.Reduce(e, (0,), 2), other),
        st.sampled_from(VARIABLES[:5]),
        expressions,
    ),
)


@given(st.lists(some_constraints, max_size=12), st.sampled_from(VARIABLES[:5]), st.sampled_from(REGISTERS))
def test_a_system_is_reduced_as_by_jax(some: list, guessed: Variable, guess: RegisterLayout) -> None:
    """Step by step, until nothing changes, and again once one more variable has a layout."""
    copies = [dataclasses.replace(one) for one in some]
    ours, theirs = ConstraintSystem(constraints=copies), ConstraintSystem(constraints=some)
    for guesses in ({}, {guessed: guess}):
        ours.assignments.update(guesses)
        theirs.assignments.update(guesses)
        while ours is not None:
            last, ours, theirs = (
                ours,
                *(
                    outcome(reduce, system)
                    for reduce, system in (
                        (faster_lowering.reduce_system_once, ours),
                        (JAX["constraints._reduce_system_once"], theirs),
                    )
                ),
            )
            assert type(ours) is type(theirs)
            if not isinstance(ours, ConstraintSystem):
                break
            assert ours == theirs
            assert list(ours.assignments) == list(theirs.assignments)
        if ours is not None:
            return
        ours, theirs = (ConstraintSystem(dict(last.assignments), list(last.constraints)) for _ in range(2))


def outcome(reduce: Callable[..., Any], system: ConstraintSystem) -> Any:
    """The reduced system, or the type of what was raised."""
    try:
        return reduce(system)
    except (NotImplementedError, ValueError, AssertionError) as error:
        return type(error)


def test_results_are_kept() -> None:
    """But not those of calls with arguments."""
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Two:
        number: int

        def times(self, other: int = 1) -> int:
            asked.append(other)
            return self.number * other

    Two.times = faster_lowering.keeping_result(Two.times)
    two = Two(2)
    assert [two.times(), two.times(), two.times(3), two.times(3)] == [2, 2, 6, 6]
    assert asked == [1, 3, 3]
    assert two == Two(2)


@pytest.mark.usefixtures("unpatched")
def test_branches_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come out as they do from jax, which lowers the first one of three that are nested eight times."""
    lowered, modules, lower_module = [], [], core.lower_mgpu_module

    def keep(module: ir.Module, *args: Any, **kwargs: Any) -> None:
        lower_module(module, *args, **kwargs)
        modules.append(re.sub(r"body_\d+", "body", str(module)))  # jax numbers them

    monkeypatch.setattr(core, "lower_mgpu_module", keep)

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
    (condition,) = (r for r in REPLACEMENTS if r.name == "_cond_lowering_rule")
    assert condition.apply()
    assert module() == theirs
    assert len(lowered) == 1


def test_layouts_are_those_of_jax() -> None:
    """Also in a second MLIR context, for which nothing is built again."""
    built = []

    def build(attribute: ir.Attribute) -> fa.TiledLayout:
        built.append(attribute)
        return JAX["layouts._from_tiled_layout_attr"](attribute)

    quickly = faster_lowering.keeping_by_text(build)
    for _ in range(2):
        with ir.Context() as context, ir.Location.unknown():
            mosaic_gpu.register_dialect(context)
            assert [quickly(layouts.to_layout_attr(layout)) for layout in LAYOUTS] == list(LAYOUTS)
    assert len(built) == len(LAYOUTS)


@pytest.mark.usefixtures("unpatched")
def test_known_functions_are_replaced() -> None:
    known = [r.title for r in REPLACEMENTS if r.is_known()]
    replaced = faster_lowering.apply()
    assert replaced[: len(known)] == tuple(known)
    assert set(replaced[len(known) :]) <= set(faster_lowering.OTHERS)
    assert all((getattr(r.place, r.name) is r.original) == (r.title not in known) for r in REPLACEMENTS)
    if jax.__version__ == "0.11.2":
        assert known == list(JAX)
        assert "utils.thread_idx" in replaced


@pytest.mark.usefixtures("unpatched")
def test_functions_of_known_files_are_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = [r.is_known() for r in REPLACEMENTS]
    monkeypatch.setattr(faster_lowering, "_is_known", lambda _: False)
    assert [r.is_known() for r in REPLACEMENTS] == by_file


@pytest.mark.usefixtures("unpatched")
def test_another_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args, **kwargs):
        raise NotImplementedError

    for replacement in REPLACEMENTS:
        monkeypatch.setattr(replacement.place, replacement.name, other)
    monkeypatch.setattr(utils, "thread_idx", other)
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


indices = st.one_of(
    st.builds(Slice, st.integers(0, 3), st.integers(1, 4)),
    st.integers(0, 3),
)


@given(st.lists(indices, min_size=1, max_size=5))
def test_shapes_of_indexers_are_those_of_jax(some: list) -> None:
    """Also where numbers are no neighbours, which puts their dimensions first."""
    for numbers in ((), (3,), (3, 2)):
        indexer = NDIndexer(tuple(some), (8,) * len(some), numbers)
        assert faster_lowering.indexer_shape(indexer) == JAX["NDIndexer.get_indexer_shape"](indexer)


def test_numbers_are_dimensions_at_once() -> None:
    asked = []
    is_dim = faster_lowering.of_numbers(lambda value: asked.append(value) or False)
    assert is_dim(3)
    assert not is_dim(jnp.ones(2))
    assert not is_dim("3")
    assert len(asked) == 2


DTYPES = (jnp.int32, np.dtype("uint8"), jnp.int4, jnp.bool_, jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)


def test_types_are_those_of_jax() -> None:
    """In each MLIR context, of which types are not shared."""
    convert = faster_lowering.of_known_width(JAX["utils.dtype_to_ir_type"])
    for _ in range(2):
        with mlir.make_ir_context():
            assert [convert(dtype) for dtype in DTYPES] == [JAX["utils.dtype_to_ir_type"](dtype) for dtype in DTYPES]


def test_shapes_of_layouts_are_those_of_jax() -> None:
    for name, arguments in (
        ("registers_shape", ((128, 64), [256, 128])),
        ("reduce", ((0,), [1])),
    ):
        theirs = JAX[f"TiledLayout.{name}"]
        kept = faster_lowering.keeping_by_argument(theirs)
        for layout in (fa.WGMMA_LAYOUT, fa.TCGEN05_LAYOUT):
            for argument in (*arguments, *arguments):
                assert kept(layout, argument) == theirs(layout, argument)


def test_layouts_of_products_are_those_of_jax() -> None:
    """Built once for each width of elements and number of warps."""
    built = []

    def build(self: Any, element_type: Any, *, m_warps: int = 4) -> None:
        built.append(m_warps)
        JAX["MMALayouts.__init__"](self, element_type, m_warps=m_warps)

    take = faster_lowering.keeping_layouts(build)
    with mlir.make_ir_context():
        kinds = [ir.F16Type.get(), ir.BF16Type.get(), ir.IntegerType.get_signless(8)]
        for kind, m_warps in itertools.product(kinds, (1, 2, 4)):
            ours, theirs = (object.__new__(MMALayouts) for _ in range(2))
            take(ours, kind, m_warps=m_warps)
            JAX["MMALayouts.__init__"](theirs, kind, m_warps=m_warps)
            assert vars(ours) == vars(theirs)
    assert len(built) == 6


def test_transfers_are_tried_once() -> None:
    tried = []

    def is_supported(self: Any, smem_layout: Any, reg_layout: Any) -> bool:
        tried.append(self.shape)
        return self.shape == (64, 64)

    ask = faster_lowering.keeping_answers(is_supported)
    for shape in ((64, 64), (64, 128)) * 2:
        transfer = SimpleNamespace(shape=shape, strides=(shape[1], 1), bitwidth=16, optimized=True)
        assert ask(transfer, None, fa.WGMMA_LAYOUT) == (shape == (64, 64))
    assert tried == [(64, 64), (64, 128)]


def pointwise(apply: Callable[..., Any]) -> list[str]:
    """Text and layout of what comes of operations on arrays that are alike and not, and of an error."""
    with mlir.make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        i32, i8 = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
        layout, shape = fa.WGMMA_ROW_LAYOUT, (64,)
        number = arith.constant(i32, 5)
        row = fa.FragmentedArray.splat(number, shape, layout, is_signed=True)
        same = fa.FragmentedArray.splat(number, shape, is_signed=True)
        small = fa.FragmentedArray.splat(arith.constant(i8, 5), shape, layout, is_signed=False)
        found = [
            apply(row, arith.addi, row),
            apply(row, arith.addi, same),
            apply(same, arith.addi, row),
            apply(same, arith.addi, same),
            apply(row, arith.subi, 3),
            apply(row, lambda x, y: arith.cmpi(arith.CmpIPredicate.slt, x, y), row, output_is_signed=False),
            apply(small, arith.andi, small, restrict_bitwidth=False),
        ]
        with pytest.raises(NotImplementedError, match="8-bit types are unsupported"):
            apply(small, arith.addi, small)
        return [f"{x.layout} {x.is_signed} {x.registers.shape} {x.registers.flat[0].owner}" for x in found]


def test_operations_on_registers_are_those_of_jax() -> None:
    theirs = JAX["FragmentedArray._pointwise"]
    assert [re.sub(r"%\w+", "%", text) for text in pointwise(faster_lowering.of_alike(theirs))] == [
        re.sub(r"%\w+", "%", text) for text in pointwise(theirs)
    ]
