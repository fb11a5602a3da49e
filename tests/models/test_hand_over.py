"""Two processes: one computes prompts, the other continues them with its pages."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import jax
import pytest

from models.engine import CachedPages, SamplingParams
from tests.models.engine_case import PROMPTS
from tests.models.test_cached_pages import check, computed, make

pytestmark = pytest.mark.usefixtures("shared_steps")

PREFILL = """
    import os, sys
    from multiprocessing.connection import Client

    import jax

    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    from models.engine import SamplingParams
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


def start(address: Path, *args: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(PREFILL), address, jax.config.jax_compilation_cache_dir, *args]
    return subprocess.Popen(list(map(str, command)))


def received(connection: Connection) -> CachedPages:
    if not connection.poll(120):
        raise TimeoutError("nothing comes")
    return CachedPages.from_bytes(connection.recv_bytes())


@pytest.mark.parametrize("dies_at", [pytest.param(None, marks=pytest.mark.slow), 4], ids=["whole", "killed half-way"])
def test_tokens_are_those_of_one_engine(tmp_path: Path, dies_at: int | None) -> None:
    """Where the other process dies, what had arrived whole counts, and the rest is computed here."""
    _, tokens = computed("windows of heads, int8")
    engine = make("windows of heads, int8")
    with Listener(str(tmp_path / "pages"), "AF_UNIX") as listener:
        prefill = start(tmp_path / "pages", *([] if dies_at is None else [dies_at]))
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
