"""Measure how much a cache dtype changes the logits of the golden models.

    python -m scripts.tools.cache_costs [NAME ...] [--weights float32 bfloat16] [--goldens DIR] [--json OUT]

A golden is a small checkpoint in tests/goldens with prompts and the outputs of Hugging Face transformers. A sequence is
a prompt of a golden followed by its greedy continuation. One forward pass computes the logits at all positions of a
sequence. The baseline is the same pass with a cache of the dtype of the weights. Goldens of DeepSeek are widened first,
because their latents are too narrow for scales (`wide_latents`). Except for rounding, results do not depend on the
device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.cli.command_line import check_outputs, exit_status, write_report
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config
from pallas_attn.models.decoder import AttentionSettings, Decoder, pad_tokens, page_size_of, run_sequence, split_model
from scripts.bench.harness import device
from scripts.tools.wide_latents import save_wide

ROOT = Path(__file__).parents[2]
LATENT_CACHES = ("bfloat16", "float8_e4m3fn")
KV_CACHES = (*LATENT_CACHES, "int8")
V4_CACHES = ("bfloat16",)
"""Cache dtypes that are compared with the baseline: `LATENT_CACHES` for latents, `KV_CACHES` for keys and values, and
`V4_CACHES` for DeepSeek-V4, because the heads of the golden are too narrow for its fp8 format.
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Differences between logits and baseline logits.

    Attributes:
      largest, rms: maximum and root mean square of the differences, over all logits of all positions.
      kl_mean, kl_largest: mean and maximum over positions of the Kullback-Leibler divergence KL(baseline || compared),
      in nats.
      equal_tokens: share of positions with the same greedy token.
    """

    largest: float
    rms: float
    kl_mean: float
    kl_largest: float
    equal_tokens: float


def cost(logits: Float[np.ndarray, "n V"], wanted: Float[np.ndarray, "n V"]) -> Cost:
    """Compare `logits` with the baseline `wanted`.

    >>> cost(np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([[0.0, 0.0], [3.0, 1.0]])).equal_tokens
    0.5
    """
    moved = np.asarray(logits, np.float64) - wanted
    p, q = (_log_softmax(np.asarray(x, np.float64)) for x in (wanted, logits))
    divergence = np.sum(np.exp(p) * (p - q), axis=-1)
    return Cost(
        largest=float(np.abs(moved).max()),
        rms=float(np.sqrt(np.mean(moved**2))),
        kl_mean=float(divergence.mean()),
        kl_largest=float(divergence.max()),
        equal_tokens=float(np.mean(logits.argmax(-1) == wanted.argmax(-1))),
    )


def _log_softmax(x: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sequences_of(golden: Path) -> list[list[int]]:
    """Return each prompt of a golden with its greedy continuation."""
    prompts = json.loads((golden / "prompts.json").read_text())
    with np.load(golden / "golden.npz") as arrays:
        return [prompt + arrays[f"tokens_{i}"].tolist() for i, prompt in enumerate(prompts)]


def all_logits(model: Decoder, sequences: Sequence[Sequence[int]], cache_dtype: str) -> Float[np.ndarray, "n V"]:
    """Return the logits at all positions of all sequences, concatenated, computed with caches of dtype
    `cache_dtype`.
    """
    step, weights = split_model(model)
    allocate = functools.partial(model.allocate_caches, dtype=cache_dtype)

    @jax.jit
    def run(weights: list[Array], tokens: Array, num_tokens: Array, rows: Array) -> Array:
        return run_sequence(step, weights, allocate, tokens, num_tokens, rows, page_size_of(model.config))[0]

    found = []
    for sequence in sequences:
        tokens = pad_tokens(sequence)
        rows = np.arange(len(tokens), dtype=np.int32)
        found.append(np.asarray(run(weights, tokens, np.int32(len(sequence)), rows))[: len(sequence)])
    return np.concatenate(found)


def compare(golden: Path, weights: str) -> Iterator[dict[str, Any]]:
    """Yield the cost of each cache dtype for the model of a golden. The baseline has a cache of the dtype `weights`."""
    sequences, settings = sequences_of(golden), AttentionSettings(implementation="xla")
    config = json.loads((golden / "config.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        if "kv_lora_rank" in config:
            save_wide(golden, Path(directory))
            golden = Path(directory)
        model = load_model(golden, jnp.dtype(weights), settings)
    is_v4 = isinstance(model.config, DeepseekV4Config)
    is_latent = is_v4 or isinstance(model.config, DeepSeekConfig)
    wanted = all_logits(model, sequences, weights)
    for dtype in V4_CACHES if is_v4 else LATENT_CACHES if is_latent else KV_CACHES:
        if dtype == weights:
            continue
        yield {
            "cached": "latents" if is_latent else "keys and values",
            "weights": weights,
            "cache": dtype,
            "compared_with": weights,
            "positions": len(wanted),
            "deviation": float(wanted.std()),
            **dataclasses.asdict(cost(all_logits(model, sequences, dtype), wanted)),
        }


def report(
    goldens: Path,
    names: Sequence[str],
    weights: Sequence[str],
    compare: Callable[[Path, str], Iterator[dict[str, Any]]] = compare,
    describe: Callable[[dict[str, Any]], str] = lambda case: f"{case['cache']:<14}",
) -> dict[str, Any]:
    """Compare and print all cases. Return the report.

    Args:
      goldens: folder of the goldens.
      names: names of goldens.
      weights: dtypes of the weights.
      compare: function that yields the cases of a golden and a dtype.
      describe: function that describes a case in one line.
    """
    here, cases = device.description(), []
    for name in names:
        for dtype in weights:
            for case in compare(goldens / name, dtype):
                cases.append({"model": name, **case})
                print(
                    f"{name:<16}{dtype} weights, {describe(case)}"
                    f" rms {case['rms']:.2g}, largest {case['largest']:.2g}, KL {case['kl_mean']:.2g},"
                    f" tokens {case['equal_tokens']:.1%}",
                    flush=True,
                )
    return {**here, "cases": cases}


def main() -> int:
    """Run the command line."""
    return exit_status("cache_costs", run)


def run() -> int:
    """Run the tool. Return the exit status."""
    return compare_goldens("cache_costs", __doc__, all_goldens, report)


def all_goldens(goldens: Path) -> list[str]:
    """Return the names of the goldens in a folder."""
    return sorted(path.parent.name for path in goldens.glob("*/golden.npz"))


def compare_goldens(
    tool: str,
    description: str,
    find: Callable[[Path], list[str]],
    report: Callable[[Path, Sequence[str], Sequence[str]], dict[str, Any]],
    kind: str = "golden",
) -> int:
    """Parse the command line of a tool that compares goldens, and write its report. Return the exit status.

    Args:
      tool: name of the tool and of its report.
      description: text whose first line describes the tool.
      find: function that returns the names of the goldens in a folder that the tool supports.
      report: function of the folder, the names of goldens and the dtypes of the weights that returns the report.
      kind: what the tool compares, for an error message.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="goldens; all that the tool supports by default")
    parser.add_argument("--weights", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--goldens", type=Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / f"{tool}.json")
    args = parser.parse_args()
    known = find(args.goldens)
    if unknown := set(args.names) - {*known}:
        parser.error(f"there is no {kind} named {', '.join(sorted(unknown))}; the goldens are {', '.join(known)}")
    check_outputs({"--json": args.json}, make_folders=True)
    write_report("--json", args.json, report(args.goldens, args.names or known, args.weights))
    return 0


if __name__ == "__main__":
    sys.exit(main())
