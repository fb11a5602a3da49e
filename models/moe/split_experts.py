"""Routed experts of a layer, on one device or split over the devices of a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.decoder.mesh import DATA, EXPERT, EXPERTS, ExpertSplit
from models.moe.dispatch import ExpertGroups, apply_experts, weighted_sum
from models.moe.exchange import ExpertExchange
from models.moe.experts import Experts

NOT_LIVE = -1
"""Expert of rows that select no expert."""


def routed_experts(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit = ExpertSplit(),
    is_live: Bool[Array, "T"] | None = None,
) -> Float[Array, "T D"]:
    """Sum weight · expert(x) over the chosen experts of each token.

    Over several devices, call it inside `jax.shard_map` with the device's own experts. It then returns one term of the
    sum; the caller adds up the terms of the devices along `expert`, which have the same tokens. Devices along `data`
    have different tokens, which are sent to the devices of the experts and back.

    Args:
      x: tokens.
      chosen: experts of each token.
      weights: weight of each chosen expert.
      experts: weights of the experts of this device.
      split: devices that the experts are split over.
      is_live: False for padding and idle rows. Several devices skip these rows and return 0; one device ignores it.
    """
    if split.devices == 1:
        return apply_experts(x, chosen, weights, experts)
    if is_live is None:
        is_live = jnp.ones(x.shape[0], jnp.bool_)
    if split.data > 1 and not is_gathered(split, chosen.shape[1]):
        return _exchanged(x, chosen, weights, experts, split, is_live)
    chosen = jnp.where(is_live[:, None], chosen, NOT_LIVE)
    if split.data == 1:
        return _own_term(x, chosen, weights, experts, split)
    # Experts and weights are gathered as one array: a small collective operation takes as long as a large one.
    routing = jnp.concatenate([chosen, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    x, routing = jax.lax.all_gather((x, routing), DATA, tiled=True)
    chosen, weights = jnp.split(routing, 2, axis=1)
    weights = jax.lax.bitcast_convert_type(weights, jnp.float32)
    return jax.lax.psum_scatter(_own_term(x, chosen, weights, experts, split), DATA, tiled=True)


def is_gathered(split: ExpertSplit, copies: int) -> bool:
    """Return whether ranks gather all tokens and sum the results, instead of exchanging rows with the experts' ranks.

    With n ranks, gathering sends n - 1 times the tokens of a rank. An exchange sends copies · (n - 1) / n times the
    tokens, divided by the devices along `expert`. Gathering is chosen up to twice the amount of the exchange: on two
    H100s, prefill by an exchange took 15 times as long, because an exchange reports its sizes to the host.

    Args:
      split: devices that the experts are split over.
      copies: experts per token.
    """
    return split.devices <= 2 * copies


def _own_term(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit,
) -> Float[Array, "T D"]:
    """Sum over the chosen experts that this device has."""
    num_own = experts.gate_up.shape[0]
    own = chosen - jax.lax.axis_index(EXPERTS) * num_own
    own = jnp.where((own >= 0) & (own < num_own), own, num_own)
    return apply_experts(x, own, weights, experts, expected=own.size // split.devices)


def _exchanged(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit,
    is_live: Bool[Array, "T"],
) -> Float[Array, "T D"]:
    """Sum over the chosen experts of all devices along `data` that have this device's index along `expert`."""
    num_own, expert = experts.gate_up.shape[0], chosen.reshape(-1)
    device = expert // num_own
    is_own = (device % split.expert == jax.lax.axis_index(EXPERT)) & jnp.repeat(is_live, chosen.shape[1])
    own = jnp.where(is_own, expert % num_own + device // split.expert * num_own, split.data * num_own)
    y = send_to_experts(x, own, experts, split)
    return weighted_sum(y, weights, x.dtype, is_own.reshape(chosen.shape))


def send_to_experts(
    x: Float[Array, "T D"], expert: Int32[Array, "M"], experts: Experts, split: ExpertSplit
) -> Float[Array, "M D"]:
    """Send rows to the devices of their experts along `data`, apply the experts, and send the results back.

    Args:
      x: tokens of this device.
      expert: expert of each (token, expert) pair, numbered over the devices along `data`; one past the last for none.
      experts: weights of the experts of this device.
      split: devices that the experts are split over.

    Returns:
      Result of each pair. Results of pairs without an expert are undefined.
    """
    num_own, copies = experts.gate_up.shape[0], expert.shape[0] // x.shape[0]
    groups = ExpertGroups.of(expert, split.data * num_own)
    exchange = ExpertExchange.of(groups.sizes.reshape(split.data, num_own), DATA)
    received, number = exchange.send(x[groups.row // copies]), exchange.experts(len(expert))[:, None]
    y = apply_experts(
        received, number, jnp.ones(number.shape, jnp.float32), experts, expected=len(expert) // split.expert
    )
    return exchange.send_back(y)[groups.place]
