"""`hyper_connection_weights` in Triton, for GPUs from Ampere (sm80) on.

A program is one warp, which handles some tokens. It loads all logits, then computes in registers:

    pre, post = sigmoid(...)                            # [tokens, n]
    mix = softmax(...)                                  # [tokens, n, n]
    repeat: mix = mix / row sums;  mix = mix / column sums

For n = 4, a thread has a row of `mix`. Column sums add the rows of several threads with shuffles. The kernel uses no
shared memory and no barriers.
"""

from __future__ import annotations

import jax
import triton.language as tl
from jaxtyping import Array, Float32

from pallas_attn.ops.hyper_connection_weights.call import HyperConnectionWeightsCall
from pallas_attn.triton.launch import kernel, launch

TILE_ELEMENTS = 128
"""Elements of `mix` of the tokens of a program: four per thread of a warp, one vector load."""

MAX_STREAMS = 16
"""Maximum number of streams: the loop keeps n · n / 32 numbers per thread in registers."""


def hyper_connection_weights(
    call: HyperConnectionWeightsCall,
) -> tuple[Float32[Array, "T n"], Float32[Array, "T n"], Float32[Array, "T n n"]]:
    (num_tokens, columns), n = call.logits.shape, call.num_streams
    if n > MAX_STREAMS or n & (n - 1):
        raise NotImplementedError(f"takes a power of two of streams up to {MAX_STREAMS}, got {n}")
    tokens = max(1, TILE_ELEMENTS // n**2)
    pre, post, mix = launch(
        _stream_weights,
        *(call.logits, call.inverse_rms, call.scale, call.base, num_tokens),
        outputs=[jax.ShapeDtypeStruct((num_tokens, *shape), call.logits.dtype) for shape in ((n,), (n,), (n, n))],
        grid=(-(-num_tokens // tokens),),
        constants={"N": n, "TOKENS": tokens, "ITERATIONS": call.iterations, "EPS": call.eps},
        num_warps=1,
        bytes_accessed=4 * num_tokens * (2 * columns + 1),
    )
    return pre, post, mix


@kernel
def _stream_weights(
    logits_ptr,  # [T, (2 + N) * N]
    inverse_rms_ptr,  # [T]
    scale_ptr,  # [3]
    base_ptr,  # [(2 + N) * N]
    num_tokens,
    pre_ptr,  # [T, N]
    post_ptr,  # [T, N]
    mix_ptr,  # [T, N, N]
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    first = token.to(tl.int64) * N
    stream = tl.arange(0, N)
    pair = stream[:, None] * N + stream[None, :]
    # All loads come before the first use, so that a program waits for memory once.
    of_token = logits_ptr + first * (2 + N)
    of_pre = tl.load(of_token[:, None] + stream[None, :], mask=exists[:, None], other=0.0)
    of_post = tl.load(of_token[:, None] + (N + stream)[None, :], mask=exists[:, None], other=0.0)
    of_mix = tl.load(of_token[:, None, None] + (2 * N + pair)[None], mask=exists[:, None, None], other=0.0)
    inverse_rms = tl.load(inverse_rms_ptr + token, mask=exists, other=0.0)
    pre_scale, post_scale, mix_scale = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    pre_base, post_base = tl.load(base_ptr + stream), tl.load(base_ptr + N + stream)
    mix_base = tl.load(base_ptr + 2 * N + pair)

    mix = of_mix * inverse_rms[:, None, None] * mix_scale + mix_base[None]  # [TOKENS, N, N]
    mix = tl.exp(mix - tl.max(mix, 2)[:, :, None])
    mix = mix * (1.0 / tl.sum(mix, 2))[:, :, None] + EPS
    mix = mix * (1.0 / (tl.sum(mix, 1) + EPS))[:, None, :]
    for _ in range(ITERATIONS - 1):
        mix = mix * (1.0 / (tl.sum(mix, 2) + EPS))[:, :, None]
        mix = mix * (1.0 / (tl.sum(mix, 1) + EPS))[:, None, :]
    tl.store(mix_ptr + (first * N)[:, None, None] + pair[None], mix, mask=exists[:, None, None])

    at = first[:, None] + stream[None, :]
    pre = _sigmoid(of_pre * inverse_rms[:, None] * pre_scale + pre_base[None, :]) + EPS
    tl.store(pre_ptr + at, pre, mask=exists[:, None])
    post = 2.0 * _sigmoid(of_post * inverse_rms[:, None] * post_scale + post_base[None, :])
    tl.store(post_ptr + at, post, mask=exists[:, None])


@kernel
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
