"""Mixtures of experts: the routers of DeepSeek-V2, V3 and gpt-oss, and expert layers computed expert by expert.

Where there are many rows they are sorted by expert, so that each expert sees one contiguous group. Two ways to multiply
the groups, and two for few rows:

- `hopper_pairs`, for 16-bit weights on Hopper: kernels of ours, one for many rows an expert (`grouped_gemm.py`), and
  one for up to 64 (`swap_ab_gemm.py`).
- `block_groups`: a loop over blocks of rows of one expert each, anywhere else. `jax.lax.ragged_dot` would be the
  obvious choice, but outside TPUs it multiplies every row with every expert: with 64 experts and 8 tokens it takes 12
  times as long on a CPU.
- `hopper_rows` and `hopper_all`, for 16-bit weights on Hopper and up to 64 rows: kernels of ours, one that reads the
  chosen experts once (`kernels/gather_gemm.py`), and one that reads all, and need not know the choice to begin
  (`kernels/all_expert_gemm.py`).
- `row_by_row`: each row with its own expert, on any GPU, where there are no more rows than experts and that kernel does
  not take them. What multiplies groups reads every expert, whether it has rows or not, and takes 300 us a layer
  (DeepSeek-V2-Lite on an H200) where 6 rows take 48 one by one, 48 rows 220 and 72 rows 315.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from models.config import DeepSeekConfig, GQAConfig
from models.decoder.layers import MLP, Linear, project, swiglu
from models.decoder.mesh import DATA, EXPERT, EXPERTS, ExpertSplit
from models.moe.exchange import ExpertExchange
from pallas_attn import call_cached, capability


class Router(nnx.Module):
    """Chooses experts for each token, in float32 whatever the model's dtype."""

    def __init__(self, config: DeepSeekConfig):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((config.hidden_size, config.n_routed_experts), jnp.float32))
        biased = config.topk_method == "noaux_tc"
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32)) if biased else None

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Returns ids of the chosen experts and their weights."""
        config = self.config
        logits = project(x, self.weight[...])
        scores = jax.nn.softmax(logits) if config.scoring_func == "softmax" else jax.nn.sigmoid(logits)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias[...][None, :]
        if config.topk_method != "greedy" and config.topk_group < config.n_group:
            choice = _keep_best_groups(choice, config)
        experts, weights = best_experts(choice, scores, config.num_experts_per_tok)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        # Otherwise XLA computes the choice again in each program of the kernels that add up what experts return.
        return jax.lax.optimization_barrier((experts, weights * config.routed_scaling_factor))


MOST_COMPARED = 2**23
"""Experts are chosen by counting instead of sorting where all rows compare at most so many pairs of experts: 2,048 rows
of DeepSeek-V2-Lite, 128 of V3."""


def best_experts(
    choice: Float32[Array, "T E"], scores: Float32[Array, "T E"], count: int
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Chooses the `count` experts with the largest `choice`, the first of equals first, and takes their scores.

    Few rows are ranked by counting: two kernels, where XLA's sort takes one between two copies, and the scores another.
    A row with a NaN chooses any experts.
    """
    if choice.shape[0] * choice.shape[1] ** 2 > MOST_COMPARED:
        experts = jax.lax.top_k(choice, count)[1]
        return experts, jnp.take_along_axis(scores, experts, axis=-1)
    number = jnp.arange(choice.shape[1], dtype=jnp.int32)
    one, other = choice[:, :, None], choice[:, None]
    comes_after = (other > one) | ((other == one) & (number[None] < number[:, None])[None])
    rank = jnp.sum(comes_after, axis=2, dtype=jnp.int32)
    is_chosen = rank[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None]  # [T, k, E]
    experts = jnp.sum(jnp.where(is_chosen, number[None, None], 0), axis=2)
    return jnp.minimum(experts, len(number) - 1), jnp.sum(jnp.where(is_chosen, scores[:, None], 0), axis=2)


def _keep_best_groups(choice: Float32[Array, "T E"], config: DeepSeekConfig) -> Float32[Array, "T E"]:
    """Masks experts outside the best groups with -inf: groups rank by their best expert (V2) or their best two (V3)."""
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)
    counted = 2 if config.topk_method == "noaux_tc" else 1
    group_scores = jnp.sum(jax.lax.top_k(grouped, counted)[0], axis=-1)
    best = jax.lax.top_k(group_scores, config.topk_group)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(config.n_group, dtype=jnp.int32)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


class MoE(nnx.Module):
    """Routed experts, and shared ones that see every token (Dai et al., arXiv:2401.06066). Shared ones are multiplied
    with the routed ones where those are all read; by themselves otherwise, and over several devices."""

    def __init__(self, config: DeepSeekConfig, dtype: DTypeLike, split: ExpertSplit = ExpertSplit()):
        width, hidden = config.hidden_size, config.moe_intermediate_size
        count = split.num_own(config.n_routed_experts)
        self.split = split
        self.gate = Router(config)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))
        shared = hidden * config.n_shared_experts // split.expert
        self.shared_experts = MLP(width, shared, dtype) if shared else None

    def __call__(self, x: Float[Array, "T D"], is_live: Bool[Array, "T"] | None = None) -> Float[Array, "T D"]:
        chosen, weights = self.gate(x)
        experts = Experts(self.gate_up_proj[...], self.down_proj[...])
        reads_all = self.split.devices == 1 and way_of_few_rows(x.shape[0], chosen.size, experts) is hopper_all
        if reads_all and self.shared_experts is not None:
            shared = Shared.of(self.shared_experts)
            if shared.fit(experts):
                return _with_shared(hopper_all(x, experts, chosen.reshape(-1), shared), weights, x.dtype)
        y = routed_experts(x, chosen, weights, experts, self.split, is_live)
        # Otherwise XLA has the shared experts' last product add to `y`, and it waits for the routed experts.
        return y if self.shared_experts is None else y + jax.lax.optimization_barrier(self.shared_experts(x))


class BiasedMoE(nnx.Module):
    """Routed experts of gpt-oss (arXiv:2508.10925): projections have biases, gates are clamped, and the weights of a
    token's experts are the softmax of their own logits."""

    def __init__(self, config: GQAConfig, dtype: DTypeLike, split: ExpertSplit = ExpertSplit()):
        width, hidden = config.hidden_size, config.intermediate_size
        count = split.num_own(config.num_local_experts)
        self.config, self.split = config, split
        self.router = Linear(width, config.num_local_experts, jnp.float32, bias=True)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((count, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))
        self.down_proj_bias = nnx.Param(jnp.zeros((count, width), dtype))

    def __call__(self, x: Float[Array, "T D"], is_live: Bool[Array, "T"] | None = None) -> Float[Array, "T D"]:
        chosen, weights = self._route(x)
        experts = Experts(
            self.gate_up_proj[...],
            self.down_proj[...],
            self.gate_up_proj_bias[...],
            self.down_proj_bias[...],
            ClampedSwiglu(self.config.swiglu_alpha, self.config.swiglu_limit),
        )
        return routed_experts(x, chosen, weights, experts, self.split, is_live)

    def _route(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Returns ids of the chosen experts and their weights, in float32 whatever the model's dtype."""
        logits, chosen = jax.lax.top_k(self.router(x), self.config.num_experts_per_tok)
        return chosen, jax.nn.softmax(logits)


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """gate · sigmoid(alpha · gate) · (up + 1) of the two halves of the columns; gates are clamped above `limit`, up
    columns on both sides."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of E experts, each down(activation(gate_up(x))) of hidden width F.

    Attributes:
      gate_up: [E, D, 2F], gates in the first half of the columns.
      down: [E, F, D].
      gate_up_bias, down_bias: [E, 2F] and [E, D], or None.
      activation: takes 2F columns to F.
    """

    gate_up: Float[Array, "E D F2"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E F2"] | None = None
    down_bias: Float[Array, "E D"] | None = None
    activation: Callable[[Array], Array] = dataclasses.field(default=swiglu, metadata={"static": True})


class Shared(NamedTuple):
    """Weights of shared experts, S times as wide as a routed one."""

    gate_up: Float[Array, "D SF2"]
    down: Float[Array, "SF D"]

    @staticmethod
    def of(experts: MLP) -> "Shared":
        return Shared(experts.gate_up_proj.weight[...], experts.down_proj.weight[...])

    def fit(self, experts: Experts) -> bool:
        """Whether they are as many more experts like the routed ones."""
        return self.down.dtype == experts.down.dtype and self.down.shape[0] % experts.down.shape[1] == 0


NOT_LIVE = -1
"""Expert of a row that is to have none."""

COUNTED_ROWS = 4096
"""Up to this many (token, expert) pairs are ranked by counting instead of sorting: two passes over their square, 17
million comparisons, in place of half a dozen kernels that sort."""

UNCUT_PAIRS = 1024
"""Up to this many pairs, of which other devices' experts have some, are multiplied at once."""


UNREAD_ROWS = 512
"""Rows that pairs without an expert read in turn: few, to stay in the L2 cache, and not one, which all pairs of other
ranks would ask the same part of it for. On four H200s they asked 676 us a layer, in place of some 60."""


def routed_experts(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit = ExpertSplit(),
    is_live: Bool[Array, "T"] | None = None,
) -> Float[Array, "T D"]:
    """Sum over each token's chosen experts of weight · expert(x).

    Over several devices, inside `jax.shard_map`, `experts` are the device's own, and the sum is one of its parts: those
    of the devices along `expert`, which have the same tokens, are to be added up. Devices along `data` have other
    tokens, which go to the experts' devices, and their results come back. Where `is_live` is False, for padding and
    idle rows, nothing is multiplied, and the sum is 0; one device alone multiplies them, too.
    """
    if split.devices == 1:
        return apply_experts(x, chosen, weights, experts)
    if is_live is None:
        is_live = jnp.ones(x.shape[0], jnp.bool_)
    if split.data > 1 and not is_gathered(split, chosen.shape[1]):
        return _exchanged(x, chosen, weights, experts, split, is_live)
    chosen = jnp.where(is_live[:, None], chosen, NOT_LIVE)
    if split.data == 1:
        return _own_part(x, chosen, weights, experts, split)
    # Experts and weights travel together: a small collective operation takes as long as a large one.
    routing = jnp.concatenate([chosen, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    x, routing = jax.lax.all_gather((x, routing), DATA, tiled=True)
    chosen, weights = jnp.split(routing, 2, axis=1)
    weights = jax.lax.bitcast_convert_type(weights, jnp.float32)
    return jax.lax.psum_scatter(_own_part(x, chosen, weights, experts, split), DATA, tiled=True)


def is_gathered(split: ExpertSplit, copies: int) -> bool:
    """Whether all ranks get all tokens, and add up what their experts made of them, in place of sending each of a
    token's copies to the rank of its expert and back.

    A device sends n - 1 times the tokens of one of n ranks then, in place of its share along `expert` of
    copies · (n - 1) / n times. Twice as much is allowed for: on two H100s, the only ones measured, prefill by an
    exchange, which has to tell the host its sizes, took 15 times as long (benchmarks/log/065).
    """
    return split.devices <= 2 * copies


def _own_part(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    split: ExpertSplit,
) -> Float[Array, "T D"]:
    """The part of the sum that this device's experts have."""
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
    """The part of the sum that the experts have of all devices along `data` with this one's number along `expert`."""
    num_own, expert = experts.gate_up.shape[0], chosen.reshape(-1)
    device = expert // num_own
    is_own = (device % split.expert == jax.lax.axis_index(EXPERT)) & jnp.repeat(is_live, chosen.shape[1])
    own = jnp.where(is_own, expert % num_own + device // split.expert * num_own, split.data * num_own)
    y = send_to_experts(x, own, experts, split)
    return _weighted_sum(y, weights, x.dtype, is_own.reshape(chosen.shape))


def send_to_experts(
    x: Float[Array, "T D"], expert: Int32[Array, "M"], experts: Experts, split: ExpertSplit
) -> Float[Array, "M D"]:
    """Applies experts as `apply_experts` does, but those of all devices along `data`, one after the other; each has
    tokens of its own."""
    num_own, copies = experts.gate_up.shape[0], expert.shape[0] // x.shape[0]
    groups = ExpertGroups.of(expert, split.data * num_own)
    exchange = ExpertExchange.of(groups.sizes.reshape(split.data, num_own), DATA)
    received, number = exchange.send(x[groups.row // copies]), exchange.experts(len(expert))[:, None]
    y = apply_experts(
        received, number, jnp.ones(number.shape, jnp.float32), experts, expected=len(expert) // split.expert
    )
    return exchange.send_back(y)[groups.place]


def apply_experts(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T k"],
    weights: Float32[Array, "T k"],
    experts: Experts,
    expected: int | None = None,
) -> Float[Array, "T D"]:
    """Sum over each row's chosen experts of weight · expert(x), of those that are among `experts`.

    Args:
      x: rows.
      chosen: experts of each row; one past the last for none.
      weights: of each.
      experts: weights of the experts.
      expected: number of (row, expert) pairs that have an expert, on average; None for all. There may be more, which
        take longer: pairs are multiplied in pieces of a quarter more than this, as many as there are.
    """
    num_experts, copies = experts.gate_up.shape[0], chosen.shape[1]
    num_pairs = chosen.size
    has_expert = None if expected is None else chosen < num_experts
    are_distinct = x.shape[0] == 1 and has_expert is None
    multiply_rows = way_of_few_rows(x.shape[0], num_pairs, experts, expected=expected, are_distinct=are_distinct)
    if multiply_rows is not None:
        y = multiply_rows(x, experts, chosen.reshape(-1))
        return _weighted_sum(y, weights, x.dtype, has_expert)
    groups = ExpertGroups.of(chosen.reshape(-1), num_experts)
    on_hopper = hopper_takes(experts)
    multiply = hopper_groups if on_hopper else block_groups
    source, place = groups.row // copies, groups.place
    piece = num_pairs if expected is None or num_pairs <= UNCUT_PAIRS else -(-5 * expected // 4 // 64) * 64
    if piece >= num_pairs:
        if on_hopper:
            own = jnp.arange(num_pairs, dtype=jnp.int32) // copies
            y, row = hopper_pairs(x, own, chosen.reshape(-1), place, experts, groups.sizes)
        else:
            y, row = multiply(x, source, experts, groups.sizes)
            row = row[place]
        return _weighted_sum(y[row], weights, x.dtype, has_expert)
    # Memory is that of a piece, and so is what is done for pairs of no expert, which read some first rows.
    ends = jnp.cumsum(groups.sizes)
    source = jnp.pad(source, (0, -num_pairs % piece))
    place = jnp.where(place < ends[-1], place, place % min(piece, UNREAD_ROWS))

    def one_piece() -> Array:
        y, row = multiply(x, source[:piece], experts, groups.sizes)
        return _weighted_sum(y[row[place]], weights, x.dtype, has_expert)

    def more_pieces() -> Array:
        def multiply_piece(i: ArrayLike, out: Array) -> Array:
            start = jnp.asarray(i, jnp.int32) * piece
            own = jnp.diff(jnp.clip(ends - start, 0, piece), prepend=jnp.zeros(1, jnp.int32))
            y, row = multiply(x, jax.lax.dynamic_slice_in_dim(source, start, piece), experts, own)
            return jax.lax.dynamic_update_slice_in_dim(out, y[row], start, axis=0)

        empty = jnp.zeros((source.shape[0], experts.down.shape[2]), x.dtype)
        y = jax.lax.fori_loop(0, (ends[-1] + piece - 1) // piece, multiply_piece, empty)
        return _weighted_sum(y[place], weights, x.dtype, has_expert)

    return jax.lax.cond(ends[-1] <= piece, one_piece, more_pieces)


class ExpertGroups(NamedTuple):
    """(token, expert) pairs in the order of their experts; those whose expert is one past the last are in no group.

    Attributes:
      row: index of the pair in each place.
      place: place of each pair.
      sizes: number of pairs of each expert.
    """

    row: Int32[Array, "M"]
    place: Int32[Array, "M"]
    sizes: Int32[Array, "E"]

    @staticmethod
    def of(expert: Int32[Array, "M"], num_experts: int) -> "ExpertGroups":
        """Ranks pairs by a stable sort, or by counting up to `COUNTED_ROWS`: three kernels with the sizes, where two
        sorts and two scatters take seven, and a decode step consists of small kernels."""
        sizes = jnp.sum(expert[None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
        if expert.shape[0] > COUNTED_ROWS:
            row = jnp.argsort(expert).astype(jnp.int32)
            return ExpertGroups(row, jnp.argsort(row).astype(jnp.int32), sizes)
        number = jnp.arange(expert.shape[0], dtype=jnp.int32)
        key = expert * expert.shape[0] + number  # of both at once: 12 million comparisons are most of a kernel
        comes_after = key[None] < key[:, None]
        place = jnp.sum(comes_after, axis=1, dtype=jnp.int32)
        return ExpertGroups(jnp.sum(jnp.where(place[None] == number[:, None], number[None], 0), axis=1), place, sizes)


def _weighted_sum(
    y: Float[Array, "M D"],
    weights: Float32[Array, "T k"],
    dtype: DTypeLike,
    counted: Bool[Array, "T k"] | None = None,
) -> Float[Array, "T D"]:
    """Sum of each row's results by their weights; of those that are `counted`, others may be anything."""
    y = y.reshape(*weights.shape, -1).astype(jnp.float32)
    if counted is not None:
        y = jnp.where(counted[:, :, None], y, jnp.zeros_like(y))
    return jnp.sum(y * weights[:, :, None], axis=1).astype(dtype)


def _with_shared(y: Float[Array, "results D"], weights: Float32[Array, "T k"], dtype: DTypeLike) -> Float[Array, "T D"]:
    """Sum of each row's results by their weights, and of those of shared experts, as `hopper_all` returns them."""
    from models.moe.kernels.all_expert_gemm import padded_rows

    num_rows, num_pairs = weights.shape[0], weights.size
    total = _weighted_sum(y[:num_pairs], weights, jnp.float32)
    shared = y[padded_rows(num_pairs) :].reshape(-1, padded_rows(num_rows), y.shape[1])[:, :num_rows]
    return (total + jnp.sum(shared.astype(jnp.float32), axis=0)).astype(dtype)


KEPT_PAIRS = 32
"""Pairs up to which the results of the first product stay in their order: a tile of the second has all of them."""


SPREAD_ROWS = 64
"""Rows up to which the kernels for few rows take more pairs than their tiles have rows."""

FULL_PAIRS = 3.5
"""Pairs an expert, on average, from which all experts are read, and before it is known who chose whom: 97% of them have
a row if all are chosen alike. Steps of V2-Lite take 1.4% longer so with 3 pairs an expert, and 1.9% less time with 3.75
(H100; benchmarks/log/117)."""


def way_of_few_rows(
    num_rows: int, num_pairs: int, experts: Experts, *, expected: int | None = None, are_distinct: bool = False
) -> Callable[[Array, Experts, Int32[Array, "M"]], Float[Array, "M D"]] | None:
    """Product of so few pairs that reading weights is all, without sorting them; None if they are many, or the
    call is not compiled for a GPU. On an H100, V2-Lite's experts take 163 us for 30 pairs by the kernel and 196 row by
    row, and 301 for 96 where the ragged product takes 392 (benchmarks/log/072).

    Args:
      num_rows, num_pairs: of the step.
      experts: weights of the experts.
      expected: number of pairs that have one of these experts, on average; None for all.
      are_distinct: whether no two pairs have the same expert.
    """
    if capability().platform != "gpu":
        return None
    if hopper_takes(experts):
        from models.moe.kernels import all_expert_gemm
        from models.moe.kernels.gather_gemm import MOST_ROWS

        is_plain = experts.activation is swiglu and experts.gate_up_bias is None and experts.down_bias is None
        is_spread = num_rows <= SPREAD_ROWS and is_plain
        pairs_an_expert = (num_pairs if expected is None else expected) / experts.down.shape[0]
        if is_spread and pairs_an_expert >= FULL_PAIRS and all_expert_gemm.takes(experts.gate_up, experts.down):
            return hopper_all
        if num_pairs <= MOST_ROWS or is_spread:
            return functools.partial(hopper_rows, are_distinct=True) if are_distinct else hopper_rows
    return row_by_row if num_pairs <= experts.gate_up.shape[0] else None


def row_by_row(x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"]) -> Float[Array, "M D"]:
    """Applies each pair's expert to its row, M / T of them a row. XLA reads weights in place, in the loop that sums."""
    rows = jnp.repeat(x, expert.shape[0] // x.shape[0], axis=0)
    expert = jnp.minimum(expert, experts.gate_up.shape[0] - 1)

    def multiply(x: Array, weight: Array, bias: Array | None) -> Array:
        # Without this layout, XLA sums some layers along neighbours in transposed rows, at a fifth of the speed.
        weight = with_layout_constraint(weight[expert], Layout(major_to_minor=(0, 1, 2)))
        products = x[:, :, None].astype(jnp.float32) * weight.astype(jnp.float32)
        y = jnp.sum(products, axis=1).astype(x.dtype)
        return y if bias is None else y + bias[expert]

    hidden = experts.activation(multiply(rows, experts.gate_up, experts.gate_up_bias))
    return multiply(hidden, experts.down, experts.down_bias)


def hopper_takes(experts: Experts) -> bool:
    """Whether the call is compiled for Hopper and fills whole tiles of its matrix units."""
    tiled = all(w.shape[1] % 64 == 0 and w.shape[2] % 64 == 0 for w in (experts.gate_up, experts.down))
    return capability().compute_capability == (9, 0) and experts.gate_up.dtype.itemsize == 2 and tiled


def hopper_rows(
    x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"], *, are_distinct: bool = False
) -> Float[Array, "M D"]:
    """Applies each pair's expert to its row, M / T pairs a row, by a kernel for Hopper that reads each expert once.
    `are_distinct` says that every pair has an expert of its own, as the pairs of one row have."""
    from models.moe.kernels.gather_gemm import Pairs, RowProduct, padded_rows, row_product

    num_pairs, num_rows, num_experts = expert.shape[0], x.shape[0], experts.gate_up.shape[0]
    gated = experts.activation is swiglu and experts.gate_up_bias is None
    pairs = Pairs(expert) if are_distinct else Pairs.of(expert, num_experts)
    call = functools.partial(
        RowProduct,
        pairs=pairs,
        num_rows=num_rows,
        copies=num_pairs // num_rows,
        spread=num_pairs > KEPT_PAIRS and gated,
    )

    def biased(y: Array, bias: Array | None) -> Array:
        return y if bias is None else y.at[:num_pairs].add(bias[expert])

    x = jnp.pad(x, ((0, padded_rows(num_rows) - num_rows), (0, 0)))
    hidden = biased(call_cached(row_product, call(x, experts.gate_up, gated=gated)), experts.gate_up_bias)
    hidden = hidden if gated else experts.activation(hidden)
    halved = halves_help(num_pairs, experts.down.shape[1:], are_distinct)
    y = call_cached(row_product, call(hidden, experts.down, second=True, halved=halved))
    y = (y[0] + y[1]).astype(x.dtype) if halved else y
    return biased(y, experts.down_bias)[:num_pairs]


def hopper_all(
    x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"], shared: Shared | None = None
) -> Float[Array, "results D"]:
    """Applies each pair's expert to its row, M / T pairs a row, by a kernel for Hopper that reads all experts, and
    shared ones to every row.

    Returns:
      Results of the pairs; with shared experts those are padded to a multiple of 8, and below them are the rows of each
      shared expert, also padded.
    """
    from models.moe.kernels.all_expert_gemm import Chains, FullProduct, full_product, padded_rows

    num_pairs, num_rows = expert.shape[0], x.shape[0]
    gate_up, down = (None, None) if shared is None else shared
    call = functools.partial(FullProduct, num_rows=padded_rows(num_rows))
    rows = jnp.pad(x, ((0, padded_rows(num_rows) - num_rows), (0, 0)))
    hidden = call_cached(full_product, call(rows, experts.gate_up, gate_up))
    chains = Chains.of(expert, experts.down.shape[0])
    y = call_cached(full_product, call(hidden, experts.down, down, chains=chains, copies=num_pairs // num_rows))
    return y[:num_pairs] if shared is None else y


def halves_help(num_pairs: int, shape: tuple[int, ...], are_distinct: bool) -> bool:
    """Whether programs that take 64 columns and half of K are done before those that take 128 columns and all of it,
    where each of so many experts is read: the one with the most work decides."""
    from models.moe.kernels.gather_gemm import COLUMNS, DEPTH, PROGRAMS

    depth, columns = shape
    if not are_distinct or depth % (2 * DEPTH) or columns % (2 * COLUMNS):
        return False
    items = num_pairs * (columns // (2 * COLUMNS))
    return -(-4 * items // PROGRAMS) < 4 * -(-items // PROGRAMS)


FEW_ROWS = 64
"""Rows an expert, on average, up to which weights are the left operand of products (`swap_ab_gemm.py`). A product of
DeepSeek-V2-Lite's experts with 54 rows each takes 212 us by it, and took 233 by jax's (H100; benchmarks/log/106)."""


def hopper_groups(
    x: Float[Array, "T D"], source: Int32[Array, "M"], experts: Experts, sizes: Int32[Array, "E"]
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Applies experts to rows of `x`, as `block_groups` does, by kernels for Hopper."""
    place = jnp.arange(source.shape[0], dtype=jnp.int32)
    return hopper_pairs(x, source, _group_of(jnp.cumsum(sizes), place), place, experts, sizes)


def hopper_pairs(
    x: Float[Array, "T D"],
    source: Int32[Array, "M"],
    expert: Int32[Array, "M"],
    place: Int32[Array, "M"],
    experts: Experts,
    sizes: Int32[Array, "E"],
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Applies experts to pairs of a row of `x` and an expert, by kernels for Hopper.

    Args:
      x: rows.
      source, expert, place: row of each pair, its expert, E or more for none, and its place in the order of experts.
      experts: weights.
      sizes: number of pairs of each expert.

    Returns:
      Results, and the row among them of each pair.
    """
    from models.moe.kernels.grouped_gemm import (
        TILE_ROWS,
        GroupProduct,
        RowTiles,
        first_rows,
        group_product,
        padded_rows,
        sums_before,
    )
    from models.moe.kernels.swap_ab_gemm import SwappedProduct, swapped_product, tile_rows_of

    num_pairs, num_experts = source.shape[0], sizes.shape[0]
    swapped = num_pairs <= FEW_ROWS * num_experts
    tile_rows = tile_rows_of(num_pairs, num_experts) if swapped else TILE_ROWS
    num_rows, first = padded_rows(num_pairs, num_experts, tile_rows), first_rows(sizes)
    behind = first - sums_before(sizes)  # how far a group begins behind its first place
    place += behind[jnp.minimum(expert, num_experts - 1)]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    some = row % x.shape[0]  # what rows of no pair read: not all of them the same
    source = some.at[place].set(source, unique_indices=True, mode="promise_in_bounds")
    # Otherwise XLA looks for a row's place at each of its numbers, in the kernels that gather rows and add them up.
    source, place = jax.lax.optimization_barrier((source, place))
    rows, expert_of_row = x[source], _group_of(first, row) - 1
    tiles = RowTiles.of(sizes, num_pairs, tile_rows)
    gated = experts.activation is swiglu and experts.gate_up_bias is None

    def multiply(x: Array, weight: Array, gated: bool = False) -> Array:
        if swapped:
            return call_cached(swapped_product, SwappedProduct(x, weight, tiles, tile_rows, gated))
        return call_cached(group_product, GroupProduct(x, weight, tiles, gated))

    hidden = _biased(multiply(rows, experts.gate_up, gated), experts.gate_up_bias, expert_of_row)
    hidden = hidden if gated else experts.activation(hidden)
    return _biased(multiply(hidden, experts.down), experts.down_bias, expert_of_row), place


def _biased(y: Float[Array, "M N"], bias: Float[Array, "E N"] | None, expert: Int32[Array, "M"]) -> Float[Array, "M N"]:
    return y if bias is None else y + bias[expert]


@jax.jit
def block_groups(
    x: Float[Array, "T D"], source: Int32[Array, "M"], experts: Experts, sizes: Int32[Array, "E"]
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Applies experts to rows of `x`, block by block; `source` names the rows, sorted by expert, `sizes` of each.

    Returns:
      Results, and the row among them of each of `source`.
    """
    num_rows, num_experts = source.shape[0], sizes.shape[0]
    block = min(128, max(8, 1 << (num_rows // num_experts - 1).bit_length()))
    expert, start, num_blocks = _block_table(sizes, block, min(num_rows, num_rows // block + num_experts))
    rows = jnp.pad(x[source], ((0, block), (0, 0)))

    def multiply(x: Array, weight: Array, bias: Array | None, index: Array) -> Array:
        y = project(x, weight[index])
        return y if bias is None else y + bias[index][None, :]

    def multiply_block(i: ArrayLike, out: Array) -> Array:
        x = jax.lax.dynamic_slice_in_dim(rows, start[i], block)
        hidden = experts.activation(multiply(x, experts.gate_up, experts.gate_up_bias, expert[i]))
        y = multiply(hidden, experts.down, experts.down_bias, expert[i])
        # A group's last block runs into the next groups' rows, which are written after it.
        return jax.lax.dynamic_update_slice_in_dim(out, y, start[i], axis=0)

    y = jax.lax.fori_loop(0, num_blocks, multiply_block, jnp.zeros_like(rows))
    return y, jnp.arange(num_rows, dtype=jnp.int32)


def _group_of(ends: Int32[Array, "groups"], place: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Index of the group that holds each place, given where groups end; the number of groups for places past the
    last."""
    return jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)


def _block_table(
    sizes: Int32[Array, "E"], block: int, max_blocks: int
) -> tuple[Int32[Array, "blocks"], Int32[Array, "blocks"], Int32[Array, ""]]:
    """Expert and first row of each block, in the order of the rows, and the number of blocks."""
    blocks = (sizes + (block - 1)) // block
    ends = jnp.cumsum(blocks)
    index = jnp.arange(max_blocks, dtype=jnp.int32)
    expert = _group_of(ends, index)
    first_row, first_block = jnp.cumsum(sizes) - sizes, ends - blocks
    return expert, first_row[expert] + (index - first_block[expert]) * block, ends[-1]
