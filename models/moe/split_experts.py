"""Routed experts of a layer, on one device or split over the devices of a mesh.

Experts are split over the mesh axes `data` and `expert`. Devices along `expert` have the same tokens. Each index along
`data` is a data rank, which has different tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.models.decoder.mesh import DATA, EXPERT, EXPERTS, ExpertSplit
from pallas_attn.models.moe.dispatch import ExpertGroups, apply_experts, weighted_sum
from pallas_attn.models.moe.exchange import ExpertExchange
from pallas_attn.models.moe.experts import Experts

NOT_LIVE = -1
"""Expert number of padding rows. No expert has this number, so no device computes these rows."""


def routed_experts(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit = ExpertSplit(),
    is_live: Bool[Array, "T"] | None = None,
) -> Float[Array, "T D"]:
    """Return for each token the sum of weight · expert(token) over its selected experts.

    If the experts are split over several devices, call this function inside `jax.shard_map` on each of them. Devices
    along `data` have different tokens: this function sends tokens to the devices of their experts along `data`, and
    results back. Devices along `expert` have the same tokens: this function sends nothing along `expert`. Its result is
    a partial sum, over the experts of all devices with this device's index along `expert`. The caller must add up the
    partial sums along `expert`.

    Args:
      x: hidden states of this device's tokens.
      chosen: selected experts of each token, numbered over all devices.
      weights: weight of each selected expert.
      experts: weights of the experts of this device.
      split: devices that the experts are split over.
      is_live: False for padding; None for no padding. If the experts are split, padding is skipped and its result is 0.
        On one device, `is_live` is ignored and padding is computed like other rows.
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
    # Selected experts and weights are gathered as one array: both are small, and each gather has a fixed latency.
    routing = jnp.concatenate([chosen, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    x, routing = jax.lax.all_gather((x, routing), DATA, tiled=True)
    chosen, weights = jnp.split(routing, 2, axis=1)
    weights = jax.lax.bitcast_convert_type(weights, jnp.float32)
    return jax.lax.psum_scatter(_own_term(x, chosen, weights, experts, split), DATA, tiled=True)


def is_gathered(split: ExpertSplit, copies: int) -> bool:
    """Return whether every data rank gathers the tokens of all ranks (and the partial results are summed). Otherwise
    each token is sent only to the ranks of its experts (`_exchanged`).

    With n data ranks, a rank that gathers receives n - 1 times its number of tokens. With an exchange it receives
    copies · (n - 1) / n times this number, divided by the number of devices along `expert`. Gathering is chosen up to
    twice the amount of data of an exchange, because an exchange waits until its sizes are known to the host. On two
    H100s, prefill with an exchange took 15 times as long.

    Args:
      split: devices that the experts are split over.
      copies: number of selected experts per token.
    """
    return split.devices <= 2 * copies


def _own_term(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit,
) -> Float[Array, "T D"]:
    """Return for each token the sum of weight · expert(token) over its selected experts that are on this device."""
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
    """Return for each token the sum of weight · expert(token) over its selected experts on the devices that have this
    device's index along `expert` and any index along `data`. Tokens are sent to these devices, and results back."""
    num_own, expert = experts.gate_up.shape[0], chosen.reshape(-1)
    device = expert // num_own
    is_own = (device % split.expert == jax.lax.axis_index(EXPERT)) & jnp.repeat(is_live, chosen.shape[1])
    own = jnp.where(is_own, expert % num_own + device // split.expert * num_own, split.data * num_own)
    y = send_to_experts(x, own, experts, split)
    return weighted_sum(y, weights, x.dtype, is_own.reshape(chosen.shape))


def send_to_experts(
    x: Float[Array, "T D"], expert: Int32[Array, "M"], experts: Experts, split: ExpertSplit
) -> Float[Array, "M D"]:
    """Send tokens to the devices of their experts along `data`, apply the experts, and send the results back.

    Args:
      x: hidden states of this device's T tokens.
      expert: expert of each of M (token, expert) pairs, M / T pairs per token. Experts of the devices along `data` are
        numbered consecutively: index along `data` · E + number on the device, with E experts per device. The number
        `split.data` · E marks a pair that is not sent: padding, or an expert of a device with another index along
        `expert`.
      experts: weights of the experts of this device.
      split: devices that the experts are split over.

    Returns:
      Result of each pair. Results of pairs that are not sent are undefined.
    """
    num_own, copies = experts.gate_up.shape[0], expert.shape[0] // x.shape[0]
    groups = ExpertGroups.of(expert, split.data * num_own)
    exchange = ExpertExchange.of(groups.sizes.reshape(split.data, num_own), DATA)
    received, number = exchange.send(x[groups.row // copies]), exchange.experts(len(expert))[:, None]
    y = apply_experts(
        received, number, jnp.ones(number.shape, jnp.float32), experts, expected=len(expert) // split.expert
    )
    return exchange.send_back(y)[groups.place]
