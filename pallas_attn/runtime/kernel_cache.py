"""Cache of lowered kernels: in memory for all call sites of a process, and on disk for later processes.

Tracing and lowering a Mosaic kernel takes seconds of Python time, much longer than its compilation by XLA, and JAX's
compilation cache does not avoid it. The first call of a kernel is exported (`jax.export`), and later calls run the
exported function. The cache key contains all inputs of lowering: operation and module, shapes and dtypes of the arrays,
static arguments, the device, versions of JAX and its plugins, JAX settings, and the source files of the kernel and of
this package.

Python runs the text that it imported, and the key contains the text on disk. The two are equal as long as no source
file changed after the process started. If one did, kernels are neither read from disk nor written.

The process executes the kernels in the folder. The folder and its files must therefore belong to this user or to root,
without write permission for other users; otherwise they are not used. A file is written under a temporary name and
renamed, so a reader sees a complete file or none. It begins with a digest of the key and the kernel. Truncated and
damaged files, links and FIFOs are replaced. Writing a file also removes files that no process has read for
`UNUSED_DAYS`, such as files of old versions.

Files are stored in a subfolder of JAX's compilation cache (`jax_compilation_cache_dir`) if that is set. The environment
variable `PALLAS_ATTN_KERNEL_CACHE` names another folder; 0 disables the cache on disk and in memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import errno
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import re
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType

from pallas_attn.jax_patches import kernel_shapes
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
    "jax-triton",
)
SETTINGS = (
    *("jax_enable_x64", "jax_explicit_x64_dtypes", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
    *("jax_default_matmul_precision", "jax_allow_f16_reductions", "jax_use_hlo_logistic_lowering"),
    *("jax_default_prng_impl", "jax_legacy_prng_key", "jax_random_seed_offset", "jax_threefry_partitionable"),
    *("jax_threefry_gpu_kernel_lowering", "jax_high_dynamic_range_gumbel", "jax_softmax_custom_jvp"),
    *("jax_use_simplified_jaxpr_constants", "jax_embedded_constants_max_bytes", "eager_constant_folding"),
    *("jax_scan3", "jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_disable_jit", "jax_use_shardy_partitioner"),
    *("jax_ragged_dot_use_gpu_pallas_triton_lowering", "jax_use_emit_pipeline_primitive"),
    *("jax_pallas_enable_debug_checks", "jax_check_static_indices", "jax_mutable_array_checks", "jax_debug_key_reuse"),
    *(f"jax_error_checking_behavior_{kind}" for kind in ("nan", "divide", "oob")),
)
"""JAX settings that change what a function is traced or lowered to. A JAX version need not have all of them."""
UNUSED_DAYS = 30
MAGIC = b"pallas_attn kernel 2\n"
OWN_WARNING = "pallas_attn: "
"""Start of the warnings of this package."""
MAX_BYTES = 64 * 2**20
"""Maximum size of a file. Kernels take up to a few megabytes."""


def call_cached(function: Callable[[Any], Any], call: Any) -> Any:
    """Return `function(call)`, using the lowered form of an equal call of this or an earlier process.

    If there is none, lower the function and cache the result. Operations run their kernels through this function; it
    helps other functions too if they are slow to lower. It also makes programs identical between processes, which JAX's
    compilation cache requires: Mosaic numbers what it lowers in order of lowering.

    The cache is not used in the interpreter, on platforms other than GPUs, under a mesh with
    `jax.sharding.AxisType.Explicit` axes, and while a tuner selects configurations.

    Args:
      function: a function that a module defines by name. The key contains this name, the text of the module's file and
        of the modules of its package that it uses, the text of pallas_attn, and the version of JAX. It contains no
        other files that the function depends on, and no object. The name must therefore lead to this very function:
        bound methods, `functools.partial` objects, local functions and further wrappers of a function raise
        ValueError. A function without a file, such as one from `python -c`, is cached in memory only.
      call: a pytree of arrays and static values. The kernel is cached in memory only if a static value has a `repr`
        that does not determine the value, such as `<object at 0x7f...>`.

    Raises:
      ValueError: the function has no such name, or the module has another object under this name.
      NotImplementedError: the function does not support the call.
      LoweringError: the traced function cannot be lowered. Without the cache, JAX raises its own error later.

    Example:
      >>> pallas_attn.call_cached(jnp.linalg.norm, jnp.array([3.0, 4.0]))
      Array(5., dtype=float32)
    """
    if not isinstance(function, NamedFunction):
        _check_name(function)
    arrays, rest = arguments.split_arrays(call)
    return call_split(function, arrays, rest)


def call_split(function: Callable[[Any], Any], arrays: list[Any], rest: arguments.Rest) -> Any:
    """`call_cached` for a call that `arguments.split_arrays` has split."""
    here = device.current()
    if here.platform != "gpu" or here.interpreted or tuning.is_deciding() or not _enabled() or _has_typed_mesh():
        return function(rest.join(arrays))
    if kernel_shapes.skips_bodies():
        return function(rest.join(arrays))
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    return _lowered(_Key(function, rest, _described_rest(rest), avals, here, _settings()))(*arrays)


def _check_name(function: Callable[[Any], Any]) -> None:
    """Raise ValueError unless the function's module has this function under the function's name.

    The cache key contains the name. Two functions with one name, such as two wrappers by `functools.wraps` of one
    function, would have equal keys.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split(".") if isinstance(name, str) else [""]:
        found = getattr(found, part, None)
    if found is function and not inspect.ismethod(function):  # the name does not determine the object of a method
        return
    has = f"; {module}.{name} is another object" if found is not None and not inspect.ismethod(function) else ""
    raise ValueError(
        f"function: expected one that a module defines by name, got {function!r}{has}. Define it with `def` at the top"
        " level of a module; pass captured values in `call`; set __module__ and __qualname__ of a wrapper to the name"
        " under which a module defines the wrapper"
    )


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
    launcher = (device.JAX_TRITON_VARIABLE, device.calls_jax_triton())
    return (*((name, getattr(jax.config, name, None)) for name in SETTINGS), launcher)


@dataclasses.dataclass(frozen=True)
class _Key:
    """Cache key: all inputs of lowering that may differ within a process."""

    function: Callable[[Any], Any]
    rest: arguments.Rest
    statics: str | None
    """Description of `rest` that tells 2, 2.0 and True apart, which are equal; None if it cannot be described."""
    avals: tuple[jax.ShapeDtypeStruct, ...]
    here: device.Device
    settings: tuple[tuple[str, Any], ...]
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...] = ()
    """Size and array axes of each `jax.vmap` around the call, innermost first."""

    @property
    def digest(self) -> str | None:
        """Digest that is equal in all processes that would lower the same kernel; None without a cache on disk."""
        name = _named(self.function)
        if name is None or self.statics is None:
            return None
        fields = [self.statics, self.avals, self.here, self.settings, self.vmaps]
        return hashlib.sha256("\n".join(map(repr, (name, *fields, *_process()))).encode()).hexdigest()

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


def _described_rest(rest: arguments.Rest) -> str | None:
    """Return a text that determines the static part of a call; None if a value has no such text."""

    def nodes(tree: Any) -> tuple[Any, ...]:
        return tree.node_data(), *map(nodes, tree.children())

    try:
        return _described((nodes(rest.tree), rest.static, rest.is_array))
    except TypeError:
        return None


def _described(value: Any) -> str:
    """Return a text that determines a static value and its type. Raise TypeError if the value has no such text."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{kind}({value!r})"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, tuple | list):
        return f"{kind}({', '.join(map(_described, value))})"
    if isinstance(value, set | frozenset):
        return f"{kind}({', '.join(sorted(map(_described, value)))})"
    if isinstance(value, dict):
        return f"{kind}({', '.join(f'{_described(k)}: {_described(v)}' for k, v in value.items())})"
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return f"{kind}({value.dtype}, {value.shape}, {hashlib.sha256(value.tobytes()).hexdigest()})"
    if dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
        return f"{kind}({_described(fields)})"
    if isinstance(value, functools.partial):
        return f"{kind}({_described((value.func, value.args, value.keywords))})"
    if isinstance(value, FunctionType) and "<" not in value.__qualname__ and (name := _named(value)) is not None:
        return f"{kind}({name})"
    text = repr(value)
    if type(value).__repr__ is object.__repr__ or " at 0x" in text or "..." in text:
        raise TypeError(f"static value: expected a repr that determines the value, got {text}")
    return f"{kind}({text})"


def _named(function: Callable[[Any], Any]) -> str | None:
    """Return the name of a function, with a digest of its file unless the function belongs to this package.

    None if the function has no file.
    """
    if isinstance(function, NamedFunction):
        return f"{function.module}.{function.name}"
    source = _source(function)
    return None if source is None else f"{function.__module__}.{function.__qualname__} {source}"


@functools.cache
def _source(function: Callable[[Any], Any]) -> str | None:
    """Return a digest of `_files(function)`, or None for a function without a file."""
    files = _files(function)
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest() if files else None


def _files(function: Callable[[Any], Any]) -> list[str]:
    """Return the file that defines a function, then the files of the modules of its package that the file uses.

    The list is empty if the function has no file: functions of `python -c`, of standard input, of notebooks and of
    extension modules.
    """
    inner = inspect.unwrap(function)
    file = inspect.getsourcefile(inner) if inspect.isfunction(inner) else None
    if file is None or not os.path.isfile(file):
        return []
    modules = [sys.modules.get(each.__module__) for each in (function, inner)]  # a wrapper may be in another module
    own = {name for module in modules if (name := getattr(module, "__file__", None)) and os.path.isfile(name)}
    found = {file, *own}
    for module in modules:
        _used_files(module, found)
    return [file, *sorted(found - {file})]


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
    for file in _package_files():
        digest.update(os.path.relpath(file, ROOT).encode())
        with open(file, "rb") as content:
            digest.update(hashlib.sha256(content.read()).digest())
    return digest.hexdigest()


def _package_files() -> list[str]:
    """Return the Python and JSON files of this package, sorted.

    `pallas_attn.models` is left out: the key of its kernels has their file and the files of the same subpackage
    that it uses.
    """
    files = []
    for folder, folders, names in os.walk(ROOT):  # os.walk is faster than pathlib
        if folder == str(ROOT):
            folders[:] = [name for name in folders if name != "models"]
        files += [os.path.join(folder, name) for name in names if name.endswith((".py", ".json"))]
    return sorted(files)


def _start_of_process() -> float:
    """Return the Unix time at which this process started, at most 10 ms late; the current time where /proc is missing.

    This module is imported before most kernels. Forked processes inherit the result, like the modules.
    """
    now = time.time()
    try:
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


_STARTED = _start_of_process()


def _has_loaded_sources(key: _Key) -> bool:
    """Return whether the source files of a key have the text that this process imported, or will import."""
    function = key.function
    files = _package_files() + ([] if isinstance(function, NamedFunction) else _files(function))
    for file in files:
        try:
            changed = os.stat(file).st_ctime > _STARTED  # unlike mtime, programs cannot set it
        except OSError:
            changed = True
        if changed:
            _warn_once(f"kernels are not cached on disk, because {file} changed after this process started")
            return False
    return True


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
        if file is not None and _has_loaded_sources(key):  # lowering imports modules
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
    """Return the file of a key's kernel; None if the kernel is not stored in a file."""
    named, cache = os.environ.get(ENVIRONMENT_VARIABLE), jax.config.jax_compilation_cache_dir
    if named:
        folder = Path(named)
    elif not cache or not jax.config.jax_enable_compilation_cache or "://" in str(cache):
        return None
    else:
        folder = Path(cache) / "pallas_attn_kernels"
    if importlib.util.find_spec("flatbuffers") is None:  # an optional dependency of JAX
        _warn_once("kernels are not cached on disk, because flatbuffers is not installed: pip install flatbuffers")
        return None
    digest = key.digest
    return None if digest is None or not _has_loaded_sources(key) else folder / digest


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """Yield a descriptor of a folder that only this user or root can write; None, after a warning, for other folders.

    Raises OSError if the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if is_trusted := _is_ours(os.fstat(descriptor)):
            yield descriptor
    finally:
        os.close(descriptor)
    if not is_trusted:
        _warn_once(
            f"kernels are not cached in {folder}, because other users own it or can write it; expected a folder of "
            f"this user without write permission for others (chmod go-w {folder})"
        )
        yield None


def _is_ours(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root, and other users have no write permission."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(file: Path) -> export.Exported | None:
    """Return the exported function in a file; None if the file is missing, damaged or not to be trusted.

    Warns, once per reason, if the file is complete but JAX cannot deserialize it.
    """
    try:
        with _opened(file.parent) as folder:
            content = None if folder is None else _content(file.name, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link is replaced
            _warn_once(f"cannot read cached kernels in {file.parent}: {error.strerror or error}")
        return None
    if content is None or content[: len(MAGIC)] != MAGIC:
        return None
    header = len(MAGIC) + hashlib.sha256().digest_size
    if _digest_of(file.name, content[header:]) != content[len(MAGIC) : header]:
        return None
    mosaic_tools.find()
    try:
        return export.deserialize(bytearray(content[header:]))
    except Exception as error:  # noqa: BLE001 - flatbuffers raises many types
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        _warn_once(f"cannot deserialize a cached kernel in {file.parent}, and lowers it again: {reason}")
        return None


def _content(name: str, folder: int) -> bytes | None:
    """Return the content of a file in an open folder; None if it is no regular file of this user or too large.

    Opening waits for no writer of a FIFO and follows no link.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status) or status.st_size > MAX_BYTES:
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(descriptor)


def _digest_of(name: str, body: bytes) -> bytes:
    """Return the digest of a file's body and name, so that a file is not found under another key."""
    return hashlib.sha256(name.encode() + body).digest()


def _write(file: Path, exported: export.Exported) -> None:
    """Write a complete file or none."""
    body = bytes(exported.serialize())
    if len(body) >= MAX_BYTES - 1024:
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(file.parent) as folder:
            if folder is None:
                return
            partial = f"tmp-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                with open(os.open(partial, flags, mode=0o600, dir_fd=folder), "wb") as content:
                    content.write(MAGIC + _digest_of(file.name, body) + body)
                os.replace(partial, file.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise
            _remove_unused(folder)
    except OSError as error:
        _warn_once(f"cannot write cached kernels to {file.parent}: {error.strerror or error}")


def _remove_unused(folder: int) -> None:
    """Remove files that were neither written nor read recently. Another process may remove them at the same time."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if re.fullmatch(r"[0-9a-f]{64}|tmp-\w+", name) is None:
                continue
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_mtime < oldest:
                os.unlink(name, dir_fd=folder)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"{OWN_WARNING}{message}", stacklevel=2)
