"""Tests that jax-triton launches the same kernels as `launch` alone. Programs are only lowered."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src.interpreters import partial_eval

from pallas_attn.runtime import device
from pallas_attn.runtime.dispatch import BrokenImplementationError
from pallas_attn.triton import launch
from tests.aot.environment import ROOT
from tests.aot.triton_cases import CARDS, TRITON_CASES

CASES = {
    "write-latent-fp8-512-64": "sm80",  # pages and scales of bytes
    "write-kv-fp8-channel-head-slots": "sm89",
    "compress-128-4-fp8": "sm90",  # absent operands
    "paged-decode-tree": "sm90",
    "index-top-k-bf16-16": "sm100",  # bin counts that are updated
}
"""Compile-gate cases, and the GPU that each one is lowered for."""


@pytest.fixture(scope="module")
def jax_triton_process() -> dict[str, str]:
    """Environment variables of a process with jax-triton in which kernels are not interpreted."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("jax-triton needs jax-cuda13-plugin, which is not installed")
    if metadata.version("triton").startswith("3.6."):
        pytest.skip("jax-triton 0.4 needs triton 3.7")
    return {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "XLA_FLAGS")}


@pytest.fixture(scope="module")
def launched(jax_triton_process: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Launches of each case, without and with jax-triton."""
    return json.loads(printed(jax_triton_process, "-m", "tests.triton.test_jax_triton").splitlines()[-1])


def printed(variables: dict[str, str], *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_those_of_launch(launched: dict[str, dict[str, Any]], case: str) -> None:
    own, through = launched[case]["0"], launched[case]["1"]
    assert own["launches"]
    assert through == own


def test_example_of_the_page(jax_triton_process: dict[str, str]) -> None:
    blocks = (ROOT / "docs" / "toolchain.md").read_text().split("```\n")
    (example,) = (block for block in blocks if "import jax_triton" in block)
    mended = f"from tests.triton import test_jax_triton\ntest_jax_triton.mend_jax_triton()\n{example}"
    assert printed(jax_triton_process, "-c", mended) == "True\n"


def test_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.JAX_TRITON_VARIABLE, "yes")
    with pytest.raises(ValueError, match="PALLAS_ATTN_JAX_TRITON: expected 0 or 1, got 'yes'"):
        device.calls_jax_triton()


def test_missing_jax_triton_is_unsupported(monkeypatch: pytest.MonkeyPatch, compiled_triton: None) -> None:
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setenv(device.JAX_TRITON_VARIABLE, "1")
    monkeypatch.setattr(device, "triton_card", lambda **_: CARDS["sm90"])
    monkeypatch.setattr(launch, "call_encoder", lambda: None)
    with pytest.raises(NotImplementedError, match="PALLAS_ATTN_JAX_TRITON=1 needs jax-triton"):
        trace_case()


def two_arguments(used_outs: Any, eqn: Any) -> Any: ...
def three_arguments(used_outs: Any, live_ins: Any, eqn: Any) -> Any: ...


@pytest.mark.parametrize(
    ("version", "rule", "error"),
    [
        ((0, 12, 0), two_arguments, NotImplementedError("jax-triton 0.4.1 does not support jax")),
        ((0, 12, 0), three_arguments, BrokenImplementationError("TypeError: another error")),
        ((0, 11, 2), two_arguments, BrokenImplementationError("TypeError: another error")),
    ],
)
def test_jax_that_jax_triton_does_not_support(
    monkeypatch: pytest.MonkeyPatch, compiled_triton: None, version: tuple[int, ...], rule: Any, error: Exception
) -> None:
    def triton_call(**_: Any) -> Any:
        raise TypeError("another error")

    library = types.SimpleNamespace(triton_kernel_call_p=object())
    package = types.SimpleNamespace(triton_lib=library, triton_call=triton_call, __version__="0.4.1")
    monkeypatch.setitem(sys.modules, "jax_triton", package)
    monkeypatch.setitem(partial_eval.dce_rules, library.triton_kernel_call_p, rule)
    monkeypatch.setenv(device.JAX_TRITON_VARIABLE, "1")
    monkeypatch.setattr(device, "triton_card", lambda **_: CARDS["sm90"])
    monkeypatch.setattr(launch, "call_encoder", lambda: None)
    monkeypatch.setattr(jax, "__version_info__", version)
    with pytest.raises(type(error), match=str(error)):
        trace_case()


def trace_case() -> None:
    case = TRITON_CASES["plan-decode-1"]
    jax.eval_shape(lambda arguments: case.function(**arguments), dict(case.arguments))


# --- code of the process that lowers


def lowered(case: str) -> dict[str, Any]:
    """Lower a case. Return its launches, and the number of arrays that its custom calls update in place."""
    from jaxlib import gpu_triton

    kernels: dict[int, Any] = {}
    launches, alive = [], []
    make_kernel, make_call = gpu_triton.TritonKernel, gpu_triton.TritonKernelCall

    def kernel(name: str, warps: int, ctas: int, shared: int, ptx: str, _: str, capability: int) -> Any:
        made = make_kernel(name, warps, ctas, shared, ptx, "", capability)
        alive.append(made)
        kernels[id(made)] = (name, warps, ctas, shared, ptx, capability)
        return made

    def call(of: Any, x: int, y: int, z: int, parameters: list[Any]) -> Any:
        launches.append([*kernels[id(of)], x, y, z, len(parameters)])
        return make_call(of, x, y, z, parameters)

    function, arguments = TRITON_CASES[case].function, dict(TRITON_CASES[case].arguments)
    with (
        mock.patch.object(device, "triton_card", return_value=CARDS[CASES[case]]),
        mock.patch.object(gpu_triton, "TritonKernel", kernel),
        mock.patch.object(gpu_triton, "TritonKernelCall", call),
    ):
        traced = jax.jit(lambda arguments: function(**arguments)).trace(arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {"launches": sorted(launches), "updated": text.count("output_operand_alias")}


def mend_jax_triton() -> None:
    """Replace jax-triton's rule for dead-code elimination if it lacks the argument that jax 0.12 added."""
    if jax.__version_info__ < (0, 12):
        return
    from jax_triton import triton_lib  # pyrefly: ignore[missing-import]

    rules, primitive = partial_eval.dce_rules, triton_lib.triton_kernel_call_p
    if len(inspect.signature(rules[primitive]).parameters) == 2:
        rules[primitive] = lambda _, *rest: ([True] * len(rest[-1].invars), rest[-1])


def main() -> None:
    mend_jax_triton()
    found: dict[str, dict[str, Any]] = {case: {} for case in CASES}
    for case in CASES:
        for switch in ("0", "1"):
            with mock.patch.dict(os.environ, {device.JAX_TRITON_VARIABLE: switch}):
                found[case][switch] = lowered(case)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
