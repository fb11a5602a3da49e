"""Methods to apply experts to rows (tokens). A pair is (row, expert selected by the row).

An expert is two GEMMs with an activation between them: GEMM1 (gate and up projections) and GEMM2 (down projection).

Methods for few rows take pairs in any order and return the result of each pair:

- `hopper_gather`: reads the weights of each selected expert once (`kernels/gather_gemm.py`).
- `hopper_all_experts`: reads the weights of all experts, independent of the selection (`kernels/all_expert_gemm.py`).
- `row_by_row`: multiplies each pair separately, in XLA. On an H200, 6 pairs of DeepSeek-V2-Lite take 48 us per layer,
  48 pairs 220 us and 72 pairs 315 us. JAX's Pallas kernel `ragged_dot` for Hopper reads the weights of every expert. It
  takes 300 us for 48 pairs and for 72.

Methods for many rows take pairs sorted by expert, so that each expert multiplies one contiguous group:

- `hopper_grouped`: kernels for up to 64 rows per expert (`kernels/swap_ab_gemm.py`) and for more rows
  (`kernels/grouped_gemm.py`). `hopper_grouped_pairs` takes the pairs unsorted, with their places in the sorted order.
- `blockwise`: a loop over blocks of rows, in XLA. `jax.lax.ragged_dot` is not used, because on CPUs and GPUs it
  multiplies every row with every expert: with 64 experts and 8 tokens it takes 12 times as long on a CPU.

`hopper_*` methods need 16-bit weights and a Hopper GPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from pallas_attn import call_cached, capability
from pallas_attn.models.decoder.layers import project
from pallas_attn.models.moe.experts import Experts, SharedExperts

MAX_PACKED_PAIRS = 32
"""Maximum number of pairs for which `hopper_gather` stores the results of GEMM1 in one row per pair. GEMM2 then
multiplies the weights of each selected expert by the rows of all pairs. For more pairs, the results are stored
separately for each expert, and GEMM2 multiplies the weights of an expert by the rows of this expert only. If GEMM1 does
not compute the activation (`Experts.is_gated`), its results are always stored per pair."""

MAX_SWAP_AB_ROWS = 64
"""Maximum average number of pairs per expert for which `kernels/swap_ab_gemm.py` is used. With 54 pairs per expert, a
GEMM of DeepSeek-V2-Lite takes 212 us on an H100, and 233 us with JAX's Pallas kernel `ragged_dot`."""


def row_by_row(x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"]) -> Float[Array, "M D"]:
    """Return the result of each pair, computed as a sum of products in XLA, which does not copy the weights first.

    Args:
      x: rows.
      experts: weights of E experts.
      expert: expert of each pair, M / T pairs per row; E for a pair without an expert on this device, whose result is
        arbitrary.
    """
    rows = jnp.repeat(x, expert.shape[0] // x.shape[0], axis=0)
    expert = jnp.minimum(expert, experts.gate_up.shape[0] - 1)

    def multiply(x: Array, weight: Array, bias: Array | None) -> Array:
        # Without the constraint, XLA transposes the weights of some layers, and reads them at a fifth of the speed.
        weight = with_layout_constraint(weight[expert], Layout(major_to_minor=(0, 1, 2)))
        products = x[:, :, None].astype(jnp.float32) * weight.astype(jnp.float32)
        y = jnp.sum(products, axis=1).astype(x.dtype)
        return y if bias is None else y + bias[expert]

    hidden = experts.activation(multiply(rows, experts.gate_up, experts.gate_up_bias))
    return multiply(hidden, experts.down, experts.down_bias)


def hopper_supports(experts: Experts) -> bool:
    """Return whether the call is compiled for Hopper and the weights are 16-bit with dimensions divisible by 64."""
    tiled = all(w.shape[1] % 64 == 0 and w.shape[2] % 64 == 0 for w in (experts.gate_up, experts.down))
    return capability().compute_capability == (9, 0) and experts.gate_up.dtype.itemsize == 2 and tiled


def hopper_gather(
    x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"], *, are_distinct: bool = False
) -> Float[Array, "M D"]:
    """Return the result of each pair. The weights of each selected expert are read once.

    Args:
      x: rows.
      experts: weights of E experts.
      expert: expert of each pair, M / T pairs per row; E for a pair without an expert on this device, whose result is
        arbitrary.
      are_distinct: whether no two pairs have the same expert, as for the pairs of a single row.
    """
    from pallas_attn.models.moe.kernels.gather_gemm import GatherGemm, Pairs, gather_gemm, split_k_helps
    from pallas_attn.models.moe.kernels.pipeline import round_up

    num_pairs, num_rows, num_experts = expert.shape[0], x.shape[0], experts.gate_up.shape[0]
    gated = experts.is_gated
    pairs = Pairs(expert) if are_distinct else Pairs.of(expert, num_experts)
    call = functools.partial(
        GatherGemm,
        pairs=pairs,
        num_rows=num_rows,
        pairs_per_row=num_pairs // num_rows,
        per_expert=num_pairs > MAX_PACKED_PAIRS and gated,
    )

    def add_bias(y: Array, bias: Array | None) -> Array:
        return y if bias is None else y.at[:num_pairs].add(bias[expert])

    x = jnp.pad(x, ((0, round_up(num_rows) - num_rows), (0, 0)))
    hidden = add_bias(call_cached(gather_gemm, call(x, experts.gate_up, gated=gated)), experts.gate_up_bias)
    hidden = hidden if gated else experts.activation(hidden)
    split_k = split_k_helps(num_pairs, experts.down.shape[1:], are_distinct)
    y = call_cached(gather_gemm, call(hidden, experts.down, second=True, split_k=split_k))
    y = (y[0] + y[1]).astype(x.dtype) if split_k else y
    return add_bias(y, experts.down_bias)[:num_pairs]


def hopper_all_experts(
    x: Float[Array, "T D"], experts: Experts, expert: Int32[Array, "M"], shared: SharedExperts | None = None
) -> Float[Array, "results D"]:
    """Return the result of each pair, and the results of shared experts. The weights of all experts are read.

    Args:
      x: rows.
      experts: weights of E routed experts.
      expert: expert of each pair, M / T pairs per row; E for a pair without an expert on this device, whose result is
        arbitrary.
      shared: weights of shared experts, which are applied to every row; None if shared experts are not computed.

    Returns:
      Results of the pairs [M, D]. With shared experts, the results of the pairs are padded to a multiple of 8 and
      followed by the results of all rows for each shared expert, also padded to a multiple of 8.
      `dispatch.sum_with_shared` adds them up.
    """
    from pallas_attn.models.moe.kernels.all_expert_gemm import AllExpertGemm, Chains, all_expert_gemm
    from pallas_attn.models.moe.kernels.pipeline import round_up

    num_pairs, num_rows = expert.shape[0], x.shape[0]
    gate_up, down = (None, None) if shared is None else shared
    call = functools.partial(AllExpertGemm, num_rows=round_up(num_rows))
    rows = jnp.pad(x, ((0, round_up(num_rows) - num_rows), (0, 0)))
    hidden = call_cached(all_expert_gemm, call(rows, experts.gate_up, gate_up))
    chains = Chains.of(expert, experts.down.shape[0])
    second = call(hidden, experts.down, down, chains=chains, pairs_per_row=num_pairs // num_rows)
    y = call_cached(all_expert_gemm, second)
    return y[:num_pairs] if shared is None else y


def hopper_grouped(
    x: Float[Array, "T D"], source: Int32[Array, "M"], experts: Experts, sizes: Int32[Array, "E"]
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Apply experts to pairs that are sorted by expert, with kernels for Hopper. Arguments and result as in
    `blockwise`."""
    place = jnp.arange(source.shape[0], dtype=jnp.int32)
    return hopper_grouped_pairs(x, source, _group_of(jnp.cumsum(sizes), place), place, experts, sizes)


def hopper_grouped_pairs(
    x: Float[Array, "T D"],
    source: Int32[Array, "M"],
    expert: Int32[Array, "M"],
    place: Int32[Array, "M"],
    experts: Experts,
    sizes: Int32[Array, "E"],
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Apply experts to pairs in any order, with kernels for Hopper.

    Args:
      x: rows.
      source: index of the row of each pair.
      expert: expert of each pair; E or more for a pair without an expert on this device, whose result is arbitrary.
      place: place of each pair in the order sorted by expert.
      experts: weights of E experts.
      sizes: number of pairs of each expert.

    Returns:
      Results, sorted by expert, where the results of each expert are padded to a multiple of 8 rows; and the index of
      each pair's result.
    """
    from pallas_attn.models.moe.kernels.grouped_gemm import TILE_ROWS, GroupedGemm, grouped_gemm
    from pallas_attn.models.moe.kernels.row_tiles import RowTiles, first_rows, padded_rows, sums_before
    from pallas_attn.models.moe.kernels.swap_ab_gemm import SwapAbGemm, swap_ab_gemm, tile_rows_of

    num_pairs, num_experts = source.shape[0], sizes.shape[0]
    swap_ab = num_pairs <= MAX_SWAP_AB_ROWS * num_experts
    tile_rows = tile_rows_of(num_pairs, num_experts) if swap_ab else TILE_ROWS
    num_rows, first = padded_rows(num_pairs, num_experts, tile_rows), first_rows(sizes)
    padding = first - sums_before(sizes)  # number of padding rows before each group
    place += padding[jnp.minimum(expert, num_experts - 1)]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    unused = row % x.shape[0]  # row of x for padding; different rows, because reads of one row would be slow
    source = unused.at[place].set(source, unique_indices=True, mode="promise_in_bounds")
    # Without the barrier, XLA fuses the computation of the indices into kernels that use them, which repeat it for each
    # element of a row.
    source, place = jax.lax.optimization_barrier((source, place))
    rows, expert_of_row = x[source], _group_of(first, row) - 1
    tiles = RowTiles.of(sizes, num_pairs, tile_rows)
    gated = experts.is_gated

    def multiply(x: Array, weight: Array, gated: bool = False) -> Array:
        if swap_ab:
            return call_cached(swap_ab_gemm, SwapAbGemm(x, weight, tiles, tile_rows, gated))
        return call_cached(grouped_gemm, GroupedGemm(x, weight, tiles, gated))

    hidden = _add_bias(multiply(rows, experts.gate_up, gated), experts.gate_up_bias, expert_of_row)
    hidden = hidden if gated else experts.activation(hidden)
    return _add_bias(multiply(hidden, experts.down), experts.down_bias, expert_of_row), place


def _add_bias(y: Float[Array, "M N"], bias: Float[Array, "E N"] | None, expert: Int32[Array, "M"]) -> Array:
    return y if bias is None else y + bias[expert]


@jax.jit
def blockwise(
    x: Float[Array, "T D"], source: Int32[Array, "M"], experts: Experts, sizes: Int32[Array, "E"]
) -> tuple[Float[Array, "rows D"], Int32[Array, "M"]]:
    """Apply experts to pairs that are sorted by expert, one block of pairs of one expert at a time.

    Args:
      x: rows.
      source: index of the row of each pair; pairs are sorted by expert.
      experts: weights of E experts.
      sizes: number of pairs of each expert.

    Returns:
      Results, and the index of each pair's result.
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
        # The last block of an expert may extend into the next expert's pairs, whose blocks overwrite these results
        # later.
        return jax.lax.dynamic_update_slice_in_dim(out, y, start[i], axis=0)

    y = jax.lax.fori_loop(0, num_blocks, multiply_block, jnp.zeros_like(rows))
    return y, jnp.arange(num_rows, dtype=jnp.int32)


def _group_of(ends: Int32[Array, "groups"], place: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """Return the index of the group that contains each place, given the ends of the groups. Places after the last group
    have the number of groups."""
    return jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)


def _block_table(
    sizes: Int32[Array, "E"], block: int, max_blocks: int
) -> tuple[Int32[Array, "blocks"], Int32[Array, "blocks"], Int32[Array, ""]]:
    """Divide the pairs of each expert into blocks of `block` pairs, the last block of an expert possibly incomplete.

    Returns:
      Expert of each block, index of its first pair, and the number of blocks.
    """
    blocks = (sizes + (block - 1)) // block
    ends = jnp.cumsum(blocks)
    index = jnp.arange(max_blocks, dtype=jnp.int32)
    expert = _group_of(ends, index)
    first_row, first_block = jnp.cumsum(sizes) - sizes, ends - blocks
    return expert, first_row[expert] + (index - first_block[expert]) * block, ends[-1]
