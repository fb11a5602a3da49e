"""Layers of experts on Hopper, from one token to a prefill step: V2-Lite's widths and gpt-oss-20b's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.decoder import moe
from tests.aot.case import Case, deferred, shape

MIB = 2**20


@deferred
def v2_lite(tokens: int) -> Case:
    return layer(tokens, moe.Experts(shape(64, 2048, 2816), shape(64, 1408, 2048)), 6)


@deferred
def gpt_oss(tokens: int) -> Case:
    biases = shape(32, 5760), shape(32, 2880)
    experts = moe.Experts(shape(32, 2880, 5760), shape(32, 2880, 2880), *biases, moe.ClampedSwiglu(1.702, 7.0))
    return layer(tokens, experts, 4)


def layer(tokens: int, experts: moe.Experts, copies: int) -> Case:
    def call(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: moe.Experts) -> jax.Array:
        return moe.routed_experts(x, chosen, weights, experts)

    arguments = {
        "x": shape(tokens, experts.gate_up.shape[1]),
        "chosen": shape(tokens, copies, dtype=jnp.int32),
        "weights": shape(tokens, copies, dtype=jnp.float32),
        "experts": experts,
    }
    pair_bytes = 4 * (experts.gate_up.shape[1] + experts.gate_up.shape[2]) * 2
    return Case(call, arguments, temporaries=8 * MIB + tokens * copies * pair_bytes)


EXPERTS = {
    **{f"experts-v2-lite-{tokens}": v2_lite(tokens) for tokens in (1, 5, 8, 1024)},
    **{f"experts-gpt-oss-{tokens}": gpt_oss(tokens) for tokens in (1, 8, 1024)},
}
