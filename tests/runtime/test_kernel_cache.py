"""Tests of the cache of lowered kernels: only equal calls find a kernel, also in other processes, and files are
complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config

import pallas_attn
from pallas_attn.jax_patches import faster_lowering
from pallas_attn.portable import arguments
from pallas_attn.runtime import device, kernel_cache, mosaic_tools, tuning
from tests.kit.slow_cases import slow_cases

CARD = device.Device(platform="gpu", name="a CPU in place of a card", capability=(9, 0), multiprocessors=2)
TRACED: list[str] = []


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y", "window"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class Call:
    x: Any
    y: Any
    window: int | None = None
    scale: float = 2.0


def scaled_sum(call: Call) -> tuple[Any, Any]:
    """Stand in for an implementation of an operation. Each trace is recorded in `TRACED`."""
    TRACED.append("scaled_sum")
    if call.scale < 0:
        raise NotImplementedError("takes no negative scale")
    return call.x * call.scale + (0 if call.y is None else call.y), call.window


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Use a new cache folder, and make a GPU the current device. Kernels are compiled for the CPU.
    Return the folder.
    """
    monkeypatch.setattr(device, "current", lambda: CARD)
    monkeypatch.setattr(kernel_cache, "PLATFORM", "cpu")
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    forget()
    yield tmp_path
    kernel_cache._cached.cache_clear()


def forget() -> None:
    """Remove all kernels and records from memory, so that the next call behaves as in a new process."""
    kernel_cache._cached.cache_clear()
    kernel_cache._warn_once.cache_clear()
    TRACED.clear()


X, Y = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))


def run(call: Call) -> np.ndarray:
    return np.asarray(kernel_cache.call_cached(scaled_sum, call)[0])


def test_equal_calls_are_traced_once(cache_folder: Path) -> None:
    for x in (X, X + 1):
        np.testing.assert_array_equal(run(Call(x, Y)), x * 2 + 1)
    jax.jit(
        lambda x: (
            kernel_cache.call_cached(scaled_sum, Call(x, Y))[0] + kernel_cache.call_cached(scaled_sum, Call(x, x))[0]
        )
    )(X)
    assert len(TRACED) == 1
    assert len(list(cache_folder.iterdir())) == 1


def test_missing_flatbuffers_is_a_warning(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.warns(UserWarning, match="not cached on disk, because flatbuffers is not installed: pip install flatb"):
        np.testing.assert_array_equal(run(Call(X, Y)), X * 2 + 1)
    np.testing.assert_array_equal(run(Call(X + 1, Y)), X * 2 + 3)  # from memory
    assert len(TRACED) == 1
    assert list(cache_folder.iterdir()) == []


def test_second_process_traces_nothing(cache_folder: Path) -> None:
    want = run(Call(X, Y, window=3))
    forget()
    np.testing.assert_array_equal(run(Call(X, Y, window=3)), want)
    assert not TRACED
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        Call(X, None),
        Call(X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
        Call(X[:1], Y[:1]),
        Call(X, Y, window=4),
        Call(X, Y, scale=3.0),
    ],
)
def test_different_calls_have_different_keys(cache_folder: Path, other: Call) -> None:
    run(Call(X, Y))
    got = kernel_cache.call_cached(scaled_sum, other)
    want = scaled_sum(other)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    assert len(list(cache_folder.iterdir())) == 2


class Scaled:
    """Kernel with a state that the name of its method does not contain."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, call: Call) -> Any:
        return call.x * self.factor


@functools.wraps(scaled_sum)
def wrapped_once(call: Call) -> Any:
    return scaled_sum(call)


@functools.wraps(scaled_sum)
def wrapped_again(call: Call) -> Any:
    return tuple(2 * part for part in scaled_sum(call))


@functools.wraps(scaled_sum)
def renamed(call: Call) -> Any:
    return scaled_sum(call)


renamed.__qualname__ = "renamed"


class Namespace:
    @staticmethod
    def scaled_sum(call: Call) -> Any:
        return scaled_sum(call)


@pytest.mark.parametrize("function", [wrapped_once, wrapped_again, jax.jit(scaled_sum)])
def test_wrapper_under_the_name_of_another_function(function: Any) -> None:
    """Wrappers of one function have the name of this function, so their keys would be equal."""
    message = f"^function: expected one that a module defines by name, got .*{__name__}.scaled_sum is another object"
    with pytest.raises(ValueError, match=message):
        kernel_cache.call_cached(function, Call(X, Y))


def test_source_of_a_wrapper_includes_the_file_of_the_wrapper() -> None:
    from pallas_attn.models.moe.kernels import grouped_gemm

    @functools.wraps(grouped_gemm.grouped_gemm)
    def wrapper(call: Any) -> Any:
        return grouped_gemm.grouped_gemm(call)

    wrapper.__module__ = __name__
    assert {__file__, grouped_gemm.__file__} <= set(kernel_cache._files(wrapper))


@pytest.mark.parametrize("function", [renamed, Namespace.scaled_sum])
def test_function_that_its_name_leads_to(function: Any, cache_folder: Path) -> None:
    np.testing.assert_array_equal(kernel_cache.call_cached(function, Call(X, Y))[0], X * 2 + 1)
    assert len(list(cache_folder.iterdir())) == 1


@pytest.mark.parametrize("function", [lambda call: call, functools.partial(scaled_sum), Scaled(2.0).apply])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_function_without_a_module_name(function: Any, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(CARD, platform=platform))
    with pytest.raises(ValueError, match=r"^function: expected one that a module defines by name, got [^;]*\. Define"):
        kernel_cache.call_cached(function, Call(X, Y))


def test_cached_implementation_is_not_imported(cache_folder: Path) -> None:
    """The module of an implementation is imported only if a kernel is not cached: once for each new kernel, also for a
    second function of the same module.
    """
    imported = []

    def load() -> Any:
        imported.append("module")
        return SimpleNamespace(scaled_sum=scaled_sum, twice=lambda call: scaled_sum(dataclasses.replace(call, scale=4)))

    def run(name: str) -> np.ndarray:
        function = kernel_cache.NamedFunction("pallas_attn.ops.op.mosaic", name, load)
        return np.asarray(kernel_cache.call_cached(function, Call(X, Y))[0])

    for _ in range(2):
        np.testing.assert_array_equal(run("scaled_sum"), X * 2 + 1)
    assert len(imported) == 1
    forget()
    np.testing.assert_array_equal(run("scaled_sum"), X * 2 + 1)
    assert len(imported) == 1
    np.testing.assert_array_equal(run("twice"), X * 4 + 1)
    assert len(imported) == 2
    assert len(list(cache_folder.iterdir())) == 2


def test_key_ignores_paths_that_mosaic_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def process() -> tuple[str, ...]:
        kernel_cache._process.cache_clear()
        return kernel_cache._process()

    monkeypatch.setattr(kernel_cache, "_sources", lambda: "sources")
    try:
        before = process()
        for name in mosaic_tools.VARIABLES:
            monkeypatch.setenv(name, "/elsewhere")
        assert process() == before
        monkeypatch.setenv("MOSAIC_GPU_OTHER", "1")
        assert set(process()) == {*before, "MOSAIC_GPU_OTHER=1"}
    finally:
        monkeypatch.undo()
        kernel_cache._process.cache_clear()


def test_compile_ahead(cache_folder: Path) -> None:
    """Inside `compile_ahead`, each kernel is compiled on the executor once per process, whether it was lowered by this
    process or found in the cache. A compilation error does not fail the call.
    """
    submitted: list[Any] = []
    threads = mock.Mock(submit=lambda function, *args: submitted.append(function(*args)))
    compiled = mock.Mock(side_effect=RuntimeError("no memory"))
    with mock.patch.object(jax.stages.Lowered, "compile", compiled):
        for scale in (1.0, 2.0):
            with kernel_cache.compile_ahead(threads):
                jax.jit(lambda x: kernel_cache.call_cached(scaled_sum, Call(x, Y, scale=scale))[0]).lower(X)  # noqa: B023
        jax.jit(lambda x: kernel_cache.call_cached(scaled_sum, Call(x, Y, scale=3.0))[0]).lower(X)
        forget()
        with kernel_cache.compile_ahead(threads):
            jax.jit(lambda x: kernel_cache.call_cached(scaled_sum, Call(x, Y))[0]).lower(X)
    assert submitted == [None, None, None]
    assert compiled.call_count == 3


@pytest.mark.parametrize("what", ["card", "setting", "threefry", "jax-triton", "sources", "file"])
def test_key_depends_on_the_environment(cache_folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Call(X, Y))
    if what == "card":
        monkeypatch.setattr(device, "current", lambda: dataclasses.replace(CARD, multiprocessors=3))
        run(Call(X, Y))
    elif what == "setting":
        with jax.default_matmul_precision("highest"):
            run(Call(X, Y))
    elif what == "threefry":
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            run(Call(X, Y))
    elif what == "jax-triton":
        monkeypatch.setenv(device.JAX_TRITON_VARIABLE, "1")
        run(Call(X, Y))
    else:
        forget()
        changed = {"sources": ("_process", lambda: ("others",)), "file": ("_source", lambda function: "another")}
        monkeypatch.setattr(kernel_cache, *changed[what])
        run(Call(X, Y))
    assert len(list(cache_folder.iterdir())) == 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    number: Any
    values: Any = None

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuned) and self.number == other.number and np.array_equal(self.values, other.values)


class Opaque:
    """A static value that cannot be part of a key, because its `repr` has an address and not its contents."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 2.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        ((1, 2), (1, 2.0)),
        (Tuned(2), Tuned(2.0)),
        (Tuned(1, np.zeros(5000)), Tuned(1, np.arange(5000.0) * (np.arange(5000) == 2500))),
        (jnp.float32, jnp.float16),
        (functools.partial(max, 1), functools.partial(max, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["window", "scale"])
def test_equal_statics_of_different_types_have_different_keys(
    cache_folder: Path, one: Any, other: Any, field: str
) -> None:
    """Keys contain the types of static values, so 2 and 2.0 have different kernels. Static values are leaves of the
    call (`window`) or static fields of a pytree node (`scale`).
    """
    seen: list[Any] = []

    def record(call: Call) -> Any:
        seen.append(getattr(call, field))
        return call.x

    module: Any = SimpleNamespace(record=record)
    implementation = kernel_cache.NamedFunction("module", "record", lambda: module)
    for value in (one, other, one, other):
        kernel_cache.call_cached(implementation, dataclasses.replace(Call(X, Y, scale=1.0), **{field: value}))
    assert [type(value) for value in seen] == [type(one), type(other)]
    assert len(list(cache_folder.iterdir())) == 2
    forget()
    for value in (one, other):
        kernel_cache.call_cached(implementation, dataclasses.replace(Call(X, Y, scale=1.0), **{field: value}))
    assert len(seen) == 2


def test_static_without_description_is_cached_in_memory_only(cache_folder: Path) -> None:
    opaque = Opaque()
    for _ in range(2):
        kernel_cache.call_cached(scaled_window, Call(X, Y, window=opaque))  # pyrefly: ignore[bad-argument-type]
    assert TRACED == ["scaled_window"]
    assert not list(cache_folder.iterdir())


def scaled_window(call: Call) -> Any:
    TRACED.append("scaled_window")
    return call.x


def test_key_contains_every_boolean_setting_that_jax_traces_with() -> None:
    """Flip each boolean setting of JAX. If JAX traces again, the setting must be in the key of cached kernels.

    Otherwise a kernel that was lowered with the setting would run in a process without it. Exceptions are settings
    without effect on kernels.
    """
    without_effect = {
        *("check_vma", "jax_auto_pcast", "jax_remove_size_one_mesh_axis_from_type"),  # types inside `jax.shard_map`
        *("jax_enable_pgle", "jax_no_execution"),  # execution
        *("jax_use_direct_linearize", "jax_remat_barrier_no_cotangents"),  # gradients
        "jax_raise_on_ppermute_sort_diff",  # raises an error
    }
    missing = set()
    for name, setting in config.config_states.items():
        if isinstance(setting.value, bool):
            before = config.trace_context()
            with setting(not setting.value):
                if config.trace_context() != before:
                    missing.add(name)
    assert missing - set(kernel_cache.SETTINGS) == without_effect & missing
    assert {"jax_enable_x64", "jax_threefry_partitionable"} <= missing


def test_root_is_the_package() -> None:
    """The digest that is part of all keys covers the sources of the whole package, so a changed kernel changes the
    keys.
    """
    assert Path(pallas_attn.__file__).parent == kernel_cache.ROOT


def test_digest_depends_on_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest depends on the names and contents of Python and JSON files in all folders, and on no other files."""
    monkeypatch.setattr(kernel_cache, "ROOT", tmp_path)
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "kernel.py").write_text("x = 1")
    found = [kernel_cache._sources()]
    (tmp_path / "ops" / "notes.txt").write_text("x")
    assert kernel_cache._sources() == found[0]
    (tmp_path / "tuned.json").write_text("{}")
    found.append(kernel_cache._sources())
    (tmp_path / "ops" / "kernel.py").write_text("x = 2")
    found.append(kernel_cache._sources())
    (tmp_path / "ops" / "kernel.py").rename(tmp_path / "kernel.py")
    found.append(kernel_cache._sources())
    assert len(set(found)) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + b"\0\0"])
def test_damaged_file_is_rewritten(cache_folder: Path, damage: Any) -> None:
    want = run(Call(X, Y))
    (file,) = cache_folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget()
    np.testing.assert_array_equal(run(Call(X, Y)), want)
    assert len(TRACED) == 1
    assert file.read_bytes()[: len(kernel_cache.MAGIC)] == kernel_cache.MAGIC
    forget()
    np.testing.assert_array_equal(run(Call(X, Y)), want)
    assert not TRACED


def test_unread_files_are_removed(cache_folder: Path) -> None:
    """A write removes kernels that no process has read for UNUSED_DAYS, and unfinished files of the same age. Other
    kernels, and files that are not kernels, are not removed.
    """
    run(Call(X, Y))
    (read,) = cache_folder.iterdir()
    unread, half, other = cache_folder / ("0" * 64), cache_folder / "tmp-abc_1", cache_folder / "README"
    for file in (unread, half, other):
        file.touch()
    long_ago = time.time() - kernel_cache.UNUSED_DAYS * 24 * 3600 - 60
    for file in cache_folder.iterdir():
        os.utime(file, (long_ago, long_ago))
    forget()
    run(Call(X, Y))
    run(Call(X, None))
    assert {read, other} < set(cache_folder.iterdir())
    assert len(list(cache_folder.iterdir())) == 3


def test_unusable_folder_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file" / "kernels"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1.0, 2.0):
            np.testing.assert_array_equal(run(Call(X, Y, scale=scale)), X * scale + 1)
    messages = [str(warning.message) for warning in caught]
    assert [message.split(" cached kernels ")[0] for message in messages] == [
        "pallas_attn: cannot read",
        "pallas_attn: cannot write",
    ]


def test_unsupported_call_is_not_cached(cache_folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="no negative scale"):
            run(Call(X, Y, scale=-1.0))
    assert not list(cache_folder.iterdir())


def test_lowering_error_is_cached(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise AssertionError("the compiler knows no such layout")

    monkeypatch.setattr(kernel_cache.export, "export", broken)
    for _ in range(3):
        with pytest.raises(kernel_cache.LoweringError, match="^AssertionError: the compiler knows no such layout"):
            run(Call(X, Y))
    assert len(tried) == 1
    assert not list(cache_folder.iterdir())


def collecting(call: Call) -> tuple[Any, Any]:
    """Return `scaled_sum(call)`, and record whether the garbage collector is enabled."""
    TRACED.append(f"collecting {gc.isenabled()}")
    return scaled_sum(call)


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collector_is_disabled_while_lowering(enabled: bool) -> None:
    """After lowering, the garbage collector has its former state, also if lowering raised an exception."""
    TRACED.clear()
    if not enabled:
        gc.disable()
    try:
        kernel_cache.call_cached(collecting, Call(jnp.ones(3), None))
        assert gc.isenabled() == enabled
        with pytest.raises(NotImplementedError, match="no negative scale"):
            kernel_cache.call_cached(collecting, Call(jnp.ones(3), None, scale=-1.0))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert TRACED.count("collecting False") == 2
    assert "collecting True" not in TRACED


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("fails", [False, True])
def test_jax_functions_are_replaced_only_while_lowering(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts, export = [], kernel_cache.export.export

    def record(*args: Any, **kwargs: Any) -> Any:
        contexts.append(faster_lowering._contexts)
        if fails:
            raise AssertionError
        return export(*args, **kwargs)

    monkeypatch.delenv(faster_lowering.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(kernel_cache.export, "export", record)
    with pytest.raises(kernel_cache.LoweringError) if fails else contextlib.nullcontext():
        run(Call(X, Y))
    assert contexts == [1]
    assert faster_lowering._contexts == 0


def test_memory_error_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    export = kernel_cache.export.export
    monkeypatch.setattr(kernel_cache.export, "export", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        run(Call(X, Y))
    monkeypatch.setattr(kernel_cache.export, "export", export)
    np.testing.assert_array_equal(run(Call(X, Y)), X * 2 + 1)


def test_vmap_caches_the_batched_kernel(cache_folder: Path) -> None:
    def each(x: Any) -> Any:
        return kernel_cache.call_cached(scaled_sum, Call(x, Y[0]))[0]

    np.testing.assert_array_equal(jax.vmap(each)(X), X * 2 + 1)
    twice = jax.vmap(jax.vmap(each, in_axes=1, out_axes=1))(jnp.stack([X.T, X.T]))
    np.testing.assert_array_equal(twice, jnp.stack([X.T, X.T]) * 2 + 1)
    forget()
    np.testing.assert_array_equal(jax.jit(jax.vmap(each))(X), X * 2 + 1)
    assert not TRACED


def test_mesh_devices_share_one_kernel(cache_folder: Path) -> None:
    """All devices of a mesh, and a call on one device, use the same cached kernel."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("x")
    rows = jnp.arange(3.0 * mesh.size).reshape(mesh.size, 3)

    def call(x: Any) -> Any:
        arrays, rest = arguments.split_arrays(Call(x, None))
        return arguments.call_unvarying(lambda arrays: kernel_cache.call_split(scaled_sum, arrays, rest)[0], arrays)

    for check_vma in (True, False):
        run_all = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma))
        np.testing.assert_array_equal(run_all(rows), rows * 2)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(call)(rows[:1]), rows[:1] * 2)
    assert len(TRACED) == 1
    forget()
    np.testing.assert_array_equal(run(Call(rows[:1], None)), rows[:1] * 2)
    assert not TRACED


def test_calls_that_bypass_the_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> int:
        TRACED.clear()
        run(Call(X, Y))
        run(Call(X, Y))
        return len(TRACED)

    with tuning.deciding(lambda op, key, config: config):
        assert traced() == 2
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert traced() == 2
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(CARD, interpreted=True))
    assert traced() == 2
    monkeypatch.setattr(device, "current", lambda: dataclasses.replace(CARD, platform="cpu"))
    assert traced() == 2
    monkeypatch.setattr(device, "current", lambda: CARD)
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, "0")
    assert traced() == 2
    assert not list(cache_folder.iterdir())


def test_files_are_in_the_compilation_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kernel_cache.ENVIRONMENT_VARIABLE)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
        run(Call(X, Y))
        assert len(list((tmp_path / "jax" / "pallas_attn_kernels").iterdir())) == 1
        jax.config.update("jax_compilation_cache_dir", None)
        run(Call(X, Y, scale=5.0))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert len(list((tmp_path / "jax" / "pallas_attn_kernels").iterdir())) == 1


@pytest.mark.slow
def test_concurrent_processes(cache_folder: Path) -> None:
    """Three processes lower the same kernels at the same time. All return the correct results, and each kernel has one
    complete file.
    """
    program = textwrap.dedent("""
        import jax.numpy as jnp
        from pallas_attn.runtime import device, kernel_cache
        from tests.runtime import test_kernel_cache as here
        device.current, kernel_cache.PLATFORM = lambda: here.CARD, "cpu"
        for scale in (1.0, 2.0, 3.0):
            print(here.run(here.Call(here.X, here.Y, scale=scale)).sum())
    """)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=300)[0].split() for process in running] == [["21.0", "36.0", "51.0"]] * 3
    assert len(list(cache_folder.iterdir())) == 3
    forget()
    assert [run(Call(X, Y, scale=scale)).sum() for scale in (1.0, 2.0, 3.0)] == [21.0, 36.0, 51.0]
    assert {file.read_bytes()[: len(kernel_cache.MAGIC)] for file in cache_folder.iterdir()} == {kernel_cache.MAGIC}


SETUP = """
import sys
from pathlib import Path
import jax.numpy as jnp
from pallas_attn import call_cached
from pallas_attn.runtime import device, kernel_cache
card = device.Device(platform="gpu", name="a CPU in place of a card", capability=(9, 0), multiprocessors=2)
device.current, kernel_cache.PLATFORM = lambda: card, "cpu"
x = jnp.arange(6.0)
"""
EDITED = f"""{SETUP}
sys.path.insert(0, sys.argv[1])
import edited_kernel
file = Path(edited_kernel.__file__)
if len(sys.argv) > 2:
    file.write_text(file.read_text().replace(*sys.argv[2:]))
print(call_cached(edited_kernel.kernel, x).sum())
"""


def run_program(program: str, *arguments: str) -> tuple[float, str]:
    """Run a Python program in a new process. Return the number that it prints, and its output on stderr."""
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr


@pytest.mark.slow
def test_file_edited_between_import_and_first_call(cache_folder: Path, tmp_path: Path) -> None:
    """The source file of a kernel is edited after its import. The process runs the old kernel with a warning, and does
    not store it under the key of the new source.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "edited_kernel.py").write_text("SCALE = 2.0\ndef kernel(x):\n    return x * SCALE\n")
    time.sleep(0.05)  # makes the file older than the process
    # The new text has another size: Python compares size and time of a source file with its bytecode.
    number, warning = run_program(EDITED, str(source), "2.0", "3.00")
    assert number == 30.0
    assert "changed after this process started" in warning
    assert run_program(EDITED, str(source)) == (45.0, "")
    assert len([file for file in cache_folder.iterdir() if file.is_file()]) == 1


@pytest.mark.parametrize("edited_while", ["before the call", "while it is lowered"])
def test_package_edited_after_start(
    cache_folder: Path, tmp_path: Path, edited_while: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("x = 1")
    monkeypatch.setattr(kernel_cache, "ROOT", package)
    monkeypatch.setattr(kernel_cache, "_STARTED", time.time() + 10)

    def edit() -> None:
        monkeypatch.setattr(kernel_cache, "_STARTED", time.time() - 10)  # makes the files newer than the process

    def traced(call: Call) -> Any:
        edit()
        return call.x

    module: Any = SimpleNamespace(edit=traced)
    implementation = kernel_cache.NamedFunction("module", "edit", lambda: module)

    if edited_while == "before the call":
        edit()
    with pytest.warns(UserWarning, match=f"{package / 'module.py'} changed after this process started"):
        kernel_cache.call_cached(implementation, Call(X, Y))
    assert [file.name for file in cache_folder.iterdir()] == ["package"]


def test_start_of_process() -> None:
    """`_STARTED`, the start time of a process, is after its parent starts it, and before the library is imported."""
    printed = [time.time()]
    number, _ = run_program("from pallas_attn.runtime import kernel_cache; print(kernel_cache._STARTED)")
    printed += [number, time.time()]
    assert printed[0] - 0.02 < printed[1] < printed[2] - 0.1


STDIN = f"""{SETUP}
traced = []
def kernel(x):
    traced.append(x)
    return x * 2
for _ in range(2):
    out = call_cached(kernel, x).sum()
assert len(traced) == 1
print(out)
"""


@slow_cases("-c")
@pytest.mark.parametrize("how", ["-c", "-"])
def test_function_without_a_file(cache_folder: Path, how: str) -> None:
    """A kernel function that `python -c` or standard input defines has no source file. It is cached in memory only."""
    arguments = [how, STDIN] if how == "-c" else [how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=STDIN,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "30.0\n", "")
    assert not list(cache_folder.iterdir())


def test_former_public_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="pallas_attn.run_kept is now pallas_attn.call_cached"):
        former = pallas_attn.run_kept
    assert former is pallas_attn.call_cached
    with pytest.raises(AttributeError, match="no attribute 'run_everything'"):
        _ = pallas_attn.run_everything


def test_source_of_a_kernel_includes_the_modules_of_its_package_that_it_uses() -> None:
    from pallas_attn.models.moe.kernels import grouped_gemm, pipeline

    function = inspect.unwrap(grouped_gemm.grouped_gemm)
    file = inspect.getsourcefile(function)
    assert file is not None
    files = kernel_cache._used_files(sys.modules[function.__module__], {file})
    assert {file, pipeline.__file__} <= files
    assert {str(Path(name).parent) for name in files} == {str(Path(file).parent)}
