"""Report on a compiled case of the compile gate, and comparison of the report with the requirements of the case."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tests.aot import device
from tests.aot.case import Case

BARRIER_BYTES = 8
"""Bytes of shared memory of one barrier."""

WARPGROUP = 128
"""Number of threads of a warpgroup."""

KERNEL = re.compile(r"((?:^(?:ptxas|    ).*\n)+)((?:^(?!ptxas).*\n?)*)", re.MULTILINE)
"""Pattern of the output of Mosaic GPU for one kernel: group 1 is the log of ptxas, group 2 the disassembly."""

TENSOR_CORES = r"\b(?:[HQI]GMMA|[HQIDB]MMA|UTC[A-Z]*MMA)\b[\w.]*"
"""Pattern of the SASS instructions of wgmma, mma.sync and tcgen05."""

SET_REGISTERS = r"\bUSETMAXREG\.(TRY_ALLOC|DEALLOC)\S* (?:UP\d+, )?(0x[0-9a-f]+)"
"""Pattern of the SASS instructions of PTX's `setmaxnreg`, with which a warpgroup requests or releases registers."""

OWN_TENSOR_CORES = {"H200": ("HGMMA", "QGMMA", "IGMMA"), "B200": ("UTC",), "L4": ()}
"""Prefixes, by GPU, of the tensor-core instructions that reach the GPU's full rate. The project has no Mosaic kernels
for an L4.
"""

REMARK = re.compile(r"^ptxas \w+ +: (.*(?:Performance Loss|ignored|spilled).*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled Mosaic GPU kernel.

    Attributes:
      name: name of the Python function of the kernel.
      registers: registers per thread when the kernel starts.
        stack, spill_stores, spill_loads: bytes per thread of the stack frame and of register spills.
        remarks: messages of ptxas about lost performance, ignored instructions and spilled registers.
      tensor_cores: distinct tensor-core instructions, such as "HGMMA.64x128x16.F32.BF16", or "UTCHMMA" on a B200.
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
        """Registers that the register file can give to the kernel: `registers` times the number of warpgroups that
        fit.
        """
        return self.registers * (device.MULTIPROCESSOR_REGISTERS // WARPGROUP // self.registers)

    @property
    def wanted_registers(self) -> int:
        """Sum over the warpgroups of their registers per thread after all `setmaxnreg` instructions; 0 without
        `setmaxnreg`.

        If the sum exceeds `given_registers`, a warpgroup waits forever for registers. The disassembly shows one
        increase even if several warpgroups execute it. Therefore, each warpgroup without a decrease is assumed to
        increase its registers.
        """
        changes = [(kind, int(count, 16)) for kind, count in re.findall(SET_REGISTERS, self.sass)]
        fewer, more = ([count for kind, count in changes if kind == which] for which in ("DEALLOC", "TRY_ALLOC"))
        warpgroups = self.given_registers // self.registers
        return sum(fewer) + (warpgroups - len(fewer)) * max(more, default=self.registers) if changes else 0


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on one compiled case.

    Attributes:
      error: error message if the case does not compile; None otherwise. With an error, the other fields are empty.
      kernels: Mosaic GPU kernels, in the order of their compilation.
      block_bytes: bytes of shared memory of a thread block, for each kernel.
      tmem_columns: columns of tensor memory of a thread block, maximum over the kernels.
      temporaries: bytes of temporary memory, in addition to arguments and results.
      aliased: bytes of results that reuse the memory of donated arguments.
      copies: copies and transposes whose result is at least as large as the cache.
        joins: instructions that concatenate or copy the attention output of an engine step.
        on_slices: computations in which XLA fused a kernel with slices of its operands. Such a kernel fails at run time
        if a slice is not aligned.
        launches: kinds of thunks (operations of XLA's executable) that the host launches, in order. Filled only if the
        case must be one CUDA graph or have a number of launches.
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
        """Bytes of shared memory of a thread block, maximum over the kernels."""
        return max(self.block_bytes, default=0)

    @property
    def fitting_blocks(self) -> int:
        """Number of thread blocks of one warpgroup that fit on a multiprocessor.

        The limit is registers, shared memory or tensor memory. For each resource, the kernel that needs most of it
        counts. Registers are allocated in units of 8 per thread.
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


def complaints(report: Report, case: Case, permitted_spills: int = 0) -> Iterator[str]:
    """Yield a message for each requirement of the case that the report does not meet. `permitted_spills` limits
    the bytes that a thread stores and loads together, for each kernel.
    """
    if report.error is not None:
        yield f"does not compile: {report.error}"
        return
    for kernel in report.kernels:
        if kernel.spill_stores + kernel.spill_loads > permitted_spills:
            yield f"{kernel.name} spills: {kernel.spill_stores} bytes stored, {kernel.spill_loads} loaded"
        if kernel.stack > permitted_spills:
            yield f"{kernel.name} has a stack frame of {kernel.stack} bytes"
        remarks = (remark for remark in kernel.remarks if not (permitted_spills and "are spilled" in remark))
        yield from (f"{kernel.name}: {remark}" for remark in remarks)
        if kernel.wanted_registers > kernel.given_registers:
            yield f"{kernel.name} requests {kernel.wanted_registers} registers, limit {kernel.given_registers}"
    if case.kernels and not report.kernels:
        yield "has no Mosaic GPU kernel"
    if case.tensor_cores and not any(kernel.tensor_cores for kernel in report.kernels):
        yield "uses no tensor cores"
    for kernel in report.kernels:
        if others := [each for each in kernel.tensor_cores if not each.startswith(OWN_TENSOR_CORES[case.card])]:
            yield f"{kernel.name} uses tensor-core instructions of other cards: {', '.join(others)}"
    if report.tmem_columns > device.TMEM_COLUMNS:
        yield f"needs {report.tmem_columns} columns of tensor memory, limit {device.TMEM_COLUMNS}"
    if report.shared_memory > device.MAX_SHARED_MEMORY:
        yield f"needs {report.shared_memory} bytes of shared memory, limit {device.MAX_SHARED_MEMORY}"
    elif (fitting := report.fitting_blocks) < case.blocks:
        yield f"requires {case.blocks} thread blocks per multiprocessor, but {fitting} fit"
    if case.scratch_bytes and case.scratch_bytes not in report.block_bytes:  # one kernel of the case must match
        sizes = " and ".join(map(str, report.block_bytes))
        yield f"needs {sizes} bytes of shared memory, but the scratch types have {case.scratch_bytes}"
    if report.temporaries > case.temporaries:
        yield f"has {report.temporaries} bytes of temporaries, limit {case.temporaries}"
    if report.aliased < case.donated_bytes:
        yield f"updates {report.aliased} of {case.donated_bytes} donated bytes in place"
    yield from (f"copies a cache: {copy}" for copy in report.copies)
    yield from (f"runs a kernel on slices: {name}" for name in report.on_slices)
    yield from (f"concatenates or copies the attention output: {join}" for join in report.joins)
    if case.one_graph and report.launches != ("CommandBuffer",):
        yield f"is not one CUDA graph, but launches {', '.join(report.launches)}"
    if case.launches and len(report.launches) != case.launches:
        yield f"launches {', '.join(report.launches)}, expected {case.launches} operations"


def parse_kernels(dump: str) -> tuple[Kernel, ...]:
    """Parse the kernels of Mosaic GPU's output, which has for each kernel the log of ptxas, then the disassembly."""
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
    """Parse the number of tensor memory columns from Mosaic GPU's resource dump: the maximum over the kernels.

    The result is rounded up to the columns that are allocated: a power of two, at least 32; 0 without tensor memory.
    """
    wanted = [int(columns) for columns in re.findall(r"tmem_scratch_cols=(\d+)", dump)]
    most = max(wanted, default=0)
    return max(32, 1 << (most - 1).bit_length()) if most else 0


def parse_shared_memory(dump: str) -> tuple[int, ...]:
    """Parse the bytes of shared memory of each kernel, including barriers, from Mosaic GPU's resource dump."""
    sizes = []
    for line in re.findall(r"Resources\((.*)\)", dump):
        (scratch,) = _find(r"smem_scratch_bytes=(\d+)", line)
        barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", line)
        sizes.append(int(scratch) + sum(BARRIER_BYTES * int(number) * int(count) for number, count in barriers))
    return tuple(sizes)
