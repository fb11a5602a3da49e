"""Measures handing a cache over: the cost of steps launched layer by layer, and the time to the first token of prompts
that another process computes.

- Cost. One engine computes prompts as whole steps and layer by layer, with a consumer that drops the pages, in turn:
  seconds to the first token of both, and the share of the pages' bytes that were on the host when it came.
- Whole. What exporting the same pages after the prompt takes, which is the least that whole pages add.
- Two processes. The same prompts computed by a second process and continued here: seconds from handing a prompt in to
  its first token, and the share of the bytes that had arrived when the other process had its own first token.

Prompts are random, so that none is found in a prefix cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.config import GQA_PRESETS, PRESETS
from models.decoder import AttentionSettings
from models.engine import (
    Engine,
    EngineConfig,
    RemotePrefill,
    SamplingParams,
    SocketTransport,
    serve_prefill,
)
from scripts.bench.engine.random_model import random_model

CONFIGS = PRESETS | GQA_PRESETS


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Model and traffic that are measured.

    Attributes:
      config: name of the model's configuration; weights are random.
      dtype: of weights and cache.
      implementation: of attention; None for the fastest that runs.
      lengths: of prompts, in tokens.
      step_tokens: of a step.
      page_size: of the caches.
      repeats: of each measurement.
      pieces: that a step with a consumer is launched in.
    """

    config: str
    dtype: str
    implementation: str | None
    lengths: tuple[int, ...]
    step_tokens: int
    page_size: int
    repeats: int
    pieces: int = 4


def make_engine(work: HandOver) -> Engine:
    """Makes an engine for prompts one by one, with room for two. Its steps have few sizes: each is compiled twice."""
    settings = AttentionSettings(implementation=work.implementation)
    longest = max(work.lengths) + 2
    config = EngineConfig(
        num_pages=2 * -(-longest // work.page_size) + 2,
        page_size=work.page_size,
        max_batched_tokens=work.step_tokens,
        max_num_seqs=2,
        max_model_len=longest,
        decode_buckets=(2,),
        prefill_buckets=tuple(sorted({min(work.page_size, work.step_tokens), work.step_tokens})),
    )
    return Engine(random_model(CONFIGS[work.config], work.dtype, settings), config)


def run(work: HandOver, prefill_device: str | None) -> Iterator[dict[str, Any]]:
    """Measures each length of prompts; yields the results of one at a time."""
    engine, rng = make_engine(work), np.random.default_rng(0)
    feed = engine.watch_written(lambda written: None, pieces=work.pieces)
    engine.warmup()
    feed.close()

    def prompt(length: int) -> list[int]:
        return rng.integers(0, CONFIGS[work.config].vocab_size, length).tolist()

    with _prefill_process(work, prefill_device) as transport:
        remote = RemotePrefill(engine, transport, timeout_s=600)
        for length in (*work.lengths, *work.lengths):  # the first round loads kernels
            _remote(engine, remote, prompt(length))
        for length in work.lengths:
            whole, layered, exported, arrived = [], [], [], []
            for _ in range(work.repeats):
                whole.append(_local(engine, prompt(length), exported.append))
                bytes_at: list[tuple[float, int]] = []
                feed = engine.watch_written(
                    lambda w, at=bytes_at: at.append((time.perf_counter(), w.num_bytes)), pieces=work.pieces
                )
                began = time.perf_counter()
                layered.append(_local(engine, prompt(length)))
                feed.wait(600)
                feed.close()
                arrived.append(_share(bytes_at, began + layered[-1]))
            apart = [_remote(engine, remote, prompt(length)) for _ in range(work.repeats)]
            yield {
                "prompt_tokens": length,
                "whole_ttft_s": summary(whole),
                "layered_ttft_s": summary(layered),
                "cost": statistics.median(layered) / statistics.median(whole) - 1,
                "arrived_before_first_token": statistics.median(arrived),
                "export_s": summary(exported),
                "two_processes_ttft_s": summary(apart),
            }
        remote.close()


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "largest": max(seconds)}


def line(result: dict[str, Any]) -> str:
    """One line for people."""
    times = {
        name: f"{result[name]['median'] * 1e3:.1f} ms"
        for name in ("whole_ttft_s", "layered_ttft_s", "export_s", "two_processes_ttft_s")
    }
    return (
        f"{result['prompt_tokens']} tokens: {times['whole_ttft_s']} to the first token, layer by layer"
        f" {times['layered_ttft_s']} ({result['cost']:+.1%}; {result['arrived_before_first_token']:.0%} of the pages on"
        f" the host by then), exported whole {times['export_s']} more, two processes {times['two_processes_ttft_s']}"
    )


def _local(engine: Engine, prompt: list[int], exported: Callable[[float], None] | None = None) -> float:
    """Seconds to the first token here; `exported` is told of those that exporting takes then."""
    began = time.perf_counter()
    request = engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.output(request).finish_reason is None:
        engine.step()
    ended = time.perf_counter()
    if exported is not None:
        engine.export_pages(request).to_bytes()
        exported(time.perf_counter() - ended)
    while engine.has_unfinished:
        engine.step()
    engine.forget(request)
    return ended - began


def _remote(engine: Engine, remote: RemotePrefill, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt that the other process computes."""
    began, name = time.perf_counter(), "remote"
    remote.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), request_id=name)
    while remote.pending:
        remote.poll(0.001)
    while engine.output(name).finish_reason is None:
        engine.step()
    ended = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    engine.forget(name)
    return ended - began


def _share(bytes_at: Sequence[tuple[float, int]], end: float) -> float:
    total = sum(count for _, count in bytes_at)
    return sum(count for at, count in bytes_at if at <= end) / total if total else 0.0


@contextlib.contextmanager
def _prefill_process(work: HandOver, device: str | None) -> Iterator[SocketTransport]:
    """Starts the process that computes prompts, and connects to it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "pages")
        listener.bind(address)
        listener.listen()
        listener.settimeout(600)
        environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        command = [sys.executable, "-m", __name__, address, json.dumps(dataclasses.asdict(work))]
        process = subprocess.Popen(command, env=environment)
        try:
            connection, _ = listener.accept()
            with connection:
                yield SocketTransport(connection, timeout_s=600)
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def main(argv: list[str]) -> None:
    """Computes prompts for the process that started this one, given an address and the work as JSON."""
    address, text = argv
    given: dict[str, Any] = json.loads(text)
    given["lengths"] = tuple(given["lengths"])
    work = HandOver(**given)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    engine = make_engine(work)
    feed = engine.watch_written(lambda written: None)
    engine.warmup()
    feed.close()
    serve_prefill(engine, SocketTransport(connection, timeout_s=600), timeout_s=600)


if __name__ == "__main__":
    main(sys.argv[1:])
