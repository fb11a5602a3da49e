"""Tests of scripts/calibrate.py, which writes a file with the scales of a quantised cache. run_decode.py reads the
file, and wrong input is an error.
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_attn.models.cli import calibrate
from pallas_attn.models.cli import model as cli_model
from pallas_attn.models.cli.decode import command as run_decode
from tests.scripts.command_lines import GOLDEN, SIZES

QWEN3 = GOLDEN.with_name("qwen3")
IDS = ["--prompt-ids", str(QWEN3 / "prompts.json")]


@pytest.mark.slow  # `make test` tests the scales in tests/models/test_calibration.py
def test_run_decode_reads_the_scales(tmp_path, capsys):
    scales, out = tmp_path / "scales.safetensors", tmp_path / "out.json"
    assert calibrate.main(["--model", str(QWEN3), *IDS, "--out", str(scales)]) == 0
    printed = capsys.readouterr().out
    assert "int8 scales of qwen3" in printed
    assert "in 4 prompts; written to" in printed
    cache = ["--kv-dtype", "int8", "--kv-scales", str(scales), "--max-tokens", "6", "--verify"]
    assert run_decode.main(["--model", str(QWEN3), *IDS, *SIZES, *cache, "--json", str(out)]) == 0
    requests = json.loads(out.read_text())["requests"]
    with np.load(QWEN3 / "golden.npz") as golden:
        assert [request["output_ids"][0] for request in requests] == [golden[f"tokens_{i}"][0] for i in range(4)]


def test_random_tokens_are_the_default_prompts(tmp_path, capsys):
    out = tmp_path / "scales.safetensors"
    sizes = ["--tokens", "40", "--scales", "head", "--kv-dtype", "fp8", "--dtype", "bfloat16"]
    assert calibrate.main(["--random", "qwen3-tiny", *sizes, "--out", str(out)]) == 0
    assert {name: scale.shape for name, scale in load_file(out).items()} == {"k_scale": (3, 2), "v_scale": (3, 2)}
    assert "40 tokens in 1 prompts" in capsys.readouterr().out


@pytest.mark.slow
def test_windows_change_the_scales_of_later_layers(tmp_path):
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps([{"window": [2, 9]}, None, None]))
    found = []
    for args in ([], ["--head-windows", str(windows)]):
        out = tmp_path / "scales.safetensors"
        assert calibrate.main(["--random", "qwen3-tiny", "--tokens", "40", *args, "--out", str(out)]) == 0
        found.append(load_file(out)["v_scale"])
    everything, windowed = found
    np.testing.assert_array_equal(windowed[0], everything[0])
    assert np.mean(windowed[1] != everything[1]) > 0.5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "one of the arguments --model --random is required"),
        (["--random", "v3-tiny"], "a deepseek_v3 caches latents, which have no static scales"),
        (["--model", GOLDEN], "a deepseek_v3 caches latents, which have no static scales"),
        (["--model", "no such directory"], "no such directory"),
        (["--random", "qwen3-tiny", "--prompt", "What?"], "--prompt needs a --model"),
        (["--model", QWEN3, "--prompt", "What?"], "has no tokenizer.json"),
        (["--model", QWEN3, "--prompt-ids", "no such file"], "cannot read no such file"),
        (["--random", "qwen3-tiny", "--tokens", "0"], "--tokens: expected at least 1, at most 100000000, got 0"),
        (["--random", "qwen3-tiny", "--tokens", str(10**30)], "--tokens: expected an integer of less than 2147483648"),
        (["--random", "qwen3-tiny", "--percentile", "0"], "percentile: expected more than 0"),
        (["--random", "qwen3-tiny", "--kv-dtype", "bfloat16"], "invalid choice: 'bfloat16'"),
        (["--random", "qwen3-tiny", "--head-windows", "no such file"], "no such file"),
        (["--random", "qwen3-tiny", "--out", "."], "--out: cannot write .: it is a directory"),
        (["--random", "qwen3-tiny", "--out", "x" * 300], f"--out: cannot write {'x' * 300}: File name too long"),
    ],
)
def test_wrong_input_is_a_one_line_error(args, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibrate, "load", lambda *_: pytest.fail("weights were read or made"))
    out = tmp_path / "scales.safetensors"
    assert calibrate.main(["--out", str(out), *map(str, args)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("calibrate: error: ")
    assert message in line
    assert (captured.out, out.exists()) == ("", False)


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [(cli_model, "random_model", "--random: loading the weights: "), (calibrate, "calibrate", "")],
)
@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("Out of memory"), MemoryError("Out of memory")])
def test_out_of_memory_is_a_one_line_error(module, name, place, error, monkeypatch, tmp_path, capsys):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(module, name, full)
    assert calibrate.main(["--random", "qwen3-tiny", "--out", str(tmp_path / "scales.safetensors")]) == 2
    assert capsys.readouterr().err == f"calibrate: error: {place}Out of memory\n"


def test_write_failure_after_calibration(capsys):
    assert calibrate.main(["--random", "qwen3-tiny", "--tokens", "40", "--out", "/dev/full"]) == 3
    assert capsys.readouterr().err == "calibrate: error: --out: cannot write /dev/full: No space left on device\n"
