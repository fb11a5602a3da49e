"""Worker process of `gate.Compiler`, which compiles cases. Only this process has jax's CUDA plugin on its path.

The process reads names of cases from standard input, one per line. It compiles each case for the GPU that its
command-line argument names (`device.CARDS`), and writes the report to standard output as one line of JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import IO

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_attn.jax_patches.faster_lowering import faster_lowering
from tests.aot import device, signs
from tests.aot.case import Case, Cases
from tests.aot.cases import ALL
from tests.aot.report import Report, parse_kernels, parse_shared_memory, parse_tmem_columns
from tests.aot.samples import SAMPLES


class Printed:
    """Capture of the standard output of this process, including output of C++ libraries. Mosaic GPU prints the dumps of
    its kernels there.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, stays open until the process ends
        os.dup2(self._file.fileno(), 1)

    def take(self) -> str:
        """Return the text printed since the last call."""
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        self._file.seek(0)
        text = self._file.read().decode()
        self._file.seek(0)
        self._file.truncate()
        return text


def compile_case(case: Case, card: jax.Device, printed: Printed) -> Report:
    """Compile a case and collect its report."""
    here = NamedSharding(Mesh([card], "x"), PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), dict(case.arguments))
    jitted = jax.jit(case.function, donate_argnames=case.cache if case.donated else None)
    lists = case.one_graph or case.launches > 0
    printed.take()
    # Mosaic GPU lowers a kernel for the architecture of the default device.
    with jax.default_device(card), tempfile.TemporaryDirectory() as dumps:
        dumping = {"xla_dump_to": dumps, "xla_dump_hlo_as_text": True} if lists else {}
        compiled = jitted.lower(**arguments).compile((case.options or {}) | dumping)
        launches = launched(Path(dumps)) if lists else ()
    dump, memory, module = printed.take(), compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert module is not None
    kernels = parse_kernels(dump)
    if case.kernels and not kernels and 'custom_call_target="mosaic_gpu' in module:
        raise ValueError("an earlier case in this process has the same kernels, so they were not compiled again")
    return Report(
        kernels=kernels,
        block_bytes=parse_shared_memory(dump),
        tmem_columns=parse_tmem_columns(dump),
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        copies=large_copies(module, case.cache_elements) if case.cache else (),
        on_slices=kernels_on_slices(module),
        joins=joins(module, case.output) if case.output else (),
        launches=launches,
    )


def launched(dumps: Path) -> tuple[str, ...]:
    """Return the kinds of thunks that the host launches to run the compiled program, in order.

    A thunk is one operation of XLA's executable, such as a kernel launch; a CUDA graph is one thunk ("CommandBuffer").
    XLA dumps the thunks after several passes. The last dump is read, because it is after the pass that builds CUDA
    graphs.
    """
    *_, sequence = sorted(dumps.glob("*.thunk_sequence*.txt"))
    return tuple(re.findall(r"(?m)^\d+: k(\w+)", sequence.read_text()))


def kernels_on_slices(module: str) -> tuple[str, ...]:
    """Return the names of the computations of a compiled program in which XLA fused a kernel with slices of its
    operands.
    """
    found = []
    for computation in re.split(r"(?m)^}\n", module):
        name = re.match(r"\s*%?([\w.-]*slice-fusion[\w.-]*) ", computation)
        if name and re.search('custom_call_target="(mosaic_gpu|triton_kernel_call)', computation):
            found.append(name[1])
    return tuple(found)


def large_copies(module: str, elements: int) -> tuple[str, ...]:
    """Return the copies and transposes of a compiled program whose result has at least `elements` elements."""
    found = re.findall(r"(?m) = \(?(\w+\[([\d,]+)\])\S*(?: [^=]*\))? (copy|copy-start|transpose)\(", module)
    return tuple(
        f"{operation} of {result}"
        for result, dims, operation in found
        if math.prod(int(dim) for dim in dims.split(",")) >= elements
    )


def joins(module: str, output: tuple[int, ...]) -> tuple[str, ...]:
    """Return the instructions of a compiled program, also inside fusions, whose result has the shape `output` and that
    concatenate or copy.
    """
    dims = ",".join(map(str, output))
    found = re.findall(rf"(?m) = \(?(\w+\[{dims}\])\S*(?: [^=]*\))? (concatenate|copy|copy-start)\(", module)
    return tuple(f"{operation} of {result}" for result, operation in found)


def main(requests: IO[str], card_name: str) -> None:
    gc.set_threshold(50_000, 20, 20)  # fewer collections, which would find little, because most objects stay alive
    with faster_lowering():
        signs.check()  # after `faster_lowering`, because it wraps the lowering rules that are in effect
        answers = os.fdopen(os.dup(1), "w")
        printed, card, cases = Printed(), device.described(card_name), Cases(SAMPLES | ALL)
        for line in requests:
            report = compile_case(cases[line.strip()], card, printed)
            answer = json.dumps(dataclasses.asdict(report))
            print(f"\n{answer}", file=answers, flush=True)  # begins a new line, in case other output did not end one


if __name__ == "__main__":
    main(sys.stdin, sys.argv[1])
