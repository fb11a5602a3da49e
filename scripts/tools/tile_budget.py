"""Compare the instructions of a kernel's main loop for one tile of the cache with the time of the tile's memory
accesses.

    make tile-budget
    python scripts/tools/tile_budget.py LISTING ... [--bandwidth 4.3e12] [--multiprocessors 132] [--clock 1.98e9]
                                        [--results benchmarks/results]

This is a static forecast. If the instructions of a tile take more cycles than its bytes, no schedule lets the kernel
reach the memory bandwidth. Counts are instructions per warpgroup. A warpgroup has one warp on each of the four
schedulers of a multiprocessor, so each instruction takes one issue cycle. `pipe_cycles` has the cycles of its pipe.
Both sides of a branch are counted, so a path that few tiles take, such as masking, makes the forecast too pessimistic.

A listing is nvdisasm's output for one kernel after a line such as `// tile: 32768 bytes, 2097152 multiply-adds`. Its
main loops are the innermost loops with tensor-core instructions. Their multiply-adds give the number of tiles per
iteration, also if the compiler unrolled the loop or if several warpgroups share a tile. Instructions of tcgen05
(UTCHMMA), which one thread issues for its CTA, do not show their shape: an iteration with them counts as one tile.

With --results, forecasts of whole calls are compared with times measured on an H200 (`MEASURED`). The forecast is the
longer of two times for all tiles: bytes, and busiest pipe. The ratio is the error of the forecast.
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
"""Pipe of each instruction group, and its results per clock on a multiprocessor of compute capability 9.0, from the
throughput table of the CUDA C++ programming guide.
"""
PIPES_OF_OPCODES = {
    "IMAD": ("fma", 64),
    "SHFL": ("shuffle", 32),
    **dict.fromkeys(("FMNMX", "FSEL", "FSETP", "HMNMX2", "HSETP2"), ("alu", 64)),
}
"""Pipes of opcodes that differ from the pipe of their group."""
SHARED_BYTES = 128
"""Bytes per clock of a multiprocessor's shared memory."""
TENSOR_BITS = 2048 * 16
"""Multiply-adds per clock of a multiprocessor's tensor cores, times the operand bits."""
WARPGROUP = 128
"""Threads of a warpgroup."""
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
"""Operation and case with times on an H200 in benchmarks/results, by listing."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Cost of one tile on a multiprocessor.

    Attributes:
      counts: instructions by group (`sass.GROUPS`).
      cycles: cycles by pipe, including ISSUE. Pipes work in parallel.
      num_bytes: bytes of the tile.
      multiply_adds: multiply-adds of the tile.
    """

    counts: Mapping[str, float]
    cycles: Mapping[str, float]
    num_bytes: int
    multiply_adds: int

    @property
    def busiest(self) -> str:
        """The pipe with the most cycles."""
        return max(self.cycles, key=lambda pipe: self.cycles[pipe])


@dataclasses.dataclass(frozen=True)
class Card:
    """Copy bandwidth (bytes per second) and clock (hertz). The defaults are an H200's."""

    bandwidth: float = 4.3e12
    multiprocessors: int = 132
    clock: float = 1.98e9

    def arrival_cycles(self, num_bytes: int) -> float:
        """Cycles in which a multiprocessor receives `num_bytes` bytes if all multiprocessors receive the same
        number.
        """
        return num_bytes * self.multiprocessors / self.bandwidth * self.clock

    def seconds_of(self, budget: Budget, num_bytes: int, flops: int) -> tuple[float, float]:
        """Seconds for the bytes of a call, and seconds of the busiest pipe for all of its tiles.

        The number of tiles follows from the bytes or the multiply-adds, whichever gives more tiles.
        """
        tiles = max(num_bytes / budget.num_bytes, flops / 2 / budget.multiply_adds)
        return num_bytes / self.bandwidth, tiles * budget.cycles[budget.busiest] / self.multiprocessors / self.clock


def pipe_cycles(instruction: Instruction) -> dict[str, float]:
    """Cycles of a multiprocessor for one instruction of a warpgroup, by pipe."""
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
    """Compute the budget of a kernel.

    Raises:
      ValueError: no line defines a tile, or no loop uses the tensor cores.
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
    """Return a table with one row per kernel."""
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
    """Return a table with one row per kernel with a measured time."""
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
