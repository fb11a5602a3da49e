"""`index_top_k` in Triton, for GPUs from Ampere (sm80) on.

One kernel (`triton.index_keys`) writes the scores of some tokens to a workspace of up to MAX_SCORES scores, other
kernels (`triton.top_k`) select the highest scores. A loop repeats this for as many groups of tokens as needed.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_attn.ops.index_top_k.call import IndexTopKCall
from pallas_attn.portable.arguments import varying_like
from pallas_attn.triton import index_keys, shared_top_k, top_k

MAX_SCORES = 2**24
"""Maximum number of float32 scores in the workspace (64 MiB), for example of 128 tokens and 128k keys."""


def index_top_k(call: IndexTopKCall) -> Int32[Array, "T top_k"]:
    num_tokens, width = call.q.shape[0], call.block_tables.shape[1] * call.index.page_size
    index_keys.require_supported(call)
    room = max(1, MAX_SCORES // width)
    portions = -(-num_tokens // room)
    size = -(-num_tokens // portions)
    top_k.require_supported(size, width, call.top_k)
    if portions == 1:
        return _chosen(call)
    padding = portions * size - num_tokens
    call = dataclasses.replace(
        call,
        q=jnp.pad(call.q, ((0, padding), (0, 0), (0, 0))),
        weights=jnp.pad(call.weights, ((0, padding), (0, 0))),
        draft_mask=None if call.draft_mask is None else jnp.pad(call.draft_mask, ((0, padding), (0, 0))),
    )
    end = jnp.clip(jnp.max(call.cu_q_lens), 0, num_tokens)

    def choose(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        first, chosen = carry
        own = _chosen(_portion(call, first, size))
        return first + size, lax.dynamic_update_slice_in_dim(chosen, own, first, 0)

    # Portions without tokens of sequences are skipped. `lax.map` has a known number of iterations, so XLA would store
    # the results of an iteration by a copy at an offset, and it records no loop with such a copy in a CUDA graph.
    nothing = jnp.full((portions * size, call.top_k), -1, jnp.int32)
    start = varying_like((jnp.zeros((), jnp.int32), nothing), call)
    return lax.while_loop(lambda carry: carry[0] < end, choose, start)[1][:num_tokens]


def _chosen(call: IndexTopKCall) -> Int32[Array, "T top_k"]:
    shared = top_k.is_shared(call.q.shape[0], call.block_tables.shape[1] * call.index.page_size)
    bins = shared_top_k.empty_bins(call.q.shape[0]) if shared else None
    scores, counts, bins = index_keys.paged_scores(call, fill=False, bins=bins)
    return top_k.highest(scores, counts, call.top_k, bins)


def _portion(call: IndexTopKCall, first: Int32[Array, ""], size: int) -> IndexTopKCall:
    """Return the call for the packed tokens first to first + size - 1.

    The new tokens of a call are the last tokens of their sequences. If a sequence has packed tokens after this range,
    its kv_len is reduced by their number.
    """
    after = jnp.maximum(call.cu_q_lens[1:] - (first + size), 0)
    cut = jnp.minimum(after, jnp.diff(call.cu_q_lens))
    return dataclasses.replace(
        call,
        q=lax.dynamic_slice_in_dim(call.q, first, size),
        weights=lax.dynamic_slice_in_dim(call.weights, first, size),
        draft_mask=None if call.draft_mask is None else lax.dynamic_slice_in_dim(call.draft_mask, first, size),
        cu_q_lens=jnp.clip(call.cu_q_lens - first, 0, size),
        kv_lens=call.kv_lens - cut,
    )
