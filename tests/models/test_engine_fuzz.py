"""Random traffic with faults on a real model: engines with draft trees, multi-token prediction (MTP) and meshes.

Some meshes have several data ranks: indices along the axis `data`, which splits the requests.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import (
    Decoded,
    Engine,
    EngineConfig,
    MTPProposer,
    NGramProposer,
    PlainRun,
    SamplingParams,
    Speculation,
)
from tests.models import test_engine_mtp as mtp_case
from tests.models.engine_case import DRAWN, GREEDY, MAX_TOKENS, PROMPTS, VOCAB_SIZE, padded
from tests.models.proposer_case import KnowingTreeProposer
from tests.models.test_engine_faults import Asked, FaultyTraffic, memory_growth, play
from tests.models.test_mesh import LATENT, Sizes, devices_of, model

SIZES = EngineConfig(num_pages=14, page_size=8, max_batched_tokens=16, max_num_seqs=4, history=20)


@functools.cache
def plain_tokens(target: Callable[[], Decoder], index: int, params: SamplingParams) -> tuple[int, ...]:
    """Continue a prompt with one uncached forward pass per token.

    Stop at the first near tie of the two largest logits, where rounding could change the token.
    """
    run, tokens = plain_run(target), list[int]()
    for _ in range(MAX_TOKENS):
        choices = run.choose(Decoded(PROMPTS[index], tokens, params))
        if choices.margins[-1] < 1e-3:
            break
        tokens.append(int(choices.tokens[-1]))
    return tuple(tokens)


@functools.cache
def plain_run(target: Callable[[], Decoder]) -> PlainRun:
    return PlainRun(target(), max_output=MAX_TOKENS)


def latent() -> Decoder:
    return model(LATENT)


def predicting() -> Decoder:
    return mtp_case.modules()[0]


@dataclasses.dataclass(frozen=True)
class AskedOf(Asked):
    """A request to an engine with a real model. The expected output is the uncached run of the model `target`."""

    target: Callable[[], Decoder]

    @property
    def wanted(self) -> tuple[tuple[int, ...], str]:
        params = dataclasses.replace(self.params, max_tokens=MAX_TOKENS)
        tokens = plain_tokens(self.target, PROMPTS.index([*self.prompt]), params)
        return tokens[: self.params.max_tokens], "length"

    @classmethod
    def draw(cls, target: Callable[[], Decoder], draw: random.Random) -> AskedOf:
        index, params = draw.randrange(len(PROMPTS)), draw.choice([GREEDY, DRAWN])
        max_tokens = draw.randint(1, len(plain_tokens(target, index, params)))
        params = dataclasses.replace(params, max_tokens=max_tokens)
        return cls(tuple(PROMPTS[index]), params, draw.choice(["", "", "other"]), target)


def tree_drafts() -> Speculation:
    sequences = [[*prompt, *plain_tokens(latent, i, GREEDY)] for i, prompt in enumerate(PROMPTS)]
    return Speculation(KnowingTreeProposer(sequences, 0.6, VOCAB_SIZE), 5, adaptive=False)


def engine_of(
    devices: Sizes | None, speculate: Callable[[], Speculation] | None, target: Callable[[], Decoder]
) -> Engine:
    config = dataclasses.replace(
        SIZES,
        mesh=None if devices is None else devices_of(devices),
        speculate=None if speculate is None else speculate(),
    )
    return Engine(target() if devices is None else model(LATENT, devices), padded(config))


ENGINES: dict[str, tuple[Sizes | None, Callable[[], Speculation] | None, Callable[[], Decoder]]] = {
    "draft trees": (None, tree_drafts, latent),
    "n-grams": (None, lambda: Speculation(NGramProposer(), 3, adaptive=False), latent),
    "MTP": (None, lambda: Speculation(MTPProposer(mtp_case.modules()[1]), 2, adaptive=False), predicting),
    "MTP trees": (
        None,
        lambda: Speculation(MTPProposer(mtp_case.modules()[1], alternatives=2), 4, adaptive=False),
        predicting,
    ),
    "data ranks": ("data=2", None, latent),
    "data ranks with draft trees": ("data=2", tree_drafts, latent),
    "heads over two devices": (2, None, latent),
    "tokens of pages over two devices": ("context=2", None, latent),
}


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, including free blocks of the allocator."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ENGINES)
def test_interrupted_traffic_on_a_model(name: str):
    """Tokens equal the plain uncached run, no page is lost, and memory does not grow.

    No program is compiled after the start, so compilations cannot add memory.
    """
    devices, speculate, target = ENGINES[name]
    traffic = FaultyTraffic(
        engine_of(devices, speculate, target), random.Random(0), functools.partial(AskedOf.draw, target)
    )
    play(traffic, 200, fault_share=0.02)
    programs, resident = traffic.engine.stats().compilations, resident_bytes()
    held, arrays = memory_growth(traffic, 2000, fault_share=0.02)
    assert (held < 200_000, arrays) == (True, 0)
    assert traffic.engine.stats().compilations == programs
    assert resident_bytes() - resident < 100e6
    assert traffic.faults > 20
    assert traffic.engine.stats().preemptions > 0
