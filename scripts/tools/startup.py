"""Measure startup times of operations, of an engine and of the command `pallas-attn info`, in new processes.

    python -m scripts.tools.startup [--ops paged_decode mla_decode_16 ...] [--engine v2-lite] [--info] [--json OUT]

Shapes are typical of serving. Each operation is measured in up to three new processes: `plain` without the kernel
cache, the compilation cache and the JAX patches; `cold` with empty cache folders; and `warm` with the folders that
`cold` filled. The report has the seconds of tracing and lowering, which is Python time, and of compiling the executable
or loading it from the cache. Calls are not executed.

With `--engine`, an engine with random weights and default sizes is measured in four new processes: with and without
compilation in the background, each with empty and with filled cache folders. The report has the seconds of
`Engine.warmup` until the engine is ready and until all programs are compiled, the CPU seconds of the process in this
time, and the number of programs that XLA compiled or loaded. Requests run during and after the compilation in the
background, and the report has the longest times between two tokens. With `--info`, the report has the
seconds of the commands `pallas-attn info` and `pallas-attn info --lower`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_attn.models.cli.command_line import check_outputs, exit_status, write_report

ROOT = Path(__file__).resolve().parents[2]
MODES = ("plain", "cold", "warm")


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return a function and the shapes of its arguments for each name of `OPS`."""
    import jax
    import jax.numpy as jnp

    import pallas_attn as pa

    def bf16(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def latent_call(heads: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        decode = functools.partial(pa.mla_decode, sm_scale=0.1)
        return decode, (bf16(64, 1, heads, 512), bf16(64, 1, heads, 64), latents, int32(64, 128), int32(64))

    pages = {"num_pages": 8192, "page_size": 64, "dtype": jnp.bfloat16}
    kv = jax.eval_shape(lambda: pa.PagedKV.allocate(pa.kv_cache_spec(**pages, num_kv_heads=8, head_dim=128)))
    latents = jax.eval_shape(
        lambda: pa.PagedLatent.allocate(pa.latent_cache_spec(**pages, latent_dim=512, rope_dim=64))
    )
    prefill = (bf16(2048, 32, 128), kv, int32(4, 64), int32(5), int32(4))
    ragged = (bf16(2048, 16, 192), bf16(2048, 16, 192), bf16(2048, 16, 128), int32(5), int32(5))
    gather = functools.partial(pa.gather_latent, length=4096)
    return {
        "paged_decode": (pa.paged_decode, (bf16(64, 1, 32, 128), kv, int32(64, 128), int32(64))),
        "mla_decode_16": latent_call(16),
        "mla_decode_128": latent_call(128),
        "paged_prefill": (pa.paged_prefill, prefill),
        "ragged_attention": (pa.ragged_attention, ragged),
        "write_kv": (pa.write_kv, (kv, bf16(64, 8, 128), bf16(64, 8, 128), int32(64))),
        "write_latent": (pa.write_latent, (latents, bf16(64, 576), int32(64))),
        "gather_latent": (gather, (latents, bf16(2048, 576), int32(4, 64), int32(5), int32(4))),
    }


OPS = (
    "paged_decode",
    "mla_decode_16",
    "mla_decode_128",
    "paged_prefill",
    "ragged_attention",
    "write_kv",
    "write_latent",
    "gather_latent",
)


def first_call(op: str) -> dict[str, float]:
    """Lower and compile the call of an operation. Return the seconds of both."""
    import jax

    function, arguments = calls()[op]
    jax.devices()  # initialize the driver before the measurement
    began = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    traced = time.perf_counter()
    lowered.compile()
    return {"lower_s": traced - began, "compile_s": time.perf_counter() - traced}


def start_of_engine(name: str, *, wait: bool) -> dict[str, float]:
    """Measure the start of an engine with random weights of a preset. Without `wait`, programs are compiled in the
    background.
    """
    import jax
    import jax.numpy as jnp

    from pallas_attn.models.checkpoints import random_model
    from pallas_attn.models.compilation_cache import enable_compilation_cache
    from pallas_attn.models.config import PRESETS
    from pallas_attn.models.engine import Engine, EngineConfig

    enable_compilation_cache()
    on_gpu = jax.default_backend() == "gpu"
    model = random_model(PRESETS[name], dtype=jnp.bfloat16 if on_gpu else jnp.float32)
    engine = Engine(model, EngineConfig(max_model_len=2048))
    programs = 0

    def count(event: str, *_: Any, **__: Any) -> None:
        nonlocal programs
        programs += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    began, cpu = time.perf_counter(), time.process_time()

    def elapsed(prefix: str) -> dict[str, float]:
        seconds, of_cpu = time.perf_counter() - began, time.process_time() - cpu
        return {f"{prefix}_s": seconds, f"{prefix}_cpu_s": of_cpu, f"{prefix}_programs": programs}

    engine.warmup(wait=wait)
    times = elapsed("ready")
    if not wait:
        gaps: list[float] = []
        while engine.is_compiling:
            gaps += _token_gaps(engine)
        times |= elapsed("all") | {"longest_gap_ms": 1e3 * max(gaps, default=0.0)}
    return times | {"longest_gap_afterwards_ms": 1e3 * max(_token_gaps(engine))}


def _token_gaps(engine: Any) -> list[float]:
    """Generate 64 tokens for one prompt. Return the seconds between tokens."""
    from pallas_attn.models.engine import SamplingParams

    times: list[float] = []
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    request = engine.add_request([*range(20, 40)], params, on_token=lambda *_: times.append(time.perf_counter()))
    while engine.has_unfinished:
        engine.step()
    engine.forget(request)
    engine.take_compiled()
    return [after - before for before, after in itertools.pairwise(times)]


def measure_engine(name: str) -> dict[str, dict[str, float]]:
    """Measure the start of an engine in four new processes."""
    report = {}
    for kind, flags in (("all programs first", ()), ("in the background", ("--background",))):
        with tempfile.TemporaryDirectory() as folder:
            cached = {"PALLAS_ATTN_COMPILATION_CACHE": folder}
            for mode in MODES[1:]:
                report[f"{mode}, {kind}"] = in_a_process(["--start-engine", name, *flags], cached)
    return report


def measure_info() -> dict[str, float]:
    """Return the seconds of the command `pallas-attn info`, without and with `--lower`."""
    seconds = {}
    for name, flags in (("info", ()), ("info --lower", ("--lower",))):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pallas_attn", "info", *flags], cwd=ROOT, check=True, capture_output=True)
        seconds[name] = time.perf_counter() - began
    return seconds


def measure_op(op: str, mode: str, folder: Path) -> dict[str, float]:
    """Run `first_call` in a new process in a mode of `MODES`. `folder` has the caches of the modes `cold` and
    `warm`.
    """
    cached = {"PALLAS_ATTN_KERNEL_CACHE": str(folder / "kernels"), "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    plain = {"PALLAS_ATTN_KERNEL_CACHE": "0", "PALLAS_ATTN_PATCH_JAX": "0"}
    of_caches = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | (plain if mode == "plain" else cached)
    return in_a_process(["--first-call", op], of_caches)


def in_a_process(options: list[str], variables: dict[str, str]) -> dict[str, float]:
    """Run this module in a new process with more environment variables. Return the object that it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])} | variables
    command = [sys.executable, "-m", "scripts.tools.startup", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Run the command line and return its exit status."""
    return exit_status("startup", run)


def run() -> int:
    """Run the requested measurements. Raise Failure if the results cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tools.startup", description=__doc__)
    parser.add_argument("--ops", nargs="*", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--engine", metavar="NAME", help="also measure an engine: v2-lite, v3-tiny, ... (presets)")
    parser.add_argument("--info", action="store_true", help="also measure `pallas-attn info`")
    for flag in ("--first-call", "--start-engine"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        print(json.dumps(first_call(options.first_call)))
        return 0
    if options.start_engine:
        print(json.dumps(start_of_engine(options.start_engine, wait=not options.background)))
        return 0
    check_outputs({"--json": options.json})
    from scripts.bench.harness.device import description

    report: dict[str, Any] = description() | {"seconds": {}}
    for op in options.ops:
        with tempfile.TemporaryDirectory() as folder:
            times = {mode: measure_op(op, mode, Path(folder)) for mode in options.modes}
        report["seconds"][op] = times
        columns = (f"{mode} {t['lower_s']:6.2f} + {t['compile_s']:5.2f} s" for mode, t in times.items())
        print(f"{op:18}", "   ".join(columns), flush=True)
        if options.json is not None:
            write_report("--json", options.json, report)
    if options.engine is not None:
        report["engine"] = {options.engine: measure_engine(options.engine)}
        for kind, seconds in report["engine"][options.engine].items():
            print(
                f"{options.engine}, {kind:24}", {name: round(value, 1) for name, value in seconds.items()}, flush=True
            )
    if options.info:
        report["info"] = measure_info()
        print("   ".join(f"pallas-attn {name} {value:.1f} s" for name, value in report["info"].items()), flush=True)
    if options.json is not None:
        write_report("--json", options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
