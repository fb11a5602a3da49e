"""Cache of lowered kernels: in memory for all call sites of a process, and on disk for later processes.

Tracing and lowering a Mosaic kernel takes seconds of Python time, much longer than its compilation by XLA, and JAX's
compilation cache does not avoid it. The first call of a kernel is exported (`jax.export`), and later calls run the
exported function. The cache key contains all inputs of lowering: operation and module, shapes and dtypes of the arrays,
static arguments, the device, versions of JAX and its plugins, JAX settings, and the source of this package.

A file is written under a temporary name and renamed, so a reader sees a complete file or none. It begins with a digest
of the rest; a truncated or damaged file is written again. Writing a file also removes files that no process has read
for `UNUSED_DAYS`, such as files of old versions.

Files are stored in a subfolder of JAX's compilation cache (`jax_compilation_cache_dir`) if that is set. The environment
variable `PALLAS_ATTN_KERNEL_CACHE` names another folder; 0 disables the cache on disk and in memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import hashlib
import importlib.metadata
import inspect
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax import export
from jax.sharding import AxisType

from pallas_attn.portable import arguments
from pallas_attn.runtime import device, mosaic_tools, tuning

ROOT = Path(__file__).parents[1]
"""Folder of the package."""

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_KERNEL_CACHE"
PLATFORM = "cuda"
CUSTOM_CALLS = ("mosaic_gpu_v2", "triton_kernel_call_ffi")
"""Custom call targets whose format may change between JAX versions. The version is part of the cache key."""
DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-pjrt",
    "triton",
)
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
"""JAX settings that a traced function may depend on."""
UNUSED_DAYS = 30
MAGIC = b"pallas_attn kernel 1\n"


def call_cached(function: Callable[[Any], Any], call: Any) -> Any:
    """Return `function(call)`, using the lowered form of an equal call of this or an earlier process.

    If there is none, lower the function and cache the result. Operations run their kernels through this function; it
    helps other functions too if they are slow to lower. It also makes programs identical between processes, which JAX's
    compilation cache requires: Mosaic numbers what it lowers in order of lowering.

    The cache is not used in the interpreter, on platforms other than GPUs, under a mesh with
    `jax.sharding.AxisType.Explicit` axes, and while a tuner selects configurations.

    Args:
      function: a function that a module defines by name. The key contains this name and the text of the module's file.
        It contains no other files that the function depends on, except files of this package and of JAX.
      call: a pytree of arrays and static values. Different static values must have different `repr`s.

    Raises:
      ValueError: the function has no such name.
      NotImplementedError: the function does not support the call.
      LoweringError: the traced function cannot be lowered. Without the cache, JAX raises its own error later.

    Example:
      >>> pallas_attn.call_cached(jnp.linalg.norm, jnp.array([3.0, 4.0]))
      Array(5., dtype=float32)
    """
    if not isinstance(function, NamedFunction) and "<" in getattr(function, "__qualname__", "<"):
        raise ValueError(f"function: expected one that a module defines by name, got {function!r}")
    arrays, rest = arguments.split_arrays(call)
    return call_split(function, arrays, rest)


def call_split(function: Callable[[Any], Any], arrays: list[Any], rest: arguments.Rest) -> Any:
    """`call_cached` for a call that `arguments.split_arrays` has split."""
    here = device.current()
    if here.platform != "gpu" or here.interpreted or tuning.is_deciding() or not _enabled() or _has_typed_mesh():
        return function(rest.join(arrays))
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    return _lowered(_Key(function, rest, avals, here, _settings()))(*arrays)


_ahead: contextvars.ContextVar[Executor | None] = contextvars.ContextVar("_ahead", default=None)


@contextlib.contextmanager
def compile_ahead(threads: Executor) -> Iterator[None]:
    """Within this context, each kernel is also compiled separately on an executor when it is lowered or read from disk.

    XLA compiles the kernels of a program one after the other, after it has optimized the program or loaded it from
    JAX's compilation cache. It reuses kernels that the process has compiled before. With this context, a program with
    many kernels is compiled or loaded sooner. Errors on the executor are ignored; they occur again, and are raised,
    when the program is compiled.

    Args:
      threads: an executor, which the caller shuts down.

    Example:
      >>> from concurrent.futures import ThreadPoolExecutor
      >>> with ThreadPoolExecutor() as threads, pallas_attn.compile_ahead(threads):
      ...     lowered = jax.jit(jnp.sin).lower(1.0)  # a program with many kernels
      >>> compiled = lowered.compile()
    """
    token = _ahead.set(threads)
    try:
        yield
    finally:
        _ahead.reset(token)


def _compile_alone(exported: export.Exported, avals: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    with contextlib.suppress(Exception):
        jax.jit(exported.call).lower(*avals).compile()


class LoweringError(RuntimeError):
    """A traced function cannot be lowered to a kernel."""


@dataclasses.dataclass(frozen=True)
class NamedFunction:
    """A function of this package by name. Cached kernels are found without importing the function's module.

    Importing Mosaic takes longer than reading a cached kernel.

    Attributes:
      module: dotted name of the function's module.
      name: name of the function.
      load: imports the module.
    """

    module: str
    name: str
    load: Callable[[], ModuleType] = dataclasses.field(compare=False, repr=False)

    def __call__(self, call: Any) -> Any:
        return getattr(self.load(), self.name)(call)


def _enabled() -> bool:
    return os.environ.get(ENVIRONMENT_VARIABLE) != "0"


def _has_typed_mesh() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _settings() -> tuple[tuple[str, Any], ...]:
    return tuple((name, getattr(jax.config, name, None)) for name in SETTINGS)


@dataclasses.dataclass(frozen=True)
class _Key:
    """Cache key: all inputs of lowering that may differ within a process."""

    function: Callable[[Any], Any]
    rest: arguments.Rest
    avals: tuple[jax.ShapeDtypeStruct, ...]
    here: device.Device
    settings: tuple[tuple[str, Any], ...]
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...] = ()
    """Size and array axes of each `jax.vmap` around the call, innermost first."""

    @property
    def digest(self) -> str:
        """Digest that is equal in all processes that would lower the same kernel."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "function"]
        return hashlib.sha256("\n".join(map(repr, (_named(self.function), *fields, *_process()))).encode()).hexdigest()

    def batched(self, size: int, axes: tuple[int | None, ...]) -> _Key:
        """Return the key of the same call under one more `jax.vmap`."""
        pairs = zip(self.avals, axes, strict=True)
        avals = tuple(a if axis is None else jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a, axis in pairs)
        return dataclasses.replace(self, avals=avals, vmaps=(*self.vmaps, (size, axes)))

    def flat(self, *arrays: Any) -> Any:
        """The implementation as a function of arrays only."""

        def one(*arrays: Any) -> Any:
            return self.function(self.rest.join(arrays))

        function = one
        for size, axes in self.vmaps:
            function = jax.vmap(function, in_axes=axes, axis_size=size)
        return function(*arrays)


@functools.cache
def _process() -> tuple[str, ...]:
    """Return the inputs of lowering that are constant in a process: versions, sources and environment variables."""
    versions = []
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    prefixes = ("MOSAIC_GPU_", "TRITON_", "PALLAS_ATTN_PATCH")
    names = sorted(name for name in os.environ if name.startswith(prefixes) and name not in mosaic_tools.VARIABLES)
    return (*versions, platform.python_version(), _sources(), *(f"{name}={os.environ[name]}" for name in names))


def _named(function: Callable[[Any], Any]) -> str:
    """Return the name of a function, with a digest of its file unless the function belongs to this package."""
    if isinstance(function, NamedFunction):
        return f"{function.module}.{function.name}"
    return f"{function.__module__}.{function.__qualname__} {_source(function)}"


@functools.cache
def _source(function: Callable[[Any], Any]) -> str:
    """Return a digest of the file that defines a function, and of the modules of its package that the file uses."""
    file = inspect.getsourcefile(inspect.unwrap(function))
    if file is None:
        raise ValueError(f"function: expected one that a module defines by name, got {function!r} without a file")
    digest = hashlib.sha256(Path(file).read_bytes())
    for other in sorted(_used_files(sys.modules.get(inspect.unwrap(function).__module__), {file})):
        digest.update(hashlib.sha256(Path(other).read_bytes()).digest())
    return digest.hexdigest()


def _used_files(module: ModuleType | None, found: set[str]) -> set[str]:
    """Add the files of the modules in the same package that a module uses, directly or through others; return all."""
    if module is None or not module.__package__:
        return found
    names = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    for name in names:
        other = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(other, "__file__", None)
        if other is not None and file and file not in found and other.__package__ == module.__package__:
            found.add(file)
            _used_files(other, found)
    return found


def _sources() -> str:
    """Return a digest of this package. Any change of a kernel, a heuristic or a tuned configuration changes it."""
    digest = hashlib.sha256()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(ROOT) for name in names]
    for file in sorted(file for file in files if file.endswith((".py", ".json"))):  # os.walk is faster than pathlib
        digest.update(os.path.relpath(file, ROOT).encode())
        with open(file, "rb") as content:
            digest.update(hashlib.sha256(content.read()).digest())
    return digest.hexdigest()


def _lowered(key: _Key) -> Callable[..., Any]:
    """Return `_cached(key)`, or raise the LoweringError that it returns."""
    cached = _cached(key)
    if isinstance(cached, LoweringError):
        raise LoweringError(str(cached))
    return cached


@functools.lru_cache(maxsize=256)
def _cached(key: _Key) -> Callable[..., Any] | LoweringError:
    """Return the exported function of a key, jitted once, so that a program contains it once; or the LoweringError.

    Errors are cached because finding them takes as long as lowering. An exported function does not support `jax.vmap`,
    so under `jax.vmap` the batched implementation is exported and cached.
    """
    file = _file(key)
    exported = None if file is None else _read(file)
    if exported is None:
        exported = _export(key)
        if isinstance(exported, LoweringError):
            return exported
        if file is not None:
            _write(file, exported)
    if (threads := _ahead.get()) is not None:
        threads.submit(_compile_alone, exported, key.avals)
    called = jax.custom_batching.custom_vmap(jax.jit(exported.call))

    @called.def_vmap
    def _batched(axis_size: int, in_batched: list[bool], *arrays: Any) -> Any:
        out = _lowered(key.batched(axis_size, tuple(0 if batched else None for batched in in_batched)))(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return called


def _export(key: _Key) -> export.Exported | LoweringError:
    """Trace and lower a kernel; return a LoweringError if lowering fails.

    Exceptions of tracing are raised: unsupported calls and mistakes of the caller are found before anything is lowered.
    """
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALLS]
    jitted = jax.jit(key.flat)
    with device.on_one_device(jax.sharding.get_abstract_mesh()), _no_collection():
        jitted.trace(*key.avals)
        with _faster_lowering():
            try:
                return export.export(jitted, platforms=[PLATFORM], disabled_checks=checks)(*key.avals)
            except (MemoryError, RecursionError):
                raise
            except Exception as error:  # noqa: BLE001 - the exception type depends on the JAX version
                return LoweringError(f"{type(error).__name__}: {error}")


def _faster_lowering() -> contextlib.AbstractContextManager[Any]:
    """Return the context in which JAX lowers Mosaic kernels faster; an empty context if Mosaic is not imported.

    Tracing a Mosaic kernel imports Mosaic. Other kernels must not wait for this import.
    """
    if mosaic_tools.CORE not in sys.modules:
        return contextlib.nullcontext()
    from pallas_attn.jax_patches.faster_lowering import faster_lowering

    return faster_lowering()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector. Lowering creates hundreds of thousands of objects that live until it is
    finished, and each collection visits all of them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _file(key: _Key) -> Path | None:
    """Return the file of a key's kernel; None if kernels are not stored in files."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named) / key.digest
    cache = jax.config.jax_compilation_cache_dir
    if not cache or not jax.config.jax_enable_compilation_cache or "://" in str(cache):
        return None
    return Path(cache) / "pallas_attn_kernels" / key.digest


def _read(file: Path) -> export.Exported | None:
    """Return the exported function in a file; None if the file is missing or damaged."""
    try:
        content = file.read_bytes()
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"cannot read cached kernels in {file.parent}: {error.strerror or error}")
        return None
    header = len(MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(MAGIC) or hashlib.sha256(content[header:]).digest() != content[len(MAGIC) : header]:
        return None
    mosaic_tools.find()
    return export.deserialize(bytearray(content[header:]))


def _write(file: Path, exported: export.Exported) -> None:
    """Write a complete file or none."""
    body = bytes(exported.serialize())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="tmp-", delete=False) as partial:
            try:
                partial.write(MAGIC + hashlib.sha256(body).digest() + body)
                partial.close()
                os.replace(partial.name, file)
            except BaseException:
                os.unlink(partial.name)
                raise
        _remove_unused(file.parent)
    except OSError as error:
        _warn_once(f"cannot write cached kernels to {file.parent}: {error.strerror or error}")


def _remove_unused(folder: Path) -> None:
    """Remove files that were neither written nor read recently. Another process may remove them at the same time."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for file in folder.iterdir():
        is_ours = re.fullmatch(r"[0-9a-f]{64}|tmp-\w+", file.name) is not None
        with contextlib.suppress(OSError):
            if is_ours and file.is_file() and file.stat().st_mtime < oldest:
                file.unlink()


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"pallas_attn: {message}", stacklevel=2)
