"""Report of the compilers on a case, and complaints about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tests.aot import device
from tests.aot.case import Case

BARRIER_BYTES = 8
"""Shared memory that one barrier takes."""

WARPGROUP = 128
"""Threads of a warpgroup."""

KERNEL = re.compile(r"((?:^(?:ptxas|    ).*\n)+)((?:^(?!ptxas).*\n?)*)", re.MULTILINE)
"""Log of the assembler for a kernel, and its disassembly."""

TENSOR_CORES = r"\b(?:[HQI]GMMA|[HQIDB]MMA|UTC[A-Z]*MMA)\b[\w.]*"
"""Instructions that multiply matrices: of wgmma, of mma.sync, of tcgen05."""

SET_REGISTERS = r"\bUSETMAXREG\.(TRY_ALLOC|DEALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)"
"""Instructions by which a warpgroup asks for registers, or gives some back."""

OWN_TENSOR_CORES = {"H200": ("HGMMA", "QGMMA", "IGMMA"), "B200": ("UTC",), "L4": ()}
"""Beginnings of the names of those that use all of a card's tensor cores; there are no kernels for an L4."""

REMARK = re.compile(r"^ptxas \w+ +: (.*(?:Performance Loss|ignored|spilled).*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Mosaic GPU kernel, as the assembler left it.

    Attributes:
      name: of the Python function it was written as.
      registers: per thread, at entry.
      stack, spill_stores, spill_loads: bytes per thread.
      remarks: the assembler's warnings and remarks about lost performance.
      tensor_cores: its tensor-core instructions, such as "HGMMA.64x128x16.F32.BF16", or "UTCHMMA" on a B200.
      sass: disassembly.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    remarks: tuple[str, ...]
    tensor_cores: tuple[str, ...]
    sass: str

    @property
    def given_registers(self) -> int:
        """Registers that a thread block's warpgroups have at entry, for one thread of each."""
        return self.registers * (device.MULTIPROCESSOR_REGISTERS // WARPGROUP // self.registers)

    @property
    def wanted_registers(self) -> int:
        """Registers that its warpgroups ask for, for one thread of each; 0 if none does. Those that ask for more may
        share code, and one that asks for more than is left waits for ever.
        """
        asked = [(kind, int(count, 16)) for kind, count in re.findall(SET_REGISTERS, self.sass)]
        fewer, more = ([count for kind, count in asked if kind == which] for which in ("DEALLOC", "TRY_ALLOC"))
        warpgroups = self.given_registers // self.registers
        return sum(fewer) + (warpgroups - len(fewer)) * max(more, default=self.registers) if asked else 0


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled configuration.

    Attributes:
      error: why it does not compile; then the rest is empty.
      kernels: its Mosaic GPU kernels, in the order they were compiled.
      block_bytes: shared memory that a thread block of each asks for.
      tmem_columns: columns of tensor memory that a thread block takes, in the greediest of them.
      temporaries: bytes of memory beside arguments and results.
      aliased: bytes of results that take the place of donated arguments.
      copies: copying instructions of the compiled module as large as the cache, with their shapes.
      joins: instructions that concatenate or copy the step's attention output.
      on_slices: computations that run a kernel on slices of arrays, which it refuses where they are not aligned.
      launches: kinds of what the host launches, in order, of a case that has to be one graph.
    """

    error: str | None = None
    kernels: tuple[Kernel, ...] = ()
    block_bytes: tuple[int, ...] = ()
    tmem_columns: int = 0
    temporaries: int = 0
    aliased: int = 0
    copies: tuple[str, ...] = ()
    on_slices: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()

    @property
    def shared_memory(self) -> int:
        """Bytes a thread block asks for, in the greediest of them."""
        return max(self.block_bytes, default=0)

    @property
    def fitting_blocks(self) -> int:
        """Thread blocks of one warpgroup that a multiprocessor has registers and shared memory for, of the greediest
        kernel. Registers are given out by 8 a thread, and no block starts while tensor memory is short.
        """
        registers = max((-(-kernel.registers // 8) * 8 for kernel in self.kernels), default=8)
        return min(
            device.MULTIPROCESSOR_REGISTERS // (registers * WARPGROUP),
            device.MULTIPROCESSOR_SHARED_MEMORY // (self.shared_memory + device.BLOCK_SHARED_MEMORY),
            device.TMEM_COLUMNS // max(1, self.tmem_columns),
        )

    @staticmethod
    def from_json(fields: dict) -> Report:
        kernels = tuple(
            Kernel(**kernel | {name: tuple(kernel[name]) for name in ("remarks", "tensor_cores")})
            for kernel in fields["kernels"]
        )
        names = ("block_bytes", "copies", "on_slices", "joins", "launches")
        lists: dict[str, Any] = {name: tuple(fields[name]) for name in names}
        return dataclasses.replace(Report(**fields), kernels=kernels, **lists)


def complaints(report: Report, case: Case) -> Iterator[str]:
    """Yield each requirement of the case that its report does not meet; nothing if it passes."""
    if report.error is not None:
        yield f"does not compile: {report.error}"
        return
    for kernel in report.kernels:
        if kernel.spill_stores or kernel.spill_loads:
            yield f"{kernel.name} spills: {kernel.spill_stores} bytes stored, {kernel.spill_loads} loaded"
        if kernel.stack:
            yield f"{kernel.name} has a stack frame of {kernel.stack} bytes"
        yield from (f"{kernel.name}: {remark}" for remark in kernel.remarks)
        if kernel.wanted_registers > kernel.given_registers:
            yield f"{kernel.name}'s warpgroups want {kernel.wanted_registers} registers, of {kernel.given_registers}"
    if case.kernels and not report.kernels:
        yield "has no Mosaic GPU kernel"
    if case.tensor_cores and not any(kernel.tensor_cores for kernel in report.kernels):
        yield "uses no tensor cores"
    for kernel in report.kernels:
        if others := [each for each in kernel.tensor_cores if not each.startswith(OWN_TENSOR_CORES[case.card])]:
            yield f"{kernel.name} multiplies as other cards do: {', '.join(others)}"
    if report.tmem_columns > device.TMEM_COLUMNS:
        yield f"takes {report.tmem_columns} columns of tensor memory, of {device.TMEM_COLUMNS}"
    if report.shared_memory > device.MAX_SHARED_MEMORY:
        yield f"asks for {report.shared_memory} bytes of shared memory, of {device.MAX_SHARED_MEMORY}"
    elif (fitting := report.fitting_blocks) < case.blocks:
        yield f"is meant for {case.blocks} thread blocks a multiprocessor, of which {fitting} fit"
    if case.scratch_bytes and case.scratch_bytes not in report.block_bytes:  # a merge may ask for more
        asked = " and ".join(map(str, report.block_bytes))
        yield f"asks for {asked} bytes of shared memory, its scratch types come to {case.scratch_bytes}"
    if report.temporaries > case.temporaries:
        yield f"has {report.temporaries} bytes of temporaries, may have {case.temporaries}"
    if report.aliased < case.donated_bytes:
        yield f"updates {report.aliased} bytes in place, of {case.donated_bytes} donated"
    yield from (f"copies a cache: {copy}" for copy in report.copies)
    yield from (f"runs a kernel on slices: {name}" for name in report.on_slices)
    yield from (f"joins the parts of a step: {join}" for join in report.joins)
    if case.one_graph and report.launches != ("CommandBuffer",):
        yield f"is not one CUDA graph, but {', '.join(report.launches)}"


def parse_kernels(dump: str) -> tuple[Kernel, ...]:
    """The kernels in what Mosaic GPU prints while it compiles: for each, the assembler's log, then the disassembly."""
    return tuple(_parse_kernel(log, sass) for log, sass in KERNEL.findall(dump))


def _parse_kernel(log: str, sass: str) -> Kernel:
    function, stack, stores, loads, registers = _find(
        r"Function properties for (\w+)\n *(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"[\s\S]*Used (\d+) registers",
        log,
    )
    if f".text.{function}" not in sass:
        raise ValueError(f"the disassembly of {function} is missing")
    return Kernel(
        name=function.removesuffix("_mosaic_gpu_kernel"),
        registers=int(registers),
        stack=int(stack),
        spill_stores=int(stores),
        spill_loads=int(loads),
        remarks=tuple(REMARK.findall(log)),
        tensor_cores=tuple(dict.fromkeys(re.findall(TENSOR_CORES, sass))),
        sass=sass,
    )


def _find(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"expected {pattern!r} in:\n{text}")
    return match.groups()


def parse_tmem_columns(dump: str) -> int:
    """Columns of tensor memory of the greediest kernel, from what Mosaic GPU prints about what it reserves. It takes a
    power of two, 32 or more.
    """
    wanted = [int(columns) for columns in re.findall(r"tmem_scratch_cols=(\d+)", dump)]
    most = max(wanted, default=0)
    return max(32, 1 << (most - 1).bit_length()) if most else 0


def parse_shared_memory(dump: str) -> tuple[int, ...]:
    """Bytes of shared memory of each kernel, from what Mosaic GPU prints about what it reserves."""
    sizes = []
    for line in re.findall(r"Resources\((.*)\)", dump):
        (scratch,) = _find(r"smem_scratch_bytes=(\d+)", line)
        barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", line)
        sizes.append(int(scratch) + sum(BARRIER_BYTES * int(number) * int(count) for number, count in barriers))
    return tuple(sizes)
