"""`python -m pallas_attn` prints the device and the implementation that each operation would choose."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn
from pallas_attn import __main__ as report
from pallas_attn.runtime import device, dispatch
from pallas_attn.runtime.explain import CANDIDATES_OF


def test_command() -> None:
    command = [sys.executable, "-m", "pallas_attn"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    first, *_ = result.stdout.splitlines()
    assert first.split() == ["pallas_attn", pallas_attn.__version__]
    assert f"jax {jax.__version__}" in result.stdout


def chosen() -> dict[str, str]:
    """Return the implementation of each operation in the table that the report prints."""
    printed = list(report.lines())
    table = printed[printed.index("") + 2 :]
    return dict(line.split()[:2] for line in table if not line.startswith(" "))


def test_report_has_every_operation() -> None:
    assert set(report.typical_calls()) == set(CANDIDATES_OF)
    with jax.default_device("cpu"):
        assert chosen() == dict.fromkeys(CANDIDATES_OF, "xla")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [(9, 0), (10, 0)], ids=str)
def test_kernels_support_the_typical_calls(architecture: device.Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "{}.{}".format(*architecture))
    with jax.default_device("cpu"), plgpu.force_gpu_interpret_mode():
        has_kernel = {op: ("mosaic", architecture) in modules for op, modules in dispatch.MODULES.items()}
        assert chosen() == {op: "mosaic" if has_kernel[of] else "xla" for op, of in CANDIDATES_OF.items()}
        assert any("Mosaic kernels interpreted" in line for line in report.lines())


def test_reasons_against_better_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(device.TRITON_INTERPRET_VARIABLE, raising=False)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "mosaic, triton, reference")
    with jax.default_device("cpu"):
        printed = list(report.lines())
    assert f"{dispatch.ENVIRONMENT_VARIABLE}  mosaic, triton, reference" in printed
    at = next(i for i, line in enumerate(printed) if line.startswith("paged_decode"))
    assert re.fullmatch(
        r"paged_decode +reference +mosaic: needs a GPU of compute capability .*, this is cpu", printed[at]
    )
    assert re.fullmatch(r" +triton: needs a GPU of compute capability 8\.0 or later, this is cpu", printed[at + 1])
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
    assert chosen()["paged_decode"] == "none"


def test_device_description() -> None:
    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232448, 233472)
    assert report.device_words(card, 150 * 2**30) == (
        "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 227 KiB of shared memory a block, "
        "228 KiB a multiprocessor, 150.0 GiB of memory"
    )
    assert report.device_words(device.Device("cpu", "cpu"), None) == "cpu"
