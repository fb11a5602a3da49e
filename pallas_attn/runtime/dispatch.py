"""Select the implementation of an operation: try the candidates in order, and collect why each one is unsupported.

An implementation raises NotImplementedError for an unsupported call while it is traced, before anything runs. Dispatch
traces candidates until one does not raise. `explain` traces them abstractly. No separate description of the supported
calls can become outdated.

An implementation that cannot be imported or lowered, for example after a JAX update, is skipped like an implementation
that does not support the call. Dispatch also warns once with the reason, because the implementation should have run.

`MODULES` lists all implementations. To add a backend or an architecture, add a file to `ops/<operation>/` with a
function of the operation's name that takes the call object, and an entry to `MODULES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.ops.call_base import OperationCall
from pallas_attn.portable import arguments
from pallas_attn.runtime import device, kernel_cache, sharded_calls
from pallas_attn.runtime.device import Architecture
from pallas_attn.types import Implementation

NAMES = ("mosaic", "triton", "xla", "reference")
"""Names of all implementations, best first."""

KERNELS = frozenset({"mosaic", "triton"})
"""Implementations that are slow to lower. Their lowered form is cached."""

MOSAIC_JAX = (0, 11, 2)
"""Oldest version of jax for the Mosaic kernels. The interpreter of earlier versions does not run them, so no test would
cover them without a GPU. pip installs no earlier version; `make test-jax` does.
"""

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_IMPLEMENTATION"
"""Default for calls with implementation=None: comma-separated names that are tried in order. Read when a call is
traced.
"""

type Modules = Mapping[tuple[str, Architecture | None], str]
"""Map from (implementation name, architecture) to the name of the module in the operation's package.

The architecture is a compute capability, such as (9, 0), or None for any device.
"""

_ANYWHERE: Modules = {("xla", None): "xla", ("reference", None): "reference"}
_ON_SM90: Modules = {("mosaic", (9, 0)): "mosaic_sm90"}
_ON_SM100: Modules = {("mosaic", (10, 0)): "mosaic_sm100"}
_ON_SM90_AND_SM100: Modules = {("mosaic", (9, 0)): "mosaic", ("mosaic", (10, 0)): "mosaic"}
_IN_TRITON: Modules = {("triton", None): "triton"}

MODULES: dict[str, Modules] = {
    "paged_decode": {**_ON_SM90, **_ON_SM100, **_IN_TRITON, **_ANYWHERE},
    "paged_prefill": {**_ON_SM90, **_ON_SM100, **_IN_TRITON, **_ANYWHERE},
    "mla_decode": {**_ON_SM90, **_ON_SM100, **_IN_TRITON, **_ANYWHERE},
    "ragged_attention": {**_ON_SM90, **_ON_SM100, **_IN_TRITON, **_ANYWHERE},
    "plan_decode": {**_ON_SM90_AND_SM100, **_IN_TRITON, ("xla", None): "xla"},
    "write_kv": {**_ON_SM90_AND_SM100, **_IN_TRITON, **_ANYWHERE},
    "write_latent": {**_ON_SM90_AND_SM100, **_IN_TRITON, **_ANYWHERE},
    "gather_latent": {**_ON_SM90_AND_SM100, **_IN_TRITON, **_ANYWHERE},
    "index_scores": {**_IN_TRITON, **_ANYWHERE},
    "select_top_k": {**_IN_TRITON, **_ANYWHERE},
    "index_top_k": {**_IN_TRITON, **_ANYWHERE},
    "mla_sparse": {**_ON_SM90, **_IN_TRITON, **_ANYWHERE},
    "write_index_keys": {**_IN_TRITON, **_ANYWHERE},
    "compress_and_write": {**_IN_TRITON, **_ANYWHERE},
    "hyper_connection_weights": {**_IN_TRITON, **_ANYWHERE},
}
"""Modules that implement each operation."""


class BrokenImplementationError(NotImplementedError):
    """An implementation for this device cannot be imported or lowered."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Result of `explain`: which implementation would run a call.

    Attributes:
      op: name of the operation.
      chosen: name of the implementation that would run; None if no candidate supports the call.
      refused: for each candidate that was tried before `chosen`, its name and the reason why it would not run, in the
        order of the attempts.

    Example:
      >>> print(pallas_attn.Explanation("paged_decode", "xla", {"mosaic": "needs a GPU"}))
      paged_decode: xla
        not mosaic: needs a GPU
    """

    op: str
    chosen: str | None
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no implementation supports this call'}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused.items()])


def implementations(op: str) -> tuple[str, ...]:
    """Return the names of an operation's implementations, best first."""
    held = {name for name, _ in MODULES[op]}
    return tuple(name for name in NAMES if name in held)


def is_named(implementation: Implementation) -> bool:
    """Return whether the caller or the environment variable selects implementations by name."""
    return implementation is not None or bool(os.environ.get(ENVIRONMENT_VARIABLE))


def candidates(op: str, implementation: Implementation) -> list[str]:
    """Return the names of the implementations to try, in order.

    The argument `implementation` has priority over the environment variable. Without both, these are all
    implementations of the operation except "reference".

    Raises:
      ValueError: a name is unknown.
    """
    source = "implementation"
    if implementation is None and (named := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, implementation = ENVIRONMENT_VARIABLE, [name.strip() for name in named.split(",")]
    if implementation is None:
        return [name for name in implementations(op) if name != "reference"]
    names = [implementation] if isinstance(implementation, str) else implementation
    names = list(names) if isinstance(names, Sequence) else []
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"{source}: expected None or names among {', '.join(NAMES)}, got {implementation!r}")
    return names


def load(op: str, name: str, *, named: bool = True) -> ModuleType:
    """Import the module of an implementation for the device of the call being traced.

    Args:
      named: whether the caller named the implementation.

    Raises:
      NotImplementedError: the operation has no implementation of this name, or none for this device; or the module of
        an implementation for any device, or an optional dependency of it, is not installed.
      BrokenImplementationError: the import fails for another reason, or a module for this architecture is missing.
    """
    return find(op, name, named=named).load()


def find(op: str, name: str, *, named: bool = True) -> kernel_cache.NamedFunction:
    """Find the implementation for the device of the call being traced, without importing it.

    Args:
      named: whether the caller named the implementation.

    Raises:
      NotImplementedError: the operation has no implementation of this name, none for this device, or none for this
        version of jax.
    """
    if name not in implementations(op):
        raise NotImplementedError(f"{op} has no {name!r} implementation; it has {', '.join(implementations(op))}")
    if name == "mosaic" and jax.__version_info__ < MOSAIC_JAX:
        oldest = ".".join(map(str, MOSAIC_JAX))
        raise NotImplementedError(f"needs jax {oldest} or later, this is jax {jax.__version__}")
    module = MODULES[op].get((name, None))
    for_this_card = module is None
    if module is None:
        here = device.current()
        here.require(*(architecture for held, architecture in MODULES[op] if held == name and architecture))
        module = MODULES[op][name, here.capability]
    elif module == "triton":
        device.triton_card(named=named)  # before the slow import of triton
    path = f"pallas_attn.ops.{op}.{module}"
    return kernel_cache.NamedFunction(path, op, functools.partial(_import, path, op, name, for_this_card))


def _import(path: str, op: str, name: str, for_this_card: bool) -> ModuleType:
    """Import the module of an implementation. Raises as `load` does."""
    try:
        return importlib.import_module(path)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and name == "triton" and importlib.util.find_spec("triton") is None:
            raise NotImplementedError("needs triton: pip install 'pallas_attn[triton]'") from error
        is_optional = isinstance(error, ModuleNotFoundError) and not for_this_card
        refusal = NotImplementedError if is_optional else BrokenImplementationError
        raise refusal(f"{op}'s {name!r} implementation cannot be imported: {_named(error)}{_versions(name)}") from error


def choose[Result](
    op: str, implementation: Implementation, attempt: Callable[[str, kernel_cache.NamedFunction], Result]
) -> Result:
    """Call `attempt(name, function)` for one candidate after the other, and return the first result.

    Args:
      op: name of the operation.
      implementation: argument of the user's call.
      attempt: function that runs the call with a candidate, given its name and its function. It raises
        NotImplementedError if the candidate does not support the call.

    Raises:
      ValueError: an implementation name is unknown.
      NotImplementedError: the only candidate does not support the call.
      BrokenImplementationError: the only candidate cannot be imported or lowered.
      ExceptionGroup: no candidate of several supports the call; contains the NotImplementedError of each candidate.

    Warns:
      RuntimeWarning: a broken candidate was skipped; once per reason.
    """
    names, refusals = candidates(op, implementation), []
    for name in names:
        try:
            result = _try(op, name, attempt, named=is_named(implementation))
        except NotImplementedError as refusal:
            refusals.append(refusal)
        else:
            for broken in (refusal for refusal in refusals if isinstance(refusal, BrokenImplementationError)):
                _warn_once(f"{broken}; {name!r} runs in its place")
            return result
    if len(refusals) == 1:
        raise refusals[0]
    raise ExceptionGroup(f"{op}: no implementation among {', '.join(names)} supports this call", refusals)


def _try[Result](
    op: str, name: str, attempt: Callable[[str, kernel_cache.NamedFunction], Result], *, named: bool
) -> Result:
    """Attempt one implementation. Convert unexpected exceptions of a kernel to BrokenImplementationError."""
    found = find(op, name, named=named)
    try:
        return attempt(name, found)
    except (NotImplementedError, ValueError, MemoryError, RecursionError):  # unsupported, wrong arguments, no memory
        raise
    except Exception as error:
        if name not in KERNELS or _is_own_warning(error):
            raise
        raise BrokenImplementationError(
            f"{op}'s {name!r} implementation breaks: {_named(error)}{_versions(name)}"
        ) from error


def _is_own_warning(error: Exception) -> bool:
    """Return whether the exception is a warning of this package, raised because warnings are errors.

    An implementation whose inner operation warns is not broken.
    """
    return isinstance(error, Warning) and str(error).startswith(kernel_cache.OWN_WARNING)


def run(call: OperationCall, implementation: Implementation) -> Any:
    """Run a call with the first candidate that supports it, under a `jax.named_scope` with the operation's name.

    NumPy arrays are converted to JAX arrays first. Raises as `choose` does.
    """
    arrays, rest = arguments.split_arrays(call)
    arrays = arguments.refuse_gradients(call.op, [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays])
    names = tuple(implementation) if isinstance(implementation, list) else implementation
    chosen = _Chosen(call.op, names)
    with jax.named_scope(call.op):
        if (mesh := sharded_calls.mesh_of(arguments.meshes_of(arrays))) is None:
            return chosen(rest.join(arrays))
        return sharded_calls.run(mesh, call.op, chosen, arrays, rest)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """An operation as a function of its call object.

    Two objects are equal if operation and implementation names are equal, so that JAX caches traces across calls.
    """

    op: str
    implementation: Implementation

    def __call__(self, call: OperationCall) -> Any:
        @functools.cache
        def bounded() -> tuple[Any, list[Any], arguments.Rest]:
            """Return the clipped call, its arrays and the rest. They are computed once for all candidates.

            `refuse_gradients` has to come first: clipping also rounds queries, and the gradient 0 of the rounding would
            hide the error.
            """
            clipped = call.bounded()
            return clipped, *arguments.split_arrays(clipped)

        return choose(self.op, self.implementation, functools.partial(_attempt, bounded))


def _attempt(
    bounded: Callable[[], tuple[Any, list[Any], arguments.Rest]], name: str, function: kernel_cache.NamedFunction
) -> Any:
    """Run a call with one implementation."""
    call, arrays, rest = bounded()
    if name not in KERNELS:
        return function(call)
    interprets_triton = name == "triton" and device.interprets_triton()
    if interprets_triton or device.interpreted():
        sharded_calls.refuse_callbacks()
    if interprets_triton:
        return arguments.call_unvarying(lambda arrays: function(rest.join(arrays)), arrays)
    return arguments.call_unvarying(lambda arrays: kernel_cache.call_split(function, arrays, rest), arrays)


def _named(error: Exception) -> str:
    """Return the type and the first line of an error."""
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line}"


def _versions(name: str) -> str:
    """Return the versions that a Triton implementation depends on, for messages; "" for other implementations."""
    found = []
    for package in ("triton", "jax") if name == "triton" else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return f" ({', '.join(found)})" if found else ""


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"{kernel_cache.OWN_WARNING}{message}", RuntimeWarning, stacklevel=2)


def explain(
    op: str,
    function: Callable[..., Any],
    chooser: str,
    implementation: Implementation,
    *args: Any,
    **kwargs: Any,
) -> Explanation:
    """Return which implementation would run a call: trace the call with one candidate after the other.

    Args:
      op: name of the operation in the result.
      function: public function of the operation.
      chooser: operation whose implementations are the candidates. It differs from `op` only if `function` is composed
        of other operations.
      implementation: argument of the user's call.
      args, kwargs: other arguments of the user's call.

    Raises:
      ValueError: the call itself would raise it.
    """
    arrays, rest = arguments.split_arrays((args, kwargs))
    refused: dict[str, str] = {}

    def call(name: str, arrays: Sequence[Any]) -> Any:
        args, kwargs = rest.join(arrays)
        return function(*args, **kwargs, implementation=name)

    for name in candidates(chooser, implementation):
        try:
            load(chooser, name, named=is_named(implementation))
            jax.eval_shape(functools.partial(call, name), arrays)
        except NotImplementedError as refusal:
            refused[name] = str(refusal)
        else:
            return Explanation(op, name, refused)
    return Explanation(op, None, refused)
