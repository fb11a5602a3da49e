"""Measures the engine end to end: prefill and decode speed by batch size, and what prefix cache and windows save.

    python scripts/bench_engine.py [--config v3-tiny mla-25m] [--batch 1 8 32] [--transformers PYTHON]
    python scripts/bench_engine.py --config v2-lite [--batch 1 8 64] [--contexts 1024 8192 32768] [--limit-seconds 300]
    python scripts/bench_engine.py --head-windows [--windowed 1 7] [--plot OUT.png] [--limit-seconds 300]

Every number is the median of several runs on a warm engine; compilation is apart. The first token ends the prefill:
prefill speed is batch x prompt tokens by the time a run with one new token takes, decode speed is batch x (new tokens
- 1) by what the whole run takes longer. With `--transformers PYTHON`, a Python that has torch and transformers, the
same weights are also timed under transformers' own `generate` (bench/peers/transformers_generate.py), in turn with
ours.

`v2-lite`, which is of a real size, is measured otherwise (scripts/bench/serving.py): random weights are made on the
device, in bfloat16, and times are laid beside what the card could do at most.

`--head-windows` measures what windows for some KV heads save (scripts/bench/head_windows.py): contexts that a pool
holds, their throughput, and waiting times.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from models.checkpoints import load_model, save_random_checkpoint
from models.config import PRESETS, GQAConfig
from models.decoder import AttentionSettings
from models.engine import Engine, EngineConfig, SamplingParams

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.engine import head_windows
from scripts.bench.engine import serving as bench_serving
from scripts.bench.engine.head_windows import Sizes
from scripts.bench.engine.serving import Serving
from scripts.bench.harness.device import description
from scripts.cli.command_line import UsageError, as_usage_error, check_writable
from scripts.cli.model import implementations

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

LARGE = "v2-lite"
"""The configuration that is too large to be written to disk first."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "small models": {
        "config": ["v3-tiny", "mla-25m"],
        "batch": [1, 8, 32],
        "prompt_tokens": 128,
        "new_tokens": 64,
        "repeats": 3,
        "transformers": None,
    },
    f"--config {LARGE}": {
        "config": [LARGE],
        "batch": [1, 8, 64],
        "contexts": [1024, 8192, 32768],
        "new_tokens": 64,
        "limit_seconds": math.inf,
    },
    "--head-windows": {"windowed": [1, 7], "plot": None, "limit_seconds": math.inf},
}
"""By what is measured, the options that it takes beside those that all take, and their defaults."""

OWN_TOKENS = 32
"""That a request has after the prefix it shares, where the prefix cache is measured."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is run: prompts of `prompt_tokens`, each continued by `new_tokens`, `repeats` times."""

    prompt_tokens: int
    new_tokens: int
    repeats: int
    page_size: int = 64
    max_batched_tokens: int = 512

    @property
    def shared_tokens(self) -> int:
        """Of the prefix, where the prefix cache is measured."""
        return 4 * self.prompt_tokens

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most."""
        return self.shared_tokens + OWN_TOKENS + self.new_tokens

    def engine_config(self, batch: int, max_len: int, *, prefix_caching: bool) -> EngineConfig:
        return EngineConfig(
            num_pages=2 * batch * -(-max_len // self.page_size),
            page_size=self.page_size,
            max_batched_tokens=max(self.max_batched_tokens, batch),
            max_num_seqs=batch,
            max_model_len=max_len,
            prefix_caching=prefix_caching,
            decode_buckets=(batch,),
        )


def num_cores() -> int:
    """Cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompts(rng: np.random.Generator, vocab_size: int, batch: int, length: int) -> list[list[int]]:
    return rng.integers(0, vocab_size, (batch, length)).tolist()


def timed_run(engine: Engine, batch: list[list[int]], new_tokens: int) -> float:
    """Seconds from the first request to the last token."""
    began = time.perf_counter()
    outputs = engine.generate(batch, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    elapsed = time.perf_counter() - began
    for output in outputs:
        if len(output.output_ids) != new_tokens:
            raise RuntimeError(f"request {output.request_id} ended early: {output.finish_reason}")
        engine.forget(output.request_id)
    return elapsed


def make_engine(model: Any, work: Workload, batch: int, max_len: int, *, prefix_caching: bool) -> Engine:
    engine = Engine(model, work.engine_config(batch, max_len, prefix_caching=prefix_caching))
    engine.warmup()
    return engine


def bench_batch(model: Any, work: Workload, batch: int) -> dict[str, Any]:
    """Prefill and decode speed of `batch` requests at once, nothing shared between them."""
    engine = make_engine(model, work, batch, work.prompt_tokens + work.new_tokens, prefix_caching=False)
    rng = np.random.default_rng(batch)
    vocab_size = model.config.vocab_size
    timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), work.new_tokens)
    first, whole = [], []
    for _ in range(work.repeats):
        first.append(timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), 1))
        whole.append(timed_run(engine, prompts(rng, vocab_size, batch, work.prompt_tokens), work.new_tokens))
    prefill_s, total_s = statistics.median(first), statistics.median(whole)
    stats = engine.stats()
    return {
        "batch": batch,
        "prefill_s": prefill_s,
        "total_s": total_s,
        "prefill_tokens_per_s": batch * work.prompt_tokens / prefill_s,
        "decode_tokens_per_s": batch * (work.new_tokens - 1) / (total_s - prefill_s),
        "total_s_spread": [min(whole), max(whole)],
        "compilations": stats.compilations,
        "compile_s": stats.compile_s,
    }


def bench_prefix_cache(model: Any, work: Workload, batch: int) -> dict[str, Any]:
    """Requests that share a long prompt but for `OWN_TOKENS`, after one that computed it; cache off and on."""
    shared, own, requests = work.shared_tokens, OWN_TOKENS, 2 * batch
    rng = np.random.default_rng(0)
    row: dict[str, Any] = {"requests": requests, "shared_tokens": shared, "own_tokens": own, "batch": batch}
    for name, prefix_caching in (("off", False), ("on", True)):
        engine = make_engine(model, work, batch, work.longest, prefix_caching=prefix_caching)
        seconds = []
        for _ in range(work.repeats):
            prefix = prompts(rng, model.config.vocab_size, 1, shared)[0]
            tails = prompts(rng, model.config.vocab_size, requests, own)
            timed_run(engine, [prefix + tails[0]], 1)  # the first to come computes the prefix
            seconds.append(timed_run(engine, [prefix + tail for tail in tails], work.new_tokens))
        row[f"total_s_{name}"] = statistics.median(seconds)
        row[f"prefix_hit_rate_{name}"] = engine.stats().prefix_hit_rate
    row["speedup"] = row["total_s_off"] / row["total_s_on"]
    return row


def bench_transformers(python: str, checkpoint: Path, work: Workload, batches: list[int], dtype: str) -> dict[str, Any]:
    """The same weights under transformers' own generate."""
    script = Path(__file__).parent / "bench" / "peers" / "transformers_generate.py"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "transformers.json"
        command = [python, str(script), "--model", str(checkpoint), "--json", str(report), "--dtype", dtype]
        command += ["--prompt-tokens", str(work.prompt_tokens), "--new-tokens", str(work.new_tokens)]
        command += ["--repeats", str(work.repeats), "--threads", str(num_cores()), "--batch", *map(str, batches)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())


def settings_of(args: argparse.Namespace) -> AttentionSettings:
    named = args.implementation
    return AttentionSettings(implementation=None if named == "auto" else tuple(named.split(",")))


def serving_of(args: argparse.Namespace) -> Serving:
    return Serving(tuple(args.batch), tuple(args.contexts), args.new_tokens, args.limit_seconds)


def head_wise() -> tuple[GQAConfig, Sizes]:
    """The model whose heads get windows here, and how it is run."""
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    return head_windows.MODELS[backend], head_windows.SIZES[backend]


def bench_large(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measures the large configuration, and writes the report after each case, so that a run may end at any time."""
    serving = serving_of(args)
    report = description() | {"dtype": args.dtype, "workload": dataclasses.asdict(serving)}
    for result in bench_serving.run(PRESETS[LARGE], serving, settings_of(args), args.dtype):
        out.write_text(json.dumps(report | {"results": [{"config": LARGE} | result]}, indent=1) + "\n")
        console.print(bench_serving.latest(result), highlight=False, soft_wrap=True)


def bench_head_wise(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measures windows of some KV heads, and writes the report after each case."""
    config, sizes = head_wise()
    bench = head_windows.Bench(config, args.dtype, settings_of(args), sizes, tuple(args.windowed))
    report = description() | {"machine": machine()}
    for result in head_windows.run(bench, args.limit_seconds):
        report |= result
        out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(head_windows.table(report))
    if args.plot is not None:
        report["long_decode"] = head_windows.long_decode(bench, max(bench.windowed))
        out.write_text(json.dumps(report, indent=1) + "\n")
        head_windows.plot_long_decode(args.plot, bench, report["long_decode"])


def machine() -> str:
    return f"{platform.machine()}, {num_cores()} cores"


def bench_small(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measures the configurations that are written to disk first, and writes the report after each."""
    work, results = workload_of(args), []
    report = {
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "dtype": args.dtype,
        "workload": dataclasses.asdict(work),
        "results": results,
    }
    for name in args.config:
        results.append({})
        for result in bench_config(name, args, work):
            results[-1] = result
            out.write_text(json.dumps(report, indent=2) + "\n")
        show(console, results[-1])


def workload_of(args: argparse.Namespace) -> Workload:
    return Workload(args.prompt_tokens, args.new_tokens, args.repeats)


def bench_config(name: str, args: argparse.Namespace, work: Workload) -> Iterator[dict[str, Any]]:
    """Yields what was measured of a configuration, and again with what transformers takes, if that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / name
        save_random_checkpoint(checkpoint, PRESETS[name])
        model = load_model(checkpoint, args.dtype, settings_of(args))
        result: dict[str, Any] = {
            "config": name,
            "parameters": sum(weight.size for weight in jax.tree.leaves(nnx.state(model))),
            "batches": [bench_batch(model, work, batch) for batch in args.batch],
            "prefix_cache": bench_prefix_cache(model, work, min(8, max(args.batch))),
        }
        yield result
        if args.transformers is not None:
            peer = bench_transformers(args.transformers, checkpoint, work, args.batch, args.dtype)
            result["transformers"] = peer
            for ours, theirs in zip(result["batches"], peer["results"], strict=True):
                theirs_s = theirs["prefill_s"] + theirs["decode_s"]
                ours["speedup_over_transformers"] = {
                    "prefill": ours["prefill_tokens_per_s"] / theirs["prefill_tokens_per_s"],
                    "decode": ours["decode_tokens_per_s"] / theirs["decode_tokens_per_s"],
                    "total": theirs_s / ours["total_s"],
                }
            yield result


def show(console: Console, result: dict[str, Any]) -> None:
    title = f"{result['config']}: {result['parameters'] / 1e6:.1f}M parameters"
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("batch", "prefill tok/s", "decode tok/s", "total s", "compile s", "over transformers"):
        table.add_column(column, justify="right")
    for row in result["batches"]:
        ratio = row.get("speedup_over_transformers")
        versus = " ".join(f"{ratio[part]:.1f}x {part}" for part in ratio) if ratio else "not measured"
        table.add_row(
            str(row["batch"]),
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            f"{row['total_s']:.2f}",
            f"{row['compile_s']:.1f}",
            versus,
        )
    console.print(table)
    cache = result["prefix_cache"]
    console.print(
        f"prefix cache, {cache['requests']} requests sharing {cache['shared_tokens']} tokens:"
        f" {cache['total_s_off']:.2f} s without, {cache['total_s_on']:.2f} s with"
        f" ({cache['speedup']:.1f}x, hit rate {cache['prefix_hit_rate_on']:.0%})"
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", nargs="+", choices=PRESETS, help="default: v3-tiny mla-25m")
    parser.add_argument("--head-windows", action="store_true", help="measure windows of some KV heads instead")
    parser.add_argument(
        "--windowed", nargs="+", type=int, help="of --head-windows: KV heads with a window, of 8 (default: 1 7)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="of --head-windows: rows in use as a context grows"
    )
    parser.add_argument("--batch", nargs="+", type=int, help="default: 1 8 32; of v2-lite 1 8 64")
    parser.add_argument("--prompt-tokens", type=int, help="of small models (default: 128)")
    parser.add_argument("--contexts", nargs="+", type=int, help="prompt tokens of v2-lite (default: 1024 8192 32768)")
    parser.add_argument("--new-tokens", type=int, help="at least 2, for one decode step (default: 64)")
    parser.add_argument("--repeats", type=int, help="of small models (default: 3)")
    parser.add_argument("--limit-seconds", type=float, help="begin no case of v2-lite or windows after this")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; of a large model bfloat16")
    parser.add_argument("--implementation", default="auto", metavar="NAME[,NAME...]", help="of attention operations")
    parser.add_argument(
        "--transformers", metavar="PYTHON", help="a Python with torch and transformers, to time as well"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: benchmarks/results/engine_<device>.json")
    args = parser.parse_args(argv)
    large = not args.head_windows and LARGE in (args.config or ())
    if large and len(args.config) > 1:
        parser.error(f"--config: {LARGE} is measured on its own")
    measured = "--head-windows" if args.head_windows else f"--config {LARGE}" if large else "small models"
    for name in {name: None for options in DEFAULTS.values() for name in options}:
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS[measured].get(name))
        elif name not in DEFAULTS[measured]:
            takers = " and ".join(kind for kind, options in DEFAULTS.items() if name in options)
            parser.error(f"--{name.replace('_', '-')}: expected only for {takers}, got it for {measured}")
    if args.dtype is None:
        large |= args.head_windows and jax.default_backend() != "cpu"
        args.dtype = "bfloat16" if large else "float32"
    if not all(1 <= count < 8 for count in args.windowed or ()):
        parser.error("--windowed: expected 1 to 7 of 8 heads")
    counts = [args.prompt_tokens, args.repeats, *(args.batch or ()), *(args.contexts or ())]
    if any(count is not None and count < 1 for count in counts) or (
        args.new_tokens is not None and args.new_tokens < 2
    ):
        parser.error("--batch, --contexts, --prompt-tokens and --repeats are at least 1, and --new-tokens 2")
    try:
        check_models(args)
        check_files(args)
        if args.transformers is not None:
            check_transformers(args.transformers)
    except (UsageError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    return args


def check_models(args: argparse.Namespace) -> None:
    """Raises UsageError, ValueError or NotImplementedError where a model cannot be run as it is asked to be."""
    settings = settings_of(args)
    if args.head_windows:
        config, sizes = head_wise()
        engine = EngineConfig(sizes.num_pages, sizes.page_size, sizes.step_tokens)
        implementations(config, settings, engine.runner_config(sizes.context).largest_step, args.dtype)
        return
    for name in args.config:
        if name == LARGE:
            with as_usage_error(ValueError, prefix="--batch, --contexts: "):
                flag, engine = "--contexts", serving_of(args).engine_config()
            longest = engine.max_model_len or 0
        else:
            flag, work = "--prompt-tokens", workload_of(args)
            longest = work.longest
            with as_usage_error(ValueError, prefix="--batch, --prompt-tokens: "):
                engine = work.engine_config(max(args.batch), longest, prefix_caching=True)
        limit = PRESETS[name].max_position_embeddings
        if longest > limit:
            raise UsageError(f"{flag}: expected sequences of at most {limit} tokens, which {name} takes, got {longest}")
        implementations(PRESETS[name], settings, engine.runner_config(longest).largest_step, args.dtype)


def check_files(args: argparse.Namespace) -> None:
    """Makes the directories of the files to be written; raises UsageError where these cannot be."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            with as_usage_error(OSError, prefix=f"{flag}: "):
                path.parent.mkdir(parents=True, exist_ok=True)
            check_writable(flag, path)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def check_transformers(python: str) -> None:
    """Raises UsageError where this is no Python with torch and transformers."""
    try:
        subprocess.run([python, "-c", "import torch, transformers"], check=True, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"--transformers: cannot run {python}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"--transformers: {python} cannot import torch and transformers: {reason}") from error


def main(argv: list[str] | None = None) -> int:
    if not os.environ.keys() & {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}:
        # A large model leaves room for little else. Parsing looks at the device, after which it would be too late.
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    args = parse_args(argv)
    console, kind = Console(), jax.devices()[0].device_kind.lower().replace(" ", "_")
    if args.head_windows:
        name, bench = "engine_head_windows", bench_head_wise
    elif LARGE in args.config:
        name, bench = f"engine_{LARGE}", bench_large
    else:
        name, bench = "engine", bench_small
    out = args.json or RESULTS / f"{name}_{kind}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    bench(args, console, out)
    console.print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
