"""Time Hugging Face transformers' `generate` on a checkpoint, for comparison with scripts/bench_engine.py.

    pip install torch==2.13.0 transformers==5.23.0
    python scripts/bench/peers/transformers_generate.py --model DIR [--batch 1 8 32]
                                         [--prompt-tokens 128] [--new-tokens 64]
                                         [--dtype float32 bfloat16] [--threads 2] [--json OUT]

It decodes greedily with the KV cache, and with the attention and expert implementations that transformers chooses. All
prompts of a batch have equal length, so there is no padding, which is the best case for transformers. The report has
the median of several runs after a warm-up.

Prefill speed is batch x prompt tokens divided by the time to the first token. Decode speed is batch x (new tokens - 1)
divided by the time from the first to the last token.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]
from transformers import (  # pyrefly: ignore[missing-import]
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
)

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pallas_attn.models.cli.output_files import output_file


@dataclass(frozen=True)
class GenerateTiming:
    """Speed of one batch size in one dtype."""

    dtype: str
    attention: str
    experts: str
    batch: int
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class StepClock(StoppingCriteria):
    """Stopping criterion that records when each token was selected, and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(directory: Path, dtype: str) -> PreTrainedModel:
    """Load the model of a checkpoint. If the folder has no weights, make random weights for its config.json."""
    if any(directory.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # every run generates all its tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


def time_generate(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Run `generate` once. Return the seconds to the first token, and from the first to the last token."""
    clock = StepClock()
    start = time.perf_counter()
    model.generate(prompts, max_new_tokens=new_tokens, do_sample=False, use_cache=True, stopping_criteria=[clock])
    if len(clock.times) != new_tokens:
        raise RuntimeError(f"generate stopped after {len(clock.times)} of {new_tokens} tokens")
    return clock.times[0] - start, clock.times[-1] - clock.times[0]


def bench(model: PreTrainedModel, batch: int, prompt_tokens: int, new_tokens: int, repeats: int) -> GenerateTiming:
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(model.config.vocab_size, (batch, prompt_tokens), generator=generator)
    time_generate(model, prompts, new_tokens)
    prefill, decode = zip(*(time_generate(model, prompts, new_tokens) for _ in range(repeats)), strict=True)
    prefill_s, decode_s = median(prefill), median(decode)
    return GenerateTiming(
        dtype=str(model.dtype).removeprefix("torch."),
        attention=model.config._attn_implementation,
        experts=model.config._experts_implementation,
        batch=batch,
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill_tokens_per_s=batch * prompt_tokens / prefill_s,
        decode_tokens_per_s=batch * (new_tokens - 1) / decode_s,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint, or a config.json for random weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64, help="at least 2, for one decode step")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} has no config.json")
    if min(*args.batch, args.prompt_tokens, args.threads, args.repeats, args.new_tokens - 1) < 1:
        parser.error("--batch, --prompt-tokens, --threads and --repeats are at least 1, and --new-tokens 2")
    return args


def main() -> None:
    args = parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = []
    print(f"{'dtype':<10}{'batch':>6}{'prefill tok/s':>16}{'decode tok/s':>16}")
    for dtype in args.dtype:
        model = load(args.model, dtype)
        for batch in args.batch:
            timing = bench(model, batch, args.prompt_tokens, args.new_tokens, args.repeats)
            print(f"{dtype:<10}{batch:>6}{timing.prefill_tokens_per_s:>16.1f}{timing.decode_tokens_per_s:>16.1f}")
            results.append(asdict(timing))
    report = {
        "model": args.model.name,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "repeats": args.repeats,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "results": results,
    }
    if args.json:
        with output_file(args.json) as file:
            file.write((json.dumps(report, indent=2) + "\n").encode("utf-8"))


if __name__ == "__main__":
    main()
