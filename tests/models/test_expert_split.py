"""Expert layers whose experts are split over devices, compared with one device.

The devices have the same tokens (mesh axis `expert`) or different tokens (mesh axis `data`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_attn.models.decoder import over_mesh
from pallas_attn.models.decoder.mesh import DATA, EXPERT, EXPERTS, ExpertSplit
from pallas_attn.models.moe import dispatch, split_experts
from pallas_attn.models.moe import exchange as expert_exchange
from pallas_attn.models.moe.experts import Experts
from tests.kit.slow_cases import slow_cases
from tests.models.test_moe import biased_experts, draw_experts

NUM_TOKENS, WIDTH, HIDDEN, NUM_EXPERTS = 96, 16, 8, 4


def ragged_all_to_all(
    rows: Any, out: Any, starts: Any, sent: Any, their_starts: Any, received: Any, *, axis_name: str
) -> Any:
    """Emulate `lax.ragged_all_to_all`, which XLA does not support on CPUs.

    The result is NaN if the numbers of sent and received rows of the devices are inconsistent.
    """
    everyone = functools.partial(lax.all_gather, axis_name=axis_name)
    rows, starts, sent, their_starts = map(everyone, (rows, starts, sent, their_starts))
    me, number = lax.axis_index(axis_name), jnp.arange(rows.shape[1], dtype=jnp.int32)
    for device in range(lax.axis_size(axis_name)):
        count, start, begin = (sizes[device, me] for sizes in (sent, starts, their_starts))
        place = jnp.where(number < count, begin + number, out.shape[0])
        out = out.at[place].set(rows[device, jnp.minimum(start + number, rows.shape[1] - 1)], mode="drop")
    return jnp.where(jnp.all(sent[:, me] == received), out, jnp.nan)


def choose(kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "spread":
        return np.stack([rng.permutation(NUM_EXPERTS)[:2] for _ in range(NUM_TOKENS)])
    return np.tile([3, 2], (NUM_TOKENS, 1))  # the devices of these experts get more (token, expert) pairs than expected


@slow_cases(
    "ExpertSplit(data=2, expert=2)-gathered", "ExpertSplit(data=1, expert=3)-gathered",
    "ExpertSplit(data=3, expert=1)-ragged",
)  # fmt: skip
@pytest.mark.parametrize(
    ("split", "how"),
    [
        (ExpertSplit(1, 3), "gathered"),  # two experts per device, padded with zeros
        (ExpertSplit(2, 2), "gathered"),
        pytest.param(ExpertSplit(3, 1), "gathered", marks=pytest.mark.slow),
        (ExpertSplit(2, 2), "padded"),
        pytest.param(ExpertSplit(3, 1), "padded", marks=pytest.mark.slow),
        pytest.param(ExpertSplit(2, 2), "ragged", marks=pytest.mark.slow),
        (ExpertSplit(3, 1), "ragged"),
    ],
    ids=str,
)
def test_split_experts_equal_one_device(rng, monkeypatch, split: ExpertSplit, how: str):
    if len(jax.devices()) < split.devices:
        pytest.skip(f"needs {split.devices} devices")
    monkeypatch.setattr(split_experts, "is_gathered", lambda split, copies: how == "gathered")
    # More than 32 (token, expert) pairs are multiplied in chunks.
    monkeypatch.setattr(dispatch, "MAX_UNSPLIT_PAIRS", 32)
    monkeypatch.setattr(expert_exchange, "_is_ragged", lambda: how == "ragged")
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    experts = biased_experts(rng, Experts(*draw_experts(rng, WIDTH, HIDDEN)))
    missing = split.num_own(NUM_EXPERTS) * split.devices - NUM_EXPERTS
    padded = jax.tree.map(lambda w: jnp.pad(w, [(0, missing)] + [(0, 0)] * (w.ndim - 1)), experts)
    x = jnp.asarray(rng.standard_normal((NUM_TOKENS, WIDTH)), jnp.float32)

    sent, make_exchange = [], expert_exchange.ExpertExchange.of

    def recording(rows: Any, axis: str) -> expert_exchange.ExpertExchange:
        jax.debug.callback(lambda rows: sent.append(int(rows.sum())), rows)
        return make_exchange(rows, axis)

    monkeypatch.setattr(expert_exchange.ExpertExchange, "of", recording)

    def part(x: Any, chosen: Any, weights: Any, is_live: Any, experts: Any) -> jax.Array:
        return lax.psum(split_experts.routed_experts(x, chosen, weights, experts, split, is_live), EXPERT)

    mesh = jax.make_mesh((split.data, split.expert), EXPERTS, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = jax.jit(over_mesh(part, mesh, (*[P(DATA)] * 4, P(EXPERTS)), P(DATA)))
    for kind in ("spread", "all alike"):
        chosen = jnp.asarray(choose(kind, rng), jnp.int32)
        weights = jnp.asarray(rng.uniform(0.1, 1, chosen.shape), jnp.float32)
        is_live = jnp.asarray(rng.random(NUM_TOKENS) < (0.5 if kind == "spread" else 2))
        wanted = jnp.where(is_live[:, None], split_experts.routed_experts(x, chosen, weights, experts), 0.0)
        np.testing.assert_allclose(run(x, chosen, weights, is_live, padded), wanted, atol=1e-5)
        jax.effects_barrier()
        assert sum(sent) == (0 if split.data == 1 or how == "gathered" else is_live.sum() * chosen.shape[1])
        sent.clear()


def test_bits_do_not_depend_on_chunks(rng, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_UNSPLIT_PAIRS", 32)
    experts = Experts(*draw_experts(rng, WIDTH, HIDDEN))
    x = jnp.asarray(rng.standard_normal((NUM_TOKENS, WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (NUM_TOKENS, 3)), jnp.float32)
    own = np.stack([rng.permutation(NUM_EXPERTS)[:3] for _ in range(NUM_TOKENS)])
    sums = []
    for number in range(6):  # compare every fourth row; the experts of the other rows vary
        others = np.where(np.arange(NUM_TOKENS)[:, None] % 4, np.minimum(own + number % 2, number), own)
        run = jax.jit(lambda chosen: dispatch.apply_experts(x, chosen, weights, experts, expected=100))
        sums.append(np.asarray(run(jnp.asarray(others, jnp.int32)))[::4])
    for again in sums[1:]:
        np.testing.assert_array_equal(again, sums[0])


def test_is_gathered_up_to_twice_the_exchange():
    for copies, ranks, expert in itertools.product((1, 4, 6, 8), range(2, 33), (1, 2, 8)):
        gathered, exchanged = ranks - 1, copies / expert * (ranks - 1) / ranks
        assert split_experts.is_gathered(ExpertSplit(ranks, expert), copies) == (gathered <= 2 * exchanged)


@pytest.mark.parametrize(
    ("split", "num_experts", "own"),
    [
        (ExpertSplit(1, 4), 8, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (ExpertSplit(2, 2), 5, [range(2), range(2, 4), range(4, 5), range(5, 5)]),
        (ExpertSplit(), 3, [range(3)]),
    ],
)
def test_experts_of_each_device(split: ExpertSplit, num_experts: int, own: list[range]):
    assert [split.own(num_experts, device) for device in range(split.devices)] == own
    assert split.num_own(num_experts) == max(map(len, own))
