"""Measure KV-cache transfers during prefill.

A whole step is one compiled program of all layers. A layered step is launched in several chunks of layers, so that the
pages of early layers can be copied to the host, and to another process, while later layers run. The consumer is the
callback that receives the pages (`Engine.watch_written`). There are three measurements:

- Cost of layered steps. One engine computes prompts in whole steps and, interleaved, in layered steps with a consumer
that drops the pages. The report has the time to the first token of both, and the share of the page bytes that the
consumer had received when the first token of the layered run arrived.
- Export. The time to export all pages after the prompt (`Engine.export_pages`), the alternative to layered steps.
- Two processes. A second process computes prompts, and this process continues them. The report has the time from
submission to the first token; the share of page bytes received within the time to the first token of whole steps; and
the number of first tokens that equal the tokens computed in this process.

Engines on meshes, which do not support layered steps, have a measurement of their own (`run_on_meshes`): the second
process computes a prompt and exports its pages (`Engine.export_pages`), and this process imports them
(`Engine.import_pages`) and continues. The report has the time to the first token with and without the second process.

Prompts are random, so no prompt is in a prefix cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_attn.models.checkpoints import random_model as equal_on_all_meshes
from pallas_attn.models.config import GQA_PRESETS, PRESETS
from pallas_attn.models.decoder import AttentionSettings, make_mesh
from pallas_attn.models.engine import (
    CachedPages,
    Engine,
    EngineConfig,
    RemotePrefill,
    SamplingParams,
    SocketTransport,
    serve_prefill,
)
from pallas_attn.models.engine.kv_transfer.transport import TransportError
from scripts.bench.engine.random_model import random_model

CONFIGS = PRESETS | GQA_PRESETS

SECRET = "PALLAS_ATTN_TRANSFER_SECRET"
"""Environment variable with the secret that both processes share."""

PIECES = 4
"""Default number of chunks of layers per step, equal to the default of `Engine.watch_written` and `serve_prefill`."""


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Measured model and traffic.

    Attributes:
      config: name of the model's configuration. Weights are random.
      dtype: dtype of weights and cache.
      implementation: implementation of attention; None for the default.
      lengths: prompt lengths (tokens).
      step_tokens: maximum tokens per step.
      page_size: tokens per page.
      repeats: repetitions of each measurement.
      pieces: chunks of layers per layered step, each launched separately.
      mesh, prefill_mesh: devices along each axis of the mesh of this process, and of the process that computes prompts;
        empty for one device.
    """

    config: str
    dtype: str
    implementation: str | None
    lengths: tuple[int, ...]
    step_tokens: int
    page_size: int
    repeats: int
    pieces: int = PIECES
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prefill_mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def on_meshes(self) -> bool:
        return bool(self.mesh or self.prefill_mesh)


def make_engine(work: HandOver, layout: Mapping[str, int]) -> Engine:
    """Return an engine with a pool for two of the longest prompts. It has at most two sizes of prefill steps, because
    each size is compiled as a whole and as a layered step.

    Both processes have equal weights. Devices draw weights faster than the host, but the values depend on the mesh.
    """
    settings = AttentionSettings(implementation=work.implementation)
    mesh = make_mesh(layout) if layout else None
    longest = max(work.lengths) + 2
    config = EngineConfig(
        num_pages=2 * -(-longest // work.page_size) + 2,
        page_size=work.page_size,
        max_batched_tokens=work.step_tokens,
        max_num_seqs=2,
        max_model_len=longest,
        decode_buckets=(2,),
        prefill_buckets=tuple(sorted({min(work.page_size, work.step_tokens), work.step_tokens})),
        mesh=mesh,
    )
    if work.mesh == work.prefill_mesh:
        return Engine(random_model(CONFIGS[work.config], work.dtype, settings, mesh=mesh), config)
    return Engine(equal_on_all_meshes(CONFIGS[work.config], dtype=work.dtype, settings=settings, mesh=mesh), config)


def run(work: HandOver, prefill_device: str | None) -> Iterator[dict[str, Any]]:
    """Measure each prompt length; yield one result at a time."""
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(0, CONFIGS[work.config].vocab_size, length).tolist()

    with _prefill_process(work, prefill_device) as connect:
        engine = make_engine(work, {})
        warm_up(engine, work.pieces, whole=True)
        connection, secret = connect()
        transport = _TimedTransport(connection)
        remote = RemotePrefill(engine, transport, timeout_s=600, secret=secret)
        for length in (*work.lengths, *work.lengths):  # the first round is unmeasured: it loads kernels
            _remote(engine, remote, prompt(length))
        for length in work.lengths:
            whole, layered, exported, arrived = [], [], [], []
            for _ in range(work.repeats):
                whole.append(_local(engine, prompt(length))[0])
                bytes_at: list[tuple[float, int]] = []
                feed = engine.watch_written(
                    lambda w, at=bytes_at: at.append((time.perf_counter(), w.num_bytes)), pieces=work.pieces
                )
                began = time.perf_counter()
                layered.append(_local(engine, prompt(length))[0])
                feed.wait(600)
                feed.close()
                arrived.append(_share(bytes_at, began + layered[-1]))
            for _ in range(work.repeats):  # not interleaved with the other runs: exports slow down later steps
                _local(engine, prompt(length), exported=exported.append)
            apart, read, equal, equal_to_whole = [], [], 0, 0
            for _ in range(work.repeats):
                tokens, began = prompt(length), time.perf_counter()
                transport.arrived.clear()
                seconds, got = _remote(engine, remote, tokens)
                apart.append(seconds)
                read.append(_share(transport.arrived, began + statistics.median(whole)))
                equal_to_whole += got == _local(engine, tokens, salt="whole")[1]
                feed = engine.watch_written(lambda w: None, pieces=work.pieces)
                equal += got == _local(engine, tokens, salt="layer by layer")[1]
                feed.close()
            yield {
                "prompt_tokens": length,
                "whole_ttft_s": summary(whole),
                "layered_ttft_s": summary(layered),
                "cost": statistics.median(layered) / statistics.median(whole) - 1,
                "arrived_before_first_token": statistics.median(arrived),
                "export_s": summary(exported),
                "two_processes_ttft_s": summary(apart),
                "read_by_whole_ttft": statistics.median(read),
                "equal_first_tokens": equal,
                "equal_to_whole_steps": equal_to_whole,
            }
        remote.close()


def run_on_meshes(work: HandOver, prefill_devices: str | None) -> Iterator[dict[str, Any]]:
    """Measure the transfer of whole prompts between engines on meshes, one result per prompt length."""
    rng = np.random.default_rng(0)
    with _prefill_process(work, prefill_devices) as connect:
        engine = make_engine(work, work.mesh)
        warm_up(engine, 0, whole=True)
        transport = SocketTransport(connect()[0], timeout_s=600, max_bytes=MOST_BYTES)

        def measure(length: int) -> dict[str, float]:
            prompt = rng.integers(0, CONFIGS[work.config].vocab_size, length).tolist()
            began = time.perf_counter()
            transport.send({"prompt": prompt})
            times, arrays = transport.receive()
            received = time.perf_counter()
            imported = engine.import_pages(CachedPages.from_bytes(arrays["pages"].tobytes()))
            ended = time.perf_counter()
            if imported < length // work.page_size * work.page_size:
                raise RuntimeError(f"expected the pages of {length} tokens, imported pages of {imported}")
            rest, token = _local(engine, prompt)
            alone, same = _local(engine, prompt, salt="alone")
            return {
                **times,
                "transfer_s": received - began - sum(times.values()),
                "import_s": ended - received,
                "bytes": arrays["pages"].nbytes,
                "two_processes_ttft_s": ended - began + rest,
                "ttft_s": alone,
                "equal_first_tokens": token == same,
            }

        for length in (*work.lengths, *work.lengths):  # the first round is unmeasured: it loads kernels
            measure(length)
        for length in work.lengths:
            runs = [measure(length) for _ in range(work.repeats)]
            yield {
                "prompt_tokens": length,
                **{f"{name}_s": summary([run[f"{name}_s"] for run in runs]) for name in PARTS},
                "bytes": runs[0]["bytes"],
                "equal_first_tokens": sum(run["equal_first_tokens"] for run in runs),
            }
        transport.close()


PARTS = ("ttft", "two_processes_ttft", "prefill", "export", "transfer", "import")
"""Measured times of `run_on_meshes`: to the first token in this process, and with the second process, and its parts."""


MOST_BYTES = 2**40
"""Maximum size of a message with the pages of a prompt."""


def _serve_whole(engine: Engine, transport: SocketTransport) -> None:
    """Compute prompts and send their pages, until the other process closes the connection."""
    while True:
        try:
            message, _ = transport.receive()
        except TransportError:
            return
        began = time.perf_counter()
        request = engine.add_request(message["prompt"], SamplingParams(max_tokens=1, ignore_eos=True))
        _finish(engine, request)
        computed = time.perf_counter()
        pages = np.frombuffer(engine.export_pages(request).to_bytes(), np.uint8)
        times = {"prefill_s": computed - began, "export_s": time.perf_counter() - computed}
        engine.forget(request)
        transport.send(times, {"pages": pages})


def warm_up(engine: Engine, pieces: int, *, whole: bool) -> None:
    """Compile the prefill steps as layered steps of `pieces` chunks, unless it is 0, and also as whole steps if `whole`
    is set. No step of this benchmark decodes.
    """
    buckets = [bucket for bucket in engine._runner.buckets() if not bucket.decode_rows]
    if whole:
        engine._runner.compile(buckets)
    if pieces:
        engine._runner.cut_steps(pieces)
        engine._runner.compile_layers(buckets)


class _TimedTransport(SocketTransport):
    """Transport that records when page bytes were received.

    Attributes:
      arrived: receive time (`time.perf_counter` seconds) and bytes of each message with pages.
    """

    def __init__(self, connection: socket.socket):
        super().__init__(connection, timeout_s=600)
        self.arrived: list[tuple[float, int]] = []

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        header, arrays = super().receive()
        num_bytes = sum(array.nbytes for name, array in arrays.items() if name.startswith("pages."))
        if num_bytes:
            self.arrived.append((time.perf_counter(), num_bytes))
        return header, arrays


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "largest": max(seconds)}


def line(result: dict[str, Any]) -> str:
    """Format a result of `run` or `run_on_meshes` as one line."""
    if "transfer_s" in result:
        alone, apart, *parts = (f"{result[f'{name}_s']['median'] * 1e3:.1f} ms" for name in PARTS)
        shares = ", ".join(f"{name} {part}" for name, part in zip(PARTS[2:], parts, strict=True))
        return (
            f"{result['prompt_tokens']} tokens: {alone} to the first token, two processes {apart} ({shares};"
            f" {result['bytes'] / 1e6:.1f} MB; {result['equal_first_tokens']} first tokens equal)"
        )
    times = {
        name: f"{result[name]['median'] * 1e3:.1f} ms"
        for name in ("whole_ttft_s", "layered_ttft_s", "export_s", "two_processes_ttft_s")
    }
    return (
        f"{result['prompt_tokens']} tokens: {times['whole_ttft_s']} to the first token, layer by layer"
        f" {times['layered_ttft_s']} ({result['cost']:+.1%}; {result['arrived_before_first_token']:.0%} of the pages on"
        f" the host by then), exported whole {times['export_s']} more, two processes {times['two_processes_ttft_s']}"
        f" ({result['read_by_whole_ttft']:.0%} of the pages read after {times['whole_ttft_s']};"
        f" {result['equal_first_tokens']} first tokens equal, {result['equal_to_whole_steps']} to those of whole steps)"
    )


def _local(
    engine: Engine, prompt: list[int], *, salt: str = "", exported: Callable[[float], None] | None = None
) -> tuple[float, tuple[int, ...]]:
    """Compute a prompt in this process. Return the seconds to the first token, and the output tokens. If `exported` is
    given, export the pages afterwards and call it with the seconds of the export.
    """
    began = time.perf_counter()
    request = engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
    ended, token = _finish(engine, request)
    if exported is not None:
        start = time.perf_counter()
        engine.export_pages(request).to_bytes()
        exported(time.perf_counter() - start)
    engine.forget(request)
    return ended - began, token


def _remote(engine: Engine, remote: RemotePrefill, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Let the other process compute a prompt. Return the seconds to the first token, and the output tokens."""
    began, name = time.perf_counter(), "remote"
    remote.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), request_id=name)
    while remote.pending:
        remote.poll(0.001)
    ended, token = _finish(engine, name)
    engine.forget(name)
    return ended - began, token


def _finish(engine: Engine, request: int | str) -> tuple[float, tuple[int, ...]]:
    """Step until the request and all launched steps have ended. Return the end time of the request and its tokens."""
    while engine.output(request).finish_reason is None:
        engine.step()
    ended = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return ended, tuple(engine.output(request).output_ids)


def _share(bytes_at: Sequence[tuple[float, int]], end: float) -> float:
    total = sum(count for _, count in bytes_at)
    return sum(count for at, count in bytes_at if at <= end) / total if total else 0.0


@contextlib.contextmanager
def _prefill_process(work: HandOver, device: str | None) -> Iterator[Callable[[], tuple[socket.socket, bytes]]]:
    """Start the process that computes prompts. Yield a function that waits for this process and returns a connection to
    it and the shared secret.

    The process gets the secret through an environment variable, because other users can read its arguments.
    """
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "pages")
        listener.bind(address)
        listener.listen()
        listener.settimeout(1)
        environment = os.environ | {SECRET: secret} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        command = [sys.executable, "-m", __name__, address, json.dumps(dataclasses.asdict(work))]
        process = subprocess.Popen(command, env=environment)
        connections = contextlib.ExitStack()

        def connect() -> tuple[socket.socket, bytes]:
            while process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    return connections.enter_context(listener.accept()[0]), secret.encode()
            raise RuntimeError(f"the process that computes prompts ended with status {process.returncode}")

        try:
            with connections:
                yield connect
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def main(argv: list[str]) -> None:
    """Compute prompts for the parent process. The arguments are an address and the work as JSON. The environment
    variable `SECRET` has the shared secret."""
    address, text = argv
    given: dict[str, Any] = json.loads(text)
    given["lengths"] = tuple(given["lengths"])
    work = HandOver(**given)
    engine = make_engine(work, work.prefill_mesh)
    warm_up(engine, 0 if work.on_meshes else PIECES, whole=work.on_meshes)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    secret = os.environ.pop(SECRET).encode()
    if work.on_meshes:
        _serve_whole(engine, SocketTransport(connection, timeout_s=600, max_bytes=MOST_BYTES))
        return
    serve_prefill(engine, SocketTransport(connection, timeout_s=600), timeout_s=600, secret=secret)


if __name__ == "__main__":
    main(sys.argv[1:])
