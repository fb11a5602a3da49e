"""Compile calls with Triton kernels for GPUs that need not be present: to PTX, and with ptxas to machine code.

ptxas comes with triton's wheel. A separate process compiles, because Triton kernels are interpreted in the process of
the tests. `TritonCompiler` writes lines "CASE CARD" to the process and reads a line of JSON for each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pallas_attn.runtime import device
from tests.aot.environment import ROOT
from tests.aot.sources import triton_key
from tests.aot.triton_cases import CARDS, TRITON_CASES, TritonCase

RECORDED = ROOT / "tests" / "aot" / "recorded_triton.json"
"""Reports of the cases of `make test`, which `python -m tests.aot --record` writes."""
ANSWER = '{"kernels":'
TENSOR_CORE = re.compile(r"\b((?:HMMA|IMMA|QMMA|HGMMA|QGMMA|IGMMA|OMMA|UTC\w*MMA)[\w.]*)")
PTX_VERSIONS = {"sm80": "8.4", "sm86": "8.4", "sm89": "8.4", "sm90": "8.4", "sm100": "8.8", "sm120": "8.8"}


@dataclasses.dataclass(frozen=True)
class TritonKernelReport:
    """Resources of a compiled kernel.

    Attributes:
      name: name of the function.
      ptx_version: version of the PTX, such as "8.4".
      registers: registers per thread.
      stack, spills: bytes per thread of the stack frame and of register spills.
      shared_bytes: bytes of shared memory of a thread block.
      tensor_cores: names of tensor-core instructions.
    """

    name: str
    ptx_version: str
    registers: int
    stack: int
    spills: int
    shared_bytes: int
    tensor_cores: tuple[str, ...]


def complaints(
    kernels: list[TritonKernelReport], case: TritonCase, card: str, allowed_spills: int = 0
) -> Iterator[str]:
    """Yield a message for each requirement that the kernels of a call do not meet. `allowed_spills` is in bytes per
    thread.
    """
    limit = CARDS[card].shared_bytes_per_block
    assert limit is not None
    if not kernels:
        yield "no kernel"
    for kernel in kernels:
        if kernel.spills > allowed_spills or (kernel.stack and not allowed_spills):
            yield f"{kernel.name}: {kernel.spills} bytes of spills, {kernel.stack} of stack"
        if kernel.shared_bytes > limit:
            yield f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory, of {limit}"
        if kernel.ptx_version != PTX_VERSIONS[card]:
            yield f"{kernel.name}: PTX {kernel.ptx_version}, wanted {PTX_VERSIONS[card]}"
    if case.tensor_cores and not any(kernel.tensor_cores for kernel in kernels):
        yield "no kernel uses the tensor cores"


class TritonCompiler:
    """Owner of the process that compiles. The process starts with the first case that is not recorded.

    Args:
      recorded: whether to return reports of recorded_triton.json whose code has not changed.
    """

    def __init__(self, *, recorded: bool = False) -> None:
        self._recorded = json.loads(RECORDED.read_text()) if recorded else {"key": None, "kernels": {}}
        self._process: subprocess.Popen[str] | None = None

    def kernels(self, case: str, card: str) -> list[TritonKernelReport]:
        """Return the kernels of a case, compiled for a GPU of `CARDS`.

        Raises:
          AssertionError: the process ended without a result. The message is the end of its output.
        """
        found = self._recorded["kernels"].get(f"{case} {card}") if self._recorded["key"] == triton_key() else None
        if found is not None:
            return [TritonKernelReport(**kernel) for kernel in found]
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{case} {card}\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return [TritonKernelReport(**kernel) for kernel in json.loads(line)["kernels"]]
            said.append(line)
        self.close()
        raise AssertionError("".join(said[-30:]))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        left_out = {device.TRITON_INTERPRET_VARIABLE, "XLA_FLAGS"}
        variables = {name: value for name, value in os.environ.items() if name not in left_out}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.aot.triton_compile"],
            cwd=ROOT,
            env=variables | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def record(reports: Mapping[tuple[str, str], list[TritonKernelReport]]) -> None:
    """Write recorded_triton.json. `reports` has the kernels by case and card."""
    kernels = {" ".join(named): [*map(dataclasses.asdict, of_case)] for named, of_case in sorted(reports.items())}
    RECORDED.write_text(json.dumps({"key": triton_key(), "kernels": kernels}, indent=1) + "\n")


# --- code of the process that compiles


def compile_call(case: TritonCase, card: device.Device) -> list[TritonKernelReport]:
    """Trace a call for a GPU, and compile every kernel that it launches."""
    import jax

    from pallas_attn.triton import launch

    compiled: dict[Any, int] = {}

    def recording(*args: Any) -> Any:
        kernel = launch.compile_kernel(*args)
        compiled[kernel] = args[-1]
        return kernel

    with (
        mock.patch.object(device, "triton_card", return_value=card),
        mock.patch.object(launch, "compiled", recording),
        mock.patch.object(launch, "encoded_call", return_value=b""),  # the function needs jax's CUDA plugin
    ):
        # The lambda must be a new object for each call. jax caches traces by function, and they depend on the GPU.
        jax.eval_shape(lambda arguments: case.function(**arguments), dict(case.arguments))
    return [assembled(kernel, capability) for kernel, capability in compiled.items()]


def assembled(kernel: Any, capability: int) -> TritonKernelReport:
    """Compile the PTX of a kernel to machine code, and report its resources."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(kernel.ptx)
        ptxas = tools / ("ptxas-blackwell" if capability >= 100 else "ptxas")
        command = [ptxas, "-v", f"-arch={target}", ptx, "-o", cubin]
        log = subprocess.run(command, capture_output=True, text=True, check=False)
        if log.returncode:
            raise ValueError(f"{kernel.name}: {log.stderr}")
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    version = re.search(r"\.version (\S+)", kernel.ptx)
    assert version

    def number(pattern: str) -> int:
        found = re.search(pattern, log.stderr)
        assert found, log.stderr
        return int(found[1])

    return TritonKernelReport(
        name=kernel.name,
        ptx_version=version[1],
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=kernel.shared_bytes,
        tensor_cores=tuple(sorted(set(TENSOR_CORE.findall(sass)))),
    )


def main() -> None:
    for line in sys.stdin:
        case, card = line.split()
        kernels = compile_call(TRITON_CASES[case], CARDS[card])
        print(f"\n{json.dumps({'kernels': [dataclasses.asdict(kernel) for kernel in kernels]})}", flush=True)


if __name__ == "__main__":
    main()
