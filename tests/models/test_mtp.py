"""Multi-token prediction (MTP) compared with a float64 oracle, and mutations that the comparison must detect.

A mutation is a deliberate mistake in a prediction module. A module processes entries: entry i joins the hidden state of
token i with the embedding of token i + 1.

Hugging Face transformers does not load prediction modules, so the reference is the oracle. Functions of the oracle also
compute the decoder's logits, which are compared with transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model, load_mtp, random_model, random_mtp
from pallas_attn.models.checkpoints.files import open_checkpoint
from pallas_attn.models.checkpoints.weights import checkpoint_shapes, mtp_sources, random_tensor
from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder import (
    MTP,
    AttentionSettings,
    Decoder,
    MTPModule,
    StepMetadata,
    mtp,
    split_model,
    split_module,
)
from tests.models import oracle
from tests.models.step_case import PAGE_SIZE, Pages, step
from tests.models.test_model import ODD
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, Patch, assert_parity, golden

GOLDEN = "v3-fp8"
TWO = dataclasses.replace(ODD, num_nextn_predict_layers=2, tie_word_embeddings=False)
"""A decoder with two prediction modules, and with options that the model of tests/goldens does not cover."""

HIDDEN_TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with prediction modules, sequences, and results of the oracle.

    Attributes:
      model, mtp: model and modules under test.
      tensors: tensors of the checkpoint.
      tokens: tokens of each sequence. The last token has no entry of its own; it is the next token of the last entry.
      hidden: hidden states of each sequence in float64, [len(tokens) - 1, D].
    """

    model: Decoder
    mtp: MTP
    tensors: dict[str, np.ndarray]
    tokens: list[list[int]]
    hidden: list[np.ndarray]

    @property
    def config(self) -> DeepSeekConfig:
        return self.mtp.config

    def next_tokens(self, sequence: int) -> list[int]:
        return self.tokens[sequence][1:]

    def predict(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and hidden states of the first module."""
        return oracle.predict(self.config, self.tensors, 0, self.hidden[sequence], self.next_tokens(sequence))


@functools.cache
def golden_case() -> Case:
    """Return a case with the model of tests/goldens. Its sequences are the prompts with their first greedy token."""
    model = load_model(GOLDENS / GOLDEN, jnp.float32)
    checkpoint = open_checkpoint(GOLDENS / GOLDEN)
    names = [name for name in checkpoint.tensors if not name.endswith("_scale_inv")]
    prompts, first = golden(GOLDEN).prompts, golden(GOLDEN)["tokens"]
    mtp = load_mtp(GOLDENS / GOLDEN, model)
    assert isinstance(mtp, MTP)
    return case(
        model,
        mtp,
        {name: checkpoint.read(name) for name in names},
        [[*prompt, int(tokens[0])] for prompt, tokens in zip(prompts, first, strict=True)],
    )


@functools.cache
def random_case(config: DeepSeekConfig) -> Case:
    model = random_model(config, seed=5, settings=AttentionSettings(batch_invariant=True))
    shapes = checkpoint_shapes(config)
    for source in mtp_sources(config).values():
        shapes |= source.tensors
    tensors = {name: random_tensor(name, shape, 5) for name, shape in shapes.items()}
    for i in config.mtp_layers:
        tensors[f"model.layers.{i}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{i}.shared_head.head.weight"] = tensors["lm_head.weight"]
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 20))
    mtp = random_mtp(model, seed=5)
    assert isinstance(mtp, MTP)
    return case(model, mtp, tensors, tokens.tolist())


def case(model: Decoder, mtp: MTP, tensors: dict[str, np.ndarray], tokens: list[list[int]]) -> Case:
    hidden = [oracle.hidden_states(mtp.config, tensors, sequence[:-1]) for sequence in tokens]
    return Case(model, mtp, tensors, tokens, hidden)


class Drafts:
    """The caches of the prediction modules of a case, initially NaN, and the function that runs steps."""

    def __init__(self, of: Case):
        self.case = of
        self.run, self.weights = compiled(of.mtp)
        self.pages = Pages.scatter(len(of.tokens), -(-max(map(len, of.tokens)) // PAGE_SIZE) + 1)
        caches = of.mtp.allocate_caches(self.pages.tables.size + 1, PAGE_SIZE)
        self.caches = jax.tree.map(lambda pages: jnp.full_like(pages, np.nan), caches)

    def step(
        self, hidden: Sequence[np.ndarray], next_tokens: Sequence[int], metadata: StepMetadata, depth: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a step over the concatenated hidden states [n, D]. Return the logits and hidden states of the module."""
        rows = jnp.asarray(np.concatenate(hidden), jnp.float32)
        tokens = jnp.asarray(next_tokens, jnp.int32)
        logits, given, self.caches = self.run(self.weights, tokens, rows, self.caches, metadata, depth)
        return np.asarray(logits), np.asarray(given)

    def prefill(self, **stops: int) -> list[np.ndarray]:
        """Return logits of all sequences in one step. `s2=stop` ends sequence 2 early, without a new compilation."""
        lengths = [stops.get(f"s{s}", len(hidden)) for s, hidden in enumerate(self.case.hidden)]
        padding = sum(map(len, self.case.hidden)) - sum(lengths)
        hidden = [hidden[:length] for hidden, length in zip(self.case.hidden, lengths, strict=True)]
        tokens = [token for s, length in enumerate(lengths) for token in self.case.next_tokens(s)[:length]]
        metadata = step(self.pages, prefill=[(s, 0, n) for s, n in enumerate(lengths)], padding=padding)
        hidden.append(np.zeros((padding, hidden[0].shape[1])))
        logits, self.given = self.step(hidden, tokens + [0] * padding, metadata)
        return np.split(logits, np.cumsum(lengths))[:-1]


@functools.cache
def compiled(mtp: MTP) -> tuple[Callable, list[jax.Array]]:
    rebuild, weights = split_module(mtp)

    def run(weights: Any, tokens: jax.Array, hidden: jax.Array, caches: Any, metadata: StepMetadata, depth: int) -> Any:
        whole = rebuild(weights)
        given, caches = whole(tokens, hidden, caches, metadata, depth)
        return whole.logits(given), given, caches

    return jax.jit(run, static_argnums=5, donate_argnums=3), weights


def test_oracle_equals_transformers():
    case = golden_case()
    head = case.tensors["lm_head.weight"].astype(np.float64)
    for hidden, wanted in zip(case.hidden, golden(GOLDEN)["logits"], strict=True):
        assert_parity(hidden @ head.T, wanted)


@pytest.mark.slow
def test_step_returns_hidden_states_of_all_tokens():
    case = golden_case()
    run, weights = split_model(case.model)
    pages, sequence = Pages.scatter(1, 10), case.tokens[-1][:-1]
    metadata = step(pages, prefill=[(0, 0, len(sequence))], logit_rows=[3])
    tokens = jnp.asarray(sequence, jnp.int32)
    logits, _, hidden = jax.jit(run, static_argnames="return_hidden")(
        weights, tokens, pages.allocate(case.model), metadata, return_hidden=True
    )
    np.testing.assert_allclose(hidden, case.hidden[-1], **HIDDEN_TOLERANCE)
    assert_parity(np.asarray(logits), golden(GOLDEN)["logits"][-1][3:4])


@pytest.mark.slow
def test_whole_prompts_equal_oracle():
    drafts = Drafts(golden_case())
    for s, logits in enumerate(drafts.prefill()):
        assert_parity(logits, drafts.case.predict(s)[0])
    predicted = {int(row.argmax()) for s in range(4) for row in drafts.case.predict(s)[0]}
    assert len(predicted) > 30, "a module that always drafts the same shows little"


@pytest.mark.slow
def test_steps_over_scattered_pages():
    """Steps with uneven chunks, decode rows, idle rows and padding give the results of a single pass."""
    drafts = Drafts(golden_case())
    hidden, wanted = drafts.case.hidden, [drafts.case.predict(s)[0] for s in range(4)]
    tokens = [drafts.case.next_tokens(s) for s in range(4)]
    for logits, whole in zip(drafts.prefill(s2=13, s3=70), wanted, strict=True):
        assert_parity(logits, whole[: len(logits)])
    padding = np.zeros((1, hidden[0].shape[1]))
    for i in range(70, 75):
        chunk = slice(13 + 5 * (i - 70), 13 + 5 * (i - 69))
        metadata = step(drafts.pages, decode=[(3, i)], prefill=[(2, chunk.start, chunk.stop)], idle_rows=1, padding=1)
        rows = [hidden[3][i : i + 1], padding, hidden[2][chunk], padding]
        logits, _ = drafts.step(rows, [tokens[3][i], 0, *tokens[2][chunk], 0], metadata)
        assert_parity(logits[[0, *range(2, 7)]], np.concatenate([wanted[3][i : i + 1], wanted[2][chunk]]))
        assert np.all(np.isfinite(logits))


@pytest.mark.slow
def test_chained_drafts_and_rejected_drafts():
    """Chained drafts use the module's hidden states. After a rejection, the decoder's hidden states replace them.

    The decoder has not computed hidden states at the positions of drafts, so the module's hidden state is the input of
    the next draft.
    """
    drafts = Drafts(golden_case())
    case, s, known = drafts.case, 2, 30
    hidden, tokens = case.hidden[s], case.next_tokens(s)
    entries, entry_tokens = hidden[:known], tokens[:known]
    logits = drafts.prefill(s2=known)[s]
    given = drafts.given[: 1 + 9 + known]
    for i in range(3):
        wanted, states = oracle.predict(case.config, case.tensors, 0, entries, entry_tokens)
        assert_parity(logits[-1:], wanted[-1:])
        entries = np.concatenate([entries, states[-1:]])
        entry_tokens = [*entry_tokens, int(wanted[-1].argmax())]
        metadata = step(drafts.pages, decode=[(s, known + i)])
        logits, given = drafts.step([given[-1:]], entry_tokens[-1:], metadata, depth=i + 1)
    wanted, _ = case.predict(s)
    assert entry_tokens[known:] != tokens[known : known + 3], "no draft is rejected"
    for i in range(known, len(tokens)):
        logits, _ = drafts.step([hidden[i : i + 1]], tokens[i : i + 1], step(drafts.pages, decode=[(s, i)]))
        assert_parity(logits, wanted[i : i + 1])


@pytest.mark.slow
def test_two_modules_alternate():
    """The second of two modules joins a token with the first module's hidden state at the previous position.

    The decoder and both modules use batch-invariant attention.
    """
    drafts = Drafts(random_case(TWO))
    case = drafts.case
    for s, length in enumerate(map(len, case.hidden)):
        tokens = case.next_tokens(s)
        first_logits, first = case.predict(s)
        wanted, _ = oracle.predict(case.config, case.tensors, 1, first[:-1], tokens[1:])
        logits, given = drafts.step([case.hidden[s]], tokens, step(drafts.pages, prefill=[(s, 0, length)]))
        np.testing.assert_allclose(logits, first_logits, rtol=1e-4, atol=2e-4)
        # Attention depends only on differences of positions, so the entries of the second module may start at 0.
        metadata = step(drafts.pages, prefill=[(s, 0, length - 1)])
        logits, _ = drafts.step([given[:-1]], tokens[1:], metadata, depth=1)
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=2e-4)


# --- mutations


@dataclasses.dataclass
class Fed:
    """Inputs of the prediction modules. A mutation changes some of them."""

    hidden: np.ndarray
    tokens: np.ndarray
    given_scale: np.ndarray
    slot_offset: int = 0


def joined(change: Callable[[MTPModule, jax.Array, jax.Array], Sequence[jax.Array]]) -> Callable[[Fed, Patch], None]:
    def join(module: MTPModule, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        return module.eh_proj(jnp.concatenate(change(module, embedded, hidden), axis=-1))

    return lambda fed, patch: patch.setattr(MTPModule, "join", join)


def fed(**changes: Callable[[Fed], Any]) -> Callable[[Fed, Patch], None]:
    def mutation(fed: Fed, patch: Patch) -> None:
        for name, change in changes.items():
            setattr(fed, name, change(fed))

    return mutation


def weight(name: str) -> np.ndarray:
    return np.asarray(golden_case().tensors[name], np.float64)


def positions_dropped(fed: Fed, patch: Patch) -> None:
    right = mtp.rope_table
    patch.setattr(mtp, "rope_table", lambda config, positions: right(config, jnp.zeros_like(positions)))


def head_normed_as_the_decoders(fed: Fed, patch: Patch) -> None:
    patch.setattr(golden_case().mtp.depths[0], "norm", golden_case().model.norm)


MUTATIONS: dict[str, Callable[[Fed, Patch], None]] = {
    "hidden_before_the_embedding": joined(lambda m, embedded, hidden: (m.hnorm(hidden), m.enorm(embedded))),
    "embedding_not_normed": joined(lambda m, embedded, hidden: (embedded, m.hnorm(hidden))),
    "hidden_not_normed": joined(lambda m, embedded, hidden: (m.enorm(embedded), hidden)),
    "norms_swapped": joined(lambda m, embedded, hidden: (m.hnorm(embedded), m.enorm(hidden))),
    "hidden_before_the_final_norm": fed(hidden=lambda fed: fed.hidden / weight("model.norm.weight")),
    "head_normed_as_the_decoders": head_normed_as_the_decoders,
    "tokens_not_shifted": fed(tokens=lambda fed: np.roll(fed.tokens, 1)),
    "positions_dropped": positions_dropped,
    "entries_one_slot_late": fed(slot_offset=lambda fed: 1),
    "given_before_the_modules_norm": fed(
        given_scale=lambda fed: 1 / weight("model.layers.2.shared_head.norm.weight"),
    ),
}

FIRST, SECOND = 60, 15
"""Numbers of entries in the first and the second chunk of the longest prompt.

After the chunks follow `SECOND` chained entries, whose hidden states are the module's results of the second chunk.
"""


def chunks_and_a_chain(mutation: Callable[[Fed, Patch], None] | None = None) -> list[np.ndarray]:
    """Return the logits of the two chunks of the longest prompt, and of the chained entries after the chunks."""
    case, pages = golden_case(), Pages.scatter(1, 12)
    fed = Fed(case.hidden[-1], np.array(case.next_tokens(-1)), np.ones(case.config.hidden_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "layer_function", lambda: jitted_layer)  # compiled once, because no mutation changes it
        if mutation is not None:
            mutation(fed, patch)
        caches = jax.tree.map(lambda x: jnp.full_like(x, np.nan), case.mtp.allocate_caches(13, PAGE_SIZE))
        hidden, tokens, given, results = fed.hidden, fed.tokens, np.zeros(0), []
        for begin, end in ((0, FIRST), (FIRST, FIRST + SECOND), (FIRST + SECOND, FIRST + 2 * SECOND)):
            metadata = step(pages, prefill=[(0, begin, end)])
            slots = pages.slots(0, np.arange(begin, end) + fed.slot_offset)
            tables = dataclasses.replace(metadata.groups[0], slots=jnp.asarray(slots, jnp.int32))
            rows = hidden[begin:end] if end <= len(hidden) else given * fed.given_scale
            states, caches = case.mtp(
                jnp.asarray(tokens[np.arange(begin, end) % len(tokens)], jnp.int32),
                jnp.asarray(rows, jnp.float32),
                caches,
                dataclasses.replace(metadata, groups=(tables,)),
            )
            given = np.asarray(states)
            results.append(np.asarray(case.mtp.logits(states)))
    return results


jitted_layer = mtp.layer_function()


@functools.cache
def wanted_of_the_chain() -> list[np.ndarray]:
    case = golden_case()
    _, states = case.predict(-1)
    hidden = np.concatenate([case.hidden[-1], states[-SECOND:]])
    tokens = [*case.next_tokens(-1), *case.next_tokens(-1)[:SECOND]]
    return np.split(oracle.predict(case.config, case.tensors, 0, hidden, tokens)[0], [FIRST, FIRST + SECOND])


SOME = ("tokens_not_shifted", "given_before_the_modules_norm")
"""Mutations that run without `make test-slow`, which runs all mutations."""


@pytest.mark.parametrize(
    "mutations", [SOME, pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_mutations_are_detected(mutations: tuple[str, ...]):
    def moved(mutation: Callable[[Fed, Patch], None] | None = None) -> list[float]:
        pairs = zip(chunks_and_a_chain(mutation), wanted_of_the_chain(), strict=True)
        return [np.nan_to_num(np.abs(got - wanted), nan=np.inf).max() for got, wanted in pairs]

    assert max(moved()) <= LOGIT_TOLERANCE
    seen = {name: moved(MUTATIONS[name]) for name in mutations}
    assert not {name: most for name, most in seen.items() if max(most) < 100 * LOGIT_TOLERANCE}
    assert max(seen["given_before_the_modules_norm"][:2]) <= LOGIT_TOLERANCE, "only the chain is made of what is given"
