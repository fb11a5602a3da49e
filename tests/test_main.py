"""The command `pallas-attn` and its subcommand `info`, which prints the implementation of each operation."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn
from pallas_attn import __main__ as command
from pallas_attn import info
from pallas_attn.runtime import device, dispatch
from pallas_attn.runtime.explain import CANDIDATES_OF


@pytest.fixture(autouse=True)
def _called_as_pallas_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/pallas-attn"])


def run(*argv: str) -> int:
    """Return the exit status of the command with these arguments."""
    try:
        return command.main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def test_module_without_arguments_prints_the_report() -> None:
    result = subprocess.run([sys.executable, "-m", "pallas_attn"], cwd=Path(__file__).parents[1], capture_output=True)
    assert result.returncode == 0
    first, *_ = result.stdout.decode().splitlines()
    assert first.split() == ["pallas_attn", pallas_attn.__version__]
    assert f"jax {jax.__version__}" in result.stdout.decode()


@pytest.mark.slow
def test_report_ends_without_error_if_its_reader_ends() -> None:
    line = [sys.executable, "-m", "pallas_attn"]
    with subprocess.Popen(
        line, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait() == 0
    assert "BrokenPipeError" not in errors


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: pallas-attn [COMMAND")
    for name in command.COMMANDS:
        assert f"\n  {name} " in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert run("--version") == 0
    assert capsys.readouterr().out == f"pallas_attn {pallas_attn.__version__}\n"


@pytest.mark.parametrize("name", command.COMMANDS)
def test_subcommand_names_the_command_that_was_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: pallas-attn {name} ")
    assert "run_decode" not in printed
    assert "calibrate.py" not in printed
    assert run(name, "--no-such-option") == 2
    assert f"pallas-attn {name}: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("no-such-command", "argument COMMAND: invalid choice: 'no-such-command'"),
    ],
)
def test_wrong_first_argument(argument: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argument) == 2
    assert f"pallas-attn: error: {reason}" in capsys.readouterr().err.splitlines()[-1]


def test_arguments_of_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/pallas_attn/__main__.py", "info", "--help"])
    with pytest.raises(SystemExit):
        command.main()
    assert capsys.readouterr().out.startswith("usage: python -m pallas_attn info ")


# --- the report


def chosen(*, lower: bool = False) -> dict[str, str]:
    """Return the implementation of each operation in the table that the report prints."""
    _, table, *_ = "\n".join(info.lines(lower=lower)).split("\n\n")
    return dict(line.split()[:2] for line in table.splitlines()[1:])


def test_report_has_every_operation() -> None:
    assert set(info.typical_calls()) == set(CANDIDATES_OF)
    with jax.default_device("cpu"):
        assert chosen() == dict.fromkeys(CANDIDATES_OF, "xla")


@pytest.mark.parametrize("lower", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shapes", "lower"])
@pytest.mark.parametrize("architecture", [(9, 0), (10, 0)], ids=str)
def test_kernels_support_the_typical_calls(
    architecture: device.Architecture, lower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "{}.{}".format(*architecture))
    with jax.default_device("cpu"), plgpu.force_gpu_interpret_mode():
        has_kernel = {op: ("mosaic", architecture) in modules for op, modules in dispatch.MODULES.items()}
        expected = {op: "mosaic" if has_kernel[of] else "xla" for op, of in CANDIDATES_OF.items()}
        assert chosen(lower=lower) == expected
        words = " ".join(info.lines()).split()  # the line may be wrapped between these words
        assert "Mosaic kernels interpreted" in " ".join(words)


def test_report_traces_no_kernel_body_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    original = plgpu.kernel

    def kernel(body: Any, **options: Any) -> Any:
        def counted(*refs: Any) -> None:
            traced.append(options["kernel_name"])
            body(*refs)

        return original(counted, **options)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(info, "CANDIDATES_OF", {"write_latent": "write_latent"})
    with jax.default_device("cpu"), plgpu.force_gpu_interpret_mode():
        assert chosen() == {"write_latent": "mosaic"}
        assert not traced
        assert chosen(lower=True) == {"write_latent": "mosaic"}
    assert traced == ["write_latent"]
    assert plgpu.kernel is kernel  # the replacement ends with the context


def test_reasons_against_better_implementations(monkeypatch: pytest.MonkeyPatch, compiled_triton: None) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "mosaic, triton, reference")
    with jax.default_device("cpu"):
        printed = list(info.lines())
    assert f"{dispatch.ENVIRONMENT_VARIABLE}  mosaic, triton, reference" in printed
    assert any(re.fullmatch(r"paged_decode +reference  mosaic \(1\), triton \(2\)", line) for line in printed)
    *_, reasons = "\n".join(printed).split("\n\n")
    first, second, *_ = re.split(r"\n(?=\()", reasons)
    assert re.fullmatch(r"\(1\) +needs a GPU of compute capability .*,\n +this is cpu", first)
    assert re.fullmatch(r"\(2\) +needs a GPU of compute capability 8.0 or later, this is cpu", second)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
    assert chosen()["paged_decode"] == "none"


def test_report_has_80_columns_and_each_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232448, 233472)
    words = info.device_words(card, 150 * 2**30)
    monkeypatch.setattr(info, "device_words", lambda *_: words)
    with jax.default_device("cpu"):
        printed = list(info.lines())
    assert len(words) > 80
    assert max(map(len, printed)) <= 80
    _, _, reasons = "\n".join(printed).split("\n\n")
    found = [" ".join(reason.split()[1:]) for reason in re.split(r"\n(?=\()", reasons)]
    assert len(found) == len(set(found)) >= 2


def test_long_words_are_not_broken() -> None:
    path = "/" + "folder/" * 12
    assert info.aligned([("a", path), ("bcd", ""), ("e", f"x {path}")]) == [
        f"a    {path}",
        "bcd",
        "e    x",
        f"     {path}",
    ]


def test_device_description() -> None:
    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232448, 233472)
    assert info.device_words(card, 150 * 2**30) == (
        "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 227 KiB of shared memory a block, "
        "228 KiB a multiprocessor, 150.0 GiB of memory"
    )
    assert info.device_words(device.Device("cpu", "cpu"), None) == "cpu"
