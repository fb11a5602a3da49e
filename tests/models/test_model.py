"""DeepSeek models compared with a float64 oracle, and results of steps that divide the same tokens differently."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import Capability
from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.checkpoints.weights import checkpoint_shapes, random_tensor
from pallas_attn.models.config import PRESETS, DeepSeekConfig, YarnConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, layers, split_model
from tests.models import oracle
from tests.models.step_case import PAGE_SIZE, Pages, latent_pages, step

# Options that the models of tests/goldens do not cover, and widths without common divisors.
ODD = DeepSeekConfig(
    model_type="deepseek_v3",
    vocab_size=61,
    hidden_size=40,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=5,
    q_lora_rank=18,
    kv_lora_rank=22,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    moe_intermediate_size=12,
    n_routed_experts=6,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    n_group=3,
    topk_group=2,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    rope_interleave=False,
    attention_bias=True,
    tie_word_embeddings=True,
    rms_norm_eps=1e-3,
    yarn=YarnConfig(40.0, 32, mscale=1.0, mscale_all_dim=0.707, truncate=False),
)
DENSE = dataclasses.replace(
    PRESETS["v2-lite-tiny"], vocab_size=61, first_k_dense_replace=9, num_hidden_layers=2, attention_bias=True
)
SMALL = dataclasses.replace(PRESETS["v3-tiny"], num_hidden_layers=2, vocab_size=128)
LENGTHS = (75, 40, 9)
PIECES = AttentionSettings(piece_tokens=16)
"""Settings with which a cached prefix of latents is expanded to keys and values in several pieces of 16 tokens."""

TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}


def make_tokens(config: DeepSeekConfig) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, config.vocab_size, length) for length in LENGTHS]


@functools.cache
def compiled(config: DeepSeekConfig, settings: AttentionSettings):
    """Return the jitted step of a random model, its weights, and the module."""
    model = random_model(config, seed=5, settings=settings)
    run, weights = split_model(model)
    return jax.jit(run, donate_argnums=2), weights, model


class Session:
    """The caches of three sequences, initially NaN, and the function that runs steps over the sequences."""

    def __init__(self, config: DeepSeekConfig = SMALL, settings: AttentionSettings = AttentionSettings()):
        self.run, self.weights, self.model = compiled(config, settings)
        self.tokens = make_tokens(config)
        self.pages = Pages.scatter(len(LENGTHS), 12)
        self.caches = self.pages.allocate(self.model, fill=np.nan)

    def step(self, decode=(), prefill=(), padding_token: int = 0, **kwargs) -> np.ndarray:
        """Run a step over tokens of the sequences. Return the logits of all tokens, or of `logit_rows`."""
        metadata = step(self.pages, list(decode), list(prefill), **kwargs)
        tokens = [self.tokens[s][p : p + 1] for s, p in decode]
        tokens += [np.full(kwargs.get("idle_rows", 0), padding_token)]
        tokens += [self.tokens[s][start:stop] for s, start, stop in prefill]
        tokens += [np.full(kwargs.get("padding", 0), padding_token)]
        packed = jnp.asarray(np.concatenate(tokens), jnp.int32)
        logits, self.caches = self.run(self.weights, packed, self.caches, metadata)
        return np.asarray(logits)


def whole(session: Session) -> list[np.ndarray]:
    """Return logits of all sequences, prefilled in one step."""
    logits = session.step(prefill=[(s, 0, length) for s, length in enumerate(LENGTHS)])
    return np.split(logits, np.cumsum(LENGTHS)[:-1])


@functools.cache
def reference() -> list[np.ndarray]:
    return whole(Session())


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [  # dense and v3 are slow, because test_parity.py compares such models with transformers
        pytest.param(ODD, id="odd"),
        pytest.param(DENSE, id="dense", marks=pytest.mark.slow),
        pytest.param(SMALL, id="v3", marks=pytest.mark.slow),
    ],
)
def test_logits_equal_oracle(config: DeepSeekConfig):
    tensors = {name: random_tensor(name, shape, 5) for name, shape in checkpoint_shapes(config).items()}
    for logits, tokens in zip(whole(Session(config)), make_tokens(config), strict=True):
        np.testing.assert_allclose(logits, oracle.forward(config, tensors, list(tokens)), **TOLERANCE)


@pytest.mark.slow
def test_random_model_depends_on_context():
    """The next token depends on the first token, so the comparisons in this file are meaningful."""
    session = Session()
    session.tokens[0] = np.concatenate([[(session.tokens[0][0] + 1) % 128], session.tokens[0][1:]])
    changed = whole(session)[0]
    assert np.abs(changed[-1] - reference()[0][-1]).max() > 0.05
    assert len(set(np.argmax(np.concatenate(reference()), axis=-1))) > 30


@pytest.mark.slow  # slow, because random traffic of test_engine has chunks, decode rows and both, with mla="auto"
@pytest.mark.parametrize("mla", ["auto", "absorb", "expand"])
def test_chunks_and_decode_rows_equal_whole_prefill(mla):
    """Logits equal a prefill of whole sequences in one step.

    The first step has uneven prefill chunks, the second decodes one sequence and prefills two, the third decodes two.
    """
    session = Session(settings=dataclasses.replace(PIECES, mla=mla))
    wanted = reference()
    first = session.step(prefill=[(0, 0, 19), (1, 0, 39)])
    np.testing.assert_allclose(first, np.concatenate([wanted[0][:19], wanted[1][:39]]), **TOLERANCE)
    mixed = session.step(decode=[(1, 39)], prefill=[(0, 19, 74), (2, 0, 8)], idle_rows=1, padding=3)
    np.testing.assert_allclose(mixed[0], wanted[1][39], **TOLERANCE)
    np.testing.assert_allclose(mixed[2:-3], np.concatenate([wanted[0][19:74], wanted[2][:8]]), **TOLERANCE)
    assert np.all(np.isfinite(mixed))
    last = session.step(decode=[(2, 8), (0, 74)], logit_rows=[1, 0])
    np.testing.assert_allclose(last, [wanted[0][74], wanted[2][8]], **TOLERANCE)


@pytest.mark.slow
def test_settings_select_implementation():
    session = Session(settings=AttentionSettings(implementation=("mosaic", "reference")))
    np.testing.assert_allclose(session.step(prefill=[(2, 0, 9)]), reference()[2], **TOLERANCE)
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float16 queries, got float32"):
        Session(settings=AttentionSettings(implementation="triton")).step(prefill=[(2, 0, 9)])


@pytest.mark.slow
def test_padding_does_not_change_results():
    """Results of two steps are equal if only the tokens in idle rows and padding differ."""
    results = []
    for token in (0, 99):
        session = Session(settings=PIECES)
        session.step(prefill=[(0, 0, 19), (1, 0, 39)])
        logits = session.step(
            decode=[(1, 39)], prefill=[(0, 19, 74), (2, 0, 8)], idle_rows=1, padding=3, padding_token=token
        )
        results.append(
            (np.delete(logits, [1, -3, -2, -1], axis=0), [np.asarray(pages) for pages in latent_pages(session.caches)])
        )
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_step_writes_only_its_slots():
    session = Session(settings=PIECES)
    session.step(prefill=[(1, 0, 40), (2, 0, 9)], padding=9)
    written = np.concatenate([session.pages.slots(s, np.arange(LENGTHS[s])) for s in (1, 2)])
    for pages in latent_pages(session.caches):
        flat = np.asarray(pages).reshape(-1, pages.shape[-1])
        assert np.all(np.isfinite(flat[written]))
        assert np.all(np.isnan(np.delete(flat, written, axis=0)))


@pytest.mark.slow  # slow, because test_runner.py checks that whole steps do not copy caches
def test_caches_are_written_in_place():
    run, weights, model = compiled(SMALL, AttentionSettings())
    pages = Pages.scatter(1, 4)
    caches = pages.allocate(model)
    metadata = step(pages, decode=[(0, 17)], prefill=[(0, 0, 9)])
    compilation = run.lower(weights, jnp.zeros(10, jnp.int32), caches, metadata).compile()
    analysis, text = compilation.memory_analysis(), compilation.as_text()
    assert analysis is not None
    assert text is not None
    assert analysis.alias_size_in_bytes == sum(pages.nbytes for pages in latent_pages(caches))
    shape = ",".join(map(str, latent_pages(caches)[0].shape))
    copies = [line for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    assert not copies, copies


@pytest.mark.slow
def test_equal_layers_are_lowered_once():
    """Lowering a step creates one function for the dense layer, and one function for all layers with experts."""
    run, weights, model = compiled(dataclasses.replace(SMALL, num_hidden_layers=4), PIECES)
    pages = Pages.scatter(2, 4)
    metadata = step(pages, decode=[(0, 5)], prefill=[(1, 0, 3)])
    tokens = jnp.zeros(metadata.num_tokens, jnp.int32)
    lowered = run.lower(weights, tokens, pages.allocate(model), metadata).as_text()
    assert len(re.findall(r"func.func private @_apply_layer", lowered)) == 2
    assert len(re.findall(r"call @_apply_layer", lowered)) == 4


@pytest.mark.slow
def test_bfloat16_model_returns_float32_logits():
    model = random_model(SMALL, seed=5, dtype=jnp.bfloat16)
    pages = Pages.scatter(1, 12)
    tokens = make_tokens(SMALL)[1]
    caches = pages.allocate(model)
    assert latent_pages(caches)[0].dtype == jnp.bfloat16
    run, weights = split_model(model)
    logits, _ = jax.jit(run)(weights, jnp.asarray(tokens, jnp.int32), caches, step(pages, prefill=[(0, 0, 40)]))
    assert logits.dtype == jnp.float32
    exact = reference()[1]
    assert np.corrcoef(np.asarray(logits).ravel(), exact.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (24,)])
def test_gpu_multiplies_a_vector_as_eight_rows(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
):
    x, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape, (24, 7)))
    wanted = layers.project(x, weight)
    monkeypatch.setattr(layers, "capability", lambda: Capability("gpu", (9, 0)))
    assert "f32[8,7]" in str(jax.make_jaxpr(layers.project)(x, weight))
    got = layers.project(x, weight)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5])
def test_gpu_splits_k_that_xla_would_pad(rows: int, monkeypatch: pytest.MonkeyPatch, rng):
    """On a GPU, `project` splits K = 10,944 into 9 parts of 1,216.

    XLA would split K into 16 parts of 684 and pad the weights, because 684 is not a multiple of 16.
    """
    x, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((rows, 10944), (10944, 3)))
    wanted = layers.project(x, weight)
    monkeypatch.setattr(layers, "capability", lambda: Capability("gpu", (9, 0)))
    assert "f32[9,1216,3]" in str(jax.make_jaxpr(layers.project)(x, weight))
    np.testing.assert_allclose(layers.project(x, weight), wanted, rtol=1e-4, atol=1e-3)
    assert [layers.num_k_splits(depth) for depth in (10944, 11008, 2880, 8208, 8200)] == [9, 1, 1, 9, 1]


def test_invalid_steps_raise(unchecked_shapes):
    model = random_model(SMALL)
    pages = Pages.scatter(1, 2)
    caches, metadata = pages.allocate(model), step(pages, prefill=[(0, 0, 4)])
    with pytest.raises(ValueError, match="caches: expected one per layer, 2, got 1"):
        model(jnp.zeros(4, jnp.int32), caches[:1], metadata)
    with pytest.raises(ValueError, match=r"tokens: expected 4 as metadata has, got \[5\]"):
        model(jnp.zeros(5, jnp.int32), caches, metadata)
    no_sequence = step(pages, padding=4)
    with pytest.raises(ValueError, match="4 tokens do not fit 0 decode tokens and the prefill tokens of 0 sequences"):
        model(jnp.zeros(4, jnp.int32), caches, no_sequence)
    with pytest.raises(ValueError, match="mla: expected auto, absorb or expand, got 'both'"):
        AttentionSettings(mla="both")  # pyrefly: ignore[bad-argument-type]


def test_cache_spec_follows_the_model():
    model = Decoder(SMALL, AttentionSettings(), jnp.bfloat16)
    spec = model.cache_spec(num_pages=7, page_size=PAGE_SIZE)
    assert spec.arrays["pages"] == jax.ShapeDtypeStruct((7, PAGE_SIZE, SMALL.latent_width), jnp.bfloat16)
    assert model.cache_spec(7, PAGE_SIZE, jnp.float32).arrays["pages"].dtype == jnp.float32
