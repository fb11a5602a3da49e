"""Test the Mosaic kernels on a new kind of GPU: whether they run, whether results are correct, and their speed.

    python -m scripts.tools.first_run [--out out/first_run] [--parts smoke contract benchmarks] [--case-seconds 240]

1. smoke: a very small call of each operation, compared with the operation's reference implementation. Each call runs in
a separate process.
2. contract: the test suites of tests/contract on compiled kernels, one file at a time. If a test hangs, its file runs
again without this test.
3. benchmarks: copy bandwidth, matrix rate, and a grid of cases of each operation, as JSON.

A case is a smoke call, a test file or a benchmark. Every case has a time limit. A case that exceeds it is killed and
reported as hung, and the run continues. summary.json is written after each case. The exit status is 0 if all results
are correct, 1 if not, and 3 if the device is not a GPU of compute capability 9.0 or 10.0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pallas_attn.models.cli.command_line import Failure, UsageError, check_outputs, exit_status, write_report
from pallas_attn.models.cli.output_files import output_file

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("smoke", "contract", "benchmarks")
CAPABILITIES = ("9.0", "10.0")
"""Compute capabilities that have Mosaic kernels."""
GRIDS = {
    "paged_decode": "gqa-quick",
    "mla_decode": "mla-quick",
    "paged_prefill": "prefill-quick",
    "ragged_attention": "prefill-quick",
    "write_kv": "writes",
}
"""Grid of benchmark cases (`scripts/bench_ops.py --grid`) by operation."""
MOST_HANGS = 3
"""Number of hanging tests of a file after which the file is not run again."""
TOLERANCE = 0.02
"""Maximum difference from the reference, relative to the largest value of the reference. The rounding error of bfloat16
is 0.004.
"""


# --- smoke: very small calls, each in a separate process


@dataclasses.dataclass(frozen=True)
class SmokeCall:
    """Caller of operations with very small inputs: two sequences of 1 and 40 tokens in pages of 16 tokens.

    Attributes:
      implementation: name of the implementation that runs, "reference" for the expected results.
    """

    implementation: str

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        import pallas_attn

        return getattr(pallas_attn, name)(*arguments, **options, implementation=self.implementation)

    def normal(self, *shape: int, dtype: str = "bfloat16") -> Any:
        import jax

        return jax.random.normal(jax.random.key(sum(shape)), shape, "float32").astype(dtype)

    def ints(self, *values: Any) -> Any:
        import jax.numpy as jnp

        return jnp.array(values, jnp.int32)

    @property
    def tables(self) -> Any:
        return self.ints([3, -1, -1], [5, 1, 2])

    @property
    def lens(self) -> Any:
        return self.ints(1, 40)

    def kv(self, *, quantised: bool = False) -> Any:
        """Return a KV cache of 8 pages with two KV heads of head dimension 64, in bfloat16 or quantised to fp8."""
        from pallas_attn import PagedKV

        pages = self.normal(8, 2, 16, 64), self.normal(8, 2, 16, 64) * 0.5
        if not quantised:
            return PagedKV(*pages)
        scale = self.normal(2, dtype="float32") ** 2 * 0.01 + 0.01
        k, v = ((page / 0.02).astype("float8_e4m3fn") for page in pages)
        return PagedKV(k, v, scale, scale)

    def latents(self) -> Any:
        """Return a bfloat16 cache of 8 pages of latents with 128 + 64 columns."""
        from pallas_attn import PagedLatent

        return PagedLatent(self.normal(8, 16, 192))

    def decode(self, heads: int = 4, *, quantised: bool = False, **options: Any) -> Any:
        """Call `paged_decode` with one query per sequence."""
        q = self.normal(2, 1, heads, 64)
        return self("paged_decode", q, self.kv(quantised=quantised), self.tables, self.lens, **options)

    def planned(self) -> Any:
        """Call `paged_decode` with a plan of `plan_decode`. The reference implementation needs no plan."""
        q, kv = self.normal(2, 1, 4, 64), self.kv()
        plan = None
        if self.implementation != "reference":
            plan = self("plan_decode", q, kv, self.tables, self.lens)
        return self("paged_decode", q, kv, self.tables, self.lens, plan=plan)

    def latent_decode(self, heads: int) -> Any:
        q = self.normal(2, 1, heads, 128), self.normal(2, 1, heads, 64)
        return self("mla_decode", *q, self.latents(), self.tables, self.lens, sm_scale=0.1)

    def latent_prefill(self) -> Any:
        q = self.normal(21, 4, 128), self.normal(21, 4, 64)
        weights = self.normal(4, 128, 128) * 0.1, self.normal(4, 128, 128) * 0.1
        arguments = *q, self.normal(21, 192), self.latents(), *weights, self.tables, self.ints(0, 1, 21), self.lens
        return self("mla_prefill", *arguments, sm_scale=0.1)

    def ragged(self) -> Any:
        keys = self.normal(41, 2, 128), self.normal(41, 2, 128) * 0.5
        return self("ragged_attention", self.normal(21, 4, 128), *keys, self.ints(0, 1, 21), self.ints(0, 1, 41))

    def written(self) -> Any:
        new = self.normal(2, 2, 64), self.normal(2, 2, 64) * 0.5
        return self("write_kv", self.kv(), *new, self.ints(48, 33))

    def scales(self) -> Any:
        return self.normal(4, dtype="float32") ** 2 * 0.01 + 0.01


def _prefill(call: SmokeCall) -> Any:
    return call("paged_prefill", call.normal(21, 4, 64), call.kv(), call.tables, call.ints(0, 1, 21), call.lens)


def _gather(call: SmokeCall) -> Any:
    new = call.normal(21, 192)
    return call("gather_latent", call.latents(), new, call.tables, call.ints(0, 1, 21), call.lens, length=41)


SMOKE: dict[str, Callable[[SmokeCall], Any]] = {
    "write_kv": SmokeCall.written,
    "write_latent": lambda call: call("write_latent", call.latents(), call.normal(2, 192), call.ints(48, 33)),
    "gather_latent": _gather,
    "plan_decode": SmokeCall.planned,
    "paged_decode": SmokeCall.decode,
    "paged_decode of fp8": lambda call: call.decode(quantised=True),
    "paged_decode of fp8 by fp8": lambda call: call.decode(quantised=True, q_scale=call.scales()),
    "paged_prefill": _prefill,
    "ragged_attention": SmokeCall.ragged,
    "mla_decode of 16 heads": lambda call: call.latent_decode(16),
    "mla_decode of 128 heads": lambda call: call.latent_decode(128),
    "mla_prefill": SmokeCall.latent_prefill,
}
"""Smoke calls by name. Calls without GEMMs come first, because they test fewer features of the GPU."""


def error_of(name: str, implementation: str) -> float:
    """Run a smoke call. Return the maximum difference from the reference, relative to the reference's largest value."""
    import jax
    import numpy as np

    def result(implementation: str) -> list[Any]:
        computed = jax.jit(lambda: SMOKE[name](SmokeCall(implementation)))()
        return [np.asarray(x.astype("float32")) for x in jax.tree.leaves(computed)]

    pairs = list(zip(result(implementation), result("reference"), strict=True))
    return max(float(np.max(np.abs(got - want)) / np.max(np.abs(want))) for got, want in pairs)


# --- processes


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a process.

    Attributes:
      status: exit status; None if the process was killed at the time limit.
      output: standard output and error.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "no output")


def run_process(arguments: list[str], seconds: float, log: Path | None = None) -> Ended:
    """Run Python with these arguments. At the time limit, kill it and all processes that it started.

    After the kill, wait at most 10 s for the output: a process with a hanging kernel may not end until the driver
    releases it. `log` receives the output.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    began, status = time.monotonic(), None
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)
        output = _text(late.stdout)
        try:
            output = process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired as stuck:
            output = _text(stuck.stdout) or output
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if log is not None:
        with output_file(log) as file:
            file.write(output.encode())
    return Ended(status, output, time.monotonic() - began)


def _text(output: str | bytes | None) -> str:
    """Return the output of a killed process as text. `subprocess.TimeoutExpired` has it as bytes."""
    return output.decode(errors="backslashreplace") if isinstance(output, bytes) else output or ""


def this(*arguments: str) -> list[str]:
    """Return the arguments with which Python runs this module."""
    return ["-m", "scripts.tools.first_run", *arguments]


# --- parts


def smoke(name: str, seconds: float, implementation: str = "mosaic") -> dict[str, Any]:
    """Run a smoke call. Return its outcome ("right", "wrong", "failed" or "hung") with an explanation ("words")."""
    ended = run_process(this("--case", name, "--implementation", implementation), seconds)
    entry: dict[str, Any] = {"case": name, "seconds": round(ended.seconds, 1)}
    if ended.status is None:
        return entry | {"outcome": "hung", "words": f"{name} had no result after {seconds:g} s and was killed"}
    if ended.status:
        return entry | {"outcome": "failed", "words": ended.last_line, "output": ended.output[-4000:]}
    error = json.loads(ended.last_line)["error"]
    right = error <= TOLERANCE  # NaN counts as wrong
    return entry | {"outcome": "right" if right else "wrong", "words": f"error {error:.1g}", "error": error}


def contract(file: Path, out: Path, seconds: float) -> dict[str, Any]:
    """Run a test file of tests/contract. After a test that hangs, run the file again without it, until `MOST_HANGS`
    tests have hung.
    """
    hung: list[str] = []
    began = time.monotonic()
    while True:
        skipped = [f"--deselect={test}" for test in hung]
        arguments = ["-m", "pytest", str(file.relative_to(ROOT)), "-v", "--color=no", "-p", "no:cacheprovider"]
        arguments += ["-m", "not slow and not gpu", "-k", "mosaic", "--tb=short", *skipped]
        arguments += [f"--timeout={seconds:g}", "--timeout-method=thread"]  # ends pytest also inside a C++ call
        ended = run_process(arguments, 3600, out / f"contract_{file.stem}.log")
        if ended.status is not None and "+ Timeout +" not in ended.output:
            break
        test = running_test(ended.output)
        hung += [test or "before any test"]
        if test is None or len(hung) == MOST_HANGS:
            break
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)\b", ended.last_line)}
    right = not hung and ended.status in (0, 5)  # 5: no test of the file is selected
    words = ended.last_line.strip("= ") if not hung else f"hung: {', '.join(hung)}"
    return {
        "case": file.name,
        "seconds": round(time.monotonic() - began, 1),
        "outcome": "right" if right else "hung" if hung else "failed",
        "words": words,
        "counts": counts,
        "hung": hung,
    }


def running_test(output: str) -> str | None:
    """Return the test that was running when `pytest -v` wrote this output; None if the newest test has ended."""
    lines = [line.rstrip() for line in output.splitlines() if re.match(r"tests/\S+?::", line)]
    if not lines or re.search(r" [A-Z]+( \(.*\))? +\[ *\d+%\]$", lines[-1]):
        return None
    return re.sub(r" \++ Timeout \++$", "", lines[-1])


def benchmark(operation: str, out: Path, seconds: float) -> dict[str, Any]:
    """Measure the grid `GRIDS[operation]`. The result file also has the rates of the card, measured in the same run."""
    target = out / f"{operation}.json"
    target.unlink(missing_ok=True)
    limits = ["--limit-seconds", f"{seconds:g}", "--json", str(target), "--contenders", "mosaic", "xla"]
    ended = run_process(["scripts/bench_ops.py", operation, "--grid", GRIDS[operation], *limits], 3 * seconds + 300)
    report = json.loads(target.read_text()) if target.exists() else {"cases": []}
    outcome = "hung" if ended.status is None else "failed" if ended.status else "right"
    entry = {"case": operation, "seconds": round(ended.seconds, 1), "outcome": outcome, "json": target.name}
    if ended.status != 0:
        done = [case["case"] for case in report["cases"]]
        return entry | {"words": f"after {', '.join(done) or 'no case'}: {ended.last_line}"}
    rates, times = report["rates"], [case.get("results", {}).get("mosaic", {}) for case in report["cases"]]
    best = max((time.get("fraction_of_floor", 0.0) for time in times), default=0.0)
    copy, matrix = rates["copy"] / 1e12, rates["matrix"] / 1e12
    words = f"{len(times)} cases, at best {best:.0%} of the floor; copy {copy:.2f} TB/s, GEMM {matrix:.0f} TFLOP/s"
    return entry | {"words": words, "rates": rates}


# --- command line


def this_card() -> dict[str, Any]:
    """Return the device, software versions, and compute capability (None without a GPU)."""
    import jax

    from scripts.bench.harness.device import description

    first = jax.local_devices()[0]
    return description() | {"capability": getattr(first, "compute_capability", None)}


def described(seconds: float) -> dict[str, Any]:
    """Run `this_card` in a separate process, because a process that has initialized a GPU occupies its memory.

    Raises:
      Failure: the GPU does not respond, or there is no GPU with Mosaic kernels.
    """
    ended = run_process(this("--describe"), seconds)
    if ended.status is None:
        raise Failure(f"the GPU does not respond: no description within {seconds:g} s")
    if ended.status:
        raise Failure(f"JAX does not start: {ended.last_line}")
    card = json.loads(ended.last_line)
    if card["capability"] not in CAPABILITIES:
        raise Failure(f"needs a GPU of compute capability {' or '.join(CAPABILITIES)}, this is {card['device']}")
    return card


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.tools.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "first_run", help="folder; default: out/first_run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--case-seconds", type=float, default=240.0, help="time limit of a smoke case or a test; default: 240"
    )
    parser.add_argument(
        "--grid-seconds", type=float, default=60.0, help="start no case of a grid after this time; default: 60"
    )
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=SMOKE, help=argparse.SUPPRESS)
    parser.add_argument("--implementation", default="mosaic", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Run the requested parts in order and return the exit status."""
    if options.describe:
        print(json.dumps(this_card()))
        return 0
    if options.case:
        print(json.dumps({"error": error_of(options.case, options.implementation)}))
        return 0
    if min(options.case_seconds, options.grid_seconds) <= 0:
        raise UsageError("--case-seconds and --grid-seconds are above 0")
    card = described(options.case_seconds)
    out = options.out.resolve()
    check_outputs({"--out": out / "summary.json"}, make_folders=True)
    print(f"{card['device']}, compute capability {card['capability']}; jax {card['versions']['jax']}", flush=True)
    files = sorted((ROOT / "tests" / "contract").glob("test_*.py"))
    cases: Mapping[str, list[Callable[[], dict[str, Any]]]] = {
        "smoke": [functools.partial(smoke, name, options.case_seconds) for name in SMOKE],
        "contract": [functools.partial(contract, file, out, options.case_seconds) for file in files],
        "benchmarks": [functools.partial(benchmark, name, out, options.grid_seconds) for name in GRIDS],
    }
    report: dict[str, Any] = card | {"complete": False}
    for part in (part for part in PARTS if part in options.parts):
        report[part] = []
        for case in cases[part]:
            entry = case()
            report[part].append(entry)
            write_report("--out", out / "summary.json", report)
            print(
                f"{part:10} {entry['outcome']:6} {entry['case']:28} {entry['seconds']:6} s  {entry['words']}",
                flush=True,
            )
    entries = [entry for part in PARTS for entry in report.get(part, ())]
    wrong = [entry["case"] for entry in entries if entry["outcome"] != "right"]
    write_report("--out", out / "summary.json", report | {"complete": True})
    print(
        f"{len(entries) - len(wrong)} of {len(entries)} right, in {out}"
        + (f"; not: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return exit_status("first_run", lambda: run(parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
