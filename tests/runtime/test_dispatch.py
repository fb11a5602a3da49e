"""Tests of dispatch, which chooses the implementation of a call: order of candidates, fallback, errors and warnings."""

import dataclasses
import functools
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import PagedKV, PagedLatent, explain, mla_prefill, paged_decode
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.runtime import device, dispatch, kernel_cache, tuning
from pallas_attn.triton import launch
from tests.contract.paged_case import Inputs, PagedCase
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_default_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)


@dataclasses.dataclass(frozen=True)
class FakeCall(OperationCall):
    """Call object of the operation "op", which exists only in these tests."""

    op: ClassVar[str] = "op"


CALL = FakeCall()


def works(name: str) -> Callable[..., Any]:
    return lambda call: name


def refuses(reason: str) -> Callable[..., Any]:
    def implementation(call: Any) -> Any:
        raise NotImplementedError(reason)

    return implementation


def must_not_load(call: Any) -> Any:
    raise AssertionError("loaded an implementation that was not to be tried")


@pytest.fixture
def implement(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that registers implementations of the operation "op": functions of a call, by name."""

    def register(**functions: Callable[..., Any]) -> None:
        modules = {(name, None): f"fake_{name}" for name in functions}
        monkeypatch.setitem(dispatch.MODULES, "op", modules)
        for name, function in functions.items():
            module = SimpleNamespace(op=function, __name__=f"fake_{name}")
            monkeypatch.setitem(sys.modules, f"pallas_attn.ops.op.fake_{name}", module)
        package = ModuleType("pallas_attn.ops.op")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)

    return register


@pytest.fixture
def all_names(implement: Callable[..., None]) -> None:
    implement(**{name: works(name) for name in ("reference", "xla", "triton", "mosaic")})


# --- table of implementations


@pytest.mark.parametrize("op", dispatch.MODULES)
def test_table_matches_the_implementation_files(op: str) -> None:
    """Every entry is a module with a function of the operation's name, and every implementation file has an entry."""
    folder = REPOSITORY / "pallas_attn" / "ops" / op
    for module in dispatch.MODULES[op].values():
        assert callable(getattr(importlib.import_module(f"pallas_attn.ops.{op}.{module}"), op))
    files = {file.stem for file in folder.glob("*.py") if file.stem in dispatch.NAMES}
    files |= {file.stem for file in folder.glob("*_sm[0-9]*.py")}
    assert files == set(dispatch.MODULES[op].values())
    assert folder.is_dir()


def test_table_has_every_operation() -> None:
    folders = {file.parent.name for file in (REPOSITORY / "pallas_attn" / "ops").glob("*/call.py")}
    assert folders == set(dispatch.MODULES)


def test_device_selects_the_architecture(implement: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    implement(mosaic=works("sm90"), xla=works("xla"))
    sm100 = SimpleNamespace(op=works("sm100"), __name__="fake_sm100")
    monkeypatch.setitem(sys.modules, "pallas_attn.ops.op.fake_sm100", sm100)
    modules = {("mosaic", (9, 0)): "fake_mosaic", ("mosaic", (10, 0)): "fake_sm100", ("xla", None): "fake_xla"}
    monkeypatch.setitem(dispatch.MODULES, "op", modules)
    for capability, runs in [((9, 0), "sm90"), ((10, 0), "sm100"), ((8, 0), "xla"), (None, "xla")]:
        monkeypatch.setattr(device, "current", lambda capability=capability: device.Device("gpu", "a card", capability))
        assert dispatch.choose("op", None, lambda _, found: found(CALL)) == runs
    with pytest.raises(
        NotImplementedError,
        match=r"needs a GPU of compute capability 9\.0 \(H100, H200\) or 10\.0 \(B200, GB200\), this is gpu",
    ):
        dispatch.run(CALL, "mosaic")


def test_mosaic_needs_a_newer_jax_than_the_others(
    of_a_card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_card(mosaic=works("mosaic"), xla=works("xla"))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(NotImplementedError, match=r"^needs jax 0\.11\.2 or later, this is jax 0\.10\.2$"):
        dispatch.run(CALL, "mosaic")
    assert dispatch.run(CALL, None) == "xla"
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert dispatch.run(CALL, "mosaic") == "mosaic"


# --- candidates


@pytest.mark.usefixtures("all_names")
def test_candidates_are_best_first_without_reference() -> None:
    assert dispatch.candidates("op", None) == ["mosaic", "triton", "xla"]
    assert dispatch.implementations("op") == ("mosaic", "triton", "xla", "reference")


def test_candidates_are_existing_implementations(implement: Callable[..., None]) -> None:
    implement(reference=works("reference"), xla=works("xla"))
    assert dispatch.candidates("op", None) == ["xla"]


@pytest.mark.parametrize(
    ("named", "names"), [("reference", ["reference"]), ("mosaic", ["mosaic"]), (("xla", "mosaic"), ["xla", "mosaic"])]
)
def test_named_candidates_keep_their_order(implement: Callable[..., None], named: Any, names: list[str]) -> None:
    implement(xla=works("xla"))
    assert dispatch.candidates("op", named) == names


@pytest.mark.usefixtures("all_names")
@pytest.mark.parametrize("named", ["cuda", "", "XLA", [], ("xla", "cuda"), "xla,reference"])
def test_unknown_implementation_name(named: Any) -> None:
    with pytest.raises(ValueError, match="implementation: expected None or names among mosaic, triton, xla, reference"):
        dispatch.candidates("op", named)


@pytest.mark.usefixtures("all_names")
def test_environment_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference, xla")
    assert dispatch.candidates("op", None) == ["reference", "xla"]
    assert dispatch.candidates("op", "mosaic") == ["mosaic"]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "")
    assert dispatch.candidates("op", None) == ["mosaic", "triton", "xla"]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=f"{dispatch.ENVIRONMENT_VARIABLE}: expected .*, got .'fast'."):
        dispatch.candidates("op", None)


# --- fallback and errors


def test_first_supporting_candidate_runs(implement: Callable[..., None]) -> None:
    implement(reference=must_not_load, xla=works("xla"), mosaic=refuses("no tensor cores"))
    assert dispatch.run(CALL, None) == "xla"
    assert dispatch.run(CALL, ("triton", "mosaic", "xla", "reference")) == "xla"
    implement(reference=must_not_load, xla=must_not_load, mosaic=works("mosaic"))
    assert dispatch.run(CALL, None) == "mosaic"


def test_named_implementation_never_falls_back(implement: Callable[..., None]) -> None:
    implement(xla=must_not_load, mosaic=refuses("head width 17"))
    with pytest.raises(NotImplementedError, match="head width 17"):
        dispatch.run(CALL, "mosaic")
    with pytest.raises(NotImplementedError, match="op has no 'triton' implementation; it has mosaic, xla"):
        dispatch.run(CALL, "triton")


def test_error_contains_all_reasons(implement: Callable[..., None]) -> None:
    implement(xla=refuses("reason one"), mosaic=refuses("reason two"), reference=must_not_load)
    with pytest.raises(ExceptionGroup, match="op: no implementation among mosaic, xla supports this call") as failure:
        dispatch.run(CALL, None)
    assert [str(reason) for reason in failure.value.exceptions] == ["reason two", "reason one"]
    assert all(isinstance(reason, NotImplementedError) for reason in failure.value.exceptions)


def test_other_errors_are_raised(implement: Callable[..., None]) -> None:
    def broken(call: Any) -> Any:
        raise ValueError("you are wrong")

    implement(mosaic=broken, xla=must_not_load)
    with pytest.raises(ValueError, match="you are wrong"):
        dispatch.run(CALL, None)


def test_import_error_is_not_implemented(implement: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    implement(triton=must_not_load, xla=works("xla"))
    monkeypatch.delitem(sys.modules, "pallas_attn.ops.op.fake_triton")
    assert dispatch.run(CALL, None) == "xla"
    with pytest.raises(NotImplementedError, match="op's 'triton' implementation cannot be imported: .*fake_triton"):
        dispatch.run(CALL, "triton")


# --- broken implementations


@pytest.fixture
def of_a_card(implement: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that registers "mosaic" and "xla" implementations, and makes an H200 the current device."""

    def register(**functions: Callable[..., Any]) -> None:
        implement(**functions)
        modules = {("mosaic", (9, 0)): "fake_mosaic", ("xla", None): "fake_xla"}
        monkeypatch.setitem(dispatch.MODULES, "op", modules)
        card = device.Device(platform="gpu", name="NVIDIA H200", capability=(9, 0))
        monkeypatch.setattr(device, "current", lambda: card)
        monkeypatch.setenv("PALLAS_ATTN_KERNEL_CACHE", "0")

    dispatch._warn_once.cache_clear()
    return register


def breaks(error: Exception) -> Callable[..., Any]:
    def implementation(call: Any) -> Any:
        raise error

    return implementation


BREAKS = [
    AttributeError("module 'plgpu' has no attribute 'kernel'"),
    TypeError("unexpected keyword"),
    KeyError("layout"),
]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
def test_broken_backend_is_skipped_with_a_warning(of_a_card: Callable[..., None], error: Exception) -> None:
    of_a_card(mosaic=breaks(error), xla=works("xla"))
    reason = f"op's 'mosaic' implementation breaks: {type(error).__name__}: .*; 'xla' runs in its place"
    with pytest.warns(RuntimeWarning, match=reason):
        assert dispatch.run(CALL, None) == "xla"
    assert dispatch.run(CALL, None) == "xla"  # the second call gives no warning, which would be an error
    with pytest.raises(dispatch.BrokenImplementationError, match=reason.partition(";")[0]) as failure:
        dispatch.run(CALL, "mosaic")
    assert failure.value.__cause__ is error


def test_backend_with_lowering_error_is_skipped_with_a_warning(of_a_card: Callable[..., None]) -> None:
    of_a_card(mosaic=breaks(kernel_cache.LoweringError("RuntimeError: no lowering rule")), xla=works("xla"))
    with pytest.warns(RuntimeWarning, match="LoweringError: RuntimeError: no lowering rule; 'xla' runs in its place"):
        assert dispatch.run(CALL, ("mosaic", "xla")) == "xla"


@pytest.mark.parametrize("error", [*BREAKS, ModuleNotFoundError("No module named 'plgpu'"), ImportError("no name")])
def test_backend_with_import_error_is_skipped_with_a_warning(
    of_a_card: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    of_a_card(mosaic=must_not_load, xla=works("xla"))
    imported = importlib.import_module

    def import_module(name: str) -> Any:
        if name.endswith("fake_mosaic"):
            raise error
        return imported(name)

    monkeypatch.setattr(dispatch.importlib, "import_module", import_module)
    with pytest.warns(
        RuntimeWarning, match="op's 'mosaic' implementation cannot be imported: .*'xla' runs in its place"
    ):
        assert dispatch.run(CALL, None) == "xla"
    with pytest.raises(dispatch.BrokenImplementationError, match="cannot be imported"):
        dispatch.run(CALL, "mosaic")


@pytest.mark.parametrize("error", [ValueError("you are wrong"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_errors_of_caller_and_memory_are_raised(of_a_card: Callable[..., None], error: Exception) -> None:
    of_a_card(mosaic=breaks(error), xla=must_not_load)
    with pytest.raises(type(error)):
        dispatch.run(CALL, None)


@pytest.mark.parametrize("message", ["pallas_attn: inner's 'mosaic' implementation breaks", "pallas_attn: another"])
def test_own_warning_as_an_error_does_not_break_a_backend(of_a_card: Callable[..., None], message: str) -> None:
    """If warnings are errors, the warning of an inner operation is raised as it is. No other implementation runs."""

    def warns(call: Any) -> Any:
        warnings.warn(message, RuntimeWarning, stacklevel=1)

    of_a_card(mosaic=warns, xla=must_not_load)
    with pytest.raises(RuntimeWarning, match=f"^{message}$"):
        dispatch.run(CALL, None)


def test_warning_of_another_package_as_an_error_breaks_a_backend(of_a_card: Callable[..., None]) -> None:
    of_a_card(mosaic=breaks(RuntimeWarning("divide by zero")), xla=works("xla"))
    with pytest.warns(RuntimeWarning, match="implementation breaks: RuntimeWarning: divide by zero"):
        assert dispatch.run(CALL, None) == "xla"


def test_unsupported_call_gives_no_warning(of_a_card: Callable[..., None]) -> None:
    of_a_card(mosaic=refuses("head width 17"), xla=works("xla"))
    assert dispatch.run(CALL, None) == "xla"


def test_broken_last_candidate_is_among_the_reasons(of_a_card: Callable[..., None]) -> None:
    of_a_card(mosaic=breaks(KeyError("layout")), xla=refuses("no"))
    with pytest.raises(ExceptionGroup, match="no implementation among mosaic, xla") as failure:
        dispatch.run(CALL, None)
    assert [type(reason) for reason in failure.value.exceptions] == [
        dispatch.BrokenImplementationError,
        NotImplementedError,
    ]


# --- calls of paged_decode and mla_prefill


@pytest.fixture
def arrays() -> dict[str, Any]:
    inputs = Inputs.draw(PagedCase((9, 1), num_pages=24), harness.fresh_rng())
    return {name: jax.tree.map(jnp.asarray, value) for name, value in inputs.decode().items() if value is not None}


def ran(arrays: dict[str, Any], **kwargs: Any) -> list[str]:
    """Trace a call of `paged_decode`. Return the names of the implementations that supported the call."""
    names, find = [], dispatch.find

    def recording(op: str, name: str, *, named: bool) -> Any:
        found = find(op, name, named=named)

        def implementation(call: Any) -> Any:
            result = found(call)
            names.append(name)
            return result

        return implementation

    with mock.patch.object(dispatch, "find", recording):
        jax.eval_shape(lambda: paged_decode(**arrays, **kwargs))
    return names


def test_explain_agrees_with_the_call(arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in (None, "xla", "reference", ("mosaic", "reference", "xla")):
        explanation = explain("paged_decode", **arrays, implementation=chosen)
        assert ran(arrays, implementation=chosen) == [explanation.chosen]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert ran(arrays) == [explain("paged_decode", **arrays).chosen] == ["reference"]
    assert ran(arrays, implementation="xla") == ["xla"]


@slow_cases("reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_numpy_arrays(arrays: dict[str, Any], implementation: str, unchecked_shapes: None) -> None:
    want = paged_decode(**arrays, implementation=implementation)
    got = paged_decode(**jax.tree.map(np.asarray, arrays), implementation=implementation)
    harness.assert_same_bits(got, want)


def test_new_implementation_goes_first_and_may_be_unsupported(
    arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch.MODULES, "paged_decode", {("triton", None): "new", ("xla", None): "xla"})
    new = SimpleNamespace(paged_decode=refuses("needs sm80"))
    monkeypatch.setitem(sys.modules, "pallas_attn.ops.paged_decode.new", new)
    assert ran(arrays) == ["xla"]
    explanation = explain("paged_decode", **arrays)
    assert (explanation.chosen, dict(explanation.refused)) == ("xla", {"triton": "needs sm80"})
    assert str(explanation) == "paged_decode: xla\n  not triton: needs sm80"
    with pytest.raises(NotImplementedError, match="needs sm80"):
        paged_decode(**arrays, implementation="triton")
    new.paged_decode = importlib.import_module("pallas_attn.ops.paged_decode.reference").paged_decode
    assert explain("paged_decode", **arrays).chosen == "triton"


def test_environment_variable_does_not_override_names_inside_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable names `reference` as default implementation. A Mosaic decode kernel still makes its plan
    with Mosaic or XLA, because `plan_decode` has no `reference` implementation.
    """
    pages, ints = jnp.zeros((4, 1, 16, 64), jnp.bfloat16), jnp.ones((1, 4), jnp.int32)
    call = functools.partial(paged_decode, implementation="mosaic")
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    with plgpu.force_gpu_interpret_mode():
        q = jnp.zeros((1, 1, 4, 64), jnp.bfloat16)
        assert jax.eval_shape(call, q, PagedKV(pages, pages), ints, ints[:, 0]).shape == q.shape


@pytest.mark.parametrize(("implementation", "environment"), [("reference", "mosaic"), ("xla", "triton")])
def test_environment_variable_does_not_override_names_inside_a_composition(
    implementation: str, environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mla_prefill` calls other operations. It passes `implementation` to them, so the environment variable has no
    effect on them.
    """
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, environment)
    ints, latents = jnp.zeros((1,), jnp.int32), jnp.ones((4, 8))
    arrays = jnp.ones((4, 1, 2)), jnp.ones((4, 1, 2)), latents, PagedLatent(latents[None]), jnp.ones((1, 2, 6))
    call = functools.partial(mla_prefill, *arrays, jnp.ones((1, 3, 6)), ints[None], jnp.zeros((2,), jnp.int32), ints)
    out = jax.eval_shape(lambda: call(sm_scale=1.0, implementation=implementation))
    assert out.shape == (4, 1, 3)
    with pytest.raises(NotImplementedError):
        jax.eval_shape(lambda: call(sm_scale=1.0))


def test_explain_when_nothing_supports_a_call(arrays: dict[str, Any]) -> None:
    explanation = explain("paged_decode", **arrays, implementation=("mosaic", "triton"))
    assert explanation.chosen is None
    assert list(explanation.refused) == ["mosaic", "triton"]
    assert str(explanation).startswith("paged_decode: no implementation supports this call\n  not mosaic: ")


def test_explain_accepts_shapes_and_runs_nothing(arrays: dict[str, Any]) -> None:
    shapes = jax.eval_shape(lambda: arrays)
    assert explain("paged_decode", **shapes, window=3, out_dtype=jnp.float32).chosen == "xla"


@pytest.mark.parametrize(
    ("op", "capability", "cache", "refused"),
    [
        ("paged_decode", (9, 0), {}, None),
        ("paged_prefill", (9, 0), {}, None),
        ("paged_prefill", (9, 0), {"cache_dtype": "int8", "scales": "head"}, None),
        (
            "paged_prefill",
            (9, 0),
            {"cache_dtype": "int8", "scales": "channel"},
            "takes scales per head, token or token group",
        ),
        ("paged_decode", (10, 0), {}, "takes heads of width 64, 128 or 256, got 512: no kernel on Blackwell"),
        ("paged_prefill", (10, 0), {}, "takes heads of width 64, 128 or 256, got 512: no kernel on Blackwell"),
    ],
)
def test_wide_heads_have_the_kernels_of_the_support_table(
    op: str,
    capability: Any,
    cache: dict[str, Any],
    refused: str | None,
    monkeypatch: pytest.MonkeyPatch,
    compiled_triton: None,
) -> None:
    """Heads of 512 columns have Mosaic kernels on Hopper. Other calls use Triton, and say why."""
    card = device.Device("gpu", "a card", capability, 132, 227 * 1024, 228 * 1024)
    monkeypatch.setattr(device, "current", lambda: card)
    monkeypatch.setattr(device, "triton_card", lambda **_: card)
    monkeypatch.setattr(launch, "compiled", lambda *_: launch.CompiledKernel("kernel", "", 0))
    monkeypatch.setattr(launch, "encoded_call", lambda *_: b"")
    case = PagedCase((20, 1), head_dim=512, q_heads=16, page_size=16, dtype="bfloat16", tokens=2, **cache)
    inputs = Inputs.draw(case, harness.fresh_rng())
    arrays = inputs.decode() if op == "paged_decode" else inputs.prefill()
    shapes = jax.eval_shape(lambda: {name: array for name, array in arrays.items() if array is not None})
    explanation = explain(op, **shapes)
    assert explanation.chosen == ("triton" if refused else "mosaic")
    assert explanation.refused.get("mosaic", "").startswith(refused or "")


def test_explain_raises_like_the_call(arrays: dict[str, Any], unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="op: expected one of paged_decode, .*, got 'flash'"):
        explain("flash")
    with pytest.raises(ValueError, match="kv_lens: expected"):
        explain("paged_decode", **arrays | {"kv_lens": jnp.zeros((3,), jnp.int32)})


# --- tuning


def test_tuned_configuration_precedes_the_heuristic() -> None:
    entries = {"op/xla": [{"key": {"rows": 4}, "config": {"tile": 64}}]}
    with mock.patch("pallas_attn.runtime.tuning._tuned", return_value=entries):
        assert tuning.lookup("op/xla", {"rows": 4}, dict, dict) == {"tile": 64}
        assert tuning.lookup("op/xla", {"rows": 5}, dict, dict) == {}
        assert tuning.lookup("op/mosaic", {"rows": 4}, dict, dict) == {}


# --- independence of implementations

DELETIONS = """
    import importlib, pathlib, sys
    import jax
    import jax.numpy as jnp

    def call(pallas_attn, op, implementation):
        zeros, ints = jnp.zeros, lambda *values: jnp.array(values, jnp.int32)
        kv = pallas_attn.PagedKV(zeros((2, 1, 4, 8)), zeros((2, 1, 4, 8)))
        latent = pallas_attn.PagedLatent(zeros((2, 4, 8)))
        table, q = jnp.ones((1, 1), jnp.int32), zeros((1, 2, 8))
        index, scores = pallas_attn.PagedIndexKeys(latent.pages), q[:, 0]
        indexed = q, q[..., 0], index, table, ints(0, 1), ints(1)
        arguments = {
            "paged_decode": ((q[None], kv, table, ints(1)), {}),
            "paged_prefill": ((q, kv, table, ints(0, 1), ints(1)), {}),
            "mla_decode": ((q[None, ..., :6], q[None, ..., 6:], latent, table, ints(1)), {"sm_scale": 1.0}),
            "ragged_attention": ((q, q, q, ints(0, 1), ints(0, 1)), {}),
            "write_kv": ((kv, q[:, :1], q[:, :1], ints(1)), {}),
            "write_latent": ((latent, q[0, :1], ints(1)), {}),
            "gather_latent": ((latent, q[0, :1], table, ints(0, 1), ints(2)), {"length": 4}),
            "plan_decode": ((q[None], kv, table, ints(1)), {"num_programs": 3}),
            "index_scores": (indexed, {}),
            "index_top_k": (indexed, {"top_k": 2}),
            "select_top_k": ((scores,), {"top_k": 2}),
            "mla_sparse": ((q[..., :6], q[..., 6:], latent, table), {"sm_scale": 1.0}),
            "compress_and_write": (
                (pallas_attn.PagedLatent(zeros((2, 4, 32))), latent, zeros((1, 32)), zeros(8), zeros((1, 2)))
                + (zeros((1, 2)), table, table, ints(0, 1), ints(1)),
                {"ratio": 4},
            ),
            "write_index_keys": ((index, q[:, 0], ints(1)), {}),
            "hyper_connection_weights": ((scores, zeros(1), zeros(3), zeros(8)), {}),
        }
        args, kwargs = arguments[op]
        return jax.eval_shape(lambda: getattr(pallas_attn, op)(*args, **kwargs, implementation=implementation))

    def supports(pallas_attn, folder, implementation):
        try:
            call(pallas_attn, folder, implementation)
        except NotImplementedError:
            return False
        return True

    def fresh_import():
        for name in [name for name in sys.modules if name.startswith("pallas_attn") and name != "pallas_attn.types"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import pallas_attn
        assert pathlib.Path(pallas_attn.__file__).is_relative_to(pathlib.Path.cwd()), pallas_attn.__file__
        return pallas_attn

    def name_of(file):
        return file.stem.split("_")[0]

    fresh_import()
    from pallas_attn.runtime import dispatch
    names = dispatch.NAMES
    files = [file for file in sorted(pathlib.Path("pallas_attn/ops").glob("*/*.py")) if name_of(file) in names]
    whole = fresh_import()
    supported = {file for file in files if supports(whole, file.parent.name, name_of(file))}
    for deleted in files:
        folder = deleted.parent.name
        others = {name_of(file) for file in files if file.parent == deleted.parent} - {name_of(deleted)}
        before = {name_of(file) for file in supported if file.parent == deleted.parent} - {name_of(deleted)}
        source = deleted.read_text()
        deleted.unlink()
        pallas_attn = fresh_import()
        assert {name for name in others if supports(pallas_attn, folder, name)} == before, (deleted, before)
        assert not supports(pallas_attn, folder, name_of(deleted)), deleted
        assert supports(pallas_attn, folder, [name_of(deleted), *before]) == bool(before), deleted
        deleted.write_text(source)
        print(deleted)
"""


@pytest.mark.slow  # `make test` checks imports: tests/test_imports.py
def test_implementations_work_without_each_other(tmp_path: Path) -> None:
    package = REPOSITORY / "pallas_attn"
    shutil.copytree(package, tmp_path / "pallas_attn", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {k: v for k, v in os.environ.items() if k != dispatch.ENVIRONMENT_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DELETIONS)],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    portable = {str(f.relative_to(REPOSITORY)) for f in package.glob("ops/*/*.py") if f.stem in ("reference", "xla")}
    assert portable <= set(result.stdout.splitlines())
