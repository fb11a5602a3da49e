"""Forecast whether instructions or memory accesses limit a kernel, from the SASS listing of its main loop.

A tile is the part of the KV cache that the main loop processes at a time.

    make tile-budget
    python scripts/tools/tile_budget.py LISTING ... [--bandwidth 4.3e12] [--multiprocessors 132] [--clock 1.98e9]
                                        [--results benchmarks/results]

The tool compares the cycles of the instructions for one tile with the cycles in which the tile's bytes arrive from
memory. If the instructions take longer, the kernel cannot reach the memory bandwidth with any schedule.

Instructions are counted per warpgroup. A warpgroup has one warp on each of the four schedulers of a multiprocessor, so
an instruction of a warpgroup takes one issue cycle. It also occupies an execution pipe for the cycles of `pipe_cycles`.
Both sides of a branch are counted. A path that few tiles take, such as masking, therefore makes the forecast too
pessimistic.

A listing is the output of nvdisasm for one kernel after a line such as `// tile: 32768 bytes, 2097152 multiply-adds`.
Its main loops are the innermost loops with tensor-core instructions. The number of tiles per iteration is the
multiply-adds of these instructions divided by the multiply-adds of a tile. It is also right if the compiler unrolled
the loop or if several warpgroups share a tile. Instructions of tcgen05 (UTCHMMA), which one thread issues for its CTA,
do not show their shape, so an iteration with them counts as one tile.

With --results, forecasts of whole calls are compared with times measured on an H200 (`MEASURED`). The forecast is the
longer of two times: the time to read the bytes of the call, and the time of the busiest pipe for all tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.tools.sass import GROUPS, Instruction, main_loops, parse

ISSUE = "issue"
PIPES = {"float": ("fma", 128), "integer": ("alu", 64), "convert": ("convert", 64), "exp2": ("exp2", 16)}
"""Execution pipe of each instruction group, and its throughput: results (threads) per clock on a multiprocessor of
compute capability 9.0, from the throughput table of the CUDA C++ programming guide.
"""
PIPES_OF_OPCODES = {
    "IMAD": ("fma", 64),
    "SHFL": ("shuffle", 32),
    **dict.fromkeys(("FMNMX", "FSEL", "FSETP", "HMNMX2", "HSETP2"), ("alu", 64)),
}
"""Pipe and throughput of opcodes whose pipe is not the pipe of their group."""
SHARED_BYTES = 128
"""Bytes per clock of a multiprocessor's shared memory."""
TENSOR_BITS = 2048 * 16
"""Throughput of a multiprocessor's tensor cores: multiply-adds per clock times bits of an operand."""
WARPGROUP = 128
"""Number of threads of a warpgroup."""
MEASURED = {
    **{
        f"paged-decode-{cache}-d128-n8": ("paged_decode_caches", f"32/8x128 B64 8192 p64 {cache}")
        for cache in ("bf16", "f16", "int8-head", "int8-channel", "fp8-head", "fp8-group", "fp8-token")
    },
    "mla-swap-ab-512-64-n16": ("mla_decode", "512+64 h16 B128 8192 p64 bf16"),
    "mla-seesaw-512-64-h128": ("mla_decode", "512+64 h128 B128 8192 p64 bf16"),
    "ragged-192-128": ("ragged_attention", "16/16x192/128 S1 8192 on 0 bf16"),
    "ragged-128-128": ("ragged_attention", "32/8x128/128 S1 8192 on 0 bf16"),
    "paged-prefill-d128": ("paged_prefill", "32/8x128 S1 8192 on 0 p64 bf16"),
}
"""Operation and name of the measured case in benchmarks/results, by the name of the listing (without suffix)."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Cost of one tile on a multiprocessor.

    Attributes:
      counts: instructions by group of `sass.GROUPS`.
      cycles: cycles by execution pipe, and issue cycles under `ISSUE`. Pipes work in parallel.
      num_bytes: bytes of the tile.
      multiply_adds: multiply-adds of the tile.
    """

    counts: Mapping[str, float]
    cycles: Mapping[str, float]
    num_bytes: int
    multiply_adds: int

    @property
    def busiest(self) -> str:
        """Pipe with the most cycles, or `ISSUE`."""
        return max(self.cycles, key=lambda pipe: self.cycles[pipe])


@dataclasses.dataclass(frozen=True)
class Card:
    """Copy bandwidth (bytes per second), number of multiprocessors and clock (hertz) of a GPU. The defaults are an
    H200's.
    """

    bandwidth: float = 4.3e12
    multiprocessors: int = 132
    clock: float = 1.98e9

    def arrival_cycles(self, num_bytes: int) -> float:
        """Return the cycles in which a multiprocessor receives `num_bytes`, while every other multiprocessor receives
        the same number of bytes.
        """
        return num_bytes * self.multiprocessors / self.bandwidth * self.clock

    def seconds_of(self, budget: Budget, num_bytes: int, flops: int) -> tuple[float, float]:
        """Return the seconds to read the bytes of a call, and the seconds of the busiest pipe for all tiles of the
        call.

        The number of tiles is computed from the bytes and from the multiply-adds of the call. The larger number is
        used.
        """
        tiles = max(num_bytes / budget.num_bytes, flops / 2 / budget.multiply_adds)
        return num_bytes / self.bandwidth, tiles * budget.cycles[budget.busiest] / self.multiprocessors / self.clock


def pipe_cycles(instruction: Instruction) -> dict[str, float]:
    """Return the cycles, by pipe, for which one instruction of a warpgroup occupies a multiprocessor."""
    cycles = {ISSUE: 1.0}
    if found := PIPES_OF_OPCODES.get(instruction.head) or PIPES.get(instruction.group):
        pipe, lanes = found
        cycles[pipe] = WARPGROUP / lanes
    if instruction.shared_bytes:
        cycles["shared memory"] = WARPGROUP * instruction.shared_bytes / SHARED_BYTES
    if instruction.multiply_adds:
        cycles["tensor"] = instruction.multiply_adds * instruction.operand_bits / TENSOR_BITS
    return cycles


def tile_budget(listing: str) -> Budget:
    """Compute the budget of the kernel of a listing.

    Raises:
      ValueError: the listing has no line `// tile: ...`, or none of its loops uses tensor cores.
    """
    tile = re.search(r"// tile: (\d+) bytes, (\d+) multiply-adds", listing)
    if tile is None:
        raise ValueError("expected a line such as `// tile: 32768 bytes, 2097152 multiply-adds`, found none")
    executed = [instruction for body in main_loops(parse(listing)) for instruction in body]
    multiply_adds = sum(instruction.multiply_adds for instruction in executed)
    if any(instruction.head.startswith("UTC") for instruction in executed):
        multiply_adds = int(tile[2])
    if not multiply_adds:
        raise ValueError("no loop of this kernel uses a warpgroup's tensor-core instructions")
    tiles = multiply_adds / int(tile[2])
    counts, cycles = Counter[str](), Counter[str]()
    for instruction in executed:
        counts[instruction.group] += 1
        cycles.update(pipe_cycles(instruction))
    return Budget(_divided(counts, tiles), _divided(cycles, tiles), int(tile[1]), int(tile[2]))


def _divided(numbers: Mapping[str, float], divisor: float) -> dict[str, float]:
    return {name: number / divisor for name, number in numbers.items()}


def table(budgets: Mapping[str, Budget], card: Card) -> Table:
    """Return a table of instructions, cycles and arrival times of a tile, with one row per kernel."""
    result = Table(title="Instructions and cycles per tile", caption="of a warpgroup, on one multiprocessor")
    for heading in ("kernel", *GROUPS, "issue", "busiest pipe", "bytes", "arrive in", "busy"):
        result.add_column(heading, justify="left" if heading in ("kernel", "busiest pipe") else "right")
    for name, budget in budgets.items():
        arrive, busiest = card.arrival_cycles(budget.num_bytes), budget.cycles[budget.busiest]
        result.add_row(
            name,
            *(f"{budget.counts.get(group, 0):,.0f}" for group in GROUPS),
            f"{budget.cycles[ISSUE]:,.0f}",
            f"{budget.busiest} {busiest:,.0f}",
            f"{budget.num_bytes:,}",
            f"{arrive:,.0f}",
            f"{busiest / arrive:.0%}",
        )
    return result


def errors_table(budgets: Mapping[str, Budget], card: Card, results: Path) -> Table:
    """Return a table of forecast and measured times of calls, with one row per kernel in `MEASURED`."""
    result = Table(title="Forecasts and measured times of calls", caption="microseconds")
    for heading in ("kernel", "case", "bytes", "busiest pipe", "forecast", "measured", "measured / forecast"):
        result.add_column(heading, justify="left" if heading in ("kernel", "case") else "right")
    for name, budget in budgets.items():
        if name not in MEASURED:
            continue
        operation, case = MEASURED[name]
        report = json.loads((results / f"{operation}_nvidia_h200.json").read_text())
        (found,) = (entry for entry in report["cases"] if entry["case"] == case)
        arrive, busy = (1e6 * x for x in card.seconds_of(budget, found["bytes"], found["flops"]))
        forecast, measured = max(arrive, busy), found["results"]["mosaic"]["median_us"]
        times = f"{arrive:,.0f}", f"{budget.busiest} {busy:,.0f}", f"{forecast:,.0f}", f"{measured:,.0f}"
        result.add_row(name, case, *times, f"{measured / forecast:.2f}")
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listings", nargs="+", type=Path)
    for field in dataclasses.fields(Card):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="folder of measured times to compare with forecasts"
    )
    options = parser.parse_args(arguments)
    budgets = {path.stem: tile_budget(path.read_text()) for path in options.listings}
    card = Card(options.bandwidth, options.multiprocessors, options.clock)
    console = Console(width=200)
    console.print(table(budgets, card))
    if options.results is not None:
        console.print(errors_table(budgets, card, options.results))


if __name__ == "__main__":
    main()
