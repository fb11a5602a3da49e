"""Faster replacements of JAX functions whose time grows faster than linearly with the size of a kernel.

JAX calls these functions when it lowers Mosaic GPU kernels. The replacements return the same layouts and the same MLIR,
so the machine code is the same. `faster_lowering()` is a context manager that applies them to one thread: within the
context, the thread that entered it calls the replacements, and all other threads call JAX's functions. Outside of all
contexts, JAX's functions are in place. docs/toolchain.md has the gain of each replacement.

A function is replaced only if its source has a known SHA-256 digest. A JAX version with another source keeps its
function. The environment variable `PALLAS_ATTN_PATCH_JAX=0` disables all replacements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jax.experimental.pallas import mosaic_gpu as plgpu

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_PATCH_JAX"


# --- replacements


def equal_variables(system: Any) -> dict[Any, list[Any]]:
    """Map each variable of a `ConstraintSystem` to the other variables that it must equal, directly or transitively.

    Variables that equal no other variable are not in the result.

    Replaces `constraints.compute_transitively_equal_vars` (jax 0.11.2). JAX sorts the variables by their text to make
    the order deterministic. The text of a variable is the text of its MLIR operation, and printing one operation
    numbers the operations of the whole module. The time is quadratic in the size of the kernel. The replacement orders
    variables by their first occurrence in the constraints, which is deterministic too.
    """
    members: dict[Any, list[Any]] = {}  # variable: its equivalence class; variables of one class share one list
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
    """Return a system with the assignments and constraints of two systems; `Unsatisfiable` if they assign different
    layouts to a variable.

    Replaces `constraints.ConstraintSystem.__and__` (jax 0.11.2). Layout inference calls it once per operation, and JAX
    looks up each variable of the accumulated system in the system of the operation. The time is quadratic in the number
    of operations. The replacement looks up the variables of the smaller system in the larger system.
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


def find_in_dictionary(find_assignments_for: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `find_assignments_for` that keeps the unknown variables in a dictionary instead of a list.

    Wraps `layout_inference.find_assignments_for` (jax 0.11.2). JAX looks up each assigned variable in the list, which
    takes quadratic time in the number of variables.
    """

    @functools.wraps(find_assignments_for)
    def find(unknowns: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(unknowns, dict):  # `find_assignments_for` calls itself with the dictionary
            unknowns = dict.fromkeys(unknowns)
        return find_assignments_for(unknowns, *args, **kwargs)

    return find


def lower_first_branch_once(lower_condition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `_cond_lowering_rule` that lowers each branch of a `lax.cond` or `lax.switch` once.

    Wraps `lowering._cond_lowering_rule` (jax 0.11.2). JAX lowers the first branch twice: once to find the types of its
    results, and once to emit it. The innermost first branch of n nested conditions is lowered 2**n times. The wrapper
    gives JAX another branch for the first of the two lowerings: it only returns zeros of the result types.
    """

    @functools.wraps(lower_condition)
    def lower(ctx: Any, index: Any, *args: Any, branches: tuple[Any, ...], **params: Any) -> Any:
        results = ctx.avals_out
        if not results or ctx.module_ctx.lowering_semantics == plgpu.LoweringSemantics.Warpgroup:
            # With lane semantics, JAX needs the layouts of the results, too, and zeros do not have these layouts.
            zeros = _zeros(tuple((aval.shape, aval.dtype) for aval in results))
            brief = branches[0].replace(eqns=zeros.eqns, outvars=zeros.outvars, effects=zeros.effects)
            branches = _Branches(branches, brief)
        return lower_condition(ctx, index, *args, branches=branches, **params)

    return lower


@functools.cache
def _zeros(results: tuple[tuple[tuple[int, ...], Any], ...]) -> Any:
    """Return a jaxpr without arguments that returns zeros of these shapes and dtypes."""
    return jax.make_jaxpr(lambda: [jnp.zeros(*result) for result in results])().jaxpr


class _Branches(tuple[Any, ...]):
    """Branches of a condition, as JAX's lowering rule reads them.

    The rule reads index 0 to find the result types, and gets `brief`. It iterates to lower all branches, and gets them.
    """

    def __new__(cls, branches: tuple[Any, ...], brief: Any) -> _Branches:
        return super().__new__(cls, branches)

    def __init__(self, branches: tuple[Any, ...], brief: Any):
        self._brief = brief

    def __getitem__(self, number: Any) -> Any:
        return self._brief if number == 0 else super().__getitem__(number)


# --- application


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A JAX function and its replacement.

    Attributes:
      place: module or class of the function; None if this JAX version does not have it.
      name: attribute name of the function.
      source: SHA-256 digest of the source of the function.
      make: returns the replacement of a function.
    """

    place: Any
    name: str
    source: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]

    @property
    def title(self) -> str:
        """Name of the function with the name of its module or class."""
        return f"{getattr(self.place, '__name__', '').rpartition('.')[2]}.{self.name}"

    def is_known(self) -> bool:
        """Return whether the current function is the function that the replacement was written for."""
        current = getattr(self.place, self.name, None)
        return inspect.isfunction(current) and fingerprint(current) == self.source


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
        find_in_dictionary,
    ),
    Replacement(
        getattr(constraints, "ConstraintSystem", None),
        "__and__",
        "e3e27e2e1fabe374951a835893601265bd2c81d9cdcd9d45c696b44f32916325",
        lambda _: both_systems,
    ),
    Replacement(
        lowering,
        "_cond_lowering_rule",
        "65a4f7c05b7f873c52ce40c5bdb1bb5624cf3d0bc2331583caed7efc4a160af2",
        lower_first_branch_once,
    ),
)


@contextlib.contextmanager
def faster_lowering() -> Iterator[tuple[str, ...]]:
    """Apply the replacements in this thread within the context; yield their titles.

    Contexts may be nested, and several threads may be in one at the same time. The first context installs functions
    that select the replacement in threads within a context and JAX's function in other threads. The last context
    restores JAX's functions, also when an exception leaves it.

    Raises:
      ValueError: `PALLAS_ATTN_PATCH_JAX` is neither 0 nor 1.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: expected 0 or 1, got {wanted!r}")
    if wanted == "0":
        yield ()
        return
    titles = _enter()
    try:
        yield titles
    finally:
        _exit()


_lock = threading.Lock()
_contexts = 0
"""Number of `faster_lowering` contexts that are active in all threads together. Guarded by `_lock`."""

_installed: list[tuple[Replacement, Any, Any]] = []
"""For each installed replacement: the `Replacement`, JAX's function, and the function that selects between the two.
Guarded by `_lock`.
"""

_thread = threading.local()
"""Attribute `depth`: number of active contexts in this thread."""


def _enter() -> tuple[str, ...]:
    global _contexts
    with _lock:
        if not _contexts:
            for replacement in REPLACEMENTS:
                if replacement.is_known():
                    original = getattr(replacement.place, replacement.name)
                    selecting = _selecting(replacement.make(original), original)
                    _installed.append((replacement, original, selecting))
                    _set(replacement, original, selecting)
        _contexts += 1
        titles = tuple(replacement.title for replacement, _, _ in _installed)
    _thread.depth = getattr(_thread, "depth", 0) + 1
    return titles


def _exit() -> None:
    global _contexts
    _thread.depth -= 1
    with _lock:
        _contexts -= 1
        if not _contexts:
            for replacement, original, selecting in _installed:
                _set(replacement, selecting, original)
            _installed.clear()


def _selecting(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` in threads within a context and `original` in other threads."""

    @functools.wraps(original)
    def select(*args: Any, **kwargs: Any) -> Any:
        return (ours if getattr(_thread, "depth", 0) else original)(*args, **kwargs)

    return select


def _set(replacement: Replacement, old: Any, new: Any) -> None:
    """Replace the function `old` by `new`, in its module or class and in the tables of lowering rules.

    A place that does not hold `old` is left unchanged, because another library has replaced the function there.
    """
    if getattr(replacement.place, replacement.name) is old:
        setattr(replacement.place, replacement.name, new)
    if replacement.place is lowering:
        for rules in lowering.mosaic_lowering_rules.values():
            rules.update({primitive: new for primitive, rule in rules.items() if rule is old})


@functools.cache
def fingerprint(function: Any) -> str:
    """Return the SHA-256 digest of the source of a function."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
