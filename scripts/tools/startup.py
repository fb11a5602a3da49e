"""Measure the startup time of each operation: the time to trace, lower and compile its first call in a new process.

    python -m scripts.tools.startup [--ops paged_decode mla_decode_16 ...] [--json OUT]

Shapes are typical of serving. Each operation is measured in up to three new processes: `plain` without the kernel
cache, the compilation cache and the JAX patches; `cold` with empty cache folders; and `warm` with the folders that
`cold` filled. The report has the seconds of tracing and lowering, which is Python time, and of compiling the executable
or loading it from the cache. Calls are not executed.
"""

from __future__ import annotations

import argparse
import functools
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


def in_a_process(op: str, mode: str, folder: Path) -> dict[str, float]:
    """Run `first_call` in a new process in a mode of `MODES`. `folder` has the caches of the modes `cold` and
    `warm`.
    """
    cached = {"PALLAS_ATTN_KERNEL_CACHE": str(folder / "kernels"), "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    plain = {"PALLAS_ATTN_KERNEL_CACHE": "0", "PALLAS_ATTN_PATCH_JAX": "0"}
    more = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    environment = os.environ | more | (plain if mode == "plain" else cached)
    command = [sys.executable, "-m", "scripts.tools.startup", "--first-call", op]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{op}, {mode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Run the command line and return its exit status."""
    return exit_status("startup", run)


def run() -> int:
    """Run the requested measurements. Raise Failure if the results cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tools.startup", description=__doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--first-call", choices=OPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_call:
        print(json.dumps(first_call(options.first_call)))
        return 0
    check_outputs({"--json": options.json})
    from scripts.bench.harness.device import description

    report: dict[str, Any] = description() | {"seconds": {}}
    for op in options.ops:
        with tempfile.TemporaryDirectory() as folder:
            times = {mode: in_a_process(op, mode, Path(folder)) for mode in options.modes}
        report["seconds"][op] = times
        columns = (f"{mode} {t['lower_s']:6.2f} + {t['compile_s']:5.2f} s" for mode, t in times.items())
        print(f"{op:18}", "   ".join(columns), flush=True)
        if options.json is not None:
            write_report("--json", options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
