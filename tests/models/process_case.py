"""Processes of one engine, started as commands."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORKER = """
import os, signal, sys, time
import jax, numpy as np
from pallas_attn.models.decoder import make_mesh, over_mesh
from pallas_attn.models.engine import Processes, ProcessError
from jax.sharding import PartitionSpec as P

index, port, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3] if sys.argv[1] == "1" else ""

def give_up(verdict):
    print("given up:", verdict, flush=True)
    os._exit(4)

processes = Processes(f"127.0.0.1:{port}", 2, index, timeout_s=2, give_up=give_up)
mesh = make_mesh({"tensor": 4})
step = jax.jit(over_mesh(lambda x: jax.lax.psum(x, "tensor") / 4, mesh, P(), P()))
x = step(jax.make_array_from_callback((3,), jax.sharding.NamedSharding(mesh, P()), np.ones(3, np.float32).__getitem__))
processes.agree("the start")
try:
    for number in range(10):
        if number == 5 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5 and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == 5 and fault == "hanging":
            time.sleep(1000)
        read = processes.announce(f"step {number}", b"odd" if number == 5 and fault == "disagreeing" else b"plan")
        with processes.blamed():
            x = step(x)
        assert read(x).tolist() == [1, 1, 1]
    processes.leave()
    print("left")
except ProcessError as error:
    print(error, flush=True)
    processes.leave(str(error))
    os._exit(3)
"""


GLOO = re.compile(r"\[Gloo\] Rank| is connected to | peer ranks\. |Expected number of connected peer ranks is : \d*")


class Group:
    """Processes of one command, which are killed at the end."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, commands: list[list[str]], num_devices: int = 2) -> None:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self._started.append(process)

    def wait(self, index: int) -> tuple[int, list[str], str]:
        """Return exit status, lines of standard output without messages of Gloo (which threads interleave), and
        standard error."""
        process = self._started[index]
        out, err = process.communicate(timeout=240)
        lines = [GLOO.sub("", line).strip() for line in out.splitlines()]
        return process.returncode, [line for line in lines if line and not line.replace(" ", "").isdecimal()], err

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture(name="group")
def fixture_group() -> Iterator[Group]:
    group = Group()
    yield group
    group.end()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
