"""KV-cache transfer between two processes.

The prefill process computes prompts. The decode process continues these prompts with the transferred pages.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import jax
import pytest

from pallas_attn.models.engine import (
    CachedPages,
    Engine,
    IncomingPages,
    RemotePrefill,
    SamplingParams,
    SocketTransport,
    TransferError,
    WrittenLayer,
    serve_prefill,
)
from tests.kit.slow_cases import slow_cases
from tests.models.engine_case import PROMPTS, VOCAB_SIZE
from tests.models.filter_case import Third
from tests.models.test_cached_pages import HEADWISE, KINDS, LATENT_KIND, PARAMS, check, computed, make
from tests.models.transfer_peer import greet

pytestmark = pytest.mark.usefixtures("shared_steps")

PREFILL = """
    import os, sys
    from multiprocessing.connection import Client

    import jax

    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    from pallas_attn.models.engine import SamplingParams
    from tests.models.engine_case import PROMPTS
    from tests.models.test_cached_pages import make

    engine = make("windows of heads, int8")
    with Client(sys.argv[1], "AF_UNIX") as decode:
        for prompt in PROMPTS:
            request = engine.add_request(prompt, SamplingParams(max_tokens=1))
            while engine.has_unfinished:
                engine.step()
            pages = engine.export_pages(request).to_bytes()
            if len(sys.argv) > 3 and prompt is PROMPTS[int(sys.argv[3])]:
                os.write(decode.fileno(), len(pages).to_bytes(4, "big") + pages[:100])
                os._exit(9)  # in the middle of a message
            decode.send_bytes(pages)
"""


def start(script: str, address: Path, *args: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(script), address, jax.config.jax_compilation_cache_dir, *args]
    return subprocess.Popen(list(map(str, command)))


def received(connection: Connection) -> CachedPages:
    if not connection.poll(120):
        raise TimeoutError("nothing comes")
    return CachedPages.from_bytes(connection.recv_bytes())


# Slow, because test_cached_pages.py tests pages as bytes, and later tests of this file have processes that die.
@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [None, 4], ids=["whole", "killed half-way"])
def test_tokens_equal_one_engine(tmp_path: Path, dies_at: int | None) -> None:
    """Tokens equal a single engine, also if the prefill process dies.

    The engine uses pages that arrived completely before the process died, and computes the other prompts itself.
    """
    _, tokens = computed("windows of heads, int8")
    engine = make("windows of heads, int8")
    with Listener(str(tmp_path / "pages"), "AF_UNIX") as listener:
        prefill = start(PREFILL, tmp_path / "pages", *([] if dies_at is None else [dies_at]))
        with listener.accept() as connection:
            arrived = 0
            try:
                for _ in PROMPTS:
                    engine.import_pages(received(connection))
                    arrived += 1
            except (EOFError, OSError):
                assert dies_at is not None
        assert prefill.wait(60) == (0 if dies_at is None else 9)
    assert arrived == (len(PROMPTS) if dies_at is None else dies_at)
    check(engine)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=11)
    outputs = engine.generate(PROMPTS, params)
    assert tuple(tuple(output.output_ids) for output in outputs) == tokens
    assert outputs[1].cached_tokens == (len(PROMPTS[1]) - 1) // 4 * 4
    check(engine)


# --- layer by layer

SERVER = """
    import os, socket, struct, sys
    import jax

    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    from pallas_attn.models.engine import SocketTransport, serve_prefill
    from tests.models.test_cached_pages import make

    class DiesHalfWay(SocketTransport):
        left = int(sys.argv[4])

        def send(self, header, arrays={}):
            if header["kind"] == "layer":
                self.left -= 1
                if not self.left:
                    connection.send(struct.pack(">4sIQI", b"pgs1", 100, 100, 0) + b"{")  # the begin of a message
                    os._exit(9)
            super().send(header, arrays)

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    serve_prefill(make(sys.argv[3]), DiesHalfWay(connection))
"""

CLIENT = """
    import os, socket, sys

    import numpy as np

    from pallas_attn.models.engine.kv_transfer.transport import SocketTransport
    from tests.models.engine_case import PROMPTS
    from tests.models.transfer_peer import greet

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    transport = SocketTransport(connection)
    greet(transport, "decode")
    for number, prompt in enumerate(PROMPTS):
        header = {"kind": "prompt", "number": number, "salt": ""}
        transport.send(header, {"tokens": np.array(prompt, np.int32)})
    for _ in range(3):
        assert transport.receive()[0]["kind"] == "layer"
    os._exit(9)
"""


@contextlib.contextmanager
def process(script: str, folder: Path, *args: object) -> Iterator[tuple[SocketTransport, subprocess.Popen]]:
    """Start another process and connect to it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "engine"))
        listener.listen()
        listener.settimeout(120)
        running = start(script, folder / "engine", *args)
        try:
            connection, _ = listener.accept()
            with connection:
                yield SocketTransport(connection), running
        finally:
            running.kill()
            running.wait(60)


def outputs_of(engine: Engine, ids: Sequence[int | str]) -> tuple[tuple[int, ...], ...]:
    while engine.has_unfinished:
        engine.step()
    return tuple(tuple(engine.output(i).output_ids) for i in ids)


def drive(remote: RemotePrefill, engine: Engine) -> None:
    while remote.pending or engine.has_unfinished:
        remote.poll(0.0 if engine.has_unfinished else 0.05)
        engine.step()


@pytest.mark.slow  # in `make test`, test_hostile_transfer.py transfers layers between threads over a socket
@pytest.mark.parametrize("kind", KINDS)
def test_layers_from_another_process_give_the_tokens_of_one_engine(kind: str, tmp_path: Path) -> None:
    _, tokens = computed(kind)
    engine = make(kind)
    with process(SERVER, tmp_path, kind, 0) as (transport, running):
        remote = RemotePrefill(engine, transport)
        outputs = remote.generate(PROMPTS, PARAMS)
        remote.close()
        assert running.wait(60) == 0
    assert tuple(tuple(output.output_ids) for output in outputs) == tokens
    # All full pages before the last token are reused, although prompts share pages and other requests decode meanwhile.
    assert [output.cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    check(engine)


@pytest.mark.slow
def test_death_of_the_prefill_process_loses_no_request(tmp_path: Path) -> None:
    """If the prefill process dies, the decode process computes the pending prompts itself.

    It uses the pages that arrived completely. No page stays allocated.
    """
    engine = make(HEADWISE)
    with process(SERVER, tmp_path, HEADWISE, 8) as (transport, running):
        remote = RemotePrefill(engine, transport)
        for i, prompt in enumerate(PROMPTS):
            remote.add_request(prompt, PARAMS, request_id=i)
        with pytest.raises(TransferError, match="in the middle of a message|the connection is lost"):
            drive(remote, engine)
        assert running.wait(60) == 9
    assert 0 < len(remote.pending) < len(PROMPTS)
    with pytest.raises(TransferError):
        remote.poll()
    remote.compute_here()
    assert outputs_of(engine, range(len(PROMPTS))) == computed(HEADWISE)[1]
    assert engine.stats().prefix_hit_rate > 0
    remote.close()
    check(engine)


@pytest.mark.slow  # slow, because the tests above cover the death of the other process
def test_death_of_the_decode_process_releases_all_pages(tmp_path: Path) -> None:
    engine = make(LATENT_KIND)
    with process(CLIENT, tmp_path) as (transport, running):
        with pytest.raises(TransferError, match="the other process closed the connection|the connection is lost"):
            serve_prefill(engine, transport)
        assert running.wait(60) == 9
    assert not any(engine.knows(i) and engine.output(i).finish_reason is None for i in range(len(PROMPTS)))
    outputs = engine.generate(PROMPTS, PARAMS)  # uses the pages that are still in the prefix cache
    assert tuple(tuple(output.output_ids) for output in outputs) == computed(LATENT_KIND)[1]
    check(engine)


@contextlib.contextmanager
def served(engine: Engine) -> Iterator[SocketTransport]:
    """Yield a connection to an engine that runs `serve_prefill` on a thread."""
    here, there = socket.socketpair()
    thread = threading.Thread(target=serve_prefill, args=(engine, SocketTransport(there)))
    thread.start()
    try:
        yield SocketTransport(here)
    finally:
        here.close()
        thread.join(60)


@pytest.mark.slow
def test_fuzz_of_two_processes(tmp_path: Path) -> None:
    """Tokens equal a single engine and no page is lost in random runs of a prefill and a decode process.

    Prompts, salts and the number of pages are random. Steps of the engine are interrupted, and the prefill process dies
    at a random layer.
    """
    rng = random.Random(5)
    plain, died, lost = make(HEADWISE), 0, 0
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(6)]
        prompts += [[*prompt[: rng.randint(1, len(prompt))], 7] for prompt in prompts]
        params = SamplingParams(max_tokens=8, temperature=0.8, seed=trial)
        tokens = tuple(tuple(output.output_ids) for output in plain.generate(prompts, params))
        engine = make(HEADWISE, num_pages=rng.choice([24, 40, 96]), max_num_seqs=4)
        with process(SERVER, folder, HEADWISE, rng.choice([0, 0, rng.randint(1, 30)])) as (transport, running):
            remote = RemotePrefill(engine, transport)
            try:
                for i, prompt in enumerate(prompts):
                    remote.add_request(prompt, params, request_id=i, salt=str(i % 2))
                    remote.poll()
                while remote.pending or engine.has_unfinished:
                    remote.poll(0.0 if engine.has_unfinished else 0.05)
                    if rng.random() < 0.02:
                        engine._runner.reset()  # set the state after an interrupted step
                        engine._intact = False
                    engine.step()
            except TransferError:
                died += 1
                remote.compute_here()
                for i, prompt in enumerate(prompts):
                    if not engine.knows(i):
                        engine.add_request(prompt, params, request_id=i, salt=str(i % 2))
            lost += sum(engine.output(i).cached_tokens == 0 for i in range(len(prompts)))
            assert outputs_of(engine, range(len(prompts))) == tokens
            remote.close()
            assert running.wait(60) in (0, 9, 1)
        engine.step()
        check(engine)
    assert died
    assert lost


# --- incoming pages


def layers_of(kind: str, prompt: Sequence[int]) -> list[WrittenLayer]:
    """Return the reports of written layers of an engine that computes a prompt."""
    engine, told = make(kind), list[WrittenLayer]()
    feed = engine.watch_written(told.append)
    engine.generate([prompt], SamplingParams(max_tokens=1))
    feed.wait(60)
    return told


def write(incoming: IncomingPages, written: WrittenLayer) -> None:
    [chunk] = written.chunks
    incoming.write(written.step, written.layer, chunk.first_page, chunk.rows, written.contents)


def held_rows(incoming: IncomingPages) -> set[tuple[int, int]]:
    chunk = incoming._chunk
    arrays = [*enumerate(incoming._rows), *(() if chunk is None else enumerate(chunk.rows))]
    return {(group, row) for group, rows in arrays if rows is not None for row in rows.ravel().tolist() if row >= 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(LATENT_KIND, marks=pytest.mark.slow), HEADWISE])
def test_incoming_pages_are_not_given_to_requests(kind: str) -> None:
    """Pages that are being received are neither allocated to requests nor found in the prefix cache.

    Between any two received layers, requests allocate all other pages several times.
    """
    engine, (_, tokens) = make(kind, num_pages=40), computed(kind)
    incoming = engine.receive_pages(PROMPTS[4], engine.cache_format)
    pools = engine._pools[0].pools
    for written in layers_of(kind, PROMPTS[4]):
        write(incoming, written)
        held, before = held_rows(incoming), incoming.num_tokens
        assert held
        prompts = [[30 + i, *range(20), written.step, written.layer] for i in range(4)]
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=20))
        while engine.has_unfinished:
            engine.step()
            for group, pool in enumerate(pools):
                used = {row for slot in range(4) for row in pool.rows(slot).ravel().tolist()}
                assert not used & {row for g, row in held if g == group}
        assert held_rows(incoming) == held
        assert engine._prefix_caches[0].lookup(PROMPTS[4])[0].shape[1] * 4 == before
        engine._pools[0].check()
    assert (incoming.num_tokens, incoming.is_lost) == (48, False)
    request = engine.add_request(PROMPTS[4], PARAMS, incoming=incoming)
    assert outputs_of(engine, [request]) == (tokens[4],)
    assert engine.output(request).cached_tokens == 48
    assert not incoming.is_open
    check(engine)


@pytest.mark.slow
def test_incoming_pages_are_released_if_no_request_can_run() -> None:
    engine, layers = make(LATENT_KIND, num_pages=14), layers_of(LATENT_KIND, PROMPTS[4])
    incoming = engine.receive_pages(PROMPTS[4], engine.cache_format)
    for written in layers[:4]:
        write(incoming, written)
    assert incoming.num_tokens == 32
    request = engine.add_request(PROMPTS[4][::-1], SamplingParams(max_tokens=3))  # needs 13 of 14 pages; 8 are reserved
    assert len(outputs_of(engine, [request])[0]) == 3
    assert incoming.is_lost
    for written in layers[4:]:
        write(incoming, written)  # has no effect after the release
    request = engine.add_request(PROMPTS[4], SamplingParams(max_tokens=3), incoming=incoming)
    assert outputs_of(engine, [request])[0] == outputs_alone(PROMPTS[4])
    check(engine)


def outputs_alone(prompt: Sequence[int]) -> tuple[int, ...]:
    [output] = make(LATENT_KIND).generate([prompt], SamplingParams(max_tokens=3))
    return tuple(output.output_ids)


@pytest.mark.slow
def test_incoming_pages_are_lost_when_the_engine_starts_over() -> None:
    engine, layers = make(LATENT_KIND), layers_of(LATENT_KIND, PROMPTS[4])
    incoming = engine.receive_pages(PROMPTS[4], engine.cache_format)
    for written in layers[:3]:
        write(incoming, written)
    engine._intact = False  # set the state after an interrupted call
    write(incoming, layers[3])
    assert (incoming.is_open, incoming.is_lost) == (False, True)
    incoming.close()
    check(engine)


def test_step_without_its_last_layer_is_discarded() -> None:
    engine, layers = make(LATENT_KIND), layers_of(LATENT_KIND, PROMPTS[4])
    incoming = engine.receive_pages(PROMPTS[4], engine.cache_format)
    write(incoming, layers[0])
    for written in layers:
        [chunk] = written.chunks
        incoming.write(written.step + 100, written.layer, chunk.first_page, chunk.rows, written.contents)
    assert incoming.num_tokens == 48
    incoming.close()
    check(engine)


def test_invalid_layers_are_rejected() -> None:
    engine, layers = make(LATENT_KIND), layers_of(LATENT_KIND, PROMPTS[4])
    first, second, third = layers[:3]
    rows = first.chunks[0].rows
    for arguments, match in (
        ((0, 1, 0, rows, second.contents), "layer: expected 0 of step 0, got 1"),
        ((1, 0, 4, rows, third.contents), "first_page: expected at most 0, got 4"),
        ((0, 0, 0, rows + 100, first.contents), "rows: expected numbers from -1 to 3, got 100 to 103"),
        (
            (0, 0, 0, rows.astype("int64"), first.contents),
            r"rows: expected an array int32 \[1, n\], got an array int64",
        ),
        ((0, 0, 0, rows, {k: v[..., :2] for k, v in first.contents.items()}), "contents: layer 0 has other shapes"),
        ((0, 0, -1, rows, first.contents), "first_page: expected an integer from 0 to 12, got -1"),
    ):
        incoming = engine.receive_pages(PROMPTS[4], engine.cache_format)
        with pytest.raises(ValueError, match=match):
            incoming.write(*arguments)
        incoming.close()
    with pytest.raises(ValueError, match="made_for: expected an engine like this one, got page_size of 8"):
        engine.receive_pages(PROMPTS[4], engine.cache_format | {"page_size": 8})
    with pytest.raises(ValueError, match="tokens: expected ids from 0 to 63, got 64"):
        engine.receive_pages([64], engine.cache_format)
    with pytest.raises(ValueError, match="tokens: expected at most 96, got 97"):
        engine.receive_pages([1] * 97, engine.cache_format)
    check(engine)


# --- the other process


@pytest.mark.slow
def test_salts_and_refusals_are_transferred() -> None:
    engine = make(LATENT_KIND)
    with served(make(LATENT_KIND, max_num_seqs=2)) as transport:
        remote = RemotePrefill(engine, transport)
        for i, salt in enumerate(("", "one's own", "")):
            remote.add_request(PROMPTS[4], PARAMS, request_id=i, salt=salt)
        with pytest.raises(ValueError, match="request_id: expected a new one, got 0 again"):
            remote.add_request(PROMPTS[4], request_id=0)
        remote.add_request(PROMPTS[4], PARAMS, request_id="filtered", token_filter=Third())
        with pytest.raises(ValueError, match="token_filter: expected an object with a method allowed, or None, got 5"):
            remote.add_request(PROMPTS[4], request_id=9, token_filter=5)  # pyrefly: ignore[bad-argument-type]
        drive(remote, engine)
        filtered = engine.add_request(PROMPTS[4], PARAMS, token_filter=Third())
        while engine.has_unfinished:
            engine.step()
        assert engine.output("filtered").output_ids == engine.output(filtered).output_ids
        assert engine.output("filtered").output_ids != engine.output(0).output_ids
        outputs = [engine.output(i) for i in range(3)]
        assert [tuple(output.output_ids) for output in outputs] == [computed(LATENT_KIND)[1][4]] * 3
        assert [output.cached_tokens for output in outputs] == [48] * 3
        remote.close()
        with pytest.raises(TransferError, match="transport: closed"):
            remote.poll()
    check(engine)


def test_engines_with_different_cache_formats_are_rejected() -> None:
    here, there = socket.socketpair()
    errors: list[Exception] = []

    def serve() -> None:
        try:
            serve_prefill(make(LATENT_KIND, page_size=8), SocketTransport(there))
        except (ValueError, TransferError) as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ValueError, match="expected the cache format of the other process, which has page_size of 8"):
        RemotePrefill(make(LATENT_KIND), SocketTransport(here))
    thread.join(60)
    assert len(errors) == 1


@pytest.mark.slow
def test_silent_process_times_out() -> None:
    here, there = socket.socketpair()
    engine, silent = make(LATENT_KIND), SocketTransport(there)
    with here, there:
        greet(silent, "prefill", engine.cache_format)
        remote = RemotePrefill(engine, SocketTransport(here), timeout_s=0.3)
        assert remote.poll(0.5) == []  # no timeout, because no prompt is pending
        remote.add_request(PROMPTS[0], PARAMS, request_id=0)
        with pytest.raises(TransferError, match=r"no page was completed for 0\.3 s"):
            remote.poll(0.5)
        assert remote.compute_here() == [0]
        assert outputs_of(engine, [0]) == (computed(LATENT_KIND)[1][0],)
        remote.close()
    check(engine)


@slow_cases("no such prompt")
@pytest.mark.parametrize(
    "header",
    [{"kind": "song"}, {"kind": "done", "number": 7}, {"kind": "layer", "step": 0, "layer": 0, "chunks": [[0, 0]]}, {}],
    ids=["another kind", "no such prompt", "no pages", "nothing"],
)
def test_invalid_messages_end_the_transfer(header: dict) -> None:
    here, there = socket.socketpair()
    engine, other = make(LATENT_KIND), SocketTransport(there)
    with here, there:
        greet(other, "prefill", engine.cache_format)
        remote = RemotePrefill(engine, SocketTransport(here))
        remote.add_request(PROMPTS[0], PARAMS, request_id=0)
        other.send(header)
        with pytest.raises(TransferError, match="^transport: "):
            remote.poll(60)
        assert remote.pending == (0,)
        remote.close()
    check(engine)
