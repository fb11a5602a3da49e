"""Time vLLM's engine on a model with random weights, for comparison with `scripts/bench_engine.py --config v2-lite`.

    pip install vllm==0.26.0
    python scripts/bench/peers/vllm_engine.py --model DIR [--cases 1x1024 64x1024 64x8192 1x8192] [--step-tokens 16384]
                                              [--new-tokens 64] [--eager] [--json OUT]

DIR has a config.json. The engine runs in this process without a tokenizer, with compiled CUDA graphs unless `--eager`
is given, and with the kernels that vLLM chooses.

A case BATCHxCONTEXT is BATCH requests that arrive at once, each with a prompt of CONTEXT random tokens. For the prefill
speed, each request gets one new token. This is repeated, and the fastest run counts, because the first runs compile
kernels. For the decode speed, requests whose prompts are computed first get more tokens, so that at the end all
requests decode together; only the steps in which all requests decode are measured, as in `scripts/bench_engine.py`.
Cases with at most `FEW_TOKENS` prompt tokens run twice, and the run with the shorter median step counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run the engine here, to time its steps

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import vllm  # pyrefly: ignore[missing-import]

from pallas_attn.models.cli.output_files import output_file

FEW_TOKENS = 2**16
"""Maximum total number of prompt tokens of a case that is repeated often. A larger case takes seconds per run."""

PREFILL_SEQS = 16
"""Assumed maximum number of prompts that one step completes, for `tokens_each`."""


def spread_weights(model: torch.nn.Module, latent_dim: int) -> int:
    """Replace the weights by random weights that keep activations near 1, like our random models.

    vLLM's random weights are far smaller. The activations of different tokens may then become equal and select the same
    experts. vLLM has already computed absorbed projections (`W_UK_T`, `W_UV`) from its weights; they are replaced, too.
    Return the number of replaced absorbed projections.
    """
    absorbed = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(1.0, 0.1)
            elif weight.dim() == 1:
                weight.normal_(0.0, 0.1)
            else:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5)
        for module in model.modules():
            for name in ("W_UK_T", "W_UV"):
                if isinstance(getattr(module, name, None), torch.Tensor):
                    getattr(module, name).normal_(0.0, latent_dim**-0.5)
                    absorbed += 1
    torch.cuda.synchronize()
    return absorbed


class Requests:
    """Run requests that arrive at once.

    Attributes:
      steps: end time of each step in seconds, number of its new tokens, and number of requests that had a token by
      then.
      newest: newest token of each request, by request id.
    """

    def __init__(self, llm: Any, prompts: list[list[int]], new_tokens: list[int], name: str):
        engine, counts = llm.llm_engine, {}
        self.steps: list[tuple[float, int, int]] = []
        self.newest: dict[str, int] = {}
        began = time.perf_counter()
        for index, (prompt, tokens) in enumerate(zip(prompts, new_tokens, strict=True)):
            params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
            engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs, grown = engine.step(), 0
            ended = time.perf_counter() - began
            for output in outputs:
                tokens = output.outputs[0].token_ids
                grown += len(tokens) - counts.get(output.request_id, 0)
                counts[output.request_id], self.newest[output.request_id] = len(tokens), tokens[-1]
            if outputs:
                self.steps.append((ended, grown, len(counts)))

    def all_began(self, batch: int) -> float:
        """Return the seconds until each of the `batch` requests had a token."""
        return next(ended for ended, _, begun in self.steps if begun == batch)

    def between_tokens(self, batch: int) -> list[float]:
        """Return the seconds of each step in which all `batch` requests decode."""
        return [
            after - before
            for (before, _, _), (after, grown, _) in itertools.pairwise(self.steps)
            if before >= self.all_began(batch) and grown == batch
        ]


def tokens_each(batch: int, context: int, new_tokens: int, step_tokens: int) -> list[int]:
    """Return the output tokens of each request: `new_tokens`, and one more for each step that may compute prompts of
    later requests.
    """
    prompt_tokens = max(1, step_tokens - batch)
    return [
        new_tokens + behind * context // prompt_tokens + -(-behind // PREFILL_SEQS) for behind in reversed(range(batch))
    ]


def measure(llm: Any, batch: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case. `prefill_beside_decoding_tokens_per_s` is the prefill speed of the run in which requests also
    decode.
    """
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    num_alone, num_together = (5, 2) if batch * context <= FEW_TOKENS else (2, 1)
    shape = (num_alone + num_together, batch, context)
    drawn, case = np.random.default_rng(batch).integers(0, vocab_size, shape).tolist(), f"{batch}x{context}"
    alone = [Requests(llm, drawn[i], [1] * batch, f"{case}-{i}").steps[-1][0] for i in range(num_alone)]
    new_tokens = tokens_each(batch, context, args.new_tokens, args.step_tokens)
    runs = [Requests(llm, prompts, new_tokens, f"{case}-{i}") for i, prompts in enumerate(drawn[num_alone:], num_alone)]
    decoded = [run.between_tokens(batch) for run in runs]
    between = min(decoded, key=statistics.median)
    together = runs[decoded.index(between)]
    return {
        "batch": batch,
        "context": context,
        "prefill_tokens_per_s": batch * context / min(alone),
        "prefill_s": alone,
        "prefill_beside_decoding_tokens_per_s": batch * context / together.all_began(batch),
        "decode_tokens_per_s": batch / statistics.median(between),
        "between_tokens_s_of_runs": [statistics.median(run) for run in decoded],
        "between_tokens_s": {"median": statistics.median(between), "min": min(between), "max": max(between)},
        "distinct_last_tokens": len({*together.newest.values()}),
    }


def copy_rate() -> float:
    """Measure a copy in device memory. Return the bytes per second, read plus written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target, seconds = torch.empty_like(source), []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    del target
    rate = 2 * source.numel() / statistics.median(seconds)
    del source
    torch.cuda.empty_cache()
    return rate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a directory with the model's config.json")
    parser.add_argument("--cases", nargs="+", default=["1x1024", "64x1024", "64x8192", "1x8192"], metavar="BxN")
    parser.add_argument("--step-tokens", type=int, default=16384, help="maximum new tokens of a step")
    parser.add_argument("--new-tokens", type=int, default=64, help="at least 3")
    parser.add_argument("--eager", action="store_true", help="no compiled graphs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="written after each case")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    began = time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
        "rates": {"copy": copy_rate()},
        "cases": [],
    }
    llm = vllm.LLM(
        str(args.model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max(context for _, context in cases) + 4 * args.new_tokens + 512,
        max_num_batched_tokens=args.step_tokens,
        max_num_seqs=max(batch for batch, _ in cases),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.85,
        enforce_eager=args.eager,
        disable_log_stats=True,
    )
    settings = llm.llm_engine.vllm_config
    latent_dim = settings.model_config.hf_text_config.kv_lora_rank
    report |= {
        "graphs": str(settings.compilation_config.cudagraph_mode),
        "step_tokens": settings.scheduler_config.max_num_batched_tokens,
        "ready_s": time.perf_counter() - began,
        "absorbed_projections": llm.apply_model(lambda model: spread_weights(model, latent_dim)),
    }
    Requests(llm, [[1, 2, 3]] * 2, [3] * 2, "first")
    for batch, context in cases:
        report["cases"].append(measure(llm, batch, context, args))
        result = report["cases"][-1]
        rates = ", ".join(f"{kind} {result[f'{kind}_tokens_per_s']:,.0f}" for kind in ("prefill", "decode"))
        print(f"vLLM, batch {batch}, context {context}: {rates} tokens/s", flush=True)
        if args.json:
            with output_file(args.json) as file:
                file.write((json.dumps(report, indent=1) + "\n").encode("utf-8"))


if __name__ == "__main__":
    main()
