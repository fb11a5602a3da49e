"""A step with drafts: drafts are proposed, verified and accepted on the device.

    drafts = proposer.propose(state, decode rows)
    logits = model(newest token and drafts of each decode row, prompt tokens)
    chosen = sample(logits)                     # after the newest token and after each draft
    accepted = leading drafts (or the branch of a tree) that equal the tokens chosen at their positions
    tokens = chosen[: accepted + 1]
    proposer.observe(step); move accepted tokens of a tree to their cache slots; store lengths and newest tokens

Until tokens are read, only the device knows the length of a row. So lengths, newest tokens and drafts stay on the
device. The host provides pages, length limits and sampling parameters.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from models.config import HeadWindows, ModelConfig, cache_groups
from models.decoder import AttentionSettings, Caches, StepMetadata
from models.decoder.mesh import AXES, DATA
from models.engine.config import Bucket, RunnerConfig
from models.engine.group_sizes import GroupSizes
from models.engine.sampler import SamplingRows, draw
from models.engine.speculation.proposer import (
    DraftRows,
    DraftTree,
    ObservedStep,
    Proposer,
    ProposerSizes,
    decode_metadata,
    query_lens,
    tree_lens,
)
from models.engine.step.packed import PackedStep
from models.engine.step.plan import RowTokens
from pallas_attn import FULL, slot_mapping

_NOTHING = -2
"""Padding after the last token of a row."""


@typing.no_type_check  # a pytree node may hold shapes or shardings instead of arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """State of the running requests on the device, in addition to their caches.

    Attributes:
      newest: int32 [request slots], newest token of each request, whose K/V is not computed yet.
      lens: int32 [request slots], number of tokens of each request, including the newest.
      written: int32 [page rows, ps], computed token ids by page row and offset, for the head and cache group with the
        longest window. Requests that share pages share these entries.
      proposer: state of the proposer.
    """

    newest: Int32[Array, "slots"]
    lens: Int32[Array, "slots"]
    written: Int32[Array, "rows ps"]
    proposer: Any


def state_partition() -> SpeculativeState:
    """`PartitionSpec` of the state on a mesh. Devices of a data rank have equal values, except for the proposer's
    state, which may differ on each device."""
    of_ranks: Any = PartitionSpec(DATA)
    return SpeculativeState(of_ranks, of_ranks, of_ranks, proposer=PartitionSpec(AXES))


def proposer_sizes(config: RunnerConfig, num_layers: int, mesh: Mesh | None = None) -> ProposerSizes:
    """Convert the runner's sizes to the sizes that proposers take."""
    whole = GroupSizes(tuple(range(num_layers)), HeadWindows((FULL,), (0,)), False, config.num_pages)
    return ProposerSizes(
        max_num_seqs=config.max_num_seqs,
        page_size=config.page_size,
        table_pages=config.table_pages,
        groups=config.groups or (whole,),
        max_drafts=config.draft_buckets[-1],
        cache_dtype=config.cache_dtype,
        mesh=mesh,
    )


def allocate_state(proposer: Proposer, sizes: ProposerSizes) -> SpeculativeState:
    """Allocate the state before the first step."""
    group, _ = sizes.lane
    slots = jnp.zeros((sizes.max_num_seqs,), jnp.int32)
    written = jnp.zeros((sizes.groups[group].num_rows, sizes.page_size), jnp.int32)
    return SpeculativeState(slots, jnp.zeros_like(slots), written, proposer.allocate(sizes))


def check_trees(config: ModelConfig, settings: AttentionSettings, contexts: int = 1) -> None:
    """Raise NotImplementedError if a model's attention does not support trees of drafts. The drafts of a tree are
    stored in consecutive cache slots, so slots do not correspond to positions.

    Args:
      config, settings: the model's.
      contexts: number of devices that contexts are split over.
    """
    reason = None
    if any(group.window is not None for group in cache_groups(config)):
        reason = "windows are computed from slots"
    elif settings.batch_invariant:
        reason = "batch_invariant computes each token in a separate row"
    elif contexts > 1:
        reason = "with split contexts each token is computed in a separate row"
    elif settings.mla == "expand":
        reason = "expanded decode rows have one token each"
    if reason is not None:
        raise NotImplementedError(f"speculate: a tree of drafts needs decode rows of several tokens; {reason}")


@dataclasses.dataclass(frozen=True)
class _Verified:
    """Result of a step for its decode rows. Input 0 of a row is the newest token, input j + 1 is draft j.

    Attributes:
      tokens: int32 [Bd, 1 + d], tokens sampled along the accepted branch, padded with _NOTHING.
      accepted: int32 [Bd], number of accepted drafts.
      lens: int32 [Bd], new number of tokens of each row; 0 for idle rows.
      last: int32 [Bd], input of the last accepted draft; 0 if no draft is accepted.
      next_tokens: int32 [Bd, 1 + d], tokens sampled after each input on the accepted branch; _NOTHING for other inputs.
    """

    tokens: Int32[Array, "Bd Q"]
    accepted: Int32[Array, "Bd"]
    lens: Int32[Array, "Bd"]
    last: Int32[Array, "Bd"]
    next_tokens: Int32[Array, "Bd Q"]


def accept(
    chosen: Int32[Array, "B Q"], drafts: Int32[Array, "B d"], num_drafts: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Count accepted drafts: leading drafts that equal the tokens sampled at their positions.

    Args:
      chosen: tokens sampled after the newest token and after each draft, Q = 1 + d.
      drafts: proposed tokens.
      num_drafts: number of drafts of each row.
    """
    return jnp.minimum(_leading(chosen[:, :-1] == drafts), num_drafts)


def accept_branch(
    chosen: Int32[Array, "B Q"],
    drafts: Int32[Array, "B d"],
    parents: Int32[Array, "B d"],
    num_drafts: Int32[Array, "B"],
    depth: int,
) -> tuple[Int32[Array, "B Q"], Int32[Array, "B"]]:
    """Find the branch of a tree whose drafts equal the tokens sampled at their positions.

    Args:
      chosen: tokens sampled after input 0 (the newest token) and after input j + 1 (draft j).
      drafts: proposed tokens.
      parents: for each draft, the input that it follows.
      num_drafts: number of drafts of each row.
      depth: number of drafts of the longest branch.

    Returns:
      Inputs along the branch, starting with 0, padded with the last input; and the number of drafts on the branch.
    """
    rows, index = jnp.arange(chosen.shape[0], dtype=jnp.int32), jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    given = index < num_drafts[:, None]
    branch = [jnp.zeros_like(num_drafts)]
    accepted = jnp.zeros_like(num_drafts)
    for _ in range(depth):
        at = branch[-1]
        follows = given & (parents == at[:, None]) & (drafts == chosen[rows, at][:, None])
        found = jnp.any(follows, axis=1)
        branch.append(jnp.where(found, jnp.argmax(follows, axis=1).astype(jnp.int32) + 1, at))
        accepted += found.astype(jnp.int32)
    branch += [branch[-1]] * (drafts.shape[1] - depth)
    return jnp.stack(branch, axis=1), accepted


def _leading(holds: Bool[Array, "B d"]) -> Int32[Array, "B"]:
    """Number of leading True entries of each row."""
    index = jnp.arange(holds.shape[1], dtype=jnp.int32)[None]
    return jnp.min(jnp.where(holds, holds.shape[1], index), axis=1, initial=holds.shape[1])


def run_speculative_step(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: tuple[Any, Any],
    caches: Caches,
    state: SpeculativeState,
    packed: Int32[Array, "n"],
) -> tuple[Int32[Array, "n"], Float[Array, "tokens V"] | None, Caches, SpeculativeState]:
    """Run one step on the device; arguments as in `step.plain.run_step`.

    Returns:
      Tokens of the rows, for `read_tokens`; logits of the prefill tokens if the bucket has all_logits; caches; state.
    """
    if config.speculate is None:
        raise ValueError("speculate: expected a Speculation, got None")
    proposer, (of_target, of_proposer) = config.speculate.proposer, weights
    step, num_rows, queries = PackedStep.of(config, bucket, packed), bucket.decode_rows, 1 + bucket.num_drafts
    lane = proposer_sizes(config, 0).lane
    rows = _draft_rows(config, step, state, lane)
    tree, drafts, memory = _propose(proposer, of_proposer, state.proposer, rows, bucket)
    # Ids beyond the vocabulary are never sampled, so never accepted.
    num_drafts = jnp.where(rows.lens > 0, jnp.minimum(_leading(drafts >= 0), rows.max_drafts), 0)
    drafts = jnp.where(jnp.arange(bucket.num_drafts, dtype=jnp.int32)[None] < num_drafts[:, None], drafts, 0)

    inputs = jnp.concatenate([rows.tokens[:, None], drafts], axis=1)
    tokens = jnp.concatenate([inputs.reshape(-1), step.prefill_ids])
    prefill_ends = num_rows * queries + jnp.maximum(step.cu_q_lens[1:] - 1, 0)
    sampling = jnp.concatenate([jnp.arange(num_rows * queries, dtype=jnp.int32), prefill_ends])
    logit_rows = jnp.arange(tokens.shape[0], dtype=jnp.int32) if bucket.all_logits else sampling
    q_lens = jnp.where(rows.lens > 0, 1 + num_drafts, 0)
    kv_lens = jnp.where(rows.lens > 0, rows.lens + num_drafts, 0)
    reach = None if tree is None else tree.reach()
    metadata = _metadata(config, step, kv_lens, q_lens, queries, logit_rows, reach)
    extra = {"return_hidden": True} if proposer.needs_hidden else {}
    logits, caches, *hidden = model_step(of_target, tokens, caches, metadata, **extra)

    places = query_lens(kv_lens, q_lens, queries) if reach is None else tree_lens(kv_lens, q_lens, reach)
    chosen = draw(logits[sampling] if bucket.all_logits else logits, _sampling_rows(step, places, queries))
    of_rows = chosen[: num_rows * queries].reshape(num_rows, queries)
    if tree is None or reach is None:
        verified, depth = _verify(of_rows, drafts, num_drafts, rows.lens), num_drafts
    else:
        tree, longest = dataclasses.replace(tree, tokens=drafts), proposer.depth(bucket.num_drafts)
        verified = _verify_tree(of_rows, tree, num_drafts, rows.lens, longest)
        depth = (
            jnp.max(jnp.where(_first(reach, 1 + num_drafts), jnp.sum(reach, axis=2, dtype=jnp.int32), 1), axis=1) - 1
        )
    of_prefill = chosen[num_rows * queries :]
    observed = _observe(step, metadata, tokens, verified, of_prefill, hidden[0] if hidden else None, rows)
    memory = proposer.observe(of_proposer, memory, observed)
    caches = observed.moved(caches)

    state = _next_state(state, observed, verified, of_prefill, memory)
    result = jnp.concatenate([verified.tokens, depth[:, None]], axis=1).reshape(-1)
    result = jnp.concatenate([result, of_prefill])
    return result, logits[num_rows * queries :] if bucket.all_logits else None, caches, state


def _propose(
    proposer: Proposer, weights: Any, memory: Any, rows: DraftRows, bucket: Bucket
) -> tuple[DraftTree | None, Int32[Array, "Bd d"], Any]:
    """Call the proposer and check its result.

    Returns:
      The tree, None for drafts in a line; the drafts; and the proposer's state.
    """
    num_rows = bucket.decode_rows
    if not num_rows or not bucket.num_drafts:
        return None, jnp.zeros((num_rows, 0), jnp.int32), memory
    tree: DraftTree | None = None
    drafts, memory = proposer.propose(weights, memory, rows, bucket.num_drafts)
    if isinstance(drafts, DraftTree) != proposer.makes_trees:
        raise ValueError(f"propose: expected a DraftTree if and only if makes_trees, which is {proposer.makes_trees}")
    if isinstance(drafts, DraftTree):
        tree, drafts = drafts, drafts.tokens
    if drafts.shape != (num_rows, bucket.num_drafts) or drafts.dtype != jnp.int32:
        wanted = f"int32 {[num_rows, bucket.num_drafts]}"
        raise ValueError(f"propose: expected {wanted}, got {drafts.dtype.name} {list(drafts.shape)}")
    return tree, drafts, memory


def _next_state(
    state: SpeculativeState,
    observed: ObservedStep,
    verified: _Verified,
    of_prefill: Int32[Array, "S"],
    memory: Any,
) -> SpeculativeState:
    """Store the newest tokens, lengths and computed tokens of a step."""
    group, head = observed.lane
    newest = jnp.take_along_axis(verified.tokens, verified.accepted[:, None], axis=1)[:, 0]
    newest = jnp.maximum(jnp.concatenate([newest, of_prefill]), 0)  # a valid id where logits are not finite
    slots = jnp.where(observed.row_slots < 0, state.lens.shape[0], observed.row_slots)
    of_groups = observed.places or [g.slots for g in observed.metadata.groups]
    return SpeculativeState(
        newest=state.newest.at[slots].set(newest, mode="drop"),
        lens=state.lens.at[slots].set(observed.lens, mode="drop"),
        written=_write(state.written, of_groups[group], head, observed.tokens),
        proposer=memory,
    )


def read_tokens(result: np.ndarray, bucket: Bucket, num_decode: int) -> tuple[list[RowTokens], list[RowTokens]]:
    """Decode a step's result on the host. Return the tokens of the decode rows, and of all prefill rows."""
    width = 2 + bucket.num_drafts
    decode, prefill = np.split(result, [bucket.decode_rows * width])
    rows = [
        RowTokens([token for token in tokens if token != _NOTHING], drafted)
        for *tokens, drafted in decode.reshape(-1, width)[:num_decode].tolist()
    ]
    return rows, [RowTokens([token]) for token in prefill.tolist()]


def _draft_rows(config: RunnerConfig, step: PackedStep, state: SpeculativeState, lane: tuple[int, int]) -> DraftRows:
    """Make the decode rows from the state on the device. A row is idle if it reached its end in a step that the host
    had not read when it planned this step."""
    slots = jnp.maximum(step.decode_request_slots, 0)
    lens = jnp.where((step.decode_request_slots >= 0) & (state.lens[slots] < step.decode_limits), state.lens[slots], 0)
    sampling = step.sampling_rows()
    of_decode = jax.tree.map(lambda values: values[: lens.shape[0]], sampling)
    group, head = lane
    table = step.decode_tables[group]
    return DraftRows(
        slots=step.decode_request_slots,
        tokens=state.newest[slots],
        lens=lens,
        max_drafts=jnp.maximum(jnp.minimum(step.decode_drafts, step.decode_limits - lens - 1), 0),
        tables=step.decode_tables,
        sampling=dataclasses.replace(of_decode, position=lens),
        written=state.written,
        token_tables=table if table.ndim == 2 else table[:, head],
        page_size=config.page_size,
        lane=lane,
    )


def _metadata(
    config: RunnerConfig,
    step: PackedStep,
    kv_lens: Int32[Array, "Bd"],
    q_lens: Int32[Array, "Bd"],
    queries: int,
    logit_rows: Int32[Array, "n"],
    reach: Bool[Array, "Bd Q Q"] | None = None,
) -> StepMetadata:
    """Join the metadata of the decode rows and of the prefill rows."""
    if not step.decode_request_slots.shape[0]:
        return step.metadata(config.page_size, logit_rows)
    decode = decode_metadata(
        step.decode_tables, kv_lens, q_lens, queries, page_size=config.page_size, logit_rows=logit_rows, reach=reach
    )
    return decode if not step.prefill_ids.shape[0] else step.metadata(config.page_size, logit_rows, decode)


def _sampling_rows(step: PackedStep, places: Int32[Array, "BdQ"], queries: int) -> SamplingRows:
    """Sampling parameters for each query of the decode rows, then for the prefill rows."""
    given, num_rows = step.sampling_rows(), step.decode_request_slots.shape[0]

    def each(values: Array) -> Array:
        return jnp.concatenate([jnp.repeat(values[:num_rows], queries), values[num_rows:]])

    return dataclasses.replace(jax.tree.map(each, given), position=jnp.concatenate([places, given.position[num_rows:]]))


def _verify(
    chosen: Int32[Array, "Bd Q"],
    drafts: Int32[Array, "Bd d"],
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
) -> _Verified:
    """Verify drafts in a line."""
    accepted = accept(chosen, drafts, num_drafts)
    query = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None]
    is_got = (query <= accepted[:, None]) & (lens > 0)[:, None]
    tokens = jnp.where(is_got, chosen, _NOTHING)
    return _Verified(tokens, accepted, jnp.where(lens > 0, lens + accepted + 1, 0), accepted, tokens)


def _verify_tree(
    chosen: Int32[Array, "Bd Q"],
    tree: DraftTree,
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
    depth: int,
) -> _Verified:
    """Verify a tree of drafts."""
    branch, accepted = accept_branch(chosen, tree.tokens, tree.parents + 1, num_drafts, depth)
    got = _first(chosen, jnp.where(lens > 0, accepted + 1, 0))
    tokens = jnp.where(got, jnp.take_along_axis(chosen, branch, axis=1), _NOTHING)
    query = jnp.arange(chosen.shape[1], dtype=jnp.int32)
    on_branch = jnp.any(got[:, :, None] & (branch[:, :, None] == query[None, None]), axis=1)
    return _Verified(
        tokens,
        accepted,
        lens=jnp.where(lens > 0, lens + accepted + 1, 0),
        last=branch[:, -1],
        next_tokens=jnp.where(on_branch, chosen, _NOTHING),
    )


def _first(x: Array, counts: Int32[Array, "B"]) -> Bool[Array, "B n"]:
    """Mask of the first `counts[b]` entries along the second axis of `x`."""
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None] < counts[:, None]


def _observe(
    step: PackedStep,
    metadata: StepMetadata,
    tokens: Int32[Array, "T"],
    verified: _Verified,
    of_prefill: Int32[Array, "S"],
    hidden: Float[Array, "T D"] | None,
    rows: DraftRows,
) -> ObservedStep:
    """Make the proposer's view of a step after it ran."""
    num_decode, num_prefill = verified.tokens.size, step.prefill_ids.shape[0]
    index, ends = jnp.arange(num_prefill, dtype=jnp.int32), step.cu_q_lens[1:]
    after_end = jnp.where(step.prefill_next < 0, jnp.maximum(of_prefill, 0), step.prefill_next)
    starts = step.cu_q_lens[:-1]
    last = jnp.where(starts < ends, ends - 1, num_prefill)
    following = jnp.roll(step.prefill_ids, -1).at[last].set(after_end, mode="drop")
    is_prompt = index < step.cu_q_lens[-1]
    counts = verified.next_tokens != _NOTHING
    got = jnp.where(counts, jnp.maximum(verified.next_tokens, 0), -1).reshape(-1)
    firsts = jnp.arange(verified.tokens.shape[0], dtype=jnp.int32) * verified.tokens.shape[1]
    decode_request_slots = jnp.where(verified.lens > 0, step.decode_request_slots, -1)
    return ObservedStep(
        metadata=metadata,
        tokens=tokens,
        next_tokens=jnp.concatenate([got, jnp.where(is_prompt, following, -1)]),
        counts=jnp.concatenate([counts.reshape(-1), is_prompt]),
        hidden=hidden,
        row_slots=jnp.concatenate([decode_request_slots, step.prefill_request_slots]),
        last=jnp.concatenate([firsts + verified.last, num_decode + jnp.maximum(ends - 1, 0)]),
        lens=jnp.concatenate([verified.lens, step.prefill_kv_lens + 1]),
        rows=rows,
        num_drafts=max(verified.tokens.shape[1] - 1, 0),
        lane=rows.lane,
        places=None if metadata.decode_draft_mask is None else _places(step, metadata, counts, rows.page_size),
    )


def _places(
    step: PackedStep, metadata: StepMetadata, counts: Bool[Array, "Bd Q"], page_size: int
) -> tuple[Int32[Array, "T"], ...]:
    """Cache slots, for each cache group, that correspond to the positions of accepted tokens of a tree."""
    num_rows, queries = counts.shape
    num_decode = num_rows * queries
    ends = jnp.where(counts.reshape(-1), metadata.positions[:num_decode] + 1, 0)
    each = jnp.arange(num_decode + 1, dtype=jnp.int32)
    places = []
    for group, table in zip(metadata.groups, step.decode_tables, strict=True):
        tables = jnp.repeat(table, queries, axis=0)
        of_decode = slot_mapping(tables, each, ends, page_size=page_size, length=num_decode)
        places.append(jnp.concatenate([of_decode, group.slots[num_decode:]]))
    return tuple(places)


def _write(written: Int32[Array, "rows ps"], slots: Array, head: int, tokens: Int32[Array, "T"]) -> Array:
    """Write a step's token ids at the slots of their keys. Later steps overwrite rejected tokens, like their keys."""
    slots = slots if slots.ndim == 1 else slots[:, head]
    slots = jnp.where(slots < 0, written.size, slots)
    return written.reshape(-1).at[slots].set(tokens, mode="drop").reshape(written.shape)
