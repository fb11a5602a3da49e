"""Compile cases of the compile gate and print their reports.

python -m tests.aot [PATTERN ...] [--plugin cuda13] [--listings DIR]
python -m tests.aot --record          # compile the cases of `make test` and write recorded.json, recorded_triton.json

A case is a call that must compile without a GPU. A report has the resources of its kernels (`report.py`).
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from pathlib import Path

from tests.aot import triton_cases, triton_compile
from tests.aot.case import Tile
from tests.aot.cases import CASES, IN_EVERY_RUN, ON_BOTH_PLUGINS
from tests.aot.environment import PLUGINS, missing
from tests.aot.gate import Compiler, record
from tests.aot.report import Report, complaints
from tests.aot.triton_compile import TritonCompiler


def listing(report: Report, tile: Tile) -> str:
    """Return a listing for `scripts/tools/tile_budget.py`: size of the tile, and disassembly of the case's only kernel
    that uses tensor cores.
    """
    (kernel,) = (kernel for kernel in report.kernels if kernel.tensor_cores)
    return f"// tile: {tile.num_bytes} bytes, {tile.multiply_adds} multiply-adds\n{kernel.sass}"


def compile_and_print(compiler: Compiler, name: str, listings: Path | None) -> bool:
    """Compile a case, print its report, and return whether it meets its requirements. Write its listing to the folder
    `listings` if it is given.
    """
    case, began = CASES[name], time.perf_counter()
    report = compiler.report(name)
    print(
        f"{name}: {time.perf_counter() - began:.1f} s, {report.shared_memory} bytes of shared memory"
        + f", {report.tmem_columns} columns of tensor memory" * bool(report.tmem_columns)
    )
    for kernel in report.kernels:
        print(f"  {kernel.name}: {kernel.registers} registers, {', '.join(kernel.tensor_cores)}")
    wrong = list(complaints(report, case))
    for complaint in wrong:
        print(f"  FAILS: {complaint}")
    if listings and case.tile and report.error is None:
        listings.mkdir(parents=True, exist_ok=True)
        (listings / f"{name}.sass").write_text(listing(report, case.tile))
    return not wrong


def record_reports() -> int:
    """Compile the cases of `make test` whose code changed. Write recorded.json and recorded_triton.json if all cases of
    `make test` pass. Return the exit status.
    """
    reports: dict[str, dict[str, Report]] = {}
    wrong = 0
    for plugin, names in {"cuda13": IN_EVERY_RUN, "cuda12": ON_BOTH_PLUGINS}.items():
        if reason := missing(plugin):
            print(reason)
            return 1
        compiler = Compiler(plugin)
        reports[plugin] = {name: compiler.report(name) for name in sorted(names)}
        compiler.close()
        for name, report in reports[plugin].items():
            for complaint in complaints(report, CASES[name]):
                print(f"{name} ({plugin}) FAILS: {complaint}")
                wrong += 1
    triton, reports_of_triton = TritonCompiler(recorded=True), {}
    for case, card in sorted(triton_cases.IN_EVERY_RUN):
        reports_of_triton[case, card] = kernels = triton.kernels(case, card)
        spills = triton_cases.SPILLS.get((case, card), 0)
        for complaint in triton_compile.complaints(kernels, triton_cases.TRITON_CASES[case], card, spills):
            print(f"{case} ({card}) FAILS: {complaint}")
            wrong += 1
    triton.close()
    if wrong == 0:
        record(reports)
        triton_compile.record(reports_of_triton)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "patterns", nargs="*", default=["*"], metavar="PATTERN", help="pattern of case names, for example 'paged-*'"
    )
    parser.add_argument("--plugin", choices=PLUGINS, default=PLUGINS[0])
    parser.add_argument("--listings", type=Path, help="folder for the disassembly of cases with a tile")
    parser.add_argument("--record", action="store_true", help="write the reports of the cases of `make test`")
    options = parser.parse_args()
    if options.record:
        return record_reports()
    if reason := missing(options.plugin):
        parser.error(reason)
    compiler = Compiler(options.plugin, cached=False)
    names = [name for name in CASES if any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns)]
    passed = [compile_and_print(compiler, name, options.listings) for name in names]
    compiler.close()
    print(f"{sum(passed)} of {len(passed)} pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
