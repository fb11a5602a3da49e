"""Replacement of weights: later tokens equal a new engine with the new weights, and nothing is compiled.

Cached prefixes, running requests, drafts, meshes and transfers of pages do not mix old and new weights.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn.models.checkpoints import random_model, random_mtp, save_random_checkpoint
from pallas_attn.models.decoder import Decoder, named_weights
from pallas_attn.models.engine import (
    DraftModelProposer,
    Engine,
    EngineConfig,
    MTPProposer,
    NGramProposer,
    SamplingParams,
    Speculation,
    weight_slots,
)
from pallas_attn.models.engine.distributed.data_ranks import DataRanks
from pallas_attn.models.llm import LLM
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case, llm_case
from tests.models.engine_case import CONFIG, ENGINES, GREEDY, PROMPTS, QUICK, compile_events, padded
from tests.models.test_mesh import LATENT, devices_of

pytestmark = pytest.mark.usefixtures("shared_steps")

SIZES = padded(ENGINES["ample"])
SHORT = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def old() -> Decoder:
    return engine_case.model()


@pytest.fixture(scope="module")
def new() -> Decoder:
    return random_model(CONFIG, seed=4, settings=QUICK)


def tokens_of(engine: Engine, prompts: Any = PROMPTS, params: SamplingParams = SHORT) -> list[list[int]]:
    return [output.output_ids for output in engine.generate(prompts, params)]


def fresh(model: Decoder, prompts: Any = PROMPTS, params: SamplingParams = SHORT) -> list[list[int]]:
    """Return the tokens of a new engine without a prefix cache."""
    return _fresh(model, tuple(map(tuple, prompts)), params)


@functools.cache
def _fresh(model: Decoder, prompts: tuple[tuple[int, ...], ...], params: SamplingParams) -> list[list[int]]:
    return tokens_of(Engine(model, dataclasses.replace(SIZES, prefix_caching=False)), prompts, params)


def running(model: Decoder, steps: int = 5, **changes: Any) -> tuple[Engine, list[Any]]:
    """Return an engine with running and waiting requests and a step in flight, and the ids of the requests."""
    engine = Engine(model, dataclasses.replace(SIZES, **changes))
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    return engine, ids


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


# --- tokens

FORMS: dict[str, Callable[[Decoder], Any]] = {
    "model": lambda model: model,
    "state": nnx.state,
    "nested": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "numpy by name": lambda model: {name: np.array(x) for name, x in named_weights(model).items()},
}


@slow_cases("state-options1", "nested-options2")
@pytest.mark.parametrize(
    ("form", "options"),
    [("model", {}), ("state", {"copy": False}), ("nested", {"in_place": True}), ("numpy by name", {"copy": False})],
)
def test_tokens_equal_new_engine(old: Decoder, new: Decoder, form: str, options: dict[str, Any]) -> None:
    """Prefixes that the old weights computed are not found, and prefixes of the new weights are."""
    engine = Engine(old, SIZES)
    before = tokens_of(engine)
    found = [output.cached_tokens for output in engine.generate(PROMPTS, SHORT)]
    assert sum(found) > 0
    with compile_events() as events:
        assert engine.update_weights(FORMS[form](new), **options) == []
        after = engine.generate(PROMPTS, SHORT)
    assert events == []
    assert [output.output_ids for output in after] == fresh(new)
    assert after[0].cached_tokens == 0
    assert [output.output_ids for output in engine.generate(PROMPTS, SHORT)] == fresh(new)
    assert [output.cached_tokens for output in engine.generate(PROMPTS, SHORT)] == found
    engine.update_weights(old)
    assert tokens_of(engine) == before == fresh(old)
    assert before != fresh(new)


def test_weights_of_an_engine_by_name(old: Decoder) -> None:
    weights = Engine(old, SIZES).weights
    assert weights["embed_tokens"] is old.embed_tokens[...]
    assert weights["layers.1.self_attn.o_proj.weight"] is old.layers[1].self_attn.o_proj.weight[...]
    assert len(weights) == len(jax.tree.leaves(nnx.state(old)))


def test_part_of_the_weights_is_new(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    engine.update_weights({**engine.weights, "norm.weight": new.norm.weight[...]}, in_place=True)
    mixed = random_model(CONFIG, seed=3, settings=QUICK)
    mixed.norm.weight[...] = new.norm.weight[...]
    assert tokens_of(engine) == fresh(mixed) != fresh(old)


# --- running requests


def test_running_requests_are_computed_again(old: Decoder, new: Decoder) -> None:
    engine, ids = running(old)
    assert engine.update_weights(new) != []
    so_far = [engine.output(i).output_ids for i in ids]
    assert {len(tokens) for tokens in so_far} > {0}, "some requests run, others wait"
    assert engine.stats().used_pages == 0
    finish(engine)
    for i, prompt, known in zip(ids, PROMPTS, so_far, strict=True):
        tokens = engine.output(i).output_ids
        rest = SamplingParams(max_tokens=GREEDY.max_tokens - len(known))
        assert tokens[: len(known)] == fresh(old, [prompt], GREEDY)[0][: len(known)]
        assert [tokens[len(known) :]] == fresh(new, [[*prompt, *known]], rest)
    assert tokens_of(engine) == fresh(new)


def test_running_requests_keep_keys_and_values(old: Decoder, new: Decoder) -> None:
    """Pages with keys and values of old weights are not found by later requests."""
    engine, ids = running(old)
    used = engine.stats().used_pages
    engine.update_weights(new, running="keep")
    assert engine.stats().used_pages == used > 0
    begun = [i for i in ids if engine.output(i).output_ids]
    finish(engine)
    assert 0 < len(begun) < len(ids)
    for i in ids:
        output, expected = engine.output(i), fresh(new, [PROMPTS[ids.index(i)]], GREEDY)
        assert len(output.output_ids) == GREEDY.max_tokens
        assert ([output.output_ids] == expected) == (i not in begun)
    # The longest sequences whose pages could be found: the prompts and the tokens of the requests.
    whole = [[*PROMPTS[ids.index(i)], *engine.output(i).output_ids] for i in begun]
    assert tokens_of(engine, whole) == fresh(new, whole)


def test_kept_requests_share_pages_after_preemption(old: Decoder, new: Decoder) -> None:
    """A preempted request computes its keys and values again, with the new weights, so its pages are published."""
    engine, ids = running(old)
    engine.update_weights(new, running="keep")
    scheduler = engine._ranks.schedulers[0]
    (request,) = [r for r in scheduler.running if r.request_id == ids[0]]
    engine.update_weights(new, running="recompute")
    assert not request.has_old_keys
    finish(engine)
    [output] = engine.generate([[*PROMPTS[0], *engine.output(ids[0]).output_ids]], SHORT)
    assert output.cached_tokens > 0
    assert [output.output_ids] == fresh(new, [[*PROMPTS[0], *engine.output(ids[0]).output_ids]])


def test_running_requests_are_aborted(old: Decoder, new: Decoder) -> None:
    engine, ids = running(old)
    engine.update_weights(new, running="abort")
    begun = [i for i in ids if engine.output(i).finish_reason == "abort"]
    assert all(engine.output(i).output_ids for i in begun)
    assert 0 < len(begun) < len(ids)
    finish(engine)
    waiting = [i for i in ids if i not in begun]
    expected = fresh(new, [PROMPTS[ids.index(i)] for i in waiting], GREEDY)
    assert [engine.output(i).output_ids for i in waiting] == expected


def test_callbacks_get_tokens_of_old_weights_first(old: Decoder, new: Decoder) -> None:
    engine, received = Engine(old, SIZES), list[int]()
    request = engine.add_request(PROMPTS[0], SHORT, on_token=lambda _, token, __: received.append(token))
    while not received:
        engine.step()
    assert engine.update_weights(new) == [request]
    assert received == [*engine.output(request).output_ids]
    assert len(received) == 2
    finish(engine)
    assert received == engine.output(request).output_ids
    assert received[2:] == fresh(new, [[*PROMPTS[0], *received[:2]]], SamplingParams(max_tokens=6))[0]


# --- errors


def without(name: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in weights.items() if key != name}


def deleted(array: jax.Array) -> jax.Array:
    copied = jnp.array(array)
    copied.delete()
    return copied


NAME = "layers.1.self_attn.o_proj.weight"

WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda w: without(NAME, w), rf"weights: expected {NAME} as float32\[48, 32\], got no weight"),
    "unknown": (
        lambda w: {**w, "lm_head.bias": w["norm.weight"]},
        "only the weights of the engine, got 'lm_head.bias'",
    ),
    "shape": (lambda w: {**w, NAME: w[NAME].T}, rf"{NAME} as float32\[48, 32\], got float32\[32, 48\]"),
    "dtype": (lambda w: {**w, NAME: w[NAME].astype(jnp.bfloat16)}, rf"{NAME} as float32\[48, 32\], got bfloat16"),
    "list": (lambda w: {**w, NAME: 3}, rf"{NAME} as float32\[48, 32\], got a int"),
    "deleted": (lambda w: {**w, NAME: deleted(w[NAME])}, rf"{NAME} .*deleted or donated"),
    "empty": (lambda w: {}, "embed_tokens as .*, got no weight"),
}


def test_wrong_weights_change_nothing(old: Decoder, new: Decoder) -> None:
    engine, ids = running(old)
    for change, message in WRONG.values():
        for in_place in (False, True):
            with pytest.raises(ValueError, match=message):
                engine.update_weights(change(named_weights(new)), in_place=in_place)
    finish(engine)
    assert [engine.output(i).output_ids for i in ids] == fresh(old, PROMPTS, GREEDY)
    assert engine.generate([PROMPTS[1]], SHORT)[0].cached_tokens > 0


def test_wrong_options(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    with pytest.raises(ValueError, match="running: expected one of recompute, keep, abort, got 'wait'"):
        engine.update_weights(new, running="wait")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="draft: expected None, because the engine has no proposer with weights"):
        engine.update_weights(new, draft=new)


def test_failed_copy_changes_nothing(old: Decoder, new: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = running(old)
    monkeypatch.setattr(weight_slots, "_placed", fails_at(9))
    with pytest.raises(MemoryError):
        engine.update_weights(new)
    finish(engine)
    assert [engine.output(i).output_ids for i in ids] == fresh(old, PROMPTS, GREEDY)
    assert engine.stats().preemptions == 0


def fails_at(number: int) -> Callable[..., Any]:
    """Return `_placed`, but the call of this number raises MemoryError."""
    calls, placed = [0], weight_slots._placed

    def failing(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise MemoryError
        return placed(*args, **options)

    return failing


def test_interrupted_replacement_in_place(old: Decoder, new: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = running(old)
    with monkeypatch.context() as patch:
        patch.setattr(weight_slots, "_placed", fails_at(9))
        with pytest.raises(MemoryError):
            engine.update_weights(new, in_place=True)
    with pytest.raises(RuntimeError, match="call update_weights again"):
        engine.step()
    so_far = engine.output(ids[0]).output_ids
    engine.update_weights(new, in_place=True)
    finish(engine)
    rest = SamplingParams(max_tokens=GREEDY.max_tokens - len(so_far))
    assert [engine.output(ids[0]).output_ids[len(so_far) :]] == fresh(new, [[*PROMPTS[0], *so_far]], rest)


@pytest.mark.parametrize("running_requests", ["recompute", "keep", "abort"])
def test_interrupted_update(old: Decoder, new: Decoder, running_requests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption all requests are computed again with the new weights."""
    engine, ids = running(old)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DataRanks, "replace_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(new, running=running_requests)
    so_far = engine.output(ids[0]).output_ids
    finish(engine)
    rest = SamplingParams(max_tokens=GREEDY.max_tokens - len(so_far))
    assert [engine.output(ids[0]).output_ids[len(so_far) :]] == fresh(new, [[*PROMPTS[0], *so_far]], rest)
    assert tokens_of(engine) == fresh(new)


# --- memory


@pytest.mark.parametrize("in_place", [False, True])
def test_caller_may_change_and_delete_its_arrays(old: Decoder, in_place: bool) -> None:
    given = random_model(CONFIG, seed=4, settings=QUICK)
    expected, engine = fresh(given), Engine(old, SIZES)
    half = {name: np.array(x) if i % 2 else x for i, (name, x) in enumerate(named_weights(given).items())}
    engine.update_weights(half, in_place=in_place)
    for array in half.values():
        if isinstance(array, np.ndarray):
            array[...] = np.nan
        else:
            array.delete()
    assert tokens_of(engine) == expected


def test_arrays_are_used_without_a_copy(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    engine.update_weights(new, copy=False)
    assert all(
        mine is theirs for mine, theirs in zip(engine.weights.values(), named_weights(new).values(), strict=True)
    )


def counting(references: list[weakref.ref[jax.Array]], alive: list[int]) -> Callable[..., Any]:
    """Return `_placed`, which appends to `alive` the number of references whose array is alive."""
    placed = weight_slots._placed

    def counted(*args: Any, **options: Any) -> Any:
        alive.append(sum(reference() is not None for reference in references))
        return placed(*args, **options)

    return counted


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["none", "mtp"])
def test_old_weights_are_released(proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, each old weight is released before its successor is copied. Otherwise all are released at the end."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    for in_place in (True, False):
        model = random_model(config, seed=3, settings=QUICK)
        mtp = random_mtp(model) if proposer == "mtp" else None
        speculate = None if mtp is None else Speculation(MTPProposer(mtp))
        engine = Engine(model, dataclasses.replace(SIZES, speculate=speculate))
        references = [weakref.ref(array) for array in named_weights(model).values()]
        given = named_weights(random_model(config, seed=4, settings=QUICK))
        del model, mtp
        gc.collect()
        alive = list[int]()
        placed = weight_slots._placed

        def counted(
            *args: Any, placed: Any = placed, references: Any = references, alive: Any = alive, **kw: Any
        ) -> Any:
            alive.append(sum(reference() is not None for reference in references))
            return placed(*args, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(weight_slots, "_placed", counted)
            engine.update_weights(given, in_place=in_place)
        count = len(references)
        assert alive == ([*reversed(range(count))] if in_place else [count] * count)
        gc.collect()
        assert all(reference() is None for reference in references)


# --- drafts


@pytest.mark.slow
def test_proposer_shares_the_new_embedding() -> None:
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    models = [random_model(config, seed=seed, settings=QUICK) for seed in (3, 4)]
    proposer = MTPProposer(random_mtp(models[0]))
    engine = Engine(models[0], dataclasses.replace(SIZES, speculate=Speculation(proposer)))
    own = dict(zip(proposer.weight_names or (), proposer.weights, strict=True))
    engine.update_weights(models[1])
    changed = dict(zip(proposer.weight_names or (), proposer.weights, strict=True))
    assert changed["embed_tokens"] is engine.weights["embed_tokens"]
    assert changed["lm_head.weight"] is engine.weights["lm_head.weight"]
    assert {name for name in own if own[name] is not changed[name]} == {"embed_tokens", "lm_head.weight"}
    module = random_mtp(models[1], seed=4)
    with pytest.raises(ValueError, match=r"draft: expected depths\.0\.eh_proj\.weight as"):
        engine.update_weights(models[1], draft=models[1])
    engine.update_weights(models[1], draft=module, copy=False)
    assert dict(zip(proposer.weight_names or (), proposer.weights, strict=True)) == named_weights(module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "mtp", "draft model"])
def test_drafts(kind: str) -> None:
    """Drafts of the new draft weights are accepted, and tokens equal decoding without drafts."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    old, new = (random_model(config, seed=seed, settings=QUICK) for seed in (3, 4))
    proposer = {
        "ngram": lambda: NGramProposer(),
        "mtp": lambda: MTPProposer(random_mtp(old)),
        "draft model": lambda: DraftModelProposer(random_model(config, seed=3, settings=QUICK)),
    }[kind]()
    sizes = dataclasses.replace(SIZES, speculate=Speculation(proposer, num_drafts=2, adaptive=False))
    engine = Engine(old, sizes)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(5):
        engine.step()
    draft = {"ngram": None, "mtp": random_mtp(new), "draft model": new}[kind]
    with compile_events() as events:
        engine.update_weights(new, draft=draft)
        so_far = [engine.output(i).output_ids for i in ids]
        finish(engine)
        outputs = engine.generate(PROMPTS, GREEDY)
    assert events == []
    for i, prompt, known in zip(ids, PROMPTS, so_far, strict=True):
        rest = SamplingParams(max_tokens=GREEDY.max_tokens - len(known))
        assert [engine.output(i).output_ids[len(known) :]] == fresh(new, [[*prompt, *known]], rest)
    assert [output.output_ids for output in outputs] == fresh(new, PROMPTS, GREEDY)
    if kind == "draft model":  # the draft model is the model, so that all drafts are right
        assert all(output.accepted == output.drafted for output in outputs)


# --- several devices


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["tensor=2", "data=2,tensor=2"])
@pytest.mark.parametrize("form", ["mesh", "host", "one device"])
def test_mesh(sizes: str, form: str) -> None:
    """Arrays on the host or on another device are placed like the weights of the engine."""
    mesh = devices_of(sizes)
    old, new = (random_model(LATENT, seed=seed, mesh=mesh) for seed in (3, 4))
    engine = Engine(old, dataclasses.replace(SIZES, mesh=mesh))
    tokens_of(engine)
    given: Any = named_weights(new)
    if form != "mesh":
        given = {name: np.asarray(array) for name, array in given.items()}
    if form == "one device":
        given = {name: jax.device_put(array, jax.devices()[-1]) for name, array in given.items()}
    shardings = {name: array.sharding for name, array in engine.weights.items()}
    compilations = engine.stats().compilations
    with compile_events() as events:
        engine.update_weights(given)
        after = tokens_of(engine)
    assert engine.stats().compilations == compilations
    assert form == "one device" or events == [], "only copies from one device to several need programs"
    assert {name: array.sharding for name, array in engine.weights.items()} == shardings
    assert after == tokens_of(Engine(new, dataclasses.replace(SIZES, mesh=mesh)))
    assert after == fresh(random_model(LATENT, seed=4))


def test_several_processes_are_not_supported(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    engine._is_one_process = False
    with pytest.raises(NotImplementedError, match="several processes cannot replace its weights"):
        engine.update_weights(new)


# --- transfers


def test_open_transfers_are_not_supported(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    feed = engine.watch_written(lambda _: None)
    with pytest.raises(NotImplementedError, match="close the feed first"):
        engine.update_weights(new)
    feed.close()
    incoming = engine.receive_pages(PROMPTS[0], engine.cache_format)
    with pytest.raises(NotImplementedError, match="finish or close their receivers first"):
        engine.update_weights(new)
    incoming.close()
    engine.update_weights(new)


def test_pages_of_old_weights_are_rejected(old: Decoder, new: Decoder) -> None:
    engine = Engine(old, SIZES)
    tokens_of(engine)
    pages, made_for = engine.export_prefix_cache(), engine.cache_format
    engine.update_weights(new)
    assert engine.export_prefix_cache().sequences == ()
    with pytest.raises(ValueError, match="pages: expected pages of an engine like this one, got weights"):
        engine.import_pages(pages)
    with pytest.raises(ValueError, match="made_for: expected an engine like this one, got weights"):
        engine.receive_pages(PROMPTS[0], made_for)
    assert engine.cache_format == Engine(new, SIZES).cache_format


# --- LLM


def test_llm(tmp_path: Any) -> None:
    """Weights come from a folder or from a tree, while a stream is open."""
    folders = [tmp_path / name for name in ("old", "new", "other")]
    llm_case.write_model(folders[0])
    save_random_checkpoint(folders[1], llm_case.CONFIG, seed=5)
    save_random_checkpoint(folders[2], dataclasses.replace(llm_case.CONFIG, rope_theta=77.0), seed=5)
    sizes = EngineConfig(**llm_case.SIZES)
    new = random_model(llm_case.CONFIG, seed=5, settings=QUICK)
    expected = LLM.of_model(new, sizes).generate([[*range(40)]], SHORT)[0].outputs[0].token_ids
    with llm_case.load(folders[0]) as llm:
        before = llm.generate([[*range(40)]], SHORT)[0].outputs[0].token_ids
        stream = llm.stream([*range(40)], SamplingParams(max_tokens=12, ignore_eos=True))
        received = [*next(stream).token_ids]
        for wrong, message in ((folders[2], "rope_theta"), (tmp_path, "config.json")):
            with pytest.raises(ValueError, match=message):
                llm.update_weights(wrong)
        with pytest.raises(ValueError, match="expected a tree of arrays with in_place"):
            llm.update_weights(folders[1], in_place=True)
        with compile_events() as events:
            llm.update_weights(folders[1])
            for delta in stream:
                received += delta.token_ids
        assert not any("backend" in event for event in events)
        assert len(received) == 12
        assert [*received[:1]] == [*before[:1]]
        assert llm.generate([[*range(40)]], SHORT)[0].outputs[0].token_ids == expected != before
        llm.update_weights(str(folders[0]))
        assert llm.generate([[*range(40)]], SHORT)[0].outputs[0].token_ids == before
        llm.update_weights(new, in_place=True, running="abort")
        assert llm.generate([[*range(40)]], SHORT)[0].outputs[0].token_ids == expected
