"""Tests of input errors of scripts/run_decode.py. Each prints one line on stderr, has exit status
2, and runs no step.
"""

import json
import shutil
import sys

import jax
import pytest

from pallas_attn.models.cli import model as cli_model
from pallas_attn.models.cli.decode import command as run_decode
from pallas_attn.models.engine import Engine
from tests.kit.slow_cases import slow_cases
from tests.scripts.command_lines import GOLDEN, MAX_POSITIONS, SIZES, VOCAB_SIZE

JOIN = ["--mesh", "data=2", "--num-processes", "2", "--process-id", "0"]
QUANTISED = ["--random", "qwen3-tiny", "--kv-dtype", "fp8"]
LONG = "x" * 300
DIGITS = "9" * 5000  # Python's int() rejects more than 4300 digits


class TestNumbers:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--max-tokens", DIGITS], "--max-tokens: invalid int value: '999"),
            (["--top-k", str(2**31)], "--top-k: expected an integer of less than 2147483648, got 2147483648"),
            (["--max-prefill-seqs", "9" * 30], "--max-prefill-seqs: expected an integer of less than 2147483648"),
            (["--decode-buckets", "9" * 30], "--decode-buckets: expected an integer of less than 2147483648, got 99"),
            (["--decode-buckets", DIGITS], "--decode-buckets: invalid sizes value: '999"),
            (["--speculate", f"ngram:{DIGITS}"], "--speculate: expected 1 to 64 drafts, got '999"),
            (["--speculate", "ngram:\u0663"], "--speculate: expected 1 to 64 drafts, got '\u0663'"),
            (["--speculate", f"mtp:{DIGITS}"], "--speculate: expected 1 to 64 drafts, got '999"),
            (["--speculate", f"mtp:2:{DIGITS}"], "--speculate: expected mtp:N:M with 1 to 8 alternatives, got 'mtp"),
            (["--speculate", f"draft:x:{DIGITS}"], "--speculate: expected 1 to 64 drafts, got '999"),
            (["--mesh", f"tensor={DIGITS}"], "--mesh: expected a positive number of devices along tensor, got '999"),
            ([*JOIN, "--coordinator", f"host:{DIGITS}"], "--coordinator: expected HOST:PORT, got 'host:999"),
            ([*JOIN, "--coordinator", "host:\u0663"], "--coordinator: expected HOST:PORT, got 'host:\u0663'"),
            ([*JOIN, "--coordinator=a:1", "--process-timeout=1e30"], "--process-timeout: expected at least 1 and at "),
        ],
    )
    def test_number_out_of_range(self, usage_error, args, message):
        assert message in usage_error(*args)


class TestRefusals:
    @slow_cases(
        "args43-max_model_len: expected 2 to the model's",
        "args63---speculate: num_nextn_predict_layers: expected at least 1",
        "args58-speculate: a tree of drafts needs decode rows of several tokens; with split contexts each token",
    )  # fmt: skip
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
            (["--top-k", "-2"], "top_k"),
            (["--top-p", "0"], "top_p"),
            (["--top-p", "1.5"], "top_p"),
            (["--seed", "-1"], "seed"),
            (["--random", "v4"], "invalid choice: 'v4'"),
            (["--model", "x", "--random", "v3-tiny"], "not allowed with argument"),
            (["--prompt", "x", "--prompt-ids", "y"], "not allowed with argument"),
            (["--prompt", "What?"], "--prompt needs a --model"),
            (["--dtype", "float16"], "invalid choice: 'float16'"),
            (["--mla", "both"], "invalid choice: 'both'"),
            (["--kv-dtype", "int4"], "invalid choice: 'int4'"),
            (["--kv-dtype", "int8"], "'float8_e4m3fn'] for latents, got int8"),
            (["--kv-dtype", "fp8"], "latent_dim must be a multiple of 128 for float8_e4m3fn latents"),
            (["--kv-scales", "x"], "--kv-scales needs --kv-dtype int8 or fp8"),
            (["--random", "qwen3-tiny", "--kv-dtype", "fp8", "--kv-scales", "no such file"], "no such file: not a"),
            ([*QUANTISED, "--kv-scales", "."], "--kv-scales: .: not a regular file"),
            ([*QUANTISED, "--kv-scales", LONG], f"--kv-scales: cannot read {LONG}: [Errno 36] File name too long"),
            (["--random", "qwen3-tiny", "--mla", "absorb"], "a qwen3 has no latents to absorb"),
            (
                ["--random", "v32-tiny", "--mla", "expand"],
                "mla: expand does not support the sparse attention of a deepseek_v32",
            ),
            (["--random", "v3-tiny", "--index-topk", "8"], "--index-topk: a deepseek_v3 attends to all keys"),
            (["--random", "v32-tiny", "--index-topk", "0"], "--index-topk: expected at least 1, got 0"),
            (["--random", "qwen3-tiny", "--head-windows", "no such file"], "No such file or directory"),
            (["--implementation", "cuda"], "cuda"),
            (["--implementation", ""], "implementation"),
            (["--implementation", "mosaic"], "write_latent cannot run here: mosaic"),
            (["--implementation", "mosaic,triton"], "takes bfloat16 and float16 queries, got float32"),
            (["--page-size", "0"], "--page-size: expected at least 1, got 0"),
            (["--page-size", "-1"], "--page-size: expected at least 1, got -1"),
            (["--num-pages", "0"], "--num-pages: expected at least 1, got 0"),
            (["--num-pages", str(2**40)], "num_pages: expected fewer than 2**31 tokens"),
            (["--page-size", str(2**40)], "num_pages: expected fewer than 2**31 tokens"),
            (["--max-batched-tokens", "0"], "--max-batched-tokens: expected at least 1, got 0"),
            (["--max-num-seqs", "-100"], "--max-num-seqs: expected at least 1, got -100"),
            (
                ["--max-num-seqs", "9", "--max-batched-tokens", "8"],
                "max_num_seqs: expected at most max_batched_tokens=8",
            ),
            (["--max-prefill-seqs", "0"], "--max-prefill-seqs: expected at least 1, got 0"),
            (["--max-model-len", "-3"], "--max-model-len: expected at least 1, got -3"),
            (["--max-model-len", "1"], "max_model_len: expected 2 to the model's"),
            (["--decode-buckets", "a"], "--decode-buckets: invalid sizes value: 'a'"),
            (["--decode-buckets", "2,1"], "decode_buckets: expected ascending sizes from 1 or more up to 1"),
            (["--prefill-buckets", "8", "--max-batched-tokens", "9"], "prefill_buckets: expected ascending sizes"),
            (
                ["--batch-invariant", "--decode-buckets", "1,4"],
                "decode_buckets: expected None or (4,) if batch_invariant",
            ),
            (["--mesh", "tensor"], "--mesh: expected AXIS=N, separated by commas, got 'tensor'"),
            (["--mesh", "tensor=two"], "--mesh: expected a positive number of devices along tensor, got 'two'"),
            (["--mesh", "tensor=0"], "--mesh: expected a positive number of devices along tensor, got '0'"),
            (["--mesh", "tensor=-2"], "--mesh: expected a positive number of devices along tensor, got '-2'"),
            (
                ["--mesh", f"tensor={10**9}"],
                "--mesh: expected a positive number of devices along tensor, got '1000000000'",
            ),
            (["--mesh", "tensor=2,tensor=2"], "--mesh: expected each axis once, got tensor again"),
            (["--mesh", "heads=2"], "mesh: expected axes among data, tensor, context, expert, got 'heads'"),
            (["--mesh", "tensor=999"], "mesh: expected at most the 8 devices that are here, got 999"),
            (["--mesh", "data=2,expert=1"], "mesh: expert: expected a multiple of data=2 that divides data x tensor"),
            (["--mesh", "tensor=3"], "mesh: tensor: devices: expected a divisor of 4 query heads, got 3"),
            (
                ["--random", "v3-tiny", "--mesh", "context=2", "--speculate", "mtp:2:2"],
                "speculate: a tree of drafts needs decode rows of several tokens; with split contexts each token",
            ),
            (
                ["--mesh=tensor=2", "--prefix-cache=x", "--coordinator=host:1", "--num-processes=2", "--process-id=0"],
                "--prefix-cache: not with --coordinator",
            ),
            (
                ["--batch-invariant", "--mla", "expand"],
                "batch_invariant: expanded attention computes chunk and cached prefix separately",
            ),
            (["--batch-invariant", "--no-chunked-prefill"], "needs --max-batched-tokens"),
            (
                ["--random", "qwen3-tiny", "--speculate", "mtp"],
                "--speculate: multi-token prediction: a qwen3 has no modules",
            ),
            (
                ["--model", str(GOLDEN), "--speculate", "mtp:2"],
                "--speculate: num_nextn_predict_layers: expected at least 1",
            ),
            (["--num-pages", "2"], "prompt 0: the prompt needs 4 pages, the pool has 2"),
            (["--no-chunked-prefill", "--max-batched-tokens", "16"], "a step takes 16 unless prefill is chunked"),
            (["--chat"], "--chat needs a --model with a chat template"),
            (["--chat", "--prompt", "x"], "not allowed with argument"),
            (["--system", "Be brief."], "--system needs --chat"),
            (["--model", str(GOLDEN), "--chat", "--verify"], "--chat: not with --verify"),
            (["--model", str(GOLDEN), "--chat", "--dump-logits", "x"], "--chat: not with --dump-logits"),
            (["--model", str(GOLDEN), "--chat"], "has no tokenizer.json with a chat template"),
            (["--cascade-attention", "--batch-invariant"], "cascade_attention: expected False with batch_invariant"),
            (["--cascade-attention"], "cascade_attention: cascade_decode attends to keys and values"),
        ],
    )
    def test_wrong_flags_are_errors(self, usage_error, args, message):
        assert message in usage_error(*args)

    @slow_cases(
        "content9-prompt 1: prompt_ids: expected ids from 0 to 255, got 256",
        "content8-prompt_ids of request 1 must hold at least one token",
    )  # fmt: skip
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
    def test_wrong_prompts_are_errors(self, usage_error, write_ids, content, message):
        assert message in usage_error("--model", GOLDEN, *write_ids(content))

    def test_prompt_larger_than_the_pool_is_an_error(self, usage_error, write_ids):
        message = usage_error("--model", GOLDEN, *SIZES, *write_ids([[1] * 105]))
        assert "prompt 0: the prompt needs 27 pages, the pool has 26" in message

    @pytest.mark.parametrize(
        ("model", "content", "message"),
        [
            ("qwen3-tiny", "[" * 100_000, "windows.json: not JSON"),
            ("qwen3-tiny", {"window": [8, 8]}, "windows.json: head_windows: expected a list with one entry per layer"),
            ("qwen3-tiny", [None, 0, 8], "windows.json: head_windows of layer 1: expected null, a window from 1"),
            ("qwen3-tiny", [None, 8], "--head-windows: head_windows: expected one for each of 3 layers, got 2"),
            ("qwen3-tiny", [8, 8, {"window": [8]}], "layer 2: expected one for each of 2 KV heads, got 1"),
            ("v3-tiny", [None, 8, 8], "--head-windows: head_windows: all heads of latent attention share one latent"),
        ],
    )
    def test_wrong_windows_are_errors(self, usage_error, tmp_path, model, content, message):
        path = tmp_path / "windows.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert message in usage_error("--random", model, "--head-windows", path)

    def test_unreadable_prompts_are_errors(self, usage_error, tmp_path):
        assert "No such file" in usage_error("--prompt-ids", tmp_path / "none.json")
        assert "Is a directory" in usage_error("--prompt-ids", tmp_path)
        (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
        assert "not JSON" in usage_error("--prompt-ids", tmp_path / "latin.json")

    def test_text_without_a_tokenizer_is_an_error(self, usage_error):
        assert "has no tokenizer.json" in usage_error("--model", GOLDEN, "--prompt", "What?")

    @pytest.mark.parametrize("flag", ["--json", "--dump-logits", "--plot"])
    def test_files_that_cannot_be_written_are_errors(self, usage_error, tmp_path, flag):
        assert f"{flag}: cannot write" in usage_error(flag, tmp_path)
        assert "there is no directory" in usage_error(flag, tmp_path / "none" / "out")
        assert usage_error(flag, LONG).endswith(f"{flag}: cannot write {LONG}: File name too long")

    def test_two_results_in_one_file_are_an_error(self, usage_error, tmp_path):
        out = tmp_path / "out"
        assert usage_error("--json", out, "--plot", out).endswith(f"--plot: cannot write {out}: --json does")

    def test_profile_folder_that_cannot_be_created(self, usage_error, tmp_path):
        (tmp_path / "file").write_text("")
        assert "--profile: cannot make" in usage_error("--profile", tmp_path / "file")

    def test_plot_without_matplotlib_is_an_error(self, usage_error, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "pip install 'pallas_attn[plot]'" in usage_error("--plot", tmp_path / "plot.png")

    def test_unknown_default_implementation(self, usage_error, monkeypatch):
        monkeypatch.setenv("PALLAS_ATTN_IMPLEMENTATION", "cuda")
        assert "cuda" in usage_error()

    def test_pool_larger_than_memory_is_an_error(self, usage_error, monkeypatch):
        def full(*args, **kwargs):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 byte.")

        monkeypatch.setattr(run_decode, "Engine", full)
        assert "Out of memory allocating 1 byte." in usage_error()

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (jax.errors.JaxRuntimeError("Out of memory\n1 byte."), "Out of memory 1 byte."),
            (MemoryError(), "MemoryError"),
        ],
    )
    def test_weights_larger_than_memory_are_an_error(self, usage_error, monkeypatch, error, reason):
        def full(*args, **kwargs):
            raise error

        monkeypatch.setattr(cli_model, "load_model", full)
        monkeypatch.setattr(cli_model, "random_model", full)
        assert usage_error("--model", GOLDEN).endswith(f"--model: loading the weights: {reason}")
        assert usage_error("--random", "v3-tiny").endswith(f"--random: loading the weights: {reason}")

    def test_shape_without_an_implementation(self, usage_error, monkeypatch):
        def nothing(engine, on_compiled):
            raise ExceptionGroup("mla_decode: no implementation", [NotImplementedError("too wide"), ValueError("no")])

        monkeypatch.setattr(Engine, "warmup", nothing)
        assert usage_error().endswith("mla_decode: no implementation; too wide; no")

    def test_missing_device_is_an_error(self, usage_error, monkeypatch):
        def nothing():
            raise RuntimeError("no such backend")

        monkeypatch.setattr(jax, "devices", nothing)
        assert "no such backend" in usage_error()


class TestWrongCheckpoints:
    @pytest.fixture
    def directory(self, tmp_path):
        directory = tmp_path / "model"
        shutil.copytree(GOLDEN, directory)
        return directory

    def test_missing_checkpoint_is_an_error(self, usage_error, tmp_path):
        assert "there is no config.json" in usage_error("--model", tmp_path / "none")
        assert "there is no config.json" in usage_error("--model", tmp_path)

    def test_pickled_checkpoint_is_an_error(self, usage_error, directory):
        for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
            path.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        assert "pytorch_model.bin may run code" in usage_error("--model", directory)

    def test_missing_shard_is_an_error(self, usage_error, directory):
        (directory / "model-00002-of-00005.safetensors").unlink()
        assert "model-00002-of-00005.safetensors: there is no such file" in usage_error("--model", directory)

    def test_truncated_shard_is_an_error(self, usage_error, directory):
        shard = directory / "model-00001-of-00005.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        assert "not a safetensors file" in usage_error("--model", directory)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_hidden_layers": 4}, "missing"),
            ({"num_hidden_layers": 2}, "not part of the model"),
            ({"intermediate_size": 97}, "misshaped"),
            ({"hidden_size": None}, "hidden_size missing"),
            ({"model_type": "mamba"}, "model_type 'mamba'"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ],
    )
    def test_configuration_that_does_not_match(self, usage_error, directory, change, message):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert message in usage_error("--model", directory)


class TestWrongTexts:
    def test_empty_text_is_an_error(self, text_model, usage_error):
        assert "text 1 is empty" in usage_error("--model", text_model, "--prompt", "w1", " ")

    def test_broken_template_is_an_error(self, text_model, usage_error):
        (text_model / "chat_template.jinja").write_text("{% endif %}")
        assert "chat template is malformed" in usage_error("--model", text_model, "--prompt", "w1")

    def test_broken_tokenizer_is_an_error(self, text_model, usage_error):
        (text_model / "tokenizer.json").write_text("{}")
        assert "tokenizer.json" in usage_error("--model", text_model)
