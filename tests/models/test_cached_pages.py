"""Export and import of cache pages: tokens do not change, and invalid pages are rejected."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn import FULL
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, HeadWindows
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.kv_transfer.cached_pages import _digest
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case
from tests.models.engine_case import PROMPTS

pytestmark = pytest.mark.usefixtures("shared_steps")

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=11)
HEADS = HeadWindows((FULL, 6), (0, 3))
QWEN3 = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=2, vocab_size=64, windows=(HEADS, 5))
LATENT = dataclasses.replace(engine_case.CONFIG, kv_lora_rank=128)

MODELS = {"latents": engine_case.CONFIG, "sparse": engine_case.SPARSE, "wide latents": LATENT, "windows": QWEN3}
KINDS = {
    "latents": ("latents", None),
    "latents in 8 bits": ("wide latents", jnp.float8_e4m3fn),
    "latents and index keys": ("sparse", None),
    "windows of heads": ("windows", None),
    "windows of heads, int8": ("windows", jnp.int8),
}
LATENT_KIND, HEADWISE = "latents and index keys", "windows of heads, int8"
"""The two kinds of caches that run without `make test-slow`. Together they have all parts of the other kinds."""
KINDS_OF_EVERY_RUN = (LATENT_KIND, HEADWISE)
SIZES = EngineConfig(num_pages=96, page_size=4, max_batched_tokens=16, max_num_seqs=4, max_model_len=96)


@functools.cache
def model(name: str, seed: int = 3) -> Decoder:
    return random_model(MODELS[name], seed=seed, settings=engine_case.QUICK)


def make(kind: str, *, seed: int = 3, **changes: Any) -> Engine:
    name, dtype = KINDS[kind]
    config = dataclasses.replace(SIZES, cache_dtype=dtype, **changes)
    buckets = {"decode_buckets": (config.max_num_seqs,), "prefill_buckets": (config.max_batched_tokens,)}
    config = dataclasses.replace(config, separate_prefill=False)
    return Engine(model(name, seed), dataclasses.replace(config, **buckets))


def check(engine: Engine) -> None:
    engine._pools[0].check()
    engine._prefix_caches[0].check()
    assert engine.stats().used_pages == 0


def hit(engine: Engine, tokens: Sequence[int]) -> int:
    """Return the number of pages in the prefix cache that a prompt can reuse."""
    return engine._prefix_caches[0].lookup(tokens)[0].shape[1]


def passed_on(pages: CachedPages) -> CachedPages:
    """Convert pages to bytes and back, as a transfer through a file or a socket does."""
    return CachedPages.from_bytes(pages.to_bytes())


@functools.cache
def computed(kind: str) -> tuple[Engine, tuple[tuple[int, ...], ...]]:
    """Return an engine that has computed all prompts, and its tokens."""
    engine = make(kind)
    return engine, tuple(tuple(output.output_ids) for output in engine.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("kind", [HEADWISE, *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != HEADWISE)])
def test_second_engine_continues_with_the_pages_of_the_first(kind: str) -> None:
    """An engine that imports pages computes only the tokens after the last full page of each prompt.

    The importing engine may have another number of pages, requests or tokens per step.
    """
    other_sizes = {"num_pages": 64, "max_num_seqs": 2, "max_batched_tokens": 8} if kind == "windows of heads" else {}
    first, second = make(kind), make(kind, **other_sizes)
    _, tokens = computed(kind)
    request = first.add_request(PROMPTS[4], SamplingParams(max_tokens=1))
    while first.has_unfinished:
        first.step()
    pages = passed_on(first.export_pages(request))
    assert second.import_pages(pages) == len(PROMPTS[4]) // 4 * 4
    check(second)
    [output] = second.generate([PROMPTS[4]], PARAMS)
    assert tuple(output.output_ids) == tokens[4]
    assert output.cached_tokens == (len(PROMPTS[4]) - 1) // 4 * 4
    check(second)


@slow_cases("latents and index keys")
@pytest.mark.parametrize(
    "kind",
    [LATENT_KIND, HEADWISE, *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in KINDS_OF_EVERY_RUN)],
)
def test_restarted_engine_finds_all_prefixes(kind: str) -> None:
    first, tokens = computed(kind)
    second = make(kind)
    assert second.import_pages(passed_on(first.export_prefix_cache())) > 0
    check(second)
    for prompt, output in zip(PROMPTS, tokens, strict=True):
        sequence = [*prompt, *output]
        assert [hit(second, sequence[:n]) for n in range(len(sequence))] == [
            hit(first, sequence[:n]) for n in range(len(sequence))
        ]
    outputs = second.generate(PROMPTS, PARAMS)
    assert tuple(tuple(output.output_ids) for output in outputs) == tokens
    assert sum(output.cached_tokens for output in outputs) > 0
    check(second)


@pytest.mark.slow
def test_import_while_every_request_slot_is_used() -> None:
    """A waiting request reuses imported pages. Running requests keep their tokens and request slots."""
    first, tokens = computed(HEADWISE)
    second = make(HEADWISE, max_num_seqs=2)
    ids = [second.add_request(prompt, PARAMS) for prompt in (PROMPTS[0], PROMPTS[3], PROMPTS[4])]
    for _ in range(3):
        second.step()
    assert second.import_pages(passed_on(first.export_prefix_cache())) > 0
    while second.has_unfinished:
        second.step()
    assert [tuple(second.output(i).output_ids) for i in ids] == [tokens[i] for i in (0, 3, 4)]
    assert second.output(ids[2]).cached_tokens > 0
    check(second)


@pytest.mark.slow
def test_export_of_a_running_request_has_its_computed_pages() -> None:
    first, second = make(LATENT_KIND), make(LATENT_KIND)
    request = first.add_request(PROMPTS[4], PARAMS)
    first.step()  # prefills 16 of the prompt's 50 tokens
    second.import_pages(passed_on(first.export_pages(request)))
    while first.has_unfinished:
        first.step()
    [output] = second.generate([PROMPTS[4]], PARAMS)
    assert output.cached_tokens == 16
    assert output.output_ids == first.output(request).output_ids
    check(second)


def test_pages_keep_their_salt() -> None:
    first, second = make(LATENT_KIND), make(LATENT_KIND)
    request = first.add_request(PROMPTS[4], PARAMS, salt="one's own")
    while first.has_unfinished:
        first.step()
    second.import_pages(passed_on(first.export_pages(request)))
    ids = [second.add_request(PROMPTS[4], PARAMS, salt=salt) for salt in ("", "one's own")]
    while second.has_unfinished:
        second.step()
    assert [second.output(i).cached_tokens for i in ids] == [0, 48]


@pytest.mark.slow
def test_import_of_more_pages_than_fit_keeps_a_part() -> None:
    first, tokens = computed(LATENT_KIND)
    pages = passed_on(first.export_prefix_cache())
    second = make(LATENT_KIND, num_pages=20)
    taken = second.import_pages(pages)
    assert 0 < taken < sum(len(sequence.tokens) for sequence in pages.sequences)
    check(second)
    [output] = second.generate([PROMPTS[1]], PARAMS)
    assert tuple(output.output_ids) == tokens[1]
    check(second)


def test_export_of_an_empty_cache() -> None:
    engine = make(LATENT_KIND)
    request = engine.add_request(PROMPTS[4], PARAMS)
    pages = passed_on(engine.export_pages(request))
    assert (pages.sequences, pages.num_bytes) == ((), 0)
    assert make(LATENT_KIND).import_pages(pages) == 0
    with pytest.raises(ValueError, match="request_id: no request 'another'"):
        engine.export_pages("another")


def test_interrupted_import_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, tokens = computed(HEADWISE)
    second = make(HEADWISE)
    ids = [second.add_request(prompt, PARAMS) for prompt in PROMPTS]
    second.step()
    write, calls = second._runner.write_rows, []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no memory")
        write(*arguments)

    monkeypatch.setattr(second._runner, "write_rows", fails)
    with pytest.raises(MemoryError):
        second.import_pages(first.export_prefix_cache())
    assert second.export_prefix_cache().sequences == ()  # a failed import may drop all cached pages
    while second.has_unfinished:
        second.step()
    assert tuple(tuple(second.output(i).output_ids) for i in ids) == tokens
    check(second)


@slow_cases("other weights")
@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        (LATENT_KIND, {"seed": 4}, "pages: expected pages of an engine like this one, got weights of "),
        (LATENT_KIND, {"page_size": 8}, "got page_size of 4, this engine's is 8"),
        (LATENT_KIND, {"cache_dtype": "float16"}, "got arrays of .*float32.*, this engine's is .*float16"),
        (HEADWISE, {"recycling": False}, "got groups of "),
        (LATENT_KIND, {"prefix_caching": False}, "prefix_caching: expected True"),
    ],
    ids=["other weights", "other pages", "other dtype", "other windows", "no prefix cache"],
)
def test_pages_of_a_different_engine_are_rejected(kind: str, changes: dict[str, Any], match: str) -> None:
    pages = computed(kind)[0].export_prefix_cache()
    name, dtype = KINDS[kind]
    with_dtype: dict[str, Any] = {"cache_dtype": dtype} | changes
    seed = with_dtype.pop("seed", 3)
    other = Engine(model(name, seed), dataclasses.replace(SIZES, **with_dtype))
    with pytest.raises(ValueError, match=match):
        other.import_pages(pages)


def _without(pages: CachedPages, **changes: Any) -> CachedPages:
    return dataclasses.replace(pages, sequences=(dataclasses.replace(pages.sequences[0], **changes),))


MALFORMED = {
    "a group more": (lambda p: dataclasses.replace(p, groups=(*p.groups, {})), "expected 1 cache groups, got 2"),
    "other dtypes": (
        lambda p: dataclasses.replace(p, groups=({k: a.astype(np.float64) for k, a in p.groups[0].items()},)),
        "contents of group 0 have other shapes or dtypes",
    ),
    "part of a page": (lambda p: _without(p, tokens=p.sequences[0].tokens[:-1]), "has not just its whole pages"),
    "a token of another vocabulary": (
        lambda p: _without(p, tokens=(64, *p.sequences[0].tokens[1:])),
        r"pages\.sequences\[0\]\.tokens\[0\]: expected an integer from 0 to 63, got 64",
    ),
    "tokens of another dtype": (
        lambda p: _without(p, tokens=tuple(map(float, p.sequences[0].tokens))),
        r"pages\.sequences\[0\]\.tokens\[0\]: expected an integer from 0 to 63, got \d+\.0",
    ),
    "a salt of another type": (lambda p: _without(p, salt=3), r"pages\.sequences\[0\]\.salt: expected a str"),
    "a salt with a surrogate": (lambda p: _without(p, salt="\ud800"), r"pages\.sequences\[0\]\.salt: expected a str"),
    "rows of another type": (
        lambda p: _without(p, rows=(p.sequences[0].rows[0].tolist(),)),
        r"pages\.sequences\[0\]\.rows\[0\]: expected an array int32",
    ),
    "rows of another dtype": (
        lambda p: _without(p, rows=(p.sequences[0].rows[0].astype(np.float32),)),
        r"pages\.sequences\[0\]\.rows\[0\]: expected an array int32",
    ),
    "contents of another type": (
        lambda p: dataclasses.replace(p, groups=({k: a.tolist() for k, a in p.groups[0].items()},)),
        "contents of group 0 have other shapes or dtypes",
    ),
    "a format of another type": (lambda p: dataclasses.replace(p, made_for=[]), r"pages\.made_for: expected an object"),
    "no pages": (lambda p: p.to_bytes(), "pages: expected CachedPages, got a bytes"),
    "a row that is not there": (lambda p: _without(p, rows=(p.sequences[0].rows[0] + 999,)), "expected rows from -1"),
}


def test_pages_of_another_configuration_are_rejected() -> None:
    """The other model has equal weights and shapes, but another rope theta, so its keys are different."""
    other = random_model(
        dataclasses.replace(MODELS["sparse"], rope_theta=500_000.0), seed=3, settings=engine_case.QUICK
    )
    with pytest.raises(ValueError, match=r"got config\.rope_theta of 10000\.0, this engine's is 500000\.0"):
        Engine(other, SIZES).import_pages(computed(LATENT_KIND)[0].export_prefix_cache())


@pytest.mark.parametrize(("spoil", "match"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_pages_are_rejected(spoil, match: str) -> None:
    """A rejected import does not change the engine's prefix cache."""
    engine = make(LATENT_KIND)
    engine.generate([PROMPTS[3] * 9], SamplingParams(max_tokens=1))
    assert hit(engine, PROMPTS[3] * 9) == 2
    with pytest.raises(ValueError, match=match):
        engine.import_pages(spoil(computed(LATENT_KIND)[0].export_prefix_cache()))
    assert hit(engine, PROMPTS[3] * 9) == 2
    [output] = engine.generate([PROMPTS[1]], PARAMS)
    assert tuple(output.output_ids) == computed(LATENT_KIND)[1][1]
    check(engine)


def test_missing_rows_are_not_found() -> None:
    engine, pages = make(LATENT_KIND), computed(LATENT_KIND)[0].export_prefix_cache()
    longest = max(pages.sequences, key=lambda sequence: len(sequence.tokens))
    rows = longest.rows[0].copy()
    rows[0, 2] = -1
    assert engine.import_pages(dataclasses.replace(pages, sequences=(dataclasses.replace(longest, rows=(rows,)),))) == 8
    check(engine)


@functools.cache
def _bytes() -> bytes:
    return computed(LATENT_KIND)[0].export_prefix_cache().to_bytes()


def _with_about(**changes: Any) -> bytes:
    tensors = safetensors.numpy.load(_bytes())
    about = json.loads(tensors["about"].tobytes()) | changes
    return safetensors.numpy.save(tensors | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)})


def _forged(about: Any, **tensors: Any) -> bytes:
    """Return the bytes of a page file with a correct digest and an arbitrary header and arbitrary tensors."""
    if not isinstance(about, bytes):
        about = json.dumps(about).encode()
    tensors = {"tokens": np.zeros(0, np.int64)} | tensors | {"about": np.frombuffer(about, np.uint8)}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return safetensors.numpy.save(tensors | {"digest": np.frombuffer(_digest(tensors).encode(), np.uint8)})


ABOUT: dict[str, Any] = {"format": 1, "made_for": {}, "sequences": [], "groups": 0, "dtypes": {}}
ONE_ARRAY: dict[str, Any] = ABOUT | {"groups": 1, "dtypes": {"0.0.k": "float32"}}
PAGES = {"pages.0.0.k": np.zeros((2, 8), np.uint8)}


@pytest.mark.parametrize(
    ("about", "tensors", "match"),
    [
        (ABOUT | {"groups": 10**9}, {}, r"about\.groups: expected 0, got 1000000000"),
        (ABOUT | {"groups": -1}, {}, r"about\.groups: expected 0, got -1"),
        (ABOUT | {"groups": 0.0}, {}, r"about\.groups: expected 0, got 0\.0"),
        (ONE_ARRAY | {"groups": 2}, PAGES, r"about\.groups: expected an integer from 0 to 1, got 2"),
        (ONE_ARRAY | {"groups": 0}, PAGES, r"pages\.'0\.0\.k': expected a cache group from 0 to -1"),
        (
            ABOUT | {"sequences": [[-3, ""]]},
            {},
            r"about\.sequences\[0\]\[0\]: expected an integer of at least 0, got -3",
        ),
        (ABOUT | {"sequences": [[10**18, ""]]}, {}, r"about\.sequences: expected 0 tokens together, got 10{18}"),
        (ABOUT | {"sequences": [[0]]}, {}, r"about\.sequences\[0\]: expected a list of 2 items"),
        (ABOUT | {"sequences": {"0": 1}}, {}, r"about\.sequences: expected a list"),
        (ABOUT | {"sequences": [[0, 3]]}, {}, r"about\.sequences\[0\]\[1\]: expected a str"),
        (ABOUT | {"sequences": [[0, "\ud800"]]}, {}, r"about\.sequences\[0\]\[1\]: expected a str"),
        (ONE_ARRAY | {"sequences": [[0, ""]]}, PAGES, "rows: expected 1 tensors, got 0"),
        (
            ONE_ARRAY | {"sequences": [[0, ""]]},
            PAGES | {"rows.0.1": np.zeros((1, 0), np.int32)},
            r"rows\.rows\.0\.0: expected an array int32 \[n, n\], got nothing",
        ),
        (
            ONE_ARRAY | {"sequences": [[0, ""]]},
            PAGES | {"rows.0.0": np.zeros((1, 0), np.float32)},
            r"rows\.rows\.0\.0: expected an array int32 \[n, n\], got an array float32 \[1, 0\]",
        ),
        (ABOUT | {"dtypes": []}, {}, r"about\.dtypes: expected an object"),
        (ABOUT | {"dtypes": {"0.0.k": "(,)i4"}}, {}, r"about\.dtypes\['0\.0\.k'\]: expected one of int8, "),
        (ABOUT | {"dtypes": {"0.0.k": "int8"}}, {}, r"about\.dtypes: expected the names of the tensors with pages"),
        (ONE_ARRAY, {"pages.0.0.k": np.zeros((2, 7), np.uint8)}, "a multiple of 4 bytes in its last axis, got uint8"),
        (ONE_ARRAY, {"pages.0.0.k": np.zeros((), np.uint8)}, r"expected an array uint8 \[rows, ...\]"),
        (
            ONE_ARRAY,
            {"pages.0.0.k": np.zeros((2, 2))},
            r"expected an array uint8 \[rows, ...\].*, got float64 \[2, 2\]",
        ),
        (ABOUT | {"made_for": None}, {}, r"about\.made_for: expected an object, got None"),
        (ABOUT | {"format": True}, {}, r"about\.format: expected 1, got True"),
        (
            ABOUT,
            {"tokens": np.zeros(3, np.float32)},
            r"tokens: expected an array int64 \[n\], got an array float32 \[3\]",
        ),
        (ABOUT, {"tokens": None}, r"tokens: expected an array int64 \[n\], got None"),
        ([], {}, "about: expected an object"),
        (b"[" * 10_000, {}, "not JSON|within each other"),
        (b" " * 2**24 + b"{}", {}, "about: expected at most 16777216 bytes, got 16777218"),
    ],
)
def test_forged_file_is_rejected(about: Any, tensors: dict[str, Any], match: str) -> None:
    """Reject a file that has a correct digest, but wrong sizes or types. No large array is allocated."""
    with pytest.raises(ValueError, match=f"^data: no cached pages in these .*({match})"):
        CachedPages.from_bytes(_forged(about, **tensors))


def test_random_changes_of_a_file_raise_value_errors_only() -> None:
    """A forged file is rejected, or decoded to pages that an engine rejects or accepts as a whole."""
    rng, engine = random.Random(0), make(LATENT_KIND)
    tensors = safetensors.numpy.load(_bytes())
    about, accepted = json.loads(tensors.pop("about").tobytes()), 0
    odd: Any = (None, True, -1, 0, 10**18, 1.5, "", "x", "int8", "(,)i4", "\ud800", [], {}, [[]])
    for _ in range(200):
        changed = json.loads(json.dumps(about))
        name = rng.choice(("sequences", "groups", "dtypes", "format"))
        if rng.random() < 0.3 or not isinstance(changed[name], list | dict):
            changed[name] = rng.choice(odd)
        elif name == "dtypes":
            changed[name][rng.choice([*changed[name]])] = rng.choice(odd)
        else:
            rng.choice(changed[name])[rng.randrange(2)] = rng.choice(odd)
        others: dict[str, Any] = dict(tensors)
        if rng.random() < 0.3:
            name = rng.choice([*others])
            others[name] = rng.choice([others[name].astype(np.float32), others[name].reshape(-1), None])
        others.pop("digest", None)
        try:
            engine.import_pages(CachedPages.from_bytes(_forged(changed, **others)))
            accepted += 1
        except ValueError:
            pass
        engine._pools[0].check()
        engine._prefix_caches[0].check()
    assert 0 < accepted < 200
    [output] = engine.generate([PROMPTS[1]], PARAMS)
    assert tuple(output.output_ids) == computed(LATENT_KIND)[1][1]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (lambda: b"", "no cached pages in these 0 bytes"),
        (lambda: b"\xff" * 100, "no cached pages in these 100 bytes"),
        (lambda: safetensors.numpy.save({"a": np.zeros(3)}), "about: expected an array uint8"),
        (lambda: _with_about(format=2), r"about\.format: expected 1, got 2"),
        (lambda: _with_about(sequences=[]), "digest: the file is damaged"),
        (lambda: _bytes()[:-1] + bytes([_bytes()[-1] ^ 1]), "digest: the file is damaged"),
    ],
    ids=["nothing", "rubbish", "other tensors", "another version", "other sequences", "a bit"],
)
def test_invalid_bytes_are_rejected(data, match: str) -> None:
    with pytest.raises(ValueError, match=f"^data: .*{match}"):
        CachedPages.from_bytes(data())


@given(position=st.integers(0), value=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_are_rejected(position: int, value: int) -> None:
    data = bytearray(_bytes())
    data[position % len(data)] ^= value
    with pytest.raises(ValueError, match="^data: no cached pages"):
        CachedPages.from_bytes(bytes(data))
