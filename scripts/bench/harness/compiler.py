"""Messages of the compilers of Mosaic GPU kernels: registers that spill, shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator

SWITCHES = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
"""Environment variables that make the compilers print; read whenever a kernel is compiled."""


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Captures, within its context, all that this process prints, C++ libraries included; afterwards it is the list's
    one text."""
    os.environ.update(dict.fromkeys(SWITCHES, "1"))
    said: list[str] = []
    _flush()
    with tempfile.TemporaryFile() as file:
        terminal = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield said
        finally:
            _flush()
            os.dup2(terminal, 1)
            os.close(terminal)
            for switch in SWITCHES:
                del os.environ[switch]
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


def _flush() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def spilled_bytes(said: str) -> int:
    """Bytes per thread that kernels keep in memory for want of registers: stored, loaded or on the stack."""
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return sum(map(int, (number for numbers in found for number in numbers)))


def shared_bytes(said: str) -> int:
    """Bytes of shared memory of the program that takes most, without barriers."""
    return max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", said)), default=0)
