"""Log probabilities of tokens, and the likeliest tokens at their positions.

Log probabilities are the logarithm of the softmax of the model's logits, before any sampling parameter is applied. They
are computed on the device only in steps with a row that requests them, and are copied to the host only then. Log
probabilities of sampled tokens are a part of the program that samples; for prompt tokens there is a separate program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import select_top_k
from pallas_attn.models.engine.logprob_list import LogprobList

_PROMPT_TOKENS = 128
"""Number of prompt tokens whose logits are in memory together."""


def num_words(max_logprobs: int) -> int:
    """Number of entries per token of the result of `pack_logprobs`."""
    return 2 + 2 * max_logprobs


def pack_logprobs(
    logits: Float[Array, "n V"], tokens: Int32[Array, "n"], max_logprobs: int, is_used: Bool[Array, ""]
) -> Int32[Array, "n words"]:
    """Compute log probabilities on the device.

    Args:
      logits: the model's logits.
      tokens: one token per row. The result of rows with negative tokens is arbitrary.
      max_logprobs: number of likeliest tokens to return, at most V.
      is_used: whether to compute the result. Otherwise it is 0.

    Returns:
      For each row: bits of the float32 log probability of the token; rank of the token, as `TokenLogprobs.rank`; ids of
      the likeliest tokens, likeliest first; bits of their log probabilities.
    """

    idle = functools.partial(jnp.zeros, (logits.shape[0], num_words(max_logprobs)), jnp.int32)
    return lax.cond(is_used, lambda: _pack(logits, tokens, max_logprobs), idle)


def pack_prompt_logprobs(
    logits_of: Callable[[Float[Array, "n D"]], Float[Array, "n V"]],
    hidden: Float[Array, "T D"],
    tokens: Int32[Array, "T"],
    max_logprobs: int,
) -> Int32[Array, "T words"]:
    """Compute log probabilities from hidden states, with the logits of `_PROMPT_TOKENS` tokens at a time.

    Args:
      logits_of: function from hidden states to logits.
      hidden: hidden states of the tokens before `tokens`.
      tokens, max_logprobs: as in `pack_logprobs`.

    Returns:
      As `pack_logprobs`.
    """
    num_tokens = tokens.shape[0]
    size = min(_PROMPT_TOKENS, num_tokens)
    padding = -num_tokens % size
    chunks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    of_chunks = jnp.pad(tokens, (0, padding)).reshape(-1, size)
    each = lax.map(lambda chunk: _pack(logits_of(chunk[0]), chunk[1], max_logprobs), (chunks, of_chunks))
    return each.reshape(num_tokens + padding, -1)[:num_tokens]


def _pack(logits: Float[Array, "n V"], tokens: Int32[Array, "n"], max_logprobs: int) -> Int32[Array, "n words"]:
    """Compute the result of `pack_logprobs`."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)
    rank = jnp.sum(logits >= own, axis=-1, dtype=jnp.int32, keepdims=True)
    values, ids = _likeliest(logits, max_logprobs)
    of_own, of_top = (lax.bitcast_convert_type((x - largest) - total, jnp.int32) for x in (own, values))
    return jnp.concatenate([of_own, rank, ids, of_top], axis=1)


def _likeliest(logits: Float[Array, "n V"], count: int) -> tuple[Float[Array, "n count"], Int32[Array, "n count"]]:
    """Return the highest logits of each row and their tokens. Of equal logits, lower ids come first."""
    if count == 0:
        return logits[:, :0], jnp.zeros((logits.shape[0], 0), jnp.int32)
    ids = select_top_k(logits, top_k=count)  # ascending; XLA's top_k takes three times as long on a GPU
    values, order = lax.top_k(jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=1), count)
    return values, jnp.take_along_axis(ids, order, axis=1)


def read_logprobs(packed: Int32[np.ndarray, "n words"], tokens: Sequence[int], count: int) -> LogprobList:
    """Convert the first rows of the result of `pack_logprobs` on the host.

    Args:
      packed: the rows.
      tokens: the tokens of the first rows.
      count: number of likeliest tokens to return.
    """
    max_logprobs, rows = packed.shape[1] // 2 - 1, packed[: len(tokens)]
    ids = np.asarray(tokens, np.int32).reshape(-1, 1)
    of_top = 2 + max_logprobs
    return LogprobList(count, np.concatenate([ids, rows[:, : 2 + count], rows[:, of_top : of_top + count]], axis=1))
