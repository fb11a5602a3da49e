"""Measure the engine: prefill and decode speed by batch size, and the savings of prefix cache, windows and cascades.

    python scripts/bench_engine.py [--config v3-tiny mla-25m] [--batch 1 8 32] [--transformers PYTHON]
    python scripts/bench_engine.py --config v2-lite [--batch 1 8 64] [--contexts 1024 8192 32768] [--step-tokens 16384]
        [--limit-seconds 300]
    python scripts/bench_engine.py --config v4-flash [--layers 6] [--batch 1 16 64] [--contexts 8192 131072 1048576]
        [--cache fp8] [--prefill 8192 65536] [--kernels] [--no-parts] [--limit-seconds 200]
    python scripts/bench_engine.py --head-windows [--windowed 1 7] [--plot OUT.png] [--limit-seconds 300]
    python scripts/bench_engine.py --shared-prefix [--limit-seconds 300]

The first form measures small models (scripts/bench/engine/small_models.py). Each number is the median of several runs
after all steps are compiled; compilation time is reported separately. Prefill speed is batch x prompt tokens divided by
the time of a run with one new token per request. Decode speed is batch x (new tokens - 1) divided by the difference
between the times of a run with all new tokens and of a run with one. `--transformers PYTHON` names a Python that has
torch and transformers. Hugging Face transformers' `generate` then runs the same weights after our runs
(scripts/bench/peers/transformers_generate.py).

The second form measures a model of real size, DeepSeek-V2-Lite with random bfloat16 weights, and compares times with
the roofline (scripts/bench/engine/serving.py).

The third form measures decode steps of models with published widths and fewer layers, v4-flash, gemma4-31b and
gemma4-26b-a4b, over filled caches, and the parts of their layers (scripts/bench/engine/cut_models.py).

The fourth form measures windows of some KV heads (scripts/bench/engine/head_windows.py): contexts per pool, throughput
and latencies.

The fifth form measures decode steps of requests that share a prefix, with `EngineConfig.cascade_attention` and without
(scripts/bench/engine/shared_prefix.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.cli.command_line import (
    UsageError,
    as_usage_error,
    check_outputs,
    exit_status,
    write_report,
    writing,
)
from pallas_attn.models.cli.model import implementations
from pallas_attn.models.config import PRESETS, GQAConfig
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import EngineConfig
from scripts.bench.engine import cut_models, head_windows, serving, shared_prefix
from scripts.bench.engine.cut_models import CutWork
from scripts.bench.engine.filled import CACHES
from scripts.bench.engine.head_windows import HeadWindowSizes
from scripts.bench.engine.serving import Serving
from scripts.bench.engine.shared_prefix import SharedPrefixSizes
from scripts.bench.engine.small_models import Workload, bench_config, num_cores, show
from scripts.bench.harness.device import description
from scripts.bench.harness.session import RESULTS

LARGE = "v2-lite"
"""Configuration of real size. Its random weights are made on the device and not written to disk."""

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
        "step_tokens": 4096,
        "limit_seconds": math.inf,
    },
    "models with fewer layers": {
        "config": [],
        "layers": None,
        "batch": [1, 16, 64],
        "contexts": None,
        "new_tokens": 24,
        "step_tokens": 8192,
        "prefill": [],
        "cache": None,
        "no_parts": False,
        "kernels": False,
        "limit_seconds": math.inf,
    },
    "--head-windows": {"windowed": [1, 7], "plot": None, "limit_seconds": math.inf},
    "--shared-prefix": {"limit_seconds": math.inf},
}
"""Options and defaults of each kind of measurement. Options that are not listed are common to all kinds."""


def settings_of(args: argparse.Namespace) -> AttentionSettings:
    named = args.implementation
    return AttentionSettings(implementation=None if named == "auto" else tuple(named.split(",")))


def cut_work_of(args: argparse.Namespace) -> CutWork:
    return CutWork(
        tuple(args.batch),
        tuple(args.contexts or cut_models.MODELS[args.config[0]].contexts),
        args.new_tokens,
        cut_models.MODELS[args.config[0]].page_size,
        prompts=tuple(args.prefill),
        step_tokens=args.step_tokens,
        cache_dtype=None if args.cache is None else CACHES[args.cache],
        parts=not args.no_parts,
        kernels=args.kernels,
    )


def cut_layers_of(args: argparse.Namespace) -> int:
    return args.layers or cut_models.MODELS[args.config[0]].layers


def serving_of(args: argparse.Namespace) -> Serving:
    return Serving(
        tuple(args.batch),
        tuple(args.contexts),
        args.new_tokens,
        args.limit_seconds,
        max_batched_tokens=args.step_tokens,
        prefill_seqs=max(8, args.step_tokens // 1024),
    )


def head_wise() -> tuple[GQAConfig, HeadWindowSizes]:
    """Return the configuration of the model whose KV heads get windows, and the sizes of the measurement."""
    backend = "cpu" if jax.default_backend() == "cpu" else "gpu"
    return head_windows.MODELS[backend], head_windows.SIZES[backend]


def bench_large(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measure the configuration of real size. Write the report after each case, so an interrupted run keeps its
    results.
    """
    work = serving_of(args)
    report = description() | {"dtype": args.dtype, "workload": dataclasses.asdict(work)}
    for result in serving.run(PRESETS[LARGE], work, settings_of(args), args.dtype):
        write_report("--json", out, report | {"results": [{"config": LARGE} | result]})
        console.print(serving.latest(result), highlight=False, soft_wrap=True)


def bench_cut(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measure a model with fewer layers. Write the report after each case."""
    work, (name,) = cut_work_of(args), args.config
    report = description() | {"machine": machine(), "dtype": args.dtype, "workload": dataclasses.asdict(work)}
    results = cut_models.run(name, cut_layers_of(args), work, settings_of(args), args.dtype, args.limit_seconds)
    for result in results:
        write_report("--json", out, report | {"results": [result]})
        console.print(cut_models.latest(result), highlight=False, soft_wrap=True)


def bench_head_wise(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measure windows of some KV heads. Write the report after each case."""
    config, sizes = head_wise()
    bench = head_windows.HeadWindowBench(config, args.dtype, settings_of(args), sizes, tuple(args.windowed))
    report = description() | {"machine": machine()}
    for result in head_windows.run(bench, args.limit_seconds):
        report |= result
        write_report("--json", out, report)
    console.print(head_windows.table(report))
    if args.plot is not None:
        report["long_decode"] = head_windows.long_decode(bench, max(bench.windowed))
        write_report("--json", out, report)
        with writing("--plot", args.plot) as file:
            head_windows.plot_long_decode(file, bench, report["long_decode"])


def bench_shared_prefix(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measure decode steps of requests that share a prefix. Write the report after each case."""
    config, sizes, settings = shared_prefix_model(args)
    report = description() | {"machine": machine()}
    for result in shared_prefix.run(config, args.dtype, settings, sizes, args.limit_seconds):
        report |= result
        write_report("--json", out, report)
    console.print(shared_prefix.table(report))


def shared_prefix_model(args: argparse.Namespace) -> tuple[GQAConfig, SharedPrefixSizes, AttentionSettings]:
    """Return the model without windows, the sizes and the attention settings. On a CPU, each saved page read counts."""
    backend, settings = "cpu" if jax.default_backend() == "cpu" else "gpu", settings_of(args)
    if backend == "cpu":
        settings = dataclasses.replace(settings, cascade_saved_bytes=1)
    return head_windows.MODELS[backend], shared_prefix.SIZES[backend], settings


def machine() -> str:
    return f"{platform.machine()}, {num_cores()} cores"


def bench_small(args: argparse.Namespace, console: Console, out: Path) -> None:
    """Measure the small configurations. Write the report after each result."""
    work, results = workload_of(args), []
    report = description() | {"machine": machine(), "dtype": args.dtype}
    report |= {"workload": dataclasses.asdict(work), "results": results}
    for name in args.config:
        results.append({})
        for result in bench_config(name, work, args.batch, settings_of(args), args.dtype, args.transformers):
            results[-1] = result
            write_report("--json", out, report)
        show(console, results[-1])


def workload_of(args: argparse.Namespace) -> Workload:
    return Workload(args.prompt_tokens, args.new_tokens, args.repeats)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", nargs="+", choices=[*PRESETS, *cut_models.MODELS], help="default: v3-tiny mla-25m")
    parser.add_argument("--head-windows", action="store_true", help="measure windows of some KV heads instead")
    parser.add_argument(
        "--windowed", nargs="+", type=int, help="for --head-windows: KV heads with a window, of 8 (default: 1 7)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="for --head-windows: plot of rows in use as a context grows"
    )
    parser.add_argument("--shared-prefix", action="store_true", help="measure requests that share a prefix instead")
    parser.add_argument(
        "--batch", nargs="+", type=int, help="default: 1 8 32; for v2-lite 1 8 64; for models with fewer layers 1 16 64"
    )
    parser.add_argument("--prompt-tokens", type=int, help="for small models (default: 128)")
    parser.add_argument(
        "--contexts", nargs="+", type=int, help="prompt tokens of v2-lite (default: 1024 8192 32768), or filled tokens"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: as many as fit on a GPU with 141 GB)")
    parser.add_argument("--prefill", nargs="+", type=int, help="also compute prompts of these lengths")
    parser.add_argument("--cache", choices=CACHES, help="dtype of the caches (default: --dtype)")
    parser.add_argument("--no-parts", action="store_true", default=None, help="do not measure parts of layers")
    parser.add_argument(
        "--kernels", action="store_true", default=None, help="also measure the kernels of a decode step with CUPTI"
    )
    parser.add_argument(
        "--new-tokens", type=int, help="at least 2, for one decode step (default: 64; with fewer layers 24)"
    )
    parser.add_argument(
        "--step-tokens", type=int, help="maximum new tokens of a step (default: 4096 for v2-lite, else 8192)"
    )
    parser.add_argument("--repeats", type=int, help="for small models (default: 3)")
    parser.add_argument("--limit-seconds", type=float, help="start no case after this time; not for small models")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; for large models bfloat16")
    parser.add_argument(
        "--implementation", default="auto", metavar="NAME[,NAME...]", help="implementation of attention"
    )
    parser.add_argument("--transformers", metavar="PYTHON", help="also time transformers with this Python")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: benchmarks/results/engine_<device>.json")
    args = parser.parse_args(argv)
    if args.head_windows and args.shared_prefix:
        parser.error("--head-windows and --shared-prefix are measured separately")
    of_heads = args.head_windows or args.shared_prefix
    named = [] if of_heads else args.config or []
    large = LARGE in named or not {*named}.isdisjoint(cut_models.MODELS)
    if large and len(named) > 1:
        parser.error(f"--config: {LARGE} and each of {', '.join(cut_models.MODELS)} are measured separately")
    measured = "small models"
    if large:
        measured = f"--config {LARGE}" if LARGE in named else "models with fewer layers"
    if of_heads:
        measured = "--head-windows" if args.head_windows else "--shared-prefix"
    for name in {name: None for options in DEFAULTS.values() for name in options}:
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS[measured].get(name))
        elif name not in DEFAULTS[measured]:
            takers = " and ".join(kind for kind, options in DEFAULTS.items() if name in options)
            parser.error(f"--{name.replace('_', '-')}: expected only for {takers}, got it for {measured}")
    if args.dtype is None:
        on_gpu = of_heads and jax.default_backend() != "cpu"
        args.dtype = "bfloat16" if on_gpu or (large and not named[0].endswith("-tiny")) else "float32"
    if not all(1 <= count < 8 for count in args.windowed or ()):
        parser.error("--windowed: expected 1 to 7 of 8 heads")
    counts = [args.prompt_tokens, args.repeats, args.step_tokens, args.layers]
    counts += [count for counts in (args.batch, args.contexts, args.prefill) for count in counts or ()]
    if any(count is not None and count < 1 for count in counts) or (
        args.new_tokens is not None and args.new_tokens < 2
    ):
        sizes = "--batch, --contexts, --layers, --prefill, --prompt-tokens, --step-tokens and --repeats"
        parser.error(f"{sizes} are at least 1, and --new-tokens 2")
    try:
        check_models(args)
        check_files(args)
        if args.transformers is not None:
            check_transformers(args.transformers)
    except (UsageError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    return args


def check_models(args: argparse.Namespace) -> None:
    """Raise UsageError, ValueError or NotImplementedError if a model cannot run with these options."""
    settings = settings_of(args)
    if args.head_windows:
        config, sizes = head_wise()
        engine = EngineConfig(sizes.num_pages, sizes.page_size, sizes.step_tokens)
        implementations(config, settings, engine.runner_config(sizes.context).largest_step, args.dtype)
        return
    if args.shared_prefix:
        model, sizes, settings = shared_prefix_model(args)
        engine = sizes.engine_config(cascade_attention=True)
        implementations(model, settings, engine.runner_config(engine.max_model_len or 0).largest_step, args.dtype)
        return
    if args.config[0] in cut_models.MODELS:
        work = cut_work_of(args)
        config, _ = cut_models.cut(cut_models.MODELS[args.config[0]].config, cut_layers_of(args))
        work.check(config)
        cut_models.fit(cut_models.shapes_of_model(config, settings, args.dtype), work)
        longest = max(work.contexts)
        engine = work.engine_config(work.batches, work.step_tokens if work.prompts else 0)
        pages = -(-longest // work.page_size)
        sizes = dataclasses.replace(engine.runner_config(longest).largest_step, num_pages=pages, table_pages=pages)
        implementations(config, settings, sizes, args.dtype)
        return
    for name in args.config:
        if name == LARGE:
            with as_usage_error(ValueError, prefix="--batch, --contexts, --step-tokens: "):
                flag, engine = "--contexts", serving_of(args).engine_config()
            longest = engine.max_model_len or 0
        else:
            flag, work = "--prompt-tokens", workload_of(args)
            longest = work.longest
            with as_usage_error(ValueError, prefix="--batch, --prompt-tokens: "):
                engine = work.engine_config(max(args.batch), longest, prefix_caching=True)
        limit = PRESETS[name].max_position_embeddings
        if longest > limit:
            raise UsageError(
                f"{flag}: expected sequences of at most {limit} tokens, the maximum of {name}, got {longest}"
            )
        implementations(PRESETS[name], settings, engine.runner_config(longest).largest_step, args.dtype)


def check_files(args: argparse.Namespace) -> None:
    """Create the folders of the output files. Raise UsageError on failure."""
    check_outputs({"--json": args.json, "--plot": args.plot}, make_folders=True)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'pallas_attn[plot]'")


def check_transformers(python: str) -> None:
    """Raise UsageError if `python` is not a Python with torch and transformers."""
    try:
        subprocess.run([python, "-c", "import torch, transformers"], check=True, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"--transformers: cannot run {python}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"--transformers: {python} cannot import torch and transformers: {reason}") from error


def main(argv: list[str] | None = None) -> int:
    if not os.environ.keys() & {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}:
        # A large model needs most of the device memory. JAX reads the fraction when it initializes the device, which
        # `parse_args` does.
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
    args = parse_args(argv)
    return exit_status("bench_engine", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Run the measurements of the arguments. Raise Failure if a result cannot be written."""
    console, kind = Console(), jax.devices()[0].device_kind.lower().replace(" ", "_")
    if args.head_windows:
        name, bench = "engine_head_windows", bench_head_wise
    elif args.shared_prefix:
        name, bench = "engine_shared_prefix", bench_shared_prefix
    elif LARGE in args.config:
        name, bench = f"engine_{LARGE}", bench_large
    elif args.config[0] in cut_models.MODELS:
        name, bench = f"engine_{args.config[0]}", bench_cut
    else:
        name, bench = "engine", bench_small
    out = args.json or RESULTS / f"{name}_{kind}.json"
    check_outputs({"--json": out}, make_folders=True)
    bench(args, console, out)
    console.print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
