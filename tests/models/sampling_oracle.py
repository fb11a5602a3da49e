"""The effect of sampling parameters on logits in NumPy, in float64, with loops over tokens and with sorting."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.models.decoder import Decoder, split_model
from pallas_attn.models.decoder.whole_sequence import run_sequence
from pallas_attn.models.engine import SamplingParams, TokenFilter
from pallas_attn.models.engine.sampler import LogitEdit, SamplingRows, sample

MIN_MARGIN = 1e-3
"""Tokens whose perturbed logits differ by less could change because of rounding."""

MAX_LEN = 128
"""Maximum number of tokens of a sequence in `PlainLoop`."""


def edited(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    mask: np.ndarray | None = None,
    eos: Collection[int] = (),
    processor: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Return the logits [V] from which a token is drawn after the prompt and the output.

    `mask` is a bit mask of allowed tokens.
    """
    x = logits.astype(np.float64)
    for token in range(x.size):
        in_mask = mask is None or int(mask[token // 32]) >> (token % 32) & 1
        if not in_mask or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            x[token] = -np.inf
    if len(output) < params.min_tokens:
        x[[*params.stop_token_ids, *eos]] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x = processor(x)
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in collections.Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution [V] of the token that is drawn from edited logits. At temperature 0, one probability
    is 1."""
    if params.temperature == 0:
        return np.eye(x.size)[np.argmax(x)]
    order = np.lexsort((np.arange(x.size), -x))  # by descending logit, then by ascending id
    share = np.exp((x - x.max()) / params.temperature)[order]
    share[share < params.min_p] = 0.0
    share[params.top_k or x.size :] = 0.0
    share /= share.sum()
    share[(np.cumsum(share) - share >= params.top_p) & (params.top_p < 1)] = 0.0
    result = np.zeros(x.size)
    result[order] = share / share.sum()
    return result


class PlainLoop:
    """Generates tokens one by one, with one forward pass of the whole sequence per token and without a cache."""

    def __init__(self, model: Decoder):
        step, self._weights = split_model(model)
        self._eos = model.config.eos_token_ids
        self._forward = jax.jit(functools.partial(run_sequence, step), static_argnums=1)
        self._allocate = model.allocate_caches
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits float32 [n, V] after each of n tokens."""
        key = tuple(tokens)
        if key not in self._known:
            rows = np.arange(MAX_LEN, dtype=np.int32)
            padded = np.zeros(MAX_LEN, np.int32)
            padded[: len(key)] = key
            logits, _ = self._forward(self._weights, self._allocate, padded, np.int32(len(key)), rows)
            self._known[key] = np.asarray(logits)[: len(key)]
        return self._known[key]

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        token_filter: TokenFilter | None = None,
        processor: Callable[[np.ndarray], np.ndarray] = lambda x: x,
        expected: Sequence[int] = (),
    ) -> list[int]:
        """Return the output tokens.

        One forward pass computes the logits after all `expected` tokens, which may be wrong. Another pass is needed for
        each token after a wrong one.

        Raises:
          RuntimeError: rounding could change a token.
        """
        output: list[int] = []
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        of_expected = self.logits([*prompt, *expected])[len(prompt) - 1 :]
        while len(output) < params.max_tokens and not (output and output[-1] in stops):
            mask = None if token_filter is None else token_filter.allowed(output)
            is_expected = output == [*expected[: len(output)]]
            logits = of_expected[len(output)] if is_expected else self.logits([*prompt, *output])[-1]
            x = edited(logits, params, prompt, output, mask=mask, eos=self._eos, processor=processor)
            tokens, margins = _sample(
                jnp.asarray(x[None], jnp.float32), sampling_rows(params, len(prompt) + len(output))
            )
            if margins[0] < MIN_MARGIN:
                raise RuntimeError(f"near tie after {len(output)} tokens: choose another prompt or seed")
            output.append(int(tokens[0]))
        return output


def sampling_rows(params: SamplingParams, *positions: int) -> SamplingRows:
    """Return the sampling parameters of one row per position."""

    def fill(value: float, dtype: type) -> jax.Array:
        return jnp.full(len(positions), value, dtype)

    return SamplingRows(
        temperature=fill(params.temperature, jnp.float32),
        top_k=fill(params.top_k, jnp.int32),
        top_p=fill(params.top_p, jnp.float32),
        min_p=fill(params.min_p, jnp.float32),
        seed=fill(params.seed, jnp.uint32),
        position=jnp.asarray(positions, jnp.int32),
    )


@jax.jit
def _sample(x: jax.Array, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    return sample(jnp.zeros_like(x), rows, LogitEdit(lambda logits: x, None))
