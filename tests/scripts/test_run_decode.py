"""Tests of scripts/run_decode.py: results and messages."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest

from pallas_attn.models.checkpoints.weights import save_random_checkpoint
from pallas_attn.models.cli.decode import command as run_decode
from pallas_attn.models.config import PRESETS
from pallas_attn.models.engine import CachedPages, Engine
from pallas_attn.models.engine.runner import Runner
from tests.kit.slow_cases import slow_cases
from tests.models.test_engine_faults import Fault
from tests.scripts.command_lines import GOLDEN, PROMPTS, ROOT, SIZES, SMALL, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture
def run_json(tmp_path, capsys):
    """Return a function that runs a command line, asserts exit status 0, and returns the JSON result."""

    def run(*args):
        out = tmp_path / "out.json"
        assert run_decode.main([*map(str, args), "--json", str(out)]) == 0, capsys.readouterr().err
        return json.loads(out.read_text())

    return run


def outputs(result):
    return [request["output_ids"] for request in result["requests"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def printed(files):
    """Return (stdout, stderr) of one run that writes all output files."""
    command = ["--model", GOLDEN, "--prompt-ids", GOLDEN / "prompts.json", *SIZES, "--max-tokens", 24, "--verify"]
    command += [
        "--stats",
        "--json",
        files / "out.json",
        "--dump-logits",
        files / "logits.bin",
        "--plot",
        files / "plot",
    ]
    command += ["--profile", files / "trace" / "of" / "run"]
    # The new process has none of the JAX settings of the tests, except their cache of compiled programs and their
    # number of devices, which is part of the cache's keys. Later tests run the programs that this process compiles.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "run_decode.py", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **cache},
        cwd=files,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def result(printed, files):
    return json.loads((files / "out.json").read_text())


def arrays_of(golden):
    with np.load(golden / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def golden():
    return arrays_of(GOLDEN)


def documented_keys(heading):
    """Return the keys that docs/checkpoints.md documents in the table with this heading."""
    table = (ROOT / "docs" / "checkpoints.md").read_text().split(f"| {heading} | |\n")[1].split("\n\n")[0]
    return {key for row in table.splitlines()[1:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


class TestResults:
    """Tests of the results of one run that writes all output files."""

    def test_tokens_are_those_of_transformers(self, result, golden):
        assert outputs(result) == [golden[f"tokens_{i}"].tolist() for i in range(4)]

    def test_computed_logits_are_those_of_transformers(self, result, golden, files):
        with np.load(files / "logits.bin", allow_pickle=False) as dumped:
            assert sorted(dumped) == [f"logits_{i}" for i in range(4)]
            for i, request in enumerate(result["requests"]):
                logits, cached = dumped[f"logits_{i}"], request["cached_tokens"]
                assert logits.dtype == np.float32
                assert np.isnan(logits[:cached]).all()
                np.testing.assert_allclose(logits[cached:], golden[f"logits_{i}"][cached:], atol=1e-4)

    def test_requests_have_exactly_the_documented_keys(self, result):
        documented = documented_keys("of a request") - {"text", "drafted", "accepted"}  # need other options
        assert list(result) == ["requests", "run"]
        for request, prompt in zip(result["requests"], PROMPTS, strict=True):
            assert set(request) == documented
            assert request["prompt_tokens"] == len(prompt)
            assert request["finish_reason"] == "length"
            assert request["ttft_s"] > 0
            assert len(request["itl_s"]) == 23

    def test_the_shared_prefix_was_cached(self, result):
        assert [request["cached_tokens"] for request in result["requests"]] == [0, 0, 0, 32]
        assert 32 / sum(map(len, PROMPTS)) <= result["run"]["prefix_hit_rate"] < 1  # preempted requests count twice

    def test_the_run_has_exactly_the_documented_keys(self, result):
        run = result["run"]
        assert set(run) == documented_keys("of the run") - {
            *(
                "speculate",
                "drafted",
                "accepted",
                "mesh",
                "verified_loss",
                "verified_loss_allowed",
            )  # only with other options
        }
        assert run["verified"] is True
        assert run["num_pages"] == 26
        assert 16 < run["peak_pages"] <= 26
        assert run["preemptions"] >= 1
        assert run["steps"] >= 24 + 5
        assert run["compilations"] == 2  # decode rows only; decode rows and prompts
        assert min(run["prefill_tokens_per_s"], run["decode_tokens_per_s"], run["compile_s"], run["run_s"]) > 0
        assert run["implementation"] == dict.fromkeys(
            ["write_latent", "mla_decode", "gather_latent", "ragged_attention"], "xla"
        )
        assert run["device"] == "cpu"
        assert run["versions"]["jax"] == jax.__version__

    def test_table_has_the_main_statistics(self, printed):
        first, last, *table = printed[1].splitlines()
        assert first == "run_decode: compiling 2 programs ..."
        assert re.fullmatch(r"run_decode: compiled 2 programs in \d+\.\d s", last)
        text = "\n".join(table)
        assert "4 requests on v3" in text
        for word in ("prompt", "cached", "new", "TTFT", "per token", "prefix hits", "preemptions", "compilation"):
            assert word in text
        assert "yes: 96 of 96 tokens equal" in text
        assert max(map(len, table)) <= 80

    def test_each_answer_is_printed_in_full_after_a_heading(self, printed, result):
        answers = printed[0].strip().split("\n\n")
        assert len(answers) == 4
        for i, (answer, request) in enumerate(zip(answers, result["requests"], strict=True)):
            heading, ids = answer.splitlines()
            noun = "prompt token" if len(PROMPTS[i]) == 1 else "prompt tokens"
            assert heading.startswith(f"[{i}] {len(PROMPTS[i])} {noun}: {PROMPTS[i][0]}")
            assert len(heading) <= 80
            assert ids == " ".join(map(str, request["output_ids"]))

    def test_plot_is_a_png(self, printed, files):
        assert (files / "plot").read_bytes().startswith(b"\x89PNG")

    def test_profile_is_a_trace(self, printed, files):
        assert list((files / "trace" / "of" / "run").rglob("*.xplane.pb"))


@pytest.mark.slow  # tests/models/test_engine.py has more tests of both features
def test_tokens_without_chunked_prefill_and_prefix_cache(run_json, write_ids, golden):
    result = run_json(*SMALL, *write_ids([*PROMPTS[:2], PROMPTS[1]]), "--no-chunked-prefill", "--no-prefix-caching")
    assert outputs(result) == [golden[f"tokens_{i}"][:6].tolist() for i in (0, 1, 1)]
    assert result["run"]["prefix_hit_rate"] == 0
    assert [request["cached_tokens"] for request in result["requests"]] == [0, 0, 0]


@pytest.mark.slow
def test_prefix_cache_file_is_reused_by_the_next_run(run_json, write_ids, golden, tmp_path):
    file, ids = tmp_path / "prefixes", write_ids(PROMPTS[:2])
    first = run_json(*SMALL, *ids, "--prefix-cache", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # the file has tokens and salts
    second = run_json(*SMALL, *ids, "--prefix-cache", file)
    assert outputs(first) == outputs(second) == [golden[f"tokens_{i}"][:6].tolist() for i in (0, 1)]
    assert second["run"]["prefix_hit_rate"] > first["run"]["prefix_hit_rate"]


@pytest.mark.slow
def test_prefix_cache_file_of_another_model_is_an_error(usage_error, write_ids, tmp_path):
    file, run = tmp_path / "prefixes", [*SMALL, *write_ids(PROMPTS[:2]), "--prefix-cache", tmp_path / "prefixes"]
    file.write_bytes(CachedPages({"page_size": 3}, (), ()).to_bytes())
    expected = f"--prefix-cache: {file}: pages: expected pages of an engine like this one, got page_size of 3"
    assert expected in usage_error(*run)
    file.write_bytes(b"rubbish")
    assert f"--prefix-cache: {file}: data: no cached pages in these 7 bytes" in usage_error(*run)
    file.unlink()
    os.mkfifo(file)
    assert f"--prefix-cache: {file}: not a regular file" in usage_error(*run)
    assert "--prefix-cache: not with --no-prefix-caching" in usage_error(*run, "--no-prefix-caching")


@pytest.mark.slow  # tests/models/test_engine.py has more tests of sampling
def test_samples_depend_on_seed_and_position_only(run_json, write_ids):
    sampling = [*SMALL, "--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--ignore-eos"]
    result = run_json(*sampling, *write_ids(PROMPTS[1:3]), "--verify")
    assert result["run"]["verified"] is True
    assert outputs(run_json(*sampling, *write_ids(PROMPTS[:0:-1])))[1:] == outputs(result)[::-1]
    assert outputs(run_json(*sampling, *write_ids(PROMPTS[1:3]), "--seed", "1")) != outputs(result)


@pytest.mark.slow  # in `make test`, tests of the engine select implementations and MLA forms
def test_implementation_and_mla_options(run_json, write_ids):
    asked = ["--mla", "absorb", "--implementation", "reference,xla", "--verify"]
    run = run_json(*SMALL, *write_ids(PROMPTS[1:3]), *asked)["run"]
    assert run["implementation"] == {"write_latent": "reference", "mla_decode": "reference"}
    assert run["verified"] is True


@pytest.mark.slow  # `make test` tests int8 caches in tests/models/test_engine_windows.py
def test_kv_dtype_int8_of_keys_and_values(run_json, write_ids):
    qwen3 = GOLDEN.with_name("qwen3")
    prompts = json.loads((qwen3 / "prompts.json").read_text())[1:3]
    asked = ["--model", qwen3, *SIZES, "--max-tokens", 6, *write_ids(prompts), "--kv-dtype", "int8", "--verify"]
    result = run_json(*asked)
    tokens = arrays_of(qwen3)
    assert outputs(result)[0] == tokens["tokens_1"][:6].tolist()
    assert result["run"]["verified"] is True
    assert result["run"]["implementation"] == {"write_kv": "xla", "paged_decode": "xla", "paged_prefill": "xla"}


@pytest.mark.slow  # tests/models/test_latents_8bit.py has more tests of fp8 latents
def test_kv_dtype_fp8_of_latents(run_json, write_ids, tmp_path):
    config = dataclasses.replace(PRESETS["v3-tiny"], num_hidden_layers=1, kv_lora_rank=128)  # one layer compiles fast
    save_random_checkpoint(tmp_path / "model", config)
    sizes = [*SIZES, "--decode-buckets", 2, "--prefill-buckets", 16]
    asked = [*sizes, "--max-tokens", 6, *write_ids(PROMPTS[1:3]), "--kv-dtype", "fp8", "--verify"]
    result = run_json("--model", tmp_path / "model", *asked)
    assert result["run"]["verified"] is True
    assert [len(ids) for ids in outputs(result)] == [6, 6]


@pytest.mark.slow  # tests/models/test_sparse.py has more tests of sparse attention
def test_index_topk_option(run_json, write_ids, tmp_path):
    """`--index-topk` replaces the number of selected keys of the model, which is 2,000 and more than the prompts have.

    `--verify` compares with a run without a cache, which has the same option.
    """
    tiny = dataclasses.replace(PRESETS["glm-tiny"], num_hidden_layers=2, indexer_types=("full", "shared"))
    config = dataclasses.replace(tiny, index_topk=2000)
    save_random_checkpoint(tmp_path / "model", config)
    sizes = [*SIZES, "--decode-buckets", 2, "--prefill-buckets", 16]
    asked = ["--model", tmp_path / "model", *sizes, "--max-tokens", 6, *write_ids(PROMPTS[1:3]), "--verify"]
    result = run_json(*asked, "--index-topk", 3)
    assert result["run"]["verified"] is True
    assert {"write_index_keys", "index_top_k", "mla_sparse"} <= result["run"]["implementation"].keys()


@pytest.mark.slow  # `make test` tests head windows in tests/models/test_engine_windows.py
def test_head_windows_option(run_json, write_ids, tmp_path):
    """`--head-windows` changes the tokens, and the run without a cache has the same tokens. The cache is int8, because
    another test compiles the same model with an int8 cache.
    """
    qwen3, windows = GOLDEN.with_name("qwen3"), tmp_path / "windows.json"
    windows.write_text(json.dumps([None, 5, {"window": [None, 4], "sink_tokens": [0, 2]}]))
    prompt = json.loads((qwen3 / "prompts.json").read_text())[2]
    asked = ["--model", qwen3, *SIZES, "--max-tokens", 6, *write_ids([prompt]), "--kv-dtype", "int8", "--verify"]
    asked += ["--decode-buckets", "2", "--prefill-buckets", "16"]
    result = run_json(*asked, "--head-windows", windows)
    assert result["run"]["verified"] is True
    assert outputs(result)[0] != arrays_of(qwen3)["tokens_2"][:6].tolist()
    assert result["run"]["implementation"] == {"write_kv": "xla", "paged_decode": "xla", "paged_prefill": "xla"}


class TestTexts:
    def words(self, ids):
        return " ".join(f"w{i}" for i in ids)

    @pytest.mark.slow
    def test_prompts_and_outputs_are_text(self, run_json, text_model, golden):
        texts = [self.words(ids) for ids in PROMPTS[1:3]]
        result = run_json("--model", text_model, *SIZES, "--max-tokens", "6", "--prompt", *texts)
        want = [golden[f"tokens_{i}"][:6].tolist() for i in (1, 2)]
        assert outputs(result) == want
        assert [request["text"] for request in result["requests"]] == [self.words(ids) for ids in want]

    def test_chat_template_is_applied(self, run_json, text_model):
        template = "{{ messages[0].content }} w9{% if add_generation_prompt %} w8{% endif %}"
        (text_model / "chat_template.jinja").write_text(template)
        asked = [*SIZES, "--prefill-buckets", "16", "--max-tokens", "1"]  # other tests have compiled this bucket
        result = run_json("--model", text_model, *asked, "--prompt", "w1 w2", "w3")
        assert [request["prompt_tokens"] for request in result["requests"]] == [4, 3]


def test_default_prompts_share_prefixes(run_json):
    result = run_json("--model", GOLDEN, *SIZES, "--max-tokens", "2")
    requests = result["requests"]
    assert len(requests) == 8
    assert requests[0]["output_ids"] == requests[-1]["output_ids"]
    assert max(request["prompt_tokens"] for request in requests) > 3 * 16
    assert sum(request["cached_tokens"] > 0 for request in requests) >= 4


@pytest.mark.slow
def test_difference_is_reported_with_exit_status_1(monkeypatch, capsys, write_ids, tmp_path, golden):
    honest = Engine.output

    def lying(engine, request_id):
        output = honest(engine, request_id)
        ids = [*output.output_ids[:3], 5, *output.output_ids[4:]] if request_id == 1 else output.output_ids
        return dataclasses.replace(output, output_ids=ids)

    monkeypatch.setattr(Engine, "output", lying)
    want, margin = golden["tokens_2"][3], golden["margins_2"][3]
    out = tmp_path / "out.json"
    assert run_decode.main([*SMALL, *write_ids(PROMPTS[1:3]), "--verify", "--json", str(out)]) == 1
    said = f"request 1, output position 3: got 5, wanted {want}, margin {margin:.3g}"
    captured = capsys.readouterr()
    assert captured.err == f"run_decode: not verified: {said}\n"
    assert captured.out.startswith("[0] ")
    assert json.loads(out.read_text())["run"]["verified"] is False


def test_interrupt_keeps_decoded_tokens(monkeypatch, capsys, write_ids, tmp_path):
    steps, step = [], Engine.step

    def interrupted(engine):
        steps.append(step(engine))
        if len(steps) == 5:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(Engine, "step", interrupted)
    out = tmp_path / "out.json"
    args = [*SMALL, *write_ids(PROMPTS), "--verify", "--json", str(out), "--plot", str(tmp_path / "plot.png")]
    assert run_decode.main(args) == 130
    captured = capsys.readouterr()
    assert captured.err == "run_decode: interrupted\n"
    assert "[3] " in captured.out
    result = json.loads(out.read_text())
    assert len(result["requests"][0]["output_ids"]) > 1
    assert {request["finish_reason"] for request in result["requests"]} <= {"abort", "length"}
    assert result["requests"][3] == {
        "prompt_tokens": 75,
        "cached_tokens": 0,
        "output_ids": [],
        "finish_reason": "abort",
        "ttft_s": None,
        "itl_s": [],
    }
    assert "verified" not in result["run"]


@slow_cases("1", "1100", "3300")
@pytest.mark.parametrize("at", [1, 400, 1100, 2000, 3300])
def test_ctrl_c_at_any_line_keeps_decoded_tokens(monkeypatch, capsys, write_ids, tmp_path, at, golden):
    """Ctrl-C at any line of the engine and its pools loses no decoded token. The test raises KeyboardInterrupt at the
    line that is executed as number `at`.
    """
    engines, engine_of = [], run_decode._engine
    fault = Fault(at)

    def engine(*args):
        engines.append(engine_of(*args))
        fault.__enter__()
        return engines[-1]

    monkeypatch.setattr(run_decode, "_engine", engine)
    out = tmp_path / "out.json"
    try:
        status = run_decode.main([*SMALL, *write_ids(PROMPTS), "--json", str(out)])
    finally:
        fault.__exit__()
    assert status == 130
    assert fault.happened
    for request, tokens in zip(
        json.loads(out.read_text())["requests"], (golden[f"tokens_{i}"] for i in range(4)), strict=True
    ):
        assert request["output_ids"] == tokens[: len(request["output_ids"])].tolist()
        assert (request["finish_reason"] == "length") is (len(request["output_ids"]) == 6)
        assert request["finish_reason"] in ("length", "abort")
    assert capsys.readouterr().err == "run_decode: interrupted\n"


@slow_cases("error0-INTERNAL: the device is gone")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: the device is gone"), "INTERNAL: the device is gone"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_decoded_tokens_survive_a_device_failure(monkeypatch, capsys, write_ids, tmp_path, error, reason):
    launch, calls = Runner.launch, iter(range(100))

    def fail(*args):
        if next(calls) >= 8:
            raise error
        return launch(*args)

    monkeypatch.setattr(Runner, "launch", fail)
    out = tmp_path / "out.json"
    assert run_decode.main([*SMALL, *write_ids(PROMPTS), "--verify", "--json", str(out)]) == 3
    captured = capsys.readouterr()
    assert captured.err == f"run_decode: error: decoding: {reason}\n"
    assert "[3] " in captured.out
    requests = json.loads(out.read_text())["requests"]
    assert len(requests[0]["output_ids"]) > 1
    assert {request["finish_reason"] for request in requests} <= {"abort", "length"}


@slow_cases("asked1-1")
@pytest.mark.parametrize(("asked", "status"), [([], 3), (["--verify"], 1)])
def test_nonfinite_logits_are_reported(monkeypatch, capsys, write_ids, tmp_path, asked, status):
    loaded = run_decode.load

    def broken(*args):
        model = loaded(*args)
        model.embed_tokens[...] = model.embed_tokens[...].at[VOCAB_SIZE - 1].set(jax.numpy.nan)
        return model

    monkeypatch.setattr(run_decode, "load", broken)
    out = tmp_path / "out.json"
    prompts = [PROMPTS[1], [1, VOCAB_SIZE - 1, 2]]
    assert run_decode.main([*SMALL, *write_ids(prompts), *asked, "--json", str(out)]) == status
    told = "run_decode: error: request 1 ended at output position 0: logits are NaN or infinite, for example because"
    told += " of broken weights\n"
    if asked:
        told += "run_decode: not verified: request 1, output position 0: got the end, the plain run's logits are NaN or"
        told += " infinite\n"
    assert capsys.readouterr().err == told
    result = json.loads(out.read_text())
    assert [request["finish_reason"] for request in result["requests"]] == ["length", "nonfinite"]
    assert result["run"].get("verified") == (False if asked else None)


@pytest.mark.slow  # `make test` compares bits in tests/models/test_batch_invariance.py
def test_batch_invariant_tokens_do_not_depend_on_the_other_prompts(run_json, write_ids, golden):
    asked = ["--model", GOLDEN, "--page-size", "4", "--max-tokens", "6", "--max-num-seqs", "2", "--batch-invariant"]
    asked += ["--max-batched-tokens", "9", "--max-model-len", "160", "--no-recycling", "--max-prefill-seqs", "1"]
    alone = run_json(*asked, *write_ids(PROMPTS[1:2]), "--verify")
    together = run_json(*asked, *write_ids(PROMPTS[:2]))
    assert outputs(alone) == outputs(together)[1:] == [golden["tokens_1"][:6].tolist()]
    assert alone["run"]["implementation"] == {"write_latent": "xla", "mla_decode": "xla"}
    assert alone["run"]["compilations"] == together["run"]["compilations"] == 1


@pytest.mark.slow
def test_drafts_change_no_token_and_are_reported(run_json, write_ids, capsys, tmp_path):
    config = dataclasses.replace(PRESETS["v3-tiny"], num_hidden_layers=1)  # one layer compiles fast
    save_random_checkpoint(tmp_path / "model", config)
    sizes = [*SIZES, "--decode-buckets", 2, "--prefill-buckets", 16]
    asked = ["--model", tmp_path / "model", *sizes, *write_ids(PROMPTS[:3]), "--plot", tmp_path / "plot.png"]
    result = run_json(*asked, "--speculate", "ngram:2", "--max-tokens", 24, "--verify", "--stats")
    assert [len(ids) for ids in outputs(result)] == [24] * 3
    run = result["run"]
    assert (run["verified"], run["speculate"], run["compilations"]) == (True, "ngram:2", 2 + 1)
    for kind in ("drafted", "accepted"):
        by_request = [request[kind] for request in result["requests"]]
        assert run[kind] == [sum(of_position) for of_position in itertools.zip_longest(*by_request, fillvalue=0)]
    assert all(accepted <= drafted for accepted, drafted in zip(run["accepted"], run["drafted"], strict=True))
    table = capsys.readouterr().err
    assert f"ngram:2, {sum(run['accepted'])} of {sum(run['drafted'])} accepted" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.slow
def test_drafts_of_another_checkpoint(run_json, write_ids, tmp_path):
    """A checkpoint can draft for a model. In this test, both are the same checkpoint, so all drafts are accepted.

    `--verify` compares with decoding without drafts.
    """
    config = dataclasses.replace(PRESETS["v3-tiny"], num_hidden_layers=1)
    save_random_checkpoint(tmp_path / "model", config)
    asked = ["--model", tmp_path / "model", *SIZES, *write_ids(PROMPTS[:2]), "--max-tokens", 24, "--dtype", "float32"]
    run = run_json(*asked, "--speculate", f"draft:{tmp_path / 'model'}:2", "--verify")["run"]
    assert (run["verified"], run["speculate"]) == (True, f"draft:{tmp_path / 'model'}:2")
    assert run["accepted"] == run["drafted"]
    assert len(run["drafted"]) == 2


@pytest.mark.slow
def test_drafts_of_the_prediction_module(run_json, write_ids):
    golden_fp8 = GOLDEN.parent / "v3-fp8"
    with np.load(golden_fp8 / "golden.npz") as arrays:
        wanted = [arrays[f"tokens_{i}"].tolist() for i in range(3)]
    prompts = json.loads((golden_fp8 / "prompts.json").read_text())[:3]
    asked = ["--model", str(golden_fp8), *SIZES, "--dtype", "float32", "--max-tokens", 24, "--speculate", "mtp:1"]
    result = run_json(*asked, *write_ids(prompts), "--verify")
    assert outputs(result) == wanted
    assert result["run"]["verified"] is True
    assert len(result["run"]["drafted"]) == 1
    assert result["run"]["drafted"][0] > 0


@pytest.mark.slow  # `make test` tests padded steps in tests/models/test_runner.py
def test_bucket_options(run_json, write_ids, golden):
    asked = ["--model", GOLDEN, "--page-size", "4", "--num-pages", "26", "--max-tokens", "6"]
    asked += ["--decode-buckets", "1,2", "--prefill-buckets", "16", "--implementation", "reference"]
    result = run_json(*asked, *write_ids(PROMPTS[1:3]))
    assert outputs(result) == [golden[f"tokens_{i}"][:6].tolist() for i in (1, 2)]
    assert result["run"]["compilations"] == 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--plot", "--json"),
        pytest.param(("--dump-logits", "--plot", "--json"), marks=pytest.mark.slow),  # the same code writes logits
    ],
    ids=["", "and logits"],
)
def test_write_failure_after_decoding(monkeypatch, capsys, write_ids, tmp_path, flags):
    directory = tmp_path / "results"
    directory.mkdir()
    step = Engine.step

    def step_and_remove(engine):
        shutil.rmtree(directory, ignore_errors=True)
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_and_remove)
    files = {flag: directory / f"out{flag}" for flag in flags}
    args = [*SMALL, *write_ids(PROMPTS[1:3]), "--verify", *(str(part) for file in files.items() for part in file)]
    assert run_decode.main(args) == 3
    captured = capsys.readouterr()
    assert "[1] " in captured.out
    said = [f"{flag}: cannot write {path}: there is no directory {directory}" for flag, path in files.items()]
    assert captured.err == f"run_decode: error: {'; '.join(said)}\n"


def test_tokenizer_failure_at_the_output_keeps_other_results(capsys, text_model, tmp_path):
    path, out = text_model / "tokenizer.json", tmp_path / "out.json"
    parts = json.loads(path.read_text())
    parts["model"]["vocab"] = {"w" * (i + 1): i for i in range(256)}
    parts["model"]["unk_token"] = "w"
    # The decoder strips more characters than the word has, and fails.
    parts["decoder"] = {"type": "Strip", "content": "w", "start": 0, "stop": 300}
    path.write_text(json.dumps(parts))
    args = ["--model", text_model, *SIZES, "--max-tokens", "2", "--quiet", "--prompt", "w " * 12, "ww " * 12]
    args += ["--json", out]
    assert run_decode.main(list(map(str, args))) == 3
    captured = capsys.readouterr()
    assert "[1] " in captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith(f"run_decode: error: {path}: index out of bounds")
    for request in json.loads(out.read_text())["requests"]:
        assert len(request["output_ids"]) == 2
        assert "text" not in request


def test_files_are_written_if_standard_output_is_closed(monkeypatch, capsys, write_ids, tmp_path):
    reads, writes = os.pipe()
    os.close(reads)
    out = tmp_path / "out.json"
    with os.fdopen(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run_decode.main([*SMALL, *write_ids(PROMPTS[1:3]), "--json", str(out)]) == 3
    assert len(json.loads(out.read_text())["requests"]) == 2
    assert capsys.readouterr().err == ("run_decode: error: standard output was closed before everything was printed\n")


@slow_cases("error1-MemoryError")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "RESOURCE_EXHAUSTED: Out of memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_decoded_tokens_survive_a_verification_failure(monkeypatch, capsys, write_ids, tmp_path, error, reason):
    out = tmp_path / "out.json"

    def fail(*args, **kwargs):
        assert len(json.loads(out.read_text())["requests"]) == 2  # exists before verification, which may be killed
        raise error

    monkeypatch.setattr(run_decode, "verify", fail)
    assert run_decode.main([*SMALL, *write_ids(PROMPTS[1:3]), "--verify", "--json", str(out)]) == 3
    captured = capsys.readouterr()
    assert captured.err == f"run_decode: error: --verify: {reason}\n"
    assert "[1] " in captured.out
    assert "verified" not in json.loads(out.read_text())["run"]


def test_pipe_gets_one_report(write_ids):
    reads, writes = os.pipe()
    with os.fdopen(reads) as pipe:
        with os.fdopen(writes, "w"):
            args = [*SMALL, *write_ids(PROMPTS[1:3]), "--verify", "--json", f"/dev/fd/{writes}"]
            assert run_decode.main(args) == 0
        assert json.load(pipe)["run"]["verified"] is True


@slow_cases("True")
@pytest.mark.parametrize("shown", [True, False])
def test_progress_bar_on_a_terminal(monkeypatch, capsys, write_ids, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    args = [*SMALL[:-1], *write_ids(PROMPTS[1:3])] + ([] if shown else ["--no-progress"])  # without --quiet
    assert run_decode.main(args) == 0
    captured = capsys.readouterr()
    assert ("decoding" in captured.err and "/12" in captured.err) is shown
    assert "decoding" not in captured.out


def test_bug_has_not_the_exit_status_of_a_difference(monkeypatch, capsys, write_ids):
    def fail(engine):
        raise IndexError("mistaken")

    monkeypatch.setattr(Engine, "step", fail)
    assert run_decode.main([*SMALL, *write_ids(PROMPTS[1:3])]) == 3
    assert capsys.readouterr().err.endswith("IndexError: mistaken\n")


def test_help_has_examples_and_exit_status(capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_decode.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    flags = "model random prompt prompt-ids max-tokens temperature top-k top-p seed ignore-eos page-size num-pages"
    flags += " max-batched-tokens max-num-seqs chunked-prefill no-chunked-prefill prefix-caching no-prefix-caching"
    flags += " max-prefill-seqs max-model-len decode-buckets prefill-buckets recycling no-recycling batch-invariant"
    flags += " cascade-attention"
    flags += " dtype implementation mla verify json dump-logits plot profile no-progress"
    flags += " chat system stats quiet compilation-cache"
    for flag in flags.split():
        assert f"--{flag}" in text
    assert "examples:" in text
    assert "exit status:" in text
    assert all(f"  {status}  " in text for status in (0, 1, 2, 3, 130))
    assert "default: None" not in text
    assert "triton" in text
    assert "%(prog)" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow  # `make test` tests two devices in tests/models/test_mesh.py
@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_two_devices_decode_the_same_tokens(run_json, axis):
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    model = ROOT / "tests" / "goldens" / "llama"
    sizes = [*SIZES, "--decode-buckets", "2", "--prefill-buckets", "16", "--max-tokens", "6"]
    args = ["--model", model, "--prompt-ids", model / "prompts.json", *sizes, "--mesh", f"{axis}=2", "--verify"]
    result = run_json(*args)
    with np.load(model / "golden.npz") as golden:
        assert outputs(result) == [golden[f"tokens_{i}"][:6].tolist() for i in range(4)]
    assert (result["run"]["mesh"], result["run"]["verified"]) == ({axis: 2}, True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor=2", "expert=2"])
def test_experts_in_bfloat16_verify_on_two_devices(run_json, layout):
    """`--verify` accepts differences that come from another selection of experts.

    In bfloat16, the router scores of some tokens are nearly equal, so rounding can change the selected experts. With
    `tensor=2` on a CPU, the logits of one token differ by more than the tolerance for this reason.
    """
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    result = run_json("--random", "v3-tiny", "--dtype", "bfloat16", "--mesh", layout, "--verify")
    assert result["run"]["verified"] is True
