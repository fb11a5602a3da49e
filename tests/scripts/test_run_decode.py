"""run_decode as a person or a program would run it: what it computes, what it says, and how it refuses."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from models.engine import Engine
from scripts import run_decode

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "v3"
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())
VOCAB_SIZE, MAX_POSITIONS = 256, 1280

# Chunks, mixed steps and too few pages for two long requests; the same shapes, compiled once, in nearly every test.
SIZES = ["--page-size", "4", "--num-pages", "26", "--max-batched-tokens", "16", "--max-num-seqs", "2"]
SMALL = ["--model", str(GOLDEN), *SIZES, "--max-tokens", "6"]


def lines_of(text):
    return text.splitlines()


@pytest.fixture
def write_ids(tmp_path):
    def write(content, name="ids.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--prompt-ids", str(path)]

    return write


@pytest.fixture
def run_json(tmp_path, capsys):
    """Runs the command line, which has to succeed, and returns its JSON."""

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
def stdout(files):
    command = ["--model", GOLDEN, "--prompt-ids", GOLDEN / "prompts.json", *SIZES, "--max-tokens", 24, "--verify"]
    command += ["--json", files / "out.json", "--dump-logits", files / "logits.bin", "--plot", files / "plot"]
    command += ["--profile", files / "trace" / "of" / "run"]
    # As a program of its own, so that what tests configure does not help; but for compiled programs, to be quick.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "run_decode.py", *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **cache},
        cwd=files,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def result(stdout, files):
    return json.loads((files / "out.json").read_text())


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "golden.npz")


class TestResults:
    """One run with everything switched on, looked at from all sides."""

    def test_tokens_are_those_of_transformers(self, result, golden):
        assert outputs(result) == [golden[f"tokens_{i}"].tolist() for i in range(4)]

    def test_logits_are_those_of_transformers_where_they_were_computed(self, result, golden, files):
        with np.load(files / "logits.bin", allow_pickle=False) as dumped:
            assert sorted(dumped) == [f"logits_{i}" for i in range(4)]
            for i, request in enumerate(result["requests"]):
                logits, cached = dumped[f"logits_{i}"], request["cached_tokens"]
                assert logits.dtype == np.float32
                assert np.isnan(logits[:cached]).all()
                np.testing.assert_allclose(logits[cached:], golden[f"logits_{i}"][cached:], atol=1e-4)

    def test_requests_have_exactly_the_documented_keys(self, result):
        keys = {"prompt_tokens", "cached_tokens", "output_ids", "finish_reason", "ttft_s", "itl_s"}
        assert list(result) == ["requests", "run"]
        for request, prompt in zip(result["requests"], PROMPTS, strict=True):
            assert set(request) == keys
            assert request["prompt_tokens"] == len(prompt)
            assert request["finish_reason"] == "length"
            assert request["ttft_s"] > 0
            assert len(request["itl_s"]) == 23

    def test_the_shared_prefix_was_cached(self, result):
        assert [request["cached_tokens"] for request in result["requests"]] == [0, 0, 0, 32]
        assert 32 / sum(map(len, PROMPTS)) <= result["run"]["prefix_hit_rate"] < 1  # a preempted request looks again

    def test_the_run_has_exactly_the_documented_keys(self, result):
        run = result["run"]
        assert set(run) == {
            "prefill_tokens_per_s",
            "decode_tokens_per_s",
            "prefix_hit_rate",
            "peak_pages",
            "num_pages",
            "preemptions",
            "steps",
            "compilations",
            "compile_s",
            "run_s",
            "verified",
            "implementation",
            "device",
            "versions",
        }
        assert run["verified"] is True
        assert run["num_pages"] == 26
        assert 16 < run["peak_pages"] <= 26
        assert run["preemptions"] >= 1
        assert run["steps"] >= 24 + 5
        assert run["compilations"] == 3
        assert min(run["prefill_tokens_per_s"], run["decode_tokens_per_s"], run["compile_s"], run["run_s"]) > 0
        assert run["implementation"] == dict.fromkeys(
            ["write_latent", "mla_decode", "gather_latent", "ragged_attention"], "xla"
        )
        assert run["device"] == "cpu"
        assert run["versions"]["jax"] == jax.__version__

    def test_the_table_says_what_a_person_wants_to_know(self, stdout):
        assert "4 requests on v3" in stdout
        for word in ("prompt", "cached", "new", "TTFT", "per token", "prefix hits", "preemptions", "compilation"):
            assert word in stdout
        assert "yes: 96 of 96 tokens equal" in stdout
        assert max(map(len, lines_of(stdout))) <= 80

    def test_the_picture_is_a_png(self, stdout, files):
        assert (files / "plot").read_bytes().startswith(b"\x89PNG")

    def test_the_profile_is_a_trace(self, stdout, files):
        assert list((files / "trace" / "of" / "run").rglob("*.xplane.pb"))


def test_without_chunks_and_cache_the_tokens_are_the_same(run_json, write_ids, golden):
    result = run_json(*SMALL, *write_ids([*PROMPTS[:2], PROMPTS[1]]), "--no-chunked-prefill", "--no-prefix-caching")
    assert outputs(result) == [golden[f"tokens_{i}"][:6].tolist() for i in (0, 1, 1)]
    assert result["run"]["prefix_hit_rate"] == 0
    assert [request["cached_tokens"] for request in result["requests"]] == [0, 0, 0]


def test_a_draw_depends_on_seed_and_position_only(run_json, write_ids):
    sampling = [*SMALL, "--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--ignore-eos"]
    result = run_json(*sampling, *write_ids(PROMPTS[1:3]), "--verify")
    assert result["run"]["verified"] is True
    assert outputs(run_json(*sampling, *write_ids(PROMPTS[:0:-1])))[1:] == outputs(result)[::-1]
    assert outputs(run_json(*sampling, *write_ids(PROMPTS[1:3]), "--seed", "1")) != outputs(result)


def test_the_implementation_and_mla_asked_for_are_used(run_json, write_ids):
    asked = ["--mla", "absorb", "--implementation", "reference,xla", "--verify"]
    run = run_json(*SMALL, *write_ids(PROMPTS[1:3]), *asked)["run"]
    assert run["implementation"] == {"write_latent": "reference", "mla_decode": "reference"}
    assert run["verified"] is True


class TestTexts:
    @pytest.fixture
    def directory(self, tmp_path):
        """The golden model, with a tokenizer of one word for each of its ids."""
        directory = tmp_path / "model"
        shutil.copytree(GOLDEN, directory)
        core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.save(str(directory / "tokenizer.json"))
        return directory

    def words(self, ids):
        return " ".join(f"w{i}" for i in ids)

    def test_prompts_and_outputs_are_texts(self, run_json, directory, golden):
        result = run_json("--model", directory, *SIZES, "--max-tokens", "6", "--prompt", *map(self.words, PROMPTS[1:3]))
        want = [golden[f"tokens_{i}"][:6].tolist() for i in (1, 2)]
        assert outputs(result) == want
        assert [request["text"] for request in result["requests"]] == [self.words(ids) for ids in want]

    def test_the_chat_template_goes_around_a_prompt(self, run_json, directory):
        template = "{{ messages[0].content }} w9{% if add_generation_prompt %} w8{% endif %}"
        (directory / "chat_template.jinja").write_text(template)
        result = run_json("--model", directory, *SIZES, "--max-tokens", "1", "--prompt", "w1 w2", "w3")
        assert [request["prompt_tokens"] for request in result["requests"]] == [4, 3]

    def test_an_empty_text_is_refused(self, directory, refused):
        assert "text 1 is empty" in refused("--model", directory, "--prompt", "w1", " ")

    def test_a_broken_template_is_refused(self, directory, refused):
        (directory / "chat_template.jinja").write_text("{% endif %}")
        assert "chat template is malformed" in refused("--model", directory, "--prompt", "w1")

    def test_a_broken_tokenizer_is_refused(self, directory, refused):
        (directory / "tokenizer.json").write_text("{}")
        assert "tokenizer.json" in refused("--model", directory)


def test_a_model_without_prompts_gets_demonstration_prompts_of_shared_prefixes(run_json):
    result = run_json("--model", GOLDEN, *SIZES, "--max-tokens", "2")
    requests = result["requests"]
    assert len(requests) == 8
    assert requests[0]["output_ids"] == requests[-1]["output_ids"]
    assert max(request["prompt_tokens"] for request in requests) > 3 * 16
    assert sum(request["cached_tokens"] > 0 for request in requests) >= 4


def test_a_difference_is_named_and_is_exit_status_1(monkeypatch, capsys, write_ids, tmp_path, golden):
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
    assert said in captured.out
    assert json.loads(out.read_text())["run"]["verified"] is False


def test_an_interrupt_leaves_what_has_arrived(monkeypatch, capsys, write_ids, tmp_path):
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
    assert "4 requests" in captured.out
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


def test_results_that_cannot_be_written_after_all(monkeypatch, capsys, write_ids, tmp_path):
    directory = tmp_path / "results"
    directory.mkdir()
    step = Engine.step

    def step_and_remove(engine):
        shutil.rmtree(directory, ignore_errors=True)
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_and_remove)
    assert run_decode.main([*SMALL, *write_ids(PROMPTS[1:3]), "--json", str(directory / "out.json")]) == 2
    captured = capsys.readouterr()
    assert "2 requests" in captured.out
    assert len(lines_of(captured.err)) == 1


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_on_a_terminal_unless_it_is_unwanted(monkeypatch, capsys, write_ids, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    args = [*SMALL, *write_ids(PROMPTS[1:3])] + ([] if shown else ["--no-progress"])
    assert run_decode.main(args) == 0
    captured = capsys.readouterr()
    assert ("decoding" in captured.err and "/12" in captured.err) is shown
    assert "decoding" not in captured.out


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_info:
        run_decode.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    flags = "model random prompt prompt-ids max-tokens temperature top-k top-p seed ignore-eos page-size num-pages"
    flags += " max-batched-tokens max-num-seqs chunked-prefill no-chunked-prefill prefix-caching no-prefix-caching"
    flags += " dtype implementation mla verify json dump-logits plot profile no-progress"
    for flag in flags.split():
        assert f"--{flag}" in text
    assert "examples:" in text
    assert "exit status:" in text
    assert "default: None" not in text


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs the command line, which has to end in one line and status 2 before anything is decoded; returns the line."""
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("a step was run"))

    def refused(*args):
        assert run_decode.main([str(arg) for arg in args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = lines_of(captured.err)
        assert line.startswith("run_decode: error: ")
        return line

    return refused


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--bogus"], "unrecognized arguments: --bogus"),
            (["--max-tok", "3"], "unrecognized arguments"),
            (["prompt"], "unrecognized arguments: prompt"),
            (["--max-tokens", "many"], "--max-tokens: invalid int value"),
            (["--max-tokens", "0"], "max_tokens must be at least 1"),
            (["--temperature", "-1"], "temperature"),
            (["--temperature", "nan"], "temperature"),
            (["--top-k", "-1"], "top_k"),
            (["--top-p", "0"], "top_p"),
            (["--top-p", "1.5"], "top_p"),
            (["--seed", "-1"], "seed"),
            (["--random", "v4"], "invalid choice: 'v4'"),
            (["--model", "x", "--random", "v3-tiny"], "not allowed with argument"),
            (["--prompt", "x", "--prompt-ids", "y"], "not allowed with argument"),
            (["--prompt", "What?"], "--prompt needs a --model"),
            (["--dtype", "float16"], "invalid choice: 'float16'"),
            (["--mla", "both"], "invalid choice: 'both'"),
            (["--implementation", "cuda"], "cuda"),
            (["--implementation", ""], "implementation"),
            (["--implementation", "mosaic"], "write_latent cannot run here: mosaic"),
            (["--implementation", "mosaic,triton"], "triton: write_latent has no 'triton'"),
            (["--page-size", "0"], "page_size"),
            (["--page-size", "-1"], "page_size"),
            (["--num-pages", "0"], "num_pages"),
            (["--num-pages", str(2**40)], "num_pages: expected fewer than 2**31 tokens"),
            (["--page-size", str(2**40)], "num_pages: expected fewer than 2**31 tokens"),
            (["--max-batched-tokens", "0"], "max_batched_tokens"),
            (["--max-num-seqs", "-2"], "max_num_seqs"),
            (
                ["--max-num-seqs", "9", "--max-batched-tokens", "8"],
                "max_num_seqs: expected at most max_batched_tokens=8",
            ),
            (["--num-pages", "2"], "prompt 0: the prompt needs 4 pages, the pool has 2"),
            (["--no-chunked-prefill", "--max-batched-tokens", "16"], "a step takes 16 unless prefill is chunked"),
        ],
    )
    def test_wrong_flags(self, refused, args, message):
        assert message in refused(*args)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ({"ids": [1]}, "a list of lists of token ids"),
            ([], "a list of lists of token ids"),
            ([1, 2], "prompt 0 of"),
            ([[1], [2.0]], "prompt 1 of"),
            ([[True]], "prompt 0 of"),
            ([["1"]], "prompt 0 of"),
            ([[1], []], "prompt_ids of request 1 must hold at least one token"),
            ([[1], [2, VOCAB_SIZE]], f"prompt 1: prompt_ids: expected ids from 0 to 255, got {VOCAB_SIZE}"),
            ([[-1]], "expected ids from 0 to 255, got -1"),
            ([[1 << 70]], "expected ids from 0 to 255"),
            ([[1], [7] * MAX_POSITIONS], "prompt 1: the prompt has 1280 tokens, the model takes at most 1279"),
        ],
    )
    def test_wrong_prompts(self, refused, write_ids, content, message):
        assert message in refused("--model", GOLDEN, *write_ids(content))

    def test_a_prompt_the_pool_can_never_hold(self, refused, write_ids):
        message = refused("--model", GOLDEN, *SIZES, *write_ids([[1] * 105]))
        assert "prompt 0: the prompt needs 27 pages, the pool has 26" in message

    def test_unreadable_prompts(self, refused, tmp_path):
        assert "No such file" in refused("--prompt-ids", tmp_path / "none.json")
        assert "Is a directory" in refused("--prompt-ids", tmp_path)
        (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
        assert "not JSON" in refused("--prompt-ids", tmp_path / "latin.json")

    def test_a_text_without_a_tokenizer(self, refused):
        assert "has no tokenizer.json" in refused("--model", GOLDEN, "--prompt", "What?")

    @pytest.mark.parametrize("flag", ["--json", "--dump-logits", "--plot"])
    def test_files_that_cannot_be_written(self, refused, tmp_path, flag):
        assert f"{flag}: cannot write" in refused(flag, tmp_path)
        assert "there is no directory" in refused(flag, tmp_path / "none" / "out")

    def test_a_profile_directory_that_cannot_be_made(self, refused, tmp_path):
        (tmp_path / "file").write_text("")
        assert "--profile: cannot make" in refused("--profile", tmp_path / "file")

    def test_a_plot_without_matplotlib(self, refused, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "pip install matplotlib" in refused("--plot", tmp_path / "plot.png")

    def test_a_default_implementation_that_does_not_exist(self, refused, monkeypatch):
        monkeypatch.setenv("PALLAS_ATTN_IMPLEMENTATION", "cuda")
        assert "cuda" in refused()

    def test_a_pool_that_does_not_fit_into_memory(self, refused, monkeypatch):
        def full(*args, **kwargs):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte.")

        monkeypatch.setattr(run_decode, "Engine", full)
        assert "Out of memory allocating 1 byte." in refused()

    def test_a_shape_that_nothing_can_run(self, refused, monkeypatch):
        def nothing(engine):
            raise ExceptionGroup("mla_decode: no implementation", [NotImplementedError("too wide"), ValueError("no")])

        monkeypatch.setattr(Engine, "warmup", nothing)
        assert refused().endswith("mla_decode: no implementation; too wide; no")

    def test_no_device(self, refused, monkeypatch):
        def nothing():
            raise RuntimeError("no such backend")

        monkeypatch.setattr(jax, "devices", nothing)
        assert "no such backend" in refused()


class TestWrongCheckpoints:
    @pytest.fixture
    def directory(self, tmp_path):
        directory = tmp_path / "model"
        shutil.copytree(GOLDEN, directory)
        return directory

    def test_none_at_all(self, refused, tmp_path):
        assert "there is no config.json" in refused("--model", tmp_path / "none")
        assert "there is no config.json" in refused("--model", tmp_path)

    def test_only_pickles(self, refused, directory):
        for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
            path.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        assert "pytorch_model.bin may run code" in refused("--model", directory)

    def test_a_missing_shard(self, refused, directory):
        (directory / "model-00002-of-00005.safetensors").unlink()
        assert "model-00002-of-00005.safetensors: there is no such file" in refused("--model", directory)

    def test_a_truncated_shard(self, refused, directory):
        shard = directory / "model-00001-of-00005.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        assert "not a safetensors file" in refused("--model", directory)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_hidden_layers": 4}, "missing"),
            ({"num_hidden_layers": 2}, "not part of the model"),
            ({"intermediate_size": 97}, "misshaped"),
            ({"hidden_size": None}, "hidden_size missing"),
            ({"model_type": "llama"}, "model_type 'llama'"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ],
    )
    def test_a_configuration_that_does_not_fit(self, refused, directory, change, message):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert message in refused("--model", directory)
