"""Page export and import on a mesh: pages can be exchanged between device layouts, and tokens do not change."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.config import ModelConfig
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig, SamplingParams
from tests.kit.slow_cases import slow_cases
from tests.models.engine_case import PROMPTS, padded
from tests.models.test_mesh import FULL_HEADS, LATENT, WINDOWED, Sizes, devices_of, model

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
def test_other_weights_and_incoming_layers_are_rejected():
    one, _ = computed("latents")
    split, _ = computed("latents", 2)
    pages = one.export_prefix_cache()
    other = dataclasses.replace(pages, made_for={**pages.made_for, "weights": "others"})
    with pytest.raises(ValueError, match="pages: expected pages of an engine like this one, got weights of 'others'"):
        split.import_pages(other)
    with pytest.raises(NotImplementedError, match="mesh: pages can arrive layer by layer only on one device"):
        split.receive_pages(PROMPTS[4], split.cache_format)
