"""Decode steps that call `cascade_decode`: the engine chooses them if all rows share pages, and tokens stay equal."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_attn import FULL, PagedKV
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GEMMA_PRESETS, GQA_PRESETS, HeadWindows, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, StepMetadata, with_settings
from pallas_attn.models.engine import Engine, EngineConfig, NGramProposer, SamplingParams, Speculation
from pallas_attn.models.engine.config import Bucket
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.step.cascade import CascadeSteps
from pallas_attn.models.engine.step.compiler import StepCompiler
from pallas_attn.models.llm import LLM
from tests.kit.slow_cases import slow_cases
from tests.models import engine_case, llm_case
from tests.models.engine_case import compile_events
from tests.models.step_case import PAGE_SIZE, Pages, step
from tests.models.test_mesh import devices_of

pytestmark = pytest.mark.usefixtures("shared_steps")

ALWAYS = AttentionSettings(implementation="reference", cascade_saved_bytes=1)
"""Settings with which every step of two rows with a shared page calls `cascade_decode`."""

CONFIG = dataclasses.replace(llm_case.CONFIG, windows=(None, 6))
"""A model with two cache groups. Only the layer without a window can call `cascade_decode`."""

SIZES = EngineConfig(
    num_pages=22,
    page_size=4,
    max_batched_tokens=32,
    max_num_seqs=4,
    max_model_len=128,
    decode_buckets=(4,),
    prefill_buckets=(32,),
)
"""Sizes with which four long requests are preempted."""

DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
SYSTEM = [7, 3, 60, 22, 41, 9, 18, 33, 50, 2, 11, 28, 5, 44]
"""A system prompt of three full pages and two tokens."""
CHATS = [[*SYSTEM, 20 + i, 30 + i, 40 + 2 * i] for i in range(4)]


@functools.cache
def model(config: ModelConfig = CONFIG) -> Decoder:
    return random_model(config, seed=2, settings=ALWAYS)


def cascades(engine: Engine) -> list[bool]:
    """Return for each decode step whether it called `cascade_decode`."""
    return [step.cascade for step in engine.stats().steps if not step.prefill_tokens]


def alone(prompt: list[int], params: SamplingParams = DRAWN) -> list[int]:
    """Return the output tokens of a request that runs alone, whose steps call `paged_decode`."""
    engine = Engine(model(), SIZES)
    (output,) = engine.generate([prompt], params)
    assert not any(cascades(engine))
    return output.output_ids


def served(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the output tokens of prompts, after a request that puts the first prompt into the prefix cache."""
    engine.generate(prompts[:1], SamplingParams(max_tokens=1))
    return [output.output_ids for output in engine.generate(prompts, DRAWN)]


# --- tokens and the choice of steps


def test_samples_of_one_prompt_have_the_tokens_of_lone_requests() -> None:
    llm = LLM.of_model(model(), SIZES)
    (result,) = llm.generate([SYSTEM], dataclasses.replace(DRAWN, n=4))
    wanted = [alone(SYSTEM, dataclasses.replace(DRAWN, seed=5 + i)) for i in range(4)]
    assert [output.token_ids for output in result.outputs] == wanted
    assert len({*map(tuple, wanted)}) == 4
    chosen = cascades(llm.engine)
    assert sum(chosen) >= 8
    assert not chosen[0]  # sample 0 runs alone


def test_system_prompt_has_the_tokens_of_lone_requests() -> None:
    engine = Engine(model(), SIZES)
    assert served(engine, CHATS) == [*map(alone, CHATS)]
    before = sum(cascades(engine))
    assert before >= 9
    pairs = [[*SYSTEM, 1, 2], [9, *SYSTEM]]  # the pages of the second prompt differ
    assert served(engine, pairs) == [*map(alone, pairs)]
    assert sum(cascades(engine)) == before


@pytest.mark.slow
def test_cascades_start_when_their_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, compile_programs, compile_buckets = threading.Event(), StepCompiler.compile, Runner.compile
    missing: list[Bucket] = []

    def in_thread(self: StepCompiler, *arguments: Any) -> Any:
        if threading.current_thread().name == "compile steps":
            assert go_on.wait(60)
        return compile_programs(self, *arguments)

    def in_step(self: Runner, buckets: Sequence[Bucket], *rest: Any) -> None:
        missing.extend(bucket for bucket in buckets if bucket not in self._programs.forward)
        compile_buckets(self, buckets, *rest)

    monkeypatch.setattr(StepCompiler, "compile", in_thread)
    engine = Engine(model(), dataclasses.replace(SIZES, decode_buckets=(2, 4), background_compilation=True))
    engine.warmup()
    monkeypatch.setattr(Runner, "compile", in_step)
    compiler = engine._runner.background
    assert compiler is not None
    served(engine, CHATS[:2])  # with the bucket of four rows
    assert compiler._misses[Bucket(2, 0)] >= compiler._misses[Bucket(2, 0, cascade=True)] > 0
    assert compiler._misses[Bucket(4, 0)] == compiler._misses[Bucket(4, 0, cascade=True)] == 0
    wanted = served(engine, CHATS)
    assert compiler._misses[Bucket(4, 0, cascade=True)] > 0
    assert not any(cascades(engine))
    go_on.set()
    engine.warmup(wait=True)
    assert served(engine, CHATS) == wanted
    assert any(cascades(engine))
    assert missing == []


@pytest.mark.slow
def test_weights_are_replaced_in_place_while_programs_are_compiled() -> None:
    engine = Engine(model(), dataclasses.replace(SIZES, background_compilation=True))
    engine.warmup()
    assert engine.is_compiling
    engine.update_weights({name: np.asarray(x) for name, x in engine.weights.items()}, in_place=True)
    assert engine.stats().pending_compilations == 0
    assert served(engine, CHATS) == [*map(alone, CHATS)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_changing_batches_have_the_tokens_of_lone_requests(seed: int) -> None:
    """Requests with a common prefix and other requests arrive, end, are aborted and are preempted."""
    engine, prompts, draw = Engine(model(), SIZES), [*CHATS, SYSTEM[:9], [5, 6, 7]], random.Random(seed)
    params = [dataclasses.replace(DRAWN, max_tokens=12 + 4 * i, seed=i) for i in range(len(prompts))]
    arrived: dict[int | str, int] = {}
    while len(arrived) < 30 or engine.has_unfinished:
        if len(arrived) < 30 and draw.random() < 0.2:
            number, salt = draw.choice([0, 1, 2, 3] * 6 + [4, 5]), draw.choice(["", "", "", "", "", "pepper"])
            arrived[engine.add_request(prompts[number], params[number], salt=salt)] = number
        if arrived and draw.random() < 0.01:
            engine.abort(draw.choice([*arrived]))
        engine.step()
    wanted = [alone(prompt, of_prompt) for prompt, of_prompt in zip(prompts, params, strict=True)]
    for request_id, number in arrived.items():
        output = engine.output(request_id)
        assert output.output_ids == wanted[number][: len(output.output_ids)]
    chosen = cascades(engine)
    assert 10 < sum(chosen) < len(chosen) - 10
    assert engine.stats().preemptions > 0


def test_no_compilation_after_warmup() -> None:
    engine = Engine(model(), SIZES)
    engine.warmup()
    compiled = engine.stats().compilations
    for bucket in engine._runner.buckets():
        engine._runner.run_idle(bucket)  # on a GPU, warmup also runs each compiled step once
    served(engine, CHATS[:2])  # NumPy and JAX initialise some parts at the first call
    with compile_events() as events:
        served(engine, CHATS)
        served(engine, [CHATS[0], [1, 2, 3]])
    assert events == []
    assert engine.stats().compilations == compiled == 4
    assert {True, False} == {*cascades(engine)}


@slow_cases("tensor=2", "data=2")
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2"])
def test_mesh_has_the_tokens_of_one_device(mesh: str) -> None:
    """With two data ranks, a step calls `cascade_decode` if the rows of each rank share pages."""
    split = random_model(CONFIG, seed=2, settings=ALWAYS, mesh=devices_of(mesh))
    engine = Engine(split, dataclasses.replace(SIZES, num_pages=96, mesh=devices_of(mesh)))
    chats = [*CHATS, *CHATS]
    for _ in range(2):  # in the second run, each data rank finds the system prompt in its prefix cache
        outputs = [output.output_ids for output in engine.generate(chats, DRAWN)]
    assert outputs == [*map(alone, chats)]
    assert sum(cascades(engine)) >= 9


# --- numbers


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A decode step whose rows share the first `shared` pages, with an idle row, and logits of both forms of attention
    from the same caches.

    Attributes:
      config: the model.
      cache: dtype of the cache.
    """

    config: ModelConfig = CONFIG
    cache: str = "float32"
    shared: int = 2

    @functools.cached_property
    def pages(self) -> Pages:
        tables = Pages.scatter(3, 6).tables.copy()
        tables[:, : self.shared] = tables[0, : self.shared]
        return Pages(tables)

    @functools.cached_property
    def metadata(self) -> StepMetadata:
        return step(self.pages, decode=[(0, 25), (1, 31), (2, 40)], idle_rows=1)

    def logits(self, shared_pages: int | None) -> np.ndarray:
        """Return the logits of the rows that are not idle, with `cascade_decode` over `shared_pages` pages, or with
        `paged_decode` if it is None."""
        decoder = model(self.config)
        shared = None if shared_pages is None else jnp.int32(shared_pages)
        caches = decoder.allocate_caches(self.pages.tables.size + 1, PAGE_SIZE, self.cache)
        values, kept = np.random.default_rng(1), []
        for cache in caches:
            if isinstance(cache, PagedKV):
                arrays = {name: values.uniform(-1, 1, getattr(cache, name).shape) for name in ("k", "v")}
                scales = (
                    {} if cache.k_scale is None else dict.fromkeys(("k_scale", "v_scale"), 0.01 + 0 * cache.k_scale)
                )
                if scales:
                    arrays = {name: (90 * array).round() for name, array in arrays.items()}
                arrays = {name: jnp.asarray(array, cache.k.dtype) for name, array in arrays.items()}
                cache = dataclasses.replace(cache, **arrays, **scales)
            kept.append(cache)
        tokens = jnp.asarray([5, 9, 2, 0], jnp.int32)
        logits, _ = _jitted(self.config)(tokens, tuple(kept), dataclasses.replace(self.metadata, shared_pages=shared))
        return np.asarray(logits)[:3]


@functools.cache
def _jitted(config: ModelConfig) -> Any:
    return jax.jit(model(config))


SHARING = {
    "windows": Sharing(),
    "int8": Sharing(cache="int8"),
    "fp8": Sharing(cache="float8_e4m3fn"),
    "sinks and experts": Sharing(GQA_PRESETS["gpt-oss-tiny"]),
    "layers without caches": Sharing(GEMMA_PRESETS["gemma4-tiny"]),
}


@slow_cases("int8", "fp8", "sinks and experts", "layers without caches")
@pytest.mark.parametrize("name", SHARING)
def test_logits_of_both_forms(name: str) -> None:
    """Logits are close for every number of pages that the rows share. They differ if one more page is counted."""
    case = SHARING[name]
    expected = case.logits(None)
    for shared_pages in range(case.shared + 1):
        np.testing.assert_allclose(case.logits(shared_pages), expected, atol=2e-4)
    assert np.abs(case.logits(case.shared + 1) - expected).max() > 0.01


# --- buckets


def buckets(config: ModelConfig, settings: AttentionSettings = AttentionSettings(), **sizes: Any) -> list[int]:
    """Return the numbers of decode rows for which programs with `cascade_decode` are compiled."""
    shapes = nnx.eval_shape(lambda: Decoder(config, settings, jnp.bfloat16))
    dtype = sizes.pop("cache_dtype", None)
    engine = dataclasses.replace(EngineConfig(page_size=64, num_pages=4096, max_batched_tokens=512), **sizes)
    runner = dataclasses.replace(engine.runner_config(sizes.get("max_model_len", 8192)), cascade_attention=True)
    pages = runner.layer_pages(config.num_hidden_layers)
    steps = CascadeSteps(shapes, runner, shapes.cache_specs(pages, 64, dtype))
    assert all(bucket == Bucket(bucket.decode_rows, 0, cascade=True) for bucket in steps.buckets)
    return [bucket.decode_rows for bucket in steps.buckets]


WIDE = dataclasses.replace(
    CONFIG, windows=None, num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=2**17
)
"""A page of 64 tokens has 256 KiB per layer. 15 sequences with 52 pages save 195 MiB."""


@pytest.mark.parametrize(
    ("changed", "rows"),
    [
        ({}, [16]),
        ({"max_num_seqs": 64}, [16, 32, 64]),
        ({"max_num_seqs": 64, "max_model_len": 2**16}, [4, 16, 32, 64]),
        ({"max_num_seqs": 64, "max_model_len": 1024}, [64]),
        ({"max_model_len": 52 * 64}, []),
        ({"max_model_len": 53 * 64}, [16]),
        ({"max_model_len": 53 * 64, "cache_dtype": "int8"}, []),
        ({"num_pages": 67}, []),  # 16 rows have a page each for their newest tokens
        ({"num_pages": 68}, [16]),
    ],
)
def test_only_buckets_that_can_save_enough_are_compiled(changed: dict[str, Any], rows: list[int]) -> None:
    assert buckets(WIDE, **changed) == rows


def test_threshold_and_windows_decide_which_buckets_are_compiled() -> None:
    assert buckets(WIDE, AttentionSettings(cascade_saved_bytes=2**40)) == []
    windows = dataclasses.replace(WIDE, windows=(128, None))
    assert buckets(windows) == [16]
    assert buckets(dataclasses.replace(WIDE, num_key_value_heads=2)) == []


# --- refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_invariant": True}, "cascade_attention: expected False with batch_invariant, got True"),
        ({"speculate": Speculation(NGramProposer(), 2)}, "cascade_attention: expected False with speculate, got True"),
    ],
)
def test_options_that_exclude_cascades(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        EngineConfig(cascade_attention=True, **changed)
    sizes = dataclasses.replace(SIZES, decode_buckets=None, prefill_buckets=None, **changed)
    assert not any(bucket.cascade for bucket in Engine(model(), sizes)._runner.buckets())


def test_cascades_can_be_switched_off() -> None:
    engine = Engine(model(), dataclasses.replace(SIZES, cascade_attention=False))
    assert served(engine, CHATS) == [*map(alone, CHATS)]
    assert not any(cascades(engine))


HEADS = HeadWindows((FULL, 6), (0, 0))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (engine_case.model, "cascade_attention: cascade_decode attends to keys and values, a deepseek_v3 model caches"),
        (lambda: model(dataclasses.replace(CONFIG, windows=(5, 6))), "cascade_attention: all layers .* have attention"),
        (lambda: model(dataclasses.replace(CONFIG, windows=(HEADS, 6))), "cascade_attention: all layers"),
        (
            lambda: with_settings(model(), dataclasses.replace(ALWAYS, batch_invariant=True)),
            "cascade_attention: changes the rounding, which batch_invariant",
        ),
        (
            lambda: random_model(
                dataclasses.replace(CONFIG, windows=None), settings=ALWAYS, mesh=devices_of("context=2")
            ),
            "cascade_attention: the tokens of each page are split over the mesh axis context",
        ),
    ],
    ids=["latents", "windows", "windows of heads", "batch-invariant", "context"],
)
def test_models_that_exclude_cascades(decoder: Callable[[], Decoder], message: str) -> None:
    made = decoder()
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        Engine(made, dataclasses.replace(SIZES, mesh=made.mesh, cascade_attention=True))
    engine = Engine(made, dataclasses.replace(SIZES, mesh=made.mesh))  # the default is None
    assert not any(bucket.cascade for bucket in engine._runner.buckets())


def test_threshold_of_the_settings_is_checked() -> None:
    with pytest.raises(ValueError, match="^cascade_saved_bytes: expected at least 0, got -1$"):
        AttentionSettings(cascade_saved_bytes=-1)
