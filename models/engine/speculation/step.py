"""The function of a step with drafts. Drafts are guesses of later tokens, which `proposer` describes.

    drafts = proposer.propose(state, decode rows)
    logits = model(newest token and drafts of each decode row, prompt tokens)
    chosen = sample(logits)                     # one token after the newest token, and one after each draft
    accepted = number of leading drafts (in a tree: drafts of one branch) that equal the tokens chosen at their position
    tokens = chosen[: accepted + 1]             # new tokens of the row; of a tree, the tokens chosen along the branch
    proposer.observe(step)                      # the proposer updates its state
    move cache entries of accepted drafts of a tree to the slots of their positions
    store length and newest token of each row on the device

The host launches the next step before it has read the tokens of this step, so it does not know the number of accepted
drafts. Therefore lengths, newest tokens and drafts stay on the device. The host provides pages, maximum lengths and
sampling parameters.

A bucket is the padded shape of a step, for which its program is compiled. A cache group is a set of layers with equal
attention windows, which share block tables. A page row is the unit of cache allocation: one page of one KV head if the
heads of the group have different windows, otherwise one page of all heads. Block tables have indices of page rows. A
cache slot is the index of a token's place in the cache: page row · page size + offset.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_attn import FULL, slot_mapping
from pallas_attn.models.config import HeadWindows, ModelConfig, cache_groups
from pallas_attn.models.decoder import AttentionSettings, Caches, StepMetadata
from pallas_attn.models.decoder.mesh import AXES, DATA
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.logit_edits import DraftsBefore, EditRows, EditState, make_edit
from pallas_attn.models.engine.sampler import SamplingRows, draw
from pallas_attn.models.engine.speculation.proposer import (
    DraftRows,
    DraftTree,
    ObservedStep,
    Proposer,
    ProposerSizes,
    decode_metadata,
    query_lens,
    tree_lens,
)
from pallas_attn.models.engine.step.packed import PackedStep
from pallas_attn.models.engine.step.plain import LogitsOf, logprobs_of_rows, with_prompt_logprobs
from pallas_attn.models.engine.step.plan import RowTokens

_NOTHING = -2
"""Entry of an array of tokens that stands for no token: padding after the last token of a row, or no sampled token."""


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """State of the running requests on the device, in addition to their caches. A request slot is the index of a
    running request.

    Attributes:
      newest: int32 [request slots], newest token of each request. Its keys and values are not in the cache yet.
      lens: int32 [request slots], number of tokens of each request, including the newest.
      written: int32 [page rows, ps], token ids of all cached tokens by page row and offset, for the pages of the head
        with the longest window (`ProposerSizes.lane`). Requests that share pages share these entries.
      proposer: state of the proposer.
    """

    newest: Int32[Array, "slots"]
    lens: Int32[Array, "slots"]
    written: Int32[Array, "rows ps"]
    proposer: Any


def state_partition() -> SpeculativeState:
    """Return the `PartitionSpec` of each field of the state on a mesh. The proposer's state may differ on each device.
    The other fields are equal on all devices of a data rank (a group of devices with its own requests)."""
    of_ranks: Any = PartitionSpec(DATA)
    return SpeculativeState(of_ranks, of_ranks, of_ranks, proposer=PartitionSpec(AXES))


def proposer_sizes(config: RunnerConfig, num_layers: int, mesh: Mesh | None = None) -> ProposerSizes:
    """Return the sizes of the engine for `Proposer.allocate`."""
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
    """Allocate the state that the first step gets."""
    group, _ = sizes.lane
    slots = jnp.zeros((sizes.max_num_seqs,), jnp.int32)
    written = jnp.zeros((sizes.groups[group].num_rows, sizes.page_size), jnp.int32)
    return SpeculativeState(slots, jnp.zeros_like(slots), written, proposer.allocate(sizes))


def check_trees(config: ModelConfig, settings: AttentionSettings, contexts: int = 1) -> None:
    """Raise NotImplementedError if a model's attention does not support trees of drafts.

    A tree needs an attention mask between the tokens of a decode row. Its drafts are in consecutive cache slots, so the
    slot of a draft does not give its position.

    Args:
      config: configuration of the model.
      settings: attention settings of the model.
      contexts: number of devices that the tokens of each page are split over; 1 if they are not split.
    """
    reason = None
    if any(group.window is not None for group in cache_groups(config)):
        reason = "windows are computed from cache slots, which differ from positions in a tree"
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
    """Result of verification for the Bd decode rows of a step. Each row has Q = 1 + d inputs: input 0 is the newest
    token, and input j + 1 is draft j.

    Attributes:
      tokens: int32 [Bd, Q], new tokens of each row: the tokens sampled after input 0 and after each accepted draft, in
        order; then _NOTHING.
      accepted: int32 [Bd], number of accepted drafts.
      lens: int32 [Bd], number of tokens of each sequence with the new tokens; 0 for idle rows.
      last: int32 [Bd], index of the input that is the last accepted draft; 0 if no draft is accepted.
      next_tokens: int32 [Bd, Q], token sampled after each input, if the input is 0 or an accepted draft; else _NOTHING.
      inputs: int32 [Bd, Q], index of the input after which each of `tokens` was sampled.
    """

    tokens: Int32[Array, "Bd Q"]
    accepted: Int32[Array, "Bd"]
    lens: Int32[Array, "Bd"]
    last: Int32[Array, "Bd"]
    next_tokens: Int32[Array, "Bd Q"]
    inputs: Int32[Array, "Bd Q"]


def accept(
    chosen: Int32[Array, "B Q"], drafts: Int32[Array, "B d"], num_drafts: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Return the number of accepted drafts of each row: leading drafts that equal the tokens sampled at their
    positions.

    Args:
      chosen: tokens sampled after the newest token and after each draft, Q = 1 + d.
      drafts: drafts in a line.
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
    """Find the accepted branch of each row's tree: the drafts on it equal the tokens sampled at their positions.

    Input 0 is the newest token, and input j + 1 is draft j.

    Args:
      chosen: tokens sampled after each input, Q = 1 + d.
      drafts: drafts of the tree.
      parents: index of the input that each draft follows.
      num_drafts: number of drafts of each row.
      depth: number of drafts of the longest branch.

    Returns:
      Indices of the inputs along the branch, starting with 0, and repeating the last input up to Q entries; and the
      number of drafts on the branch.
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
    """Return the number of leading True entries of each row."""
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
    edits: EditState,
    masks: UInt32[Array, "rows W"],
    *,
    logits_of: LogitsOf | None = None,
) -> tuple[
    Int32[Array, "n"], Int32[Array, "m words"], Float[Array, "tokens V"] | None, Caches, SpeculativeState, EditState
]:
    """Run one step on the device.

    Args:
      model_step: the model as a function (weights, tokens, caches, metadata) -> (logits, caches), from `split_model`.
      config: sizes for which the runner compiles.
      bucket: padded shape of the step.
      weights: (weights of the model, weights of the proposer).
      caches: caches of all layers.
      state: state of the running requests.
      packed: the step's metadata, from `PackedStep.pack`.
      edits: state of the request slots, for changes of logits.
      masks: bit masks of allowed tokens of each row; ignored for rows without a token filter. Rows with a token filter
        have no drafts.
      logits_of: as in `run_step`.

    Returns:
      Sampled tokens in the format of `read_tokens`; log probabilities of the Q tokens of each decode row, then of the
      token of each prefill row, then of prompt tokens, as `pack_logprobs`; logits of the prefill tokens, or None if
      `bucket.all_logits` is False; caches with the new tokens; and the new state and `edits`.
    """
    if config.speculate is None:
        raise ValueError("speculate: expected a Speculation, got None")
    proposer, (of_target, of_proposer) = config.speculate.proposer, weights
    step, num_rows, queries = PackedStep.of(config, bucket, packed), bucket.decode_rows, 1 + bucket.num_drafts
    lane = proposer_sizes(config, 0).lane
    rows = _draft_rows(config, step, state, lane)
    tree, drafts, memory = _propose(proposer, of_proposer, state.proposer, rows, bucket)
    # Drafts are counted up to the first negative id (NO_DRAFT). An id beyond the vocabulary is harmless: it is never
    # sampled, so it is never accepted.
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
    scores = logits_of is not None and bucket.prefill_tokens > 0
    extra = {"return_hidden": True} if proposer.needs_hidden or scores else {}
    logits, caches, *hidden = model_step(of_target, tokens, caches, metadata, **extra)

    places = query_lens(kv_lens, q_lens, queries) if reach is None else tree_lens(kv_lens, q_lens, reach)
    of_sampling = logits[sampling] if bucket.all_logits else logits
    sampled, edited = _sampling_rows(step, places, queries), _edit_rows(config, step, masks, queries)
    before = DraftsBefore(drafts, _line_reach(num_rows, queries) if reach is None else reach)
    chosen = draw(of_sampling, sampled, make_edit(edited, sampled.position, edits, config.logits_processor, before))
    logprobs = logprobs_of_rows(config, edited, of_sampling, chosen)
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
    observed = _observe(
        step, metadata, tokens, verified, of_prefill, hidden[0] if proposer.needs_hidden else None, rows
    )
    memory = proposer.observe(of_proposer, memory, observed)
    caches = observed.moved(caches)

    state = _next_state(state, observed, verified, of_prefill, memory)
    result = jnp.concatenate([verified.tokens, depth[:, None]], axis=1).reshape(-1)
    result = jnp.concatenate([result, of_prefill])
    edits = edits.with_sampled(edited, jnp.concatenate([verified.tokens.reshape(-1), of_prefill]))
    inputs = (jnp.arange(num_rows, dtype=jnp.int32)[:, None] * queries + verified.inputs).reshape(-1)
    logprobs = jnp.concatenate([logprobs[inputs], logprobs[num_rows * queries :]])
    if logits_of is not None and scores:
        of_prompt = functools.partial(logits_of, of_target)
        logprobs = with_prompt_logprobs(config, step, logprobs, hidden[0][num_rows * queries :], of_prompt)
    prompt_logits = logits[num_rows * queries :] if bucket.all_logits else None
    return result, logprobs, prompt_logits, caches, state, edits


def _propose(
    proposer: Proposer, weights: Any, memory: Any, rows: DraftRows, bucket: Bucket
) -> tuple[DraftTree | None, Int32[Array, "Bd d"], Any]:
    """Call the proposer, unless the step has no decode rows or no drafts, and check its result.

    Returns:
      The tree, or None for drafts in a line; the drafts [Bd, d]; and the proposer's state.
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
    """Return the state after a step: newest tokens and lengths by request slot, and the step's input tokens by page
    row."""
    group, head = observed.lane
    newest = jnp.take_along_axis(verified.tokens, verified.accepted[:, None], axis=1)[:, 0]
    newest = jnp.maximum(jnp.concatenate([newest, of_prefill]), 0)  # NONFINITE (-1) is no valid input of the next step
    slots = jnp.where(observed.row_slots < 0, state.lens.shape[0], observed.row_slots)
    of_groups = observed.places or [g.slots for g in observed.metadata.groups]
    return SpeculativeState(
        newest=state.newest.at[slots].set(newest, mode="drop"),
        lens=state.lens.at[slots].set(observed.lens, mode="drop"),
        written=_write(state.written, of_groups[group], head, observed.tokens),
        proposer=memory,
    )


def read_tokens(result: np.ndarray, bucket: Bucket, num_decode: int) -> tuple[list[RowTokens], list[RowTokens]]:
    """Split the tokens that `run_speculative_step` returns into rows, on the host.

    Args:
      result: int32 [Bd · (2 + d) + prefill rows]. Each decode row has Q = 1 + d tokens, padded with _NOTHING, and then
        `RowTokens.drafted`: the number of verified drafts, or for a tree the length of the longest branch of verified
        drafts. The decode rows are followed by one token per prefill row.
      bucket: padded shape of the step.
      num_decode: number of decode rows that are not padding.

    Returns:
      Tokens of the decode rows without padding, and tokens of all prefill rows.
    """
    width = 2 + bucket.num_drafts
    decode, prefill = np.split(result, [bucket.decode_rows * width])
    rows = [
        RowTokens([token for token in tokens if token != _NOTHING], drafted)
        for *tokens, drafted in decode.reshape(-1, width)[:num_decode].tolist()
    ]
    return rows, [RowTokens([token]) for token in prefill.tolist()]


def _draft_rows(config: RunnerConfig, step: PackedStep, state: SpeculativeState, lane: tuple[int, int]) -> DraftRows:
    """Return the decode rows, with lengths and newest tokens from the state on the device. A row whose request reached
    its maximum length in an earlier step is idle: the host had not read that step when it planned this one."""
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
    """Return the target's metadata of the step.

    Args:
      config, step: sizes and packed metadata.
      kv_lens: number of tokens of each decode row, including drafts.
      q_lens: number of inputs of each decode row: the newest token and drafts; 0 for idle rows.
      queries: Q, number of inputs to which decode rows are padded.
      logit_rows: indices of the tokens for which logits are computed.
      reach: attention masks of trees; None for drafts in a line.
    """
    if not step.decode_request_slots.shape[0]:
        return step.metadata(config.page_size, logit_rows)
    decode = decode_metadata(
        step.decode_tables, kv_lens, q_lens, queries, page_size=config.page_size, logit_rows=logit_rows, reach=reach
    )
    return decode if not step.prefill_ids.shape[0] else step.metadata(config.page_size, logit_rows, decode)


def _sampling_rows(step: PackedStep, places: Int32[Array, "BdQ"], queries: int) -> SamplingRows:
    """Return the sampling parameters for each input of the decode rows, then for each prefill row. `places` are the
    positions of the tokens sampled after the inputs of decode rows."""
    given, num_rows = step.sampling_rows(), step.decode_request_slots.shape[0]
    expanded = jax.tree.map(lambda values: _repeated(values, num_rows, queries), given)
    return dataclasses.replace(expanded, position=jnp.concatenate([places, given.position[num_rows:]]))


def _edit_rows(config: RunnerConfig, step: PackedStep, masks: UInt32[Array, "rows W"], queries: int) -> EditRows:
    """Return the parameters that change logits for each input of the decode rows, then for each prefill row."""
    num_rows = step.decode_request_slots.shape[0]
    return jax.tree.map(lambda values: _repeated(values, num_rows, queries), step.edit_rows(config, masks))


def _repeated(values: Array, num_rows: int, queries: int) -> Array:
    """Repeat each of the first `num_rows` entries along axis 0 `queries` times."""
    return jnp.concatenate([jnp.repeat(values[:num_rows], queries, axis=0), values[num_rows:]])


def _line_reach(num_rows: int, queries: int) -> Bool[Array, "Bd Q Q"]:
    """Return `DraftTree.reach` of drafts in a line."""
    index = jnp.arange(queries, dtype=jnp.int32)
    return jnp.broadcast_to(index[:, None] >= index[None], (num_rows, queries, queries))


def _verify(
    chosen: Int32[Array, "Bd Q"],
    drafts: Int32[Array, "Bd d"],
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
) -> _Verified:
    """Compare drafts in a line with the tokens sampled after each input (`chosen`). `lens` is 0 for idle rows."""
    accepted = accept(chosen, drafts, num_drafts)
    query = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None]
    is_got = (query <= accepted[:, None]) & (lens > 0)[:, None]
    tokens = jnp.where(is_got, chosen, _NOTHING)
    inputs = jnp.broadcast_to(query, tokens.shape)
    return _Verified(tokens, accepted, jnp.where(lens > 0, lens + accepted + 1, 0), accepted, tokens, inputs)


def _verify_tree(
    chosen: Int32[Array, "Bd Q"],
    tree: DraftTree,
    num_drafts: Int32[Array, "Bd"],
    lens: Int32[Array, "Bd"],
    depth: int,
) -> _Verified:
    """Compare the drafts of a tree with the tokens sampled after each input (`chosen`). `depth` is the length of the
    longest branch; `lens` is 0 for idle rows."""
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
        inputs=branch,
    )


def _first(x: Array, counts: Int32[Array, "B"]) -> Bool[Array, "B n"]:
    """Return a mask [B, n] of the first `counts[b]` entries of row b, with n = x.shape[1]."""
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
    """Return the inputs and results of a step for `Proposer.observe`."""
    num_decode, num_prefill = verified.tokens.size, step.prefill_ids.shape[0]
    index, ends = jnp.arange(num_prefill, dtype=jnp.int32), step.cu_q_lens[1:]
    after_end = jnp.where(step.prefill_next < 0, jnp.maximum(of_prefill, 0), step.prefill_next)
    following = dataclasses.replace(step, prefill_next=after_end).next_prompt_tokens()
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
    """Return `ObservedStep.places`: for each cache group, the cache slot of the position of each input of a tree."""
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
    """Store a step's token ids in `written` at the cache slots of their keys. Rejected drafts are overwritten by the
    tokens of later steps."""
    slots = slots if slots.ndim == 1 else slots[:, head]
    slots = jnp.where(slots < 0, written.size, slots)
    return written.reshape(-1).at[slots].set(tokens, mode="drop").reshape(written.shape)
