"""Lower Mosaic GPU kernels in a third of the time, by replacing functions of jax.

None of the replacements changes what is inferred, nor machine code. On two busy cores jax 0.11.2 lowered `paged_decode`
with its plan in 13 s, with the first of them replaced in 7 and with the first four in 4; `mla_decode` of 128 heads in
34, 11 and 9. What the others gained: benchmarks/log/104 and 112.

- `constraints.compute_transitively_equal_vars` sorts its variables by their text, to be deterministic. The text of a
  variable is that of its MLIR operation, and printing one operation numbers the whole module first, so the time grows
  with the square of the kernel. Ours takes variables in the order in which constraints name them, which is as
  deterministic.
- `layout_inference.find_assignments_for` looks each variable up in a list of all. Ours hands it a dictionary.
- `constraints.ConstraintSystem.__and__`, called once for each operation of a kernel, looks up all variables found so
  far among those of the operation. Ours looks up the few among the many.
- `layouts._from_tiled_layout_attr` builds and checks the same few layouts for each operation. Ours keeps them.
- `constraints._reduce_system_once` builds each constraint of a kernel anew, several times for each layout that is
  tried. Ours passes over those that it has reduced before, where none of their variables has got a layout since.
- `constraints.Variable.__hash__`, and `to_mgpu` of Pallas's `ReducedLayout` and `ParameterizedLayout`, do the same work
  again at each of thousands of calls. Ours keep the result.
- `lowering._cond_lowering_rule` lowers the first branch of a condition, to learn the types of its results, and throws
  it away; the first one inside that four times, and so on. Ours shows it a branch that only makes zeros of those types.
- `_get_ptxas_isa_version` starts the assembler to ask for its version, at each conversion from or to bool or 8 bits: 20
  to 40 ms each, 60 times for `mla_decode` of 128 heads. Ours asks once.
- Others do the same work again for each operation. `IsTransferableSmemRegisters._is_supported_smem_transfer` emits a
  transfer to find out whether it can be; `_lower_fn_with_avals` traces how an index commutes with a reference's tiling;
  `TiledLayout` and `MMALayouts` work out the same few shapes and layouts. Ours keep the results.
- `FragmentedArray._pointwise` copies operands to the layout that they have; `NDIndexer.get_indexer_shape`,
  `core.is_dim`, `utils.dtype_to_ir_type` and `utils.is_signed` take long for what is mostly known at once.
- Constants and numbers of threads: `reused_values.py`.

A function that reads otherwise than the one its replacement was written against is left as it is; the assembler's has
no source, and its result is kept by its arguments, of which there are none today.
`PALLAS_ATTN_PATCH_JAX=0` leaves every jax as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api_util, core, flattree
from jax._src import config as jax_config
from jax._src.interpreters import partial_eval
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.state import indexing
from jax._src.state.indexing import Slice
from jax.experimental.mosaic.gpu import (
    FragmentedArray,
    constraints,
    fragmented_array,
    layout_inference,
    layouts,
    utils,
)
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_attn.jax_patches import reused_values

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_PATCH_JAX"

KNOWN_FILES = frozenset(
    {
        "4f38df02f4a04835692f016e0593c1819aa0c253bf3367b8ccc2161c4381c3dc",  # core.py
        "b5da7f36b8c52c95c40efaf3ca1581531e8c9d5e543dc3e71f90402e92a49803",  # indexing.py
        "3f63ca73332f1d7ab0e48f6dcb596bfa897842f5c5ddca11fab4f14b368ae564",  # core.py
        "5c84b40b856f5331e7cf2f3653d21994204a2cc052bd999b4834f6641f22413b",  # lowering.py
        "8834ed17947e6494e18c25f9331f87ba217a3f7927879937047e051ebc136057",  # constraints.py
        "c10e8e4d03f9ed4753f7ed556feff6144880e5f539796854d05a939be3be68bc",  # fragmented_array.py
        "ad92f3b756766cad2f3a124cccddba00045a52b192e406ef07696a5adb4e80d7",  # layout_inference.py
        "ab255a99c910c567f9806d49bf7784e1272547a05c72165fdd567864c7a08195",  # layouts.py
        "b4b434c4b5d717e89d4f5b646f1c2ee9216fb9acdbcdc03a6aff51f531c86081",  # mma.py
        "335992325437cd31e3e12bae02d6945d21ceb2c3d4cc3b4538bdaf2cc5df8bbd",  # utils.py
        "2e2b231fbfc8fb0006f2c504de46b7c79884059970e735bef0c4300e67f9f36c",  # arith.py
    }
)
"""SHA-256 of jax's files (0.11.2) all of whose functions below are the known ones."""


def equal_variables(system: Any) -> dict[Any, list[Any]]:
    """Map each variable in an equality of a `constraints.ConstraintSystem` to all others that it is transitively equal
    to.
    """
    members: dict[Any, list[Any]] = {}  # of the class of each variable; all of a class share one list
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as left, rhs=constraints.Variable() as right):
                first, second = (members.setdefault(v, [v]) for v in (left, right))
                if first is second:
                    continue
                first.extend(second)
                members.update(dict.fromkeys(second, first))
    return {v: [other for other in same if other != v] for v, same in members.items()}


def both_systems(first: Any, second: Any) -> Any:
    """The `constraints.ConstraintSystem` with the assignments and constraints of two; `Unsatisfiable` if they assign
    one variable differently.
    """
    if isinstance(second, constraints.Unsatisfiable):
        return constraints.Unsatisfiable()
    few, many = first.assignments, second.assignments
    if len(few) > len(many):
        few, many = many, few
    if any(variable in many and assigned != many[variable] for variable, assigned in few.items()):
        return constraints.Unsatisfiable()
    return constraints.ConstraintSystem(
        assignments=first.assignments | second.assignments,
        constraints=[*first.constraints, *second.constraints],
    )


def looking_up_quickly(find_assignments_for: Callable[..., Any]) -> Callable[..., Any]:
    """`find_assignments_for` with its variables, which it goes through and looks others up in, as a dictionary."""

    @functools.wraps(find_assignments_for)
    def find(unknowns: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unknowns, dict):  # it calls itself, for each guess
            unknowns = dict.fromkeys(unknowns)
        return find_assignments_for(unknowns, *args, **kwargs)

    return find


def keeping_by_text(from_attribute: Callable[..., Any]) -> Callable[..., Any]:
    """`_from_tiled_layout_attr` that builds a layout once for each text of an attribute; to keep attributes would be to
    keep the MLIR context of their kernel.
    """
    layouts_by_text: dict[str, Any] = {}

    @functools.wraps(from_attribute)
    def from_text(attribute: Any) -> Any:
        text = str(attribute)
        if text not in layouts_by_text:
            layouts_by_text[text] = from_attribute(attribute)
        return layouts_by_text[text]

    return from_text


def reduce_system_once(system: Any) -> Any:
    """The `constraints.ConstraintSystem` with each constraint reduced by the layouts that are known; None if nothing
    changes, `Unsatisfiable` if they contradict each other.
    """
    assignments, left, changed = system.assignments, [], False
    for constraint in system.constraints:
        waits_for = constraint.__dict__.get("_waits_for")  # constraints are frozen, but for what is no field
        if waits_for is not None and assignments.keys().isdisjoint(waits_for):
            left.append(constraint)
            continue
        reduced = constraints.reduce_constraint(constraint, assignments)
        if isinstance(reduced, constraints.Unsatisfiable):
            return reduced
        if isinstance(reduced, constraints.Equals) and (found := _assignment(reduced)) is not None:
            variable, layout = found
            if assignments.get(variable, layout) != layout or not constraints.is_valid_assignment(variable, layout):
                return constraints.Unsatisfiable()
            assignments[variable] = layout
            changed = True
            continue
        holds = reduced.holds()
        if holds is False:
            return constraints.Unsatisfiable()
        if holds:
            changed = True
            continue
        left.append(reduced)
        changed |= reduced != constraint
        reduced.__dict__["_waits_for"] = tuple(variables_of(reduced))
    merged = constraints._merge_all_divides_constraints(left)
    changed |= len(merged) != len(left)
    if constraints._has_relayout_of_non_splat_to_splat(merged):
        return constraints.Unsatisfiable()
    return constraints.ConstraintSystem(assignments=assignments, constraints=merged) if changed else None


def _assignment(equality: Any) -> tuple[Any, Any] | None:
    """The variable and the layout of an equality of these two."""
    for variable, layout in ((equality.lhs, equality.rhs), (equality.rhs, equality.lhs)):
        if isinstance(variable, constraints.Variable) and isinstance(layout, constraints.Constant):
            return variable, layout
    return None


def variables_of(part: Any) -> Iterator[Any]:
    """The variables of a constraint, or of an expression in one."""
    if isinstance(part, constraints.Variable):
        yield part
    elif dataclasses.is_dataclass(part) and not isinstance(part, constraints.Constant):
        for value in vars(part).values():
            yield from variables_of(value)


def keeping_result(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a frozen dataclass that keeps what it returns, where it has no arguments, beside the fields."""
    name = f"_kept{method.__name__}"

    @functools.wraps(method)
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return method(self, *args, **kwargs)
        fields = self.__dict__
        if name not in fields:
            fields[name] = method(self)
        return fields[name]

    return kept


def lowering_branches_once(lower_condition: Callable[..., Any]) -> Callable[..., Any]:
    """`_cond_lowering_rule` for which the first branch, where it is asked for by its number, only makes zeros."""

    @functools.wraps(lower_condition)
    def lower(ctx: Any, index: Any, *args: Any, branches: tuple[Any, ...], **params: Any) -> Any:
        results = ctx.avals_out
        if not results or ctx.module_ctx.lowering_semantics == plgpu.LoweringSemantics.Warpgroup:  # no layouts yet
            zeros = _zeros(tuple((aval.shape, aval.dtype) for aval in results))
            brief = branches[0].replace(eqns=zeros.eqns, outvars=zeros.outvars, effects=zeros.effects)
            branches = _Branches(branches, brief)
        return lower_condition(ctx, index, *args, branches=branches, **params)

    return lower


@functools.cache
def _zeros(results: tuple[tuple[tuple[int, ...], Any], ...]) -> Any:
    """Jaxpr without arguments that makes zeros of these shapes and dtypes."""
    return jax.make_jaxpr(lambda: [jnp.zeros(*result) for result in results])().jaxpr


class _Branches(tuple[Any, ...]):
    """Branches, of which number 0 is another one than the first of them."""

    def __new__(cls, branches: tuple[Any, ...], brief: Any) -> _Branches:
        return super().__new__(cls, branches)

    def __init__(self, branches: tuple[Any, ...], brief: Any):
        self._brief = brief

    def __getitem__(self, number: Any) -> Any:
        return self._brief if number == 0 else super().__getitem__(number)


def keeping_by_argument(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a frozen dataclass that keeps what it returns for each of its arguments, beside the fields."""
    name = f"_kept{method.__name__}"

    @functools.wraps(method)
    def kept(self: Any, argument: Any) -> Any:
        results = self.__dict__.setdefault(name, {})
        key = tuple(argument)
        if key not in results:
            results[key] = method(self, argument)
        return results[key]

    return kept


def keeping_answers(is_supported: Callable[..., bool]) -> Callable[..., bool]:
    """`IsTransferableSmemRegisters._is_supported_smem_transfer`, which emits the transfer to find out, that keeps what
    came of it.
    """
    answers: dict[Any, bool] = {}

    @functools.wraps(is_supported)
    def ask(self: Any, smem_layout: Any, reg_layout: Any) -> bool:
        key = (self.shape, self.strides, self.bitwidth, self.optimized, smem_layout, reg_layout)
        if key not in answers:
            answers[key] = is_supported(self, smem_layout, reg_layout)
        return answers[key]

    return ask


def of_numbers(is_dim: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """`core.is_dim` that sees at once that an int is one."""

    @functools.wraps(is_dim)
    def ask(value: Any) -> bool:
        return type(value) is int or is_dim(value)

    return ask


def indexer_shape(indexer: Any) -> tuple[Any, ...]:
    """Shape of what an `NDIndexer` takes: `get_indexer_shape` without numpy, which takes longer than the rest."""
    sizes = tuple(index.size for index in indexer.indices if isinstance(index, Slice))
    places = [place for place, index in enumerate(indexer.indices) if not isinstance(index, Slice)]
    if not places:
        return sizes
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0  # numbers that are neighbours stay in place
    return (*sizes[:first], *indexer.int_indexer_shape, *sizes[first:])


def of_known_width(to_ir_type: Callable[[Any], ir.Type]) -> Callable[[Any], ir.Type]:
    """`utils.dtype_to_ir_type` that asks for the width of an integer dtype once."""
    widths: dict[Any, int | None] = {}

    @functools.wraps(to_ir_type)
    def convert(dtype: Any) -> ir.Type:
        if dtype not in widths:
            known = to_ir_type(dtype)
            widths[dtype] = known.width if isinstance(known, ir.IntegerType) and known.is_signless else None
            return known
        width = widths[dtype]
        return to_ir_type(dtype) if width is None else ir.IntegerType.get_signless(width)

    return convert


def keeping_layouts(build: Callable[..., Any]) -> Callable[..., Any]:
    """`MMALayouts.__init__` that builds the layouts once for each width of elements and number of warps."""
    built: dict[tuple[int, int], dict[str, Any]] = {}

    @functools.wraps(build)
    def take(self: Any, element_type: Any, *, m_warps: int = 4) -> None:
        if not isinstance(element_type, ir.Type):
            build(self, element_type, m_warps=m_warps)
            return
        key = utils.bitwidth(element_type), m_warps
        if key not in built:
            build(self, element_type, m_warps=m_warps)
            built[key] = dict(vars(self))
        vars(self).update(built[key])

    return take


def tracing_once(_: Callable[..., Any]) -> Callable[..., Any]:
    """`_lower_fn_with_avals` that traces a partial function once for equal arguments and types."""
    traced: dict[Any, Any] = {}

    def lower_with_avals(function: Any, avals: Any) -> Callable[..., Any]:
        leaves, tree = jax.tree.flatten(avals)
        key = function.func, function.args, tuple(leaves), tree, jax_config.trace_context()
        if key not in traced:
            info = api_util.debug_info("traced once", function, ("",) * len(avals), {}).with_unknown_names()
            jaxpr, out_avals = partial_eval.trace_to_jaxpr(
                function, flattree.flatten_args(*avals), debug_info=info, requires_low=True
            )
            traced[key] = jaxpr, out_avals.tree, out_avals.unflatten()
        jaxpr, out_tree, out_avals = traced[key]

        def lower(ctx: Any, *args: Any) -> Any:
            out = lowering.lower_jaxpr_to_mosaic_gpu(
                ctx.module_ctx, ctx.launch_ctx, jaxpr, jax.tree.leaves(args), jaxpr.consts
            )
            return out_tree.unflatten(out), out_avals

        return lower

    return lower_with_avals


def of_alike(pointwise: Callable[..., Any]) -> Callable[..., Any]:
    """`FragmentedArray._pointwise` that makes no copies of operands with the layout and the shape of the result."""

    @functools.wraps(pointwise)
    def apply(
        self: Any, op: Any, *others: Any, output_is_signed: bool | None = None, restrict_bitwidth: bool = True
    ) -> Any:
        registers, layout = self.registers, self.layout
        alike = all(
            isinstance(other, FragmentedArray)
            and (other.layout is layout or other.layout == layout)
            and other.registers.shape == registers.shape
            for other in others
        )
        if not alike or (restrict_bitwidth and 1 < utils.bitwidth(self.mlir_dtype) <= 8):
            return pointwise(self, op, *others, output_is_signed=output_is_signed, restrict_bitwidth=restrict_bitwidth)
        results = np.empty_like(registers)
        for index, register in np.ndenumerate(registers):
            results[index] = op(register, *(other.registers[index] for other in others))
        element = results.flat[0].type
        if isinstance(element, ir.VectorType):
            element = element.element_type
        if output_is_signed is None and isinstance(element, ir.IntegerType):
            output_is_signed = self.is_signed
        return FragmentedArray(_registers=results, _layout=layout, _is_signed=output_is_signed)

    return apply


class Replacement:
    """A function of jax, and what makes ours of it.

    Attributes:
      place: module or class that it is found in.
      name: under which.
      source: SHA-256 of the source of the function that may be replaced, or of the class that Python made it for.
      make: makes ours of the function.
      original: the function that jax came with; None if it has none of the name.
    """

    def __init__(self, place: Any, name: str, source: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]):
        self.place, self.name, self.source, self.make = place, name, source, make
        self.original: Any = getattr(place, name, None)

    @property
    def title(self) -> str:
        """The function's name, after that of its module or class."""
        return f"{getattr(self.place, '__name__', '').rpartition('.')[2]}.{self.name}"

    def is_known(self) -> bool:
        """Whether the function is the one that the replacement was written against."""
        current = getattr(self.place, self.name, None)
        if not inspect.isfunction(current):
            return False
        is_generated = current.__code__.co_filename == "<string>"  # by dataclasses
        file = inspect.getsourcefile(self.place) if is_generated else current.__code__.co_filename
        return _is_known(file) or fingerprint(self.place if is_generated else current) == self.source

    def apply(self) -> bool:
        """Replace the function if it is the known one; return whether it was."""
        if not self.is_known():
            return False
        current = getattr(self.place, self.name)
        ours = self.make(current)
        setattr(self.place, self.name, ours)
        if self.place is lowering:
            for rules in lowering.mosaic_lowering_rules.values():
                rules.update({primitive: ours for primitive, rule in rules.items() if rule is current})
        return True


REPLACEMENTS = (
    Replacement(
        constraints,
        "compute_transitively_equal_vars",
        "ea511d05d683676d19f44f29d2ef267f0c11a990ed2865179f1b32afc98067e3",
        lambda _: equal_variables,
    ),
    Replacement(
        layout_inference,
        "find_assignments_for",
        "369a10d5d96f7f1023f19871bcbb41fbacaa5338d1682b829684317a20e70f93",
        looking_up_quickly,
    ),
    Replacement(
        getattr(constraints, "ConstraintSystem", None),
        "__and__",
        "e3e27e2e1fabe374951a835893601265bd2c81d9cdcd9d45c696b44f32916325",
        lambda _: both_systems,
    ),
    Replacement(
        layouts,
        "_from_tiled_layout_attr",
        "c2efb205b42eccfcdeb5da035ff47602f5e4bfbcbcaca15ca16f3180b7931876",
        keeping_by_text,
    ),
    Replacement(
        constraints,
        "_reduce_system_once",
        "f749a926ff1fbdff8b2f87f3e9d1236a9abafa0cacaf9a561d8daa38b0514b95",
        lambda _: reduce_system_once,
    ),
    Replacement(
        getattr(constraints, "Variable", None),
        "__hash__",
        "4073b42b88f286dda6049abb4f243cf73fbf32ef860717b9a6847210869e9ec3",
        keeping_result,
    ),
    Replacement(
        getattr(gpu_core, "ReducedLayout", None),
        "to_mgpu",
        "5cf521cdad652c203a965825a1b1f74d2852701450cf47430ed20444d2c9fd5a",
        keeping_result,
    ),
    Replacement(
        getattr(gpu_core, "ParameterizedLayout", None),
        "to_mgpu",
        "f7d515089b156ca77f12e4b2956269475eecb25c044db12881e2aa6d103a9b39",
        keeping_result,
    ),
    Replacement(
        getattr(constraints, "IsTransferableSmemRegisters", None),
        "_is_supported_smem_transfer",
        "d9a40db663b337f15eb0b2e90b5a60684e36e826034b582427095f1c451b8169",
        keeping_answers,
    ),
    Replacement(
        core,
        "is_dim",
        "014bf092f022dc05ab1e8bec864b7f42a7fe99c1e116dd8f80adb4c7ca67201a",
        of_numbers,
    ),
    Replacement(
        getattr(indexing, "NDIndexer", None),
        "get_indexer_shape",
        "dc0eef0c66f98d9dbb52aed969e2d42b1c16983e6c7ee86c06c46bcfe5c31b1e",
        lambda _: indexer_shape,
    ),
    Replacement(
        utils,
        "dtype_to_ir_type",
        "99e1ff88741cb6ed2620161fe2cc4117a25bb43aa11f06dc6c00926cdb99dbc5",
        of_known_width,
    ),
    Replacement(
        utils,
        "is_signed",
        "a9d2cef8828a2fa9b8797a861cc9d7eeea7c7aed8d227f798ed521eedd8a5c2a",
        functools.cache,
    ),
    Replacement(
        lowering,
        "_cond_lowering_rule",
        "65a4f7c05b7f873c52ce40c5bdb1bb5624cf3d0bc2331583caed7efc4a160af2",
        lowering_branches_once,
    ),
    Replacement(
        lowering,
        "lower_jaxpr_to_mosaic_gpu",
        "9e0d84df8a8ac4c4e7288689ec180ad82bfc5e803fac71d225bb9449617088dd",
        reused_values.emitting_once,
    ),
    Replacement(
        arith,
        "constant",
        "2c99bc16cb9978aaac6a32f4bbe8ffa91b00d7bdfbe3ac185380a0c32132a33f",
        reused_values.constant_once,
    ),
    Replacement(
        getattr(fragmented_array, "TiledLayout", None),
        "lane_indices",
        "4e429de9dfa24261d14f5ec187ebd7fc11aebbe4aeb5a225d3796e1e6388aa70",
        reused_values.computed_once,
    ),
    Replacement(
        getattr(fragmented_array, "TiledLayout", None),
        "warp_indices",
        "edabd6edb720751ad3ecb230920d5f5ac0801c359d5e93566324123d8c4bed6f",
        reused_values.computed_once,
    ),
    Replacement(
        lowering,
        "_lower_fn_with_avals",
        "a2d25621a387b46bf18a86176e8196703ae97ebd52d6898e4eed6e95a2bf91a0",
        tracing_once,
    ),
    Replacement(
        getattr(fragmented_array, "TiledLayout", None),
        "registers_shape",
        "d95af4ca66858abb9f7c177b6dabd8f01f7257f06c624ab0520e2487ab63034f",
        keeping_by_argument,
    ),
    Replacement(
        getattr(fragmented_array, "TiledLayout", None),
        "shape_from_registers_shape",
        "32cf9892928bd464eec3b3d390fcdb4083db7d95b3d60fc900cf3037b02c0a8c",
        keeping_by_argument,
    ),
    Replacement(
        getattr(fragmented_array, "TiledLayout", None),
        "reduce",
        "eca3b9738ea2bc69308a6f0363b79afa606f79d644075de7a8a109359f098756",
        keeping_by_argument,
    ),
    Replacement(
        MMALayouts,
        "__init__",
        "23f40224c8906edb97c24f5de6229e822897b26e52825bf36687ad334d4fb050",
        keeping_layouts,
    ),
    Replacement(
        FragmentedArray,
        "_pointwise",
        "230f490e1bd57075c0dbc2a9c02473877dd7b80a306f069ac27c971641d5e656",
        of_alike,
    ),
)

ASSEMBLER_VERSION = "_get_ptxas_isa_version"


@functools.cache
def apply() -> tuple[str, ...]:
    """Replace those of jax's functions that are the known ones; return their titles.

    Raises:
      ValueError: `PALLAS_ATTN_PATCH_JAX` is neither 0 nor 1.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        return ()
    replaced = [replacement.title for replacement in REPLACEMENTS if replacement.apply()]
    return (*replaced, *(title for title, replace in OTHERS.items() if replace()))


def ask_assembler_once() -> bool:
    """Keep what the assembler says of its version; return whether jax has a function for it, and a plugin."""
    extension = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    version = getattr(extension, ASSEMBLER_VERSION, None)
    if version is None:
        return False
    setattr(extension, ASSEMBLER_VERSION, functools.cache(version))
    return True


NUMBER_SOURCE = "89cfb8b0170cf06c4f3933115c43de747aef36acd7ad2a68141dc20a30c0ce23"


def number_threads_once() -> bool:
    """Have `utils.thread_idx`, a partial function, reuse what it emitted; return whether it is the known one."""
    number = getattr(utils, "thread_idx", None)
    if not isinstance(number, functools.partial) or fingerprint(number.func) != NUMBER_SOURCE:
        return False
    utils.thread_idx = reused_values.computed_once(number)
    return True


OTHERS = {ASSEMBLER_VERSION: ask_assembler_once, "utils.thread_idx": number_threads_once}
"""Replacements of what has no source of its own."""


@functools.cache
def _is_known(file: str | None) -> bool:
    """Whether a file is one that its functions' replacements were written against. Reading functions takes longer."""
    if file is None or not Path(file).is_file():
        return False
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() in KNOWN_FILES


def fingerprint(function: Any) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
