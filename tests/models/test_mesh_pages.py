"""Page transfer on a mesh: pages can be exchanged between device layouts, whole or layer by layer, and tokens do not
change."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.config import ModelConfig
from pallas_attn.models.engine import (
    CachedPages,
    Engine,
    EngineConfig,
    IncomingPages,
    RemotePrefill,
    SamplingParams,
    WrittenLayer,
)
from tests.kit.slow_cases import slow_cases
from tests.models.engine_case import PROMPTS, padded
from tests.models.test_hand_over import served
from tests.models.test_mesh import FULL_HEADS, LATENT, WINDOWED, Sizes, devices_of, model

pytestmark = pytest.mark.usefixtures("shared_steps")

PARAMS = SamplingParams(max_tokens=8)
SIZES = EngineConfig(num_pages=96, page_size=4, max_batched_tokens=16, max_num_seqs=4)

MODELS = {"latents": LATENT, "heads": FULL_HEADS, "heads, int8": FULL_HEADS, "windows": WINDOWED}


def make(kind: str, devices: Sizes | None) -> Engine:
    mesh = None if devices is None else devices_of(devices)
    dtype = jnp.int8 if "int8" in kind else None
    config: ModelConfig = MODELS[kind]
    return Engine(model(config, devices), padded(dataclasses.replace(SIZES, mesh=mesh, cache_dtype=dtype)))


@functools.cache
def computed(kind: str, devices: Sizes | None = None) -> tuple[Engine, list[list[int]]]:
    """Return an engine that has computed all prompts, and its tokens."""
    engine = make(kind, devices)
    return engine, [output.output_ids for output in engine.generate(PROMPTS, PARAMS)]


def passed_on(pages: CachedPages) -> CachedPages:
    """Convert pages to bytes and back, as a transfer through a file or a socket does."""
    return CachedPages.from_bytes(pages.to_bytes())


def page_contents(pages: CachedPages) -> dict[tuple[int, ...], list[np.ndarray]]:
    """Return the contents of each page, keyed by all tokens up to the end of the page.

    The cache has one cache group, because all layers have the same attention windows.
    """
    [arrays], page_size = pages.groups, SIZES.page_size
    return {
        sequence.tokens[: (i + 1) * page_size]: [array[row] for array in arrays.values()]
        for sequence in pages.sequences
        for i, row in enumerate(sequence.rows[0][0])
    }


LAYOUTS = [
    ("latents", 2),
    ("heads", "context=2,tensor=2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("latents", "data=2"),
            ("latents", "data=2,context=2"),
            ("latents", "data=2,expert=4"),
            ("heads", 4),  # two devices have copies of each KV head
            ("heads", "data=2,tensor=2"),
            ("heads, int8", 2),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "devices"), LAYOUTS)
def test_pages_have_the_format_of_one_device(kind: str, devices: Sizes):
    """Pages exported on a mesh have the format and, up to rounding, the contents of pages exported on one device.

    `made_for`, which describes the model and the cache format, is equal.
    """
    (one, _), (split, _) = computed(kind), computed(kind, devices)
    wanted, got = one.export_prefix_cache(), passed_on(split.export_prefix_cache())
    assert got.made_for == wanted.made_for
    expected, found = page_contents(wanted), page_contents(got)
    assert found.keys() & expected.keys() >= {tuple(p[:4]) for p in PROMPTS if len(p) >= 4}
    tolerance = 1.0 if "int8" in kind else 1e-4  # a rounding error may move a quantised value to the next one
    for prefix in found.keys() & expected.keys():
        for array, same in zip(found[prefix], expected[prefix], strict=True):
            np.testing.assert_allclose(np.float32(array), np.float32(same), atol=tolerance)


@slow_cases("latents-2", "heads-context=2,tensor=2")
@pytest.mark.parametrize(("kind", "devices"), LAYOUTS)
def test_pages_are_exchanged_between_a_mesh_and_one_device(kind: str, devices: Sizes):
    """Pages exported on one device are used on every data rank of a mesh, and pages exported on a mesh on one device.

    Exporting imported pages again returns the same contents.
    """
    one, tokens = computed(kind)
    sent = passed_on(one.export_prefix_cache())
    split = make(kind, devices)
    assert split.import_pages(sent) == sum(len(sequence.tokens) for sequence in sent.sequences)
    returned = page_contents(passed_on(split.export_prefix_cache()))
    expected = page_contents(sent)
    assert returned.keys() == expected.keys()
    for prefix, arrays in expected.items():
        for array, same in zip(returned[prefix], arrays, strict=True):
            np.testing.assert_array_equal(array, same)
    outputs = split.generate(PROMPTS, PARAMS)
    assert [output.output_ids for output in outputs] == tokens
    assert all(o.cached_tokens == (len(p) - 1) // 4 * 4 for o, p in zip(outputs, PROMPTS, strict=True))
    for pools, cache in zip(split._pools, split._prefix_caches, strict=True):
        pools.check()
        cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, "data=2", "context=2"])
def test_pages_of_one_request(devices: Sizes):
    """Pages of a request are exported from the data rank that computed the request.

    Another engine that imports the pages computes only the tokens after the last full page.
    """
    first, second = make("latents", devices), make("latents", None)
    _, tokens = computed("latents")
    ids = [first.add_request(PROMPTS[i], SamplingParams(max_tokens=1)) for i in (1, 4)]
    while first.has_unfinished:
        first.step()
    assert second.import_pages(passed_on(first.export_pages(ids[1]))) == len(PROMPTS[4]) // 4 * 4
    [output] = second.generate([PROMPTS[4]], PARAMS)
    assert output.output_ids == tokens[4]
    assert output.cached_tokens == (len(PROMPTS[4]) - 1) // 4 * 4


@pytest.mark.slow
def test_rows_of_windowed_heads_need_the_same_split():
    """Pages of heads with different windows can be imported only by an engine that splits heads over as many devices.

    With windows per head, the pool allocates page rows: one page of one KV head on each device.
    """
    first, tokens = computed("windows", 2)
    pages = passed_on(first.export_prefix_cache())
    with pytest.raises(ValueError, match="pages: expected pages of an engine like this one, got groups of"):
        make("windows", None).import_pages(pages)
    second = make("windows", 2)
    assert second.import_pages(pages) > 0
    outputs = second.generate(PROMPTS, PARAMS)
    assert [output.output_ids for output in outputs] == tokens
    assert sum(output.cached_tokens for output in outputs) > 0


@pytest.mark.slow
def test_other_weights_are_rejected():
    one, _ = computed("latents")
    split, _ = computed("latents", 2)
    pages = one.export_prefix_cache()
    other = dataclasses.replace(pages, made_for={**pages.made_for, "weights": "others"})
    with pytest.raises(ValueError, match="pages: expected pages of an engine like this one, got weights of 'others'"):
        split.import_pages(other)


# --- layer by layer

SALTS = (f"transfer {number}" for number in itertools.count())
"""Salts of transfers. Requests find only pages with their own salt, so tests can share engines."""


@functools.cache
def transferring(kind: str, devices: Sizes | None) -> Engine:
    """Return an engine for transfers layer by layer, which tests share because its compilation takes longer than a
    test."""
    return make(kind, devices)


def layers_of(engine: Engine, prompts: Sequence[Sequence[int]], *, fails: bool = False) -> list[WrittenLayer]:
    """Return the reports of written layers of an engine that computes prompts. The ids of the requests are "prompt 0",
    "prompt 1" and so on.

    Args:
      engine: the engine.
      prompts: the prompts.
      fails: whether the first step fails between its two layers.
    """
    told = list[WrittenLayer]()
    feed, salt, failures = engine.watch_written(told.append, pieces=2), next(SALTS), 0
    add = feed.add

    def failing(step: Any, layer: int, copies: Any) -> None:
        if fails and step.number == 0 and layer == 1:
            raise MemoryError("no memory")
        add(step, layer, copies)

    feed.add = failing
    ids = [f"prompt {number}" for number in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(prompt, SamplingParams(max_tokens=1), request_id=request_id, salt=salt)
    while engine.has_unfinished:
        try:
            engine.step()
        except MemoryError:
            failures += 1
    assert failures == fails
    feed.wait(60)
    feed.close()
    for request_id in ids:
        engine.forget(request_id)
    return told


def received(
    engine: Engine, prompts: Sequence[Sequence[int]], told: Sequence[WrittenLayer], salt: str
) -> list[IncomingPages]:
    """Write the layers of prompts into the caches of an engine."""
    incoming = {
        f"prompt {number}": engine.receive_pages(prompt, engine.cache_format, salt=salt)
        for number, prompt in enumerate(prompts)
    }
    for written in told:
        for chunk in written.chunks:
            arguments = written.step, written.layer, chunk.first_page, chunk.rows, written.contents
            incoming[str(chunk.request_id)].write(*arguments)
    return [*incoming.values()]


def continued(engine: Engine, prompts: Sequence[Sequence[int]], incoming: Sequence[IncomingPages], salt: str) -> Any:
    """Return the outputs of requests that use received pages. Check that no page stays allocated."""
    given = zip(prompts, incoming, strict=True)
    ids = [engine.add_request(prompt, PARAMS, incoming=pages, salt=salt) for prompt, pages in given]
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().used_pages == 0
    for pools, cache in zip(engine._pools, engine._prefix_caches, strict=True):
        pools.check()
        cache.check()
    return [engine.output(i) for i in ids]


@pytest.mark.parametrize(
    ("kind", "sender", "receiver"),
    [
        ("heads", 2, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("heads, int8", None, 2),
                ("heads, int8", 2, "data=2"),
                ("heads, int8", "data=2,tensor=2", None),
                ("heads", None, "data=2,tensor=2"),
                ("heads", "context=2,tensor=2", "data=2,tensor=2"),
                ("heads", "data=2,tensor=2", 4),  # two devices have copies of each KV head
                ("latents", "data=2,expert=4", "data=2,context=2"),
                ("windows", 2, 2),
            )
        ),
    ],
)
def test_layers_are_exchanged_between_layouts(kind: str, sender: Sizes | None, receiver: Sizes | None):
    """Tokens of an engine that receives pages layer by layer equal the tokens of one device without transfer."""
    source = transferring(kind, sender)
    told, salt = layers_of(source, PROMPTS), next(SALTS)
    expected = computed(kind, receiver if kind == "windows" else None)[1]
    target = transferring(kind, receiver)
    target.compile_page_writes()
    assert target.cache_format == source.cache_format
    incoming = received(target, PROMPTS, told, salt)
    assert [pages.num_tokens for pages in incoming] == [len(prompt) // 4 * 4 for prompt in PROMPTS]
    ranks = [pages.rank for pages in incoming]
    assert {*ranks} == {*range(len(target._pools))}  # the prompts are divided among the data ranks
    outputs = continued(target, PROMPTS, incoming, salt)
    assert [output.output_ids for output in outputs] == expected
    assert [output.cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]


@pytest.mark.slow
def test_layers_of_a_failed_step_are_discarded_on_a_mesh():
    """The sender reports the first layer of a step that then fails. The receiver writes it, and discards it when the
    next step begins."""
    kind, prompts, salt = "heads", [PROMPTS[4], PROMPTS[5]], next(SALTS)
    told = layers_of(transferring(kind, "data=2,tensor=2"), prompts, fails=True)
    assert [(written.step, written.layer) for written in told[:3]] == [(0, 0), (1, 0), (1, 1)]
    lost = dataclasses.replace(told[0], contents={name: array + 1 for name, array in told[0].contents.items()})
    target = transferring(kind, 2)
    [unfinished] = received(target, prompts[:1], [_of_prompt(lost, 0)], salt)
    assert unfinished.num_tokens == 0
    assert target._prefix_caches[0].lookup(PROMPTS[4], salt)[0].shape[1] == 0
    unfinished.close()
    outputs = continued(target, prompts, received(target, prompts, [lost, *told[1:]], salt), salt)
    assert [output.output_ids for output in outputs] == computed(kind)[1][4:]
    assert [output.cached_tokens for output in outputs] == [48, 36]


def _of_prompt(written: WrittenLayer, number: int) -> WrittenLayer:
    chunks = tuple(chunk for chunk in written.chunks if chunk.request_id == f"prompt {number}")
    return dataclasses.replace(written, chunks=chunks)


@pytest.mark.slow
def test_held_pages_of_a_data_rank_are_released_if_its_requests_cannot_run():
    """Received pages fill one data rank. A request on this rank runs, although requests of the other rank run, too."""
    sizes = dataclasses.replace(SIZES, mesh=devices_of("data=2"), num_pages=14)
    target, salt = Engine(model(FULL_HEADS, "data=2"), padded(sizes)), next(SALTS)
    told = layers_of(transferring("heads", 2), [PROMPTS[4]])
    [incoming] = received(target, [PROMPTS[4]], told[:4], salt)
    assert (incoming.rank, incoming.num_tokens) == (0, 32)
    ids = [target.add_request(PROMPTS[4][::-1], SamplingParams(max_tokens=3)) for _ in range(2)]  # 13 pages per request
    while target.has_unfinished:
        target.step()
    assert [len(target.output(i).output_ids) for i in ids] == [3, 3]
    assert incoming.is_lost


@pytest.mark.slow
def test_prefill_process_on_a_mesh():
    engine = transferring("heads", None)
    with served(make("heads", "data=2,tensor=2")) as transport:
        remote = RemotePrefill(engine, transport)
        outputs = remote.generate(PROMPTS, PARAMS)
        remote.close()
    assert [output.output_ids for output in outputs] == computed("heads")[1]
    assert [output.cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]


def test_receiver_of_another_engine_is_rejected():
    first, second = transferring("heads", None), make("heads", None)
    incoming = first.receive_pages(PROMPTS[4], first.cache_format)
    with pytest.raises(ValueError, match="incoming: expected a receiver of this engine, got a receiver of another"):
        second.add_request(PROMPTS[4], incoming=incoming)
    incoming.close()
