"""Which implementation runs a call, in which order they are tried, and what is said where none can."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import dispatch, explain, paged_decode, tuning
from pallas_attn.ops import paged_decode as paged_decode_module
from tests.ops import harness
from tests.ops.paged_case import Inputs, PagedCase

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_default_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)


def works(name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda *args, **kwargs: (name, args, kwargs)


def refuses(reason: str) -> Callable[[], Callable[..., Any]]:
    def implementation(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(reason)

    return lambda: implementation


def must_not_load() -> Any:
    raise AssertionError("loaded an implementation that was not to be tried")


ALL = {name: works(name) for name in ("reference", "xla", "triton", "mosaic")}


# --- candidates


def test_best_first_and_never_the_reference() -> None:
    assert dispatch.candidates("op", ALL, None) == ["mosaic", "triton", "xla"]
    assert dispatch.candidates("op", {"reference": ALL["reference"], "xla": ALL["xla"]}, None) == ["xla"]


@pytest.mark.parametrize(
    ("named", "names"), [("reference", ["reference"]), ("mosaic", ["mosaic"]), (("xla", "mosaic"), ["xla", "mosaic"])]
)
def test_names_are_taken_as_given(named: Any, names: list[str]) -> None:
    assert dispatch.candidates("op", {"xla": ALL["xla"]}, named) == names


@pytest.mark.parametrize("named", ["cuda", "", "XLA", [], ("xla", "cuda"), "xla,reference"])
def test_unknown_names_are_an_error(named: Any) -> None:
    with pytest.raises(ValueError, match="implementation: expected None or names among mosaic, triton, xla, reference"):
        dispatch.candidates("op", ALL, named)


def test_environment_stands_in_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference, xla")
    assert dispatch.candidates("op", ALL, None) == ["reference", "xla"]
    assert dispatch.candidates("op", ALL, "mosaic") == ["mosaic"]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "")
    assert dispatch.candidates("op", ALL, None) == ["mosaic", "triton", "xla"]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "fast")
    with pytest.raises(ValueError, match=f"{dispatch.ENVIRONMENT_VARIABLE}: expected .*, got .'fast'."):
        dispatch.candidates("op", ALL, None)


# --- running


def test_the_first_that_supports_the_call_runs() -> None:
    loaders = {"reference": must_not_load, "xla": works("xla"), "mosaic": refuses("no tensor cores")}
    assert dispatch.run("op", loaders, None, 1, two=2) == ("xla", (1,), {"two": 2})
    assert dispatch.run("op", loaders | {"mosaic": works("mosaic"), "xla": must_not_load}, None)[0] == "mosaic"
    assert dispatch.run("op", loaders, ("triton", "mosaic", "xla", "reference"))[0] == "xla"


def test_a_named_implementation_never_falls_back() -> None:
    loaders = {"xla": must_not_load, "mosaic": refuses("head width 17")}
    with pytest.raises(NotImplementedError, match="head width 17"):
        dispatch.run("op", loaders, "mosaic")
    with pytest.raises(NotImplementedError, match="op has no 'triton' implementation; it has xla, mosaic"):
        dispatch.run("op", loaders, "triton")


def test_all_reasons_are_given() -> None:
    loaders = {"xla": refuses("reason one"), "mosaic": refuses("reason two"), "reference": must_not_load}
    with pytest.raises(ExceptionGroup, match="op: no implementation among mosaic, xla supports this call") as failure:
        dispatch.run("op", loaders, None)
    assert [str(reason) for reason in failure.value.exceptions] == ["reason two", "reason one"]
    assert all(isinstance(reason, NotImplementedError) for reason in failure.value.exceptions)


def test_errors_are_not_reasons_to_go_on() -> None:
    def broken() -> Any:
        raise ValueError("you are wrong")

    with pytest.raises(ValueError, match="you are wrong"):
        dispatch.run("op", {"mosaic": lambda: lambda: broken(), "xla": must_not_load}, None)


def test_what_cannot_be_imported_is_refused() -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'jax_triton'")

    assert dispatch.run("op", {"triton": load, "xla": works("xla")}, None)[0] == "xla"
    with pytest.raises(NotImplementedError, match="op's 'triton' implementation cannot be imported: .*jax_triton"):
        dispatch.run("op", {"triton": load, "xla": must_not_load}, "triton")


# --- through an operation


@pytest.fixture
def arrays() -> dict[str, Any]:
    inputs = Inputs.draw(PagedCase((9, 1), num_pages=24), harness.fresh_rng())
    return {name: jax.tree.map(jnp.asarray, value) for name, value in inputs.decode().items() if value is not None}


def ran(arrays: dict[str, Any], **kwargs: Any) -> list[str]:
    """The implementations that took a call (which is only traced)."""
    names = []

    def recording(name: str, load: Any) -> Any:
        def loader() -> Any:
            function = load()

            def implementation(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                names.append(name)
                return result

            return implementation

        return loader

    loaders = {name: recording(name, load) for name, load in paged_decode_module.IMPLEMENTATIONS.items()}
    with mock.patch.dict(paged_decode_module.IMPLEMENTATIONS, loaders):
        jax.eval_shape(lambda: paged_decode(**arrays, **kwargs))
    return names


def test_an_operation_runs_what_explain_says(arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in (None, "xla", "reference", ("mosaic", "reference", "xla")):
        explanation = explain("paged_decode", **arrays, implementation=chosen)
        assert ran(arrays, implementation=chosen) == [explanation.chosen]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert ran(arrays) == [explain("paged_decode", **arrays).chosen] == ["reference"]
    assert ran(arrays, implementation="xla") == ["xla"]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_arrays_of_numpy_are_taken(arrays: dict[str, Any], implementation: str, unchecked_shapes: None) -> None:
    want = paged_decode(**arrays, implementation=implementation)
    got = paged_decode(**jax.tree.map(np.asarray, arrays), implementation=implementation)
    harness.assert_same_bits(got, want)


def test_a_new_implementation_goes_first_and_may_refuse(arrays: dict[str, Any]) -> None:
    loaders = paged_decode_module.IMPLEMENTATIONS
    with mock.patch.dict(loaders, {"mosaic": refuses("needs sm90")}):
        assert ran(arrays) == ["xla"]
        explanation = explain("paged_decode", **arrays)
        assert (explanation.chosen, dict(explanation.refused)) == ("xla", {"mosaic": "needs sm90"})
        assert str(explanation) == "paged_decode: xla\n  not mosaic: needs sm90"
        with pytest.raises(NotImplementedError, match="needs sm90"):
            paged_decode(**arrays, implementation="mosaic")
    with mock.patch.dict(loaders, {"mosaic": loaders["reference"]}):
        assert explain("paged_decode", **arrays).chosen == "mosaic"


def test_explain_when_nothing_supports_a_call(arrays: dict[str, Any]) -> None:
    explanation = explain("paged_decode", **arrays, implementation=("mosaic", "triton"))
    assert explanation.chosen is None
    assert list(explanation.refused) == ["mosaic", "triton"]
    assert str(explanation).startswith("paged_decode: no implementation supports this call\n  not mosaic: ")


def test_explain_takes_shapes_and_runs_nothing(arrays: dict[str, Any]) -> None:
    shapes = jax.eval_shape(lambda: arrays)
    assert explain("paged_decode", **shapes, window=3, out_dtype=jnp.float32).chosen == "xla"


def test_explain_refuses_what_the_call_would(arrays: dict[str, Any], unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="op: expected one of paged_decode, .*, got 'flash'"):
        explain("flash")
    with pytest.raises(ValueError, match="kv_lens: expected"):
        explain("paged_decode", **arrays | {"kv_lens": jnp.zeros((3,), jnp.int32)})


# --- what a call is compiled for


def test_capability_of_the_default_device() -> None:
    major, _, minor = getattr(jax.devices()[0], "compute_capability", "").partition(".")
    here = dispatch.Capability(jax.devices()[0].platform, (int(major), int(minor)) if major else None)
    assert dispatch.capability() == here
    seen = []
    with jax.default_device(jax.devices()[0]), jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert dispatch.capability() == here
        jax.jit(lambda x: (seen.append(dispatch.capability()), x)[1])(1.0)
    assert seen == [here]


@pytest.mark.parametrize(("version", "pair"), [("9.0", (9, 0)), ("10.3", (10, 3)), ("8", (8, 0)), ("gfx942", None)])
def test_capability_of_a_gpu(version: str, pair: tuple[int, int] | None) -> None:
    device = SimpleNamespace(platform="cuda", compute_capability=version, device_kind="NVIDIA H200")
    with mock.patch("jax.local_devices", return_value=[device]):
        assert dispatch.capability() == dispatch.Capability("gpu", pair)
        assert tuning.device_name() == "nvidia_h200"


def test_tuned_configurations_go_before_the_heuristic() -> None:
    entries = {"op/xla": [{"key": {"rows": 4}, "config": {"tile": 64}}]}
    with mock.patch("pallas_attn.tuning._tuned", return_value=entries):
        assert tuning.lookup("op/xla", {"rows": 4}, dict, dict) == {"tile": 64}
        assert tuning.lookup("op/xla", {"rows": 5}, dict, dict) == {}
        assert tuning.lookup("op/mosaic", {"rows": 4}, dict, dict) == {}


# --- implementations live alone

DELETIONS = """
    import importlib, pathlib, sys
    import jax
    import jax.numpy as jnp

    def call(pallas_attn, op, implementation):
        zeros, ints = jnp.zeros, lambda *values: jnp.array(values, jnp.int32)
        kv = pallas_attn.PagedKV(zeros((2, 1, 4, 8)), zeros((2, 1, 4, 8)))
        latent = pallas_attn.PagedLatent(zeros((2, 4, 8)))
        table, q = jnp.ones((1, 1), jnp.int32), zeros((1, 2, 8))
        arguments = {
            "paged_decode": ((q[None], kv, table, ints(1)), {}),
            "paged_prefill": ((q, kv, table, ints(0, 1), ints(1)), {}),
            "mla_decode": ((q[None, ..., :6], q[None, ..., 6:], latent, table, ints(1)), {"sm_scale": 1.0}),
            "ragged_attention": ((q, q, q, ints(0, 1), ints(0, 1)), {}),
            "write_kv": ((kv, q[:, :1], q[:, :1], ints(1)), {}),
            "write_latent": ((latent, q[0, :1], ints(1)), {}),
            "gather_latent": ((latent, q[0, :1], table, ints(0, 1), ints(2)), {"length": 4}),
            "plan_decode": ((ints(1),), {"page_size": 4, "num_q_heads": 2, "num_kv_heads": 1, "num_programs": 3}),
        }
        args, kwargs = arguments[op]
        return jax.eval_shape(lambda: getattr(pallas_attn, op)(*args, **kwargs, implementation=implementation))

    OPS = {
        "decode_plan": "plan_decode",
        "kv_write": "write_kv",
        "latent_write": "write_latent",
        "latent_gather": "gather_latent",
    }

    def supports(pallas_attn, folder, implementation):
        try:
            call(pallas_attn, OPS.get(folder, folder), implementation)
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

    names = fresh_import().dispatch.NAMES
    files = [file for file in sorted(pathlib.Path("pallas_attn/ops").glob("*/*.py")) if name_of(file) in names]
    files = [file for file in files if file.parent.name != "common"]
    for deleted in files:
        folder = deleted.parent.name
        others = {name_of(file) for file in files if file.parent == deleted.parent} - {name_of(deleted)}
        before = {name for name in others if supports(fresh_import(), folder, name)}
        source = deleted.read_text()
        deleted.unlink()
        pallas_attn = fresh_import()
        assert {name for name in others if supports(pallas_attn, folder, name)} == before, (deleted, before)
        assert not supports(pallas_attn, folder, name_of(deleted)), deleted
        assert supports(pallas_attn, folder, [name_of(deleted), *before]) == bool(before), deleted
        deleted.write_text(source)
        print(deleted)
"""


def test_deleting_any_implementation_leaves_the_others(tmp_path: Path) -> None:
    package = REPOSITORY / "pallas_attn"
    shutil.copytree(package, tmp_path / "pallas_attn", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {k: v for k, v in os.environ.items() if k != dispatch.ENVIRONMENT_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(DELETIONS)],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    portable = {str(f.relative_to(REPOSITORY)) for f in package.glob("ops/*/*.py") if f.stem in ("reference", "xla")}
    assert portable <= set(result.stdout.splitlines())
