"""Searches the configurations of an operation for the fastest ones on this device, by measuring them.

    python scripts/tune.py paged_decode [--grid tune] [--only plan_decode] [--limit-seconds 600]

Runs the cases of a benchmark's grid as they are, and records their look-ups: kinds of configuration
("paged_decode/mosaic") and keys, the static facts of a call that the choice depends on. For each key it then tries the
candidates of `SPACES`, nearest to the one in use first, on the cases that look it up, and keeps the one with the least
geometric mean of times. Candidates that do not compile, spill registers or do not fit side by side on a multiprocessor
are skipped. pallas_attn/runtime/tuned/<device>.json is written after each key, keeping its other keys;
benchmarks/results gets all that was tried, with reasons.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.config.json_files import read_json
from pallas_attn.runtime import tuning
from scripts.bench.harness.case import Bench, Case
from scripts.bench.harness.compiler import printed, shared_bytes, spilled_bytes
from scripts.bench.harness.device import description
from scripts.bench.harness.pools import Pools
from scripts.bench.harness.session import FAILURES, OPERATIONS, RESULTS, load, reason
from scripts.bench.harness.timing import Stopwatch
from scripts.cli.command_line import as_usage_error, check_outputs, exit_status, write_report

TUNED = Path(__file__).resolve().parent.parent / "pallas_attn" / "runtime" / "tuned"
SHARED_BYTES = 228 * 1024
"""Shared memory of a Hopper multiprocessor, of which each program loses 1 KB."""
WORTHWHILE = 0.99
"""A candidate replaces the best one if its times are below this fraction of the best one's."""
HOPELESS = 1.05
"""A candidate is given up once its times are above this multiple of the best one's."""

type Settings = dict[str, Any]
type Key = tuple[str, tuple[tuple[str, Any], ...]]
"""A kind of configuration, and the static facts of the call that it is looked up by."""


# --- what can be chosen


def paged_decode_mosaic(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Tiles that fit shared memory in the chosen number; other buffers take about a fifth beside them."""
    for tile_tokens, stages, programs in itertools.product((64, 128, 256), range(2, 9), range(1, 9)):
        tiles = 2 * tile_tokens * key["head_dim"] * key["cache_bytes"] * stages * programs
        if tiles <= SHARED_BYTES and tiles >= SHARED_BYTES // 8:
            yield {"tile_tokens": tile_tokens, "stages": stages, "programs_per_multiprocessor": programs}


def plan_decode(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Row overheads from nothing to 512 tokens, cuts up to 1,024 tokens."""
    most = max(4, 512 // key["page_size"])
    starts = sorted({0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32} & set(range(most + 1)))
    cuts = (tokens // key["page_size"] for tokens in (0, 256, 512, 1024))
    for start, cut in itertools.product(starts, cuts):
        yield {"row_overhead_pages": start, "cut_pages": cut}


def paged_decode_xla(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Steps of up to 8,192 tokens, with at most as many rows as the call has."""
    for tile_tokens, group_rows in itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32)):
        if group_rows <= key["rows"] and tile_tokens * group_rows <= 8192:
            yield {"tile_tokens": tile_tokens, "group_rows": group_rows}


def kv_write_mosaic(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Threads of a row; lengths of scans only if groups of tokens have a scale."""
    scans = (1, 2, 4, 8, 16) if key["group_tokens"] else (None,)
    for row_threads, scan_tokens in itertools.product((1, 2, 4, 8, 16, 32), scans):
        yield {"row_threads": row_threads} | ({} if scan_tokens is None else {"scan_tokens": scan_tokens})


def mla_decode_mosaic(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Pairs of tiles of 64 latents that fit shared memory beside 64 queries, in programs that share them and in
    programs that do not."""
    row = 2 * (key["latent_dim"] + key["rope_dim"])
    for pairs, cluster in itertools.product(range(1, 6), (1, 2)):
        if 64 * row * (2 * pairs + 1) <= SHARED_BYTES:
            yield {"pairs": pairs, "cluster": cluster}


def mla_prefill(key: Mapping[str, Any]) -> Iterator[Settings]:
    """Pieces whose keys and values take at most a gigabyte."""
    for piece_tokens in (512, 1024, 2048, 4096, 8192, 16384):
        if piece_tokens * key["heads"] * key["width"] <= 2**29:
            yield {"piece_tokens": piece_tokens}


def flash_mosaic(key: Mapping[str, Any]) -> Iterator[Settings]:
    """All sizes of tiles; the kernel refuses those that do not fit shared memory."""
    for tile_keys, stages, consumers in itertools.product((64, 128, 192), (2, 3, 4), (1, 2, 3)):
        yield {"tile_keys": tile_keys, "stages": stages, "consumers": consumers}


SPACES: dict[str, Callable[[Mapping[str, Any]], Iterable[Settings]]] = {
    "paged_decode/mosaic": paged_decode_mosaic,
    "paged_decode/xla": paged_decode_xla,
    "plan_decode": plan_decode,
    "kv_write/mosaic": kv_write_mosaic,
    "mla_decode/mosaic": mla_decode_mosaic,
    "mla_prefill": mla_prefill,
    "ragged_attention/mosaic": flash_mosaic,
    "paged_prefill/mosaic": flash_mosaic,
}
"""Candidates by kind of configuration, for a key; a field that a candidate does not name keeps its value."""

PROGRAMS = "programs_per_multiprocessor"
"""Field that gives the number of programs that have to fit side by side, in configurations that have it."""


def nearest_first(candidates: Iterable[Settings], start: Settings) -> list[Settings]:
    """Sorts candidates by their distance from `start`: ratios count, so that 2 to 4 is as far as 4 to 8."""

    def distance(candidate: Settings) -> float:
        return sum(abs(math.log2((candidate[name] + 1) / (start[name] + 1))) for name in candidate)

    return sorted((c for c in candidates if distance(c) > 0), key=distance)


# --- measuring


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Measures cases with one implementation under chosen configurations.

    Attributes:
      bench: benchmark of the operation.
      contender: name of the implementation.
      stopwatch: settings of the measurement.
      end: time after which no candidate is begun, in seconds of `time.perf_counter`.
      console: output for messages.
    """

    bench: Bench
    contender: str
    stopwatch: Stopwatch
    end: float
    console: Console
    pools: Pools = dataclasses.field(default_factory=Pools)

    def measure(self, case: Case, inputs: Any, chosen: Mapping[Key, Settings]) -> tuple[float, dict[Key, Settings]]:
        """Measures the seconds of a call under some chosen configurations, and collects all that were looked up.

        Raises:
          RuntimeError: the compiled kernel spills registers, or does not fit side by side.
        """
        looked_up: dict[Key, Settings] = {}

        def decide(op: str, key: Mapping[str, Any], config: Any) -> Any:
            name = op, tuple(key.items())
            config = dataclasses.replace(config, **chosen.get(name, {}))
            looked_up[name] = dataclasses.asdict(config)
            return config

        with printed() as said, tuning.deciding(decide):
            timing = self.bench.contenders[self.contender](case, inputs, self.stopwatch)
        check_compiled(said[0], [settings[PROGRAMS] for settings in looked_up.values() if PROGRAMS in settings])
        return timing.median, looked_up

    def baseline(self, cases: Sequence[Case]) -> dict[Key, dict[Case, tuple[float, Settings]]]:
        """Measures the cases, and maps each key to the cases that look it up, with their times and configurations."""
        found: dict[Key, dict[Case, tuple[float, Settings]]] = {}
        for case in cases:
            if time.perf_counter() >= self.end:
                break
            try:
                seconds, looked_up = self.measure(case, self.bench.inputs(case, self.pools), {})
            except (MemoryError, NotImplementedError, *FAILURES) as error:
                self.console.print(f"{case.name}: passed over, {reason(error)}", highlight=False)
                continue
            for key, settings in looked_up.items():
                found.setdefault(key, {})[case] = seconds, settings
        return found

    def search(self, key: Key, cases: Mapping[Case, tuple[float, Settings]], end: float) -> dict[str, Any]:
        """Searches for the best candidate until `end`; returns it with all that were tried.

        The winner is measured once more, right after the configuration in use, since a case's first measurement may be
        further from its later ones than candidates are from each other.
        """
        start = next(iter(cases.values()))[1]
        before = {case: seconds for case, (seconds, _) in cases.items()}
        best, times = start, before
        tried: list[dict[str, Any]] = []
        inputs = {case: self.bench.inputs(case, self.pools) for case in cases}
        candidates = nearest_first(SPACES[key[0]](dict(key[1])), start)
        for number, candidate in enumerate(candidates):
            if time.perf_counter() >= min(end, self.end):
                tried.append({"not reached": len(candidates) - number})
                break
            entry, measured = self.attempt(key, candidate, times, inputs)
            tried.append({"config": candidate} | entry)
            if measured is not None and mean_ratio(measured, times) < WORTHWHILE:
                best, times = start | candidate, measured
        if best != start:
            before, times = (
                {case: self.measure(case, inputs[case], {key: x})[0] for case in cases} for x in (start, best)
            )
            if mean_ratio(times, before) >= WORTHWHILE:
                best, times = start, before
        microseconds = {case.name: [1e6 * before[case], 1e6 * times[case]] for case in before}
        return {"key": dict(key[1]), "config": best, "us_before_and_after": microseconds, "tried": tried}

    def attempt(
        self, key: Key, candidate: Settings, times: Mapping[Case, float], inputs: Mapping[Case, Any]
    ) -> tuple[dict[str, Any], dict[Case, float] | None]:
        """Measures a candidate; returns its entry in the report, and its times if all cases were measured."""
        measured: dict[Case, float] = {}
        for case, best in times.items():
            try:
                measured[case], _ = self.measure(case, inputs[case], {key: candidate})
            except (MemoryError, NotImplementedError, *FAILURES) as error:
                return {"passed over": reason(error)}, None
            if measured[case] > HOPELESS * best:
                break
        entry = {"us": {case.name: 1e6 * seconds for case, seconds in measured.items()}}
        return entry, measured if len(measured) == len(times) else None


def check_compiled(said: str, programs: Sequence[int]) -> None:
    """Raises RuntimeError if the compilers' messages about just compiled kernels rule these out."""
    if spilled := spilled_bytes(said):
        raise RuntimeError(f"spills {spilled} bytes")
    shared = shared_bytes(said) + 1024
    for side_by_side in programs:
        if side_by_side * shared > SHARED_BYTES:
            raise RuntimeError(f"{side_by_side} programs of {shared} bytes do not fit in {SHARED_BYTES}")


def mean_ratio(times: Mapping[Case, float], others: Mapping[Case, float]) -> float:
    """Geometric mean of the ratios of times to others' times."""
    return math.exp(sum(math.log(times[case] / others[case]) for case in times) / len(times))


# --- what is kept


def merged(tuned: Mapping[str, Any], op: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Adds an entry to a file's content, in place of any with its key."""
    others = [other for other in tuned.get(op, ()) if other["key"] != entry["key"]]
    return {**tuned, op: [*others, {"key": entry["key"], "config": entry["config"]}]}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS, metavar="OP", help=", ".join(OPERATIONS))
    parser.add_argument("--grid", default="tune", help="of the operation's benchmark; default: tune")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--contender", default="mosaic", help="implementation; default: mosaic")
    parser.add_argument("--only", nargs="+", choices=SPACES, default=list(SPACES), metavar="KIND", help="default: all")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="shared out among the keys")
    parser.add_argument("--tuned", type=Path, metavar="OUT", help="default: pallas_attn/runtime/tuned/<device>.json")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: benchmarks/results/tune_OP_<device>.json")
    args = parser.parse_args(argv)
    bench = load(args.operation)
    for name, known in (("grid", bench.grids), ("contender", bench.contenders)):
        if getattr(args, name) not in known:
            parser.error(f"--{name}: {args.operation} has {', '.join(known)}; got {getattr(args, name)!r}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("tune", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Tunes what the arguments ask for; returns 1 if nothing to tune was looked up.

    Raises:
      UsageError: the file of tuned configurations cannot be read, or results cannot be written.
      Failure: results cannot be written after all.
    """
    console = Console(width=160)
    bench, device = load(args.operation), tuning.device_name()
    tuned_path = args.tuned or TUNED / f"{device}.json"
    report_path = args.json or RESULTS / f"tune_{args.operation}_{device}.json"
    check_outputs({"--tuned": tuned_path, "--json": report_path}, make_folders=True)
    with as_usage_error(OSError, ValueError, prefix="--tuned: "):
        tuned = read_json(tuned_path) if tuned_path.is_file() else {}
        if not isinstance(tuned, dict):
            raise ValueError(f"{tuned_path}: expected a JSON object")
    end = time.perf_counter() + args.limit_seconds
    tuner = Tuner(bench, args.contender, Stopwatch(sample_seconds=0.02, samples=5), end, console)
    found = tuner.baseline([case for case in bench.grids[args.grid] if args.match in case.name])
    keys = [key for kind in args.only for key in found if key[0] == kind]
    report = description() | {"operation": args.operation, "grid": args.grid, "searched": {}}
    for number, key in enumerate(keys):
        share = (end - time.perf_counter()) / (len(keys) - number)
        entry = tuner.search(key, found[key], time.perf_counter() + share)
        report["searched"].setdefault(key[0], []).append(entry)
        if any("us" in candidate for candidate in entry["tried"]):
            tuned = merged(tuned, key[0], entry)
            write_report("--tuned", tuned_path, tuned)
        write_report("--json", report_path, report)
        console.print(f"{key[0]} {entry['key']}: {entry['config']}", entry["us_before_and_after"], highlight=False)
    console.print(f"{len(keys)} keys, written to {tuned_path}" if keys else "nothing to tune was looked up")
    return 0 if keys else 1


if __name__ == "__main__":
    sys.exit(main())
