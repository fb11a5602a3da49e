"""The programs of a step with drafts. Drafts are guesses of later tokens, which `proposer` describes.

propose:
    drafts = proposer.propose(state, decode rows)
forward:
    logits = model(newest token and drafts of each decode row, prompt tokens)
sample:
    chosen = sample(logits)                     # one token after the newest token, and one after each draft
    accepted = number of leading drafts (in a tree: drafts of one branch) that equal the tokens chosen at their position
    tokens = chosen[: accepted + 1]             # new tokens of the row; of a tree, the tokens chosen along the branch
    proposer.observe(step)                      # the proposer updates its state
    move cache entries of accepted drafts of a tree to the slots of their positions
    store length and newest token of each row on the device

The host reads the drafts only if a row with drafts has a token filter. It then computes a token mask for each input of
the row, while the device runs `forward`. A step without drafts has no `propose`.

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
from pallas_attn.models.engine.logit_edits import DraftsBefore, EditState, make_edit
from pallas_attn.models.engine.sampler import draw
from pallas_attn.models.engine.speculation.acceptance import NOTHING, Verified, first, leading, verify, verify_tree
from pallas_attn.models.engine.speculation.proposer import (
    NO_DRAFT,
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
from pallas_attn.models.engine.step.plain import StepOutputs, logprobs_of_rows, make_outputs
from pallas_attn.models.engine.step.plan import RowTokens


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


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Drafts of the Bd decode rows of a step, on the device.

    Attributes:
      tokens: int32 [Bd, d], drafts of each row, then 0.
      counts: int32 [Bd], number of drafts of each row.
      parents: int32 [Bd, d], as `DraftTree.parents`; None for drafts in a line.
    """

    tokens: Int32[Array, "Bd d"]
    counts: Int32[Array, "Bd"]
    parents: Int32[Array, "Bd d"] | None

    @property
    def tree(self) -> DraftTree | None:
        """The tree of drafts; None for drafts in a line."""
        return None if self.parents is None else DraftTree(self.tokens, self.parents)


def has_drafts(bucket: Bucket) -> bool:
    """Whether steps of a bucket have drafts, and therefore run `propose`."""
    return bucket.decode_rows > 0 and bucket.num_drafts > 0


def propose(
    config: RunnerConfig, bucket: Bucket, weights: Any, state: SpeculativeState, packed: Int32[Array, "n"]
) -> tuple[Drafts, Int32[Array, "Bd d2"], SpeculativeState]:
    """Propose drafts for the decode rows of a step.

    Args:
      config: sizes for which the runner compiles.
      bucket: numbers of decode rows and of drafts of the step, with `has_drafts`.
      weights: weights of the proposer.
      state: state of the running requests.
      packed: metadata of the step's decode rows, from `PackedStep.pack`.

    Returns:
      The drafts; for the host, the drafts (NO_DRAFT after the last) and then the parents of each row, as in
      `DraftTree`, int32 [Bd, 2 · d]; and the new state.
    """
    proposer = _proposer(config)
    rows = _draft_rows(config, PackedStep.of(config, bucket, packed), state)
    tree, drafts, memory = _propose(proposer, weights, state.proposer, rows, bucket)
    # Drafts are counted up to the first negative id (NO_DRAFT). An id beyond the vocabulary is harmless: it is never
    # sampled, so it is never accepted.
    counts = jnp.where(rows.lens > 0, jnp.minimum(leading(drafts >= 0), rows.max_drafts), 0)
    index = jnp.arange(bucket.num_drafts, dtype=jnp.int32)[None]
    is_draft = index < counts[:, None]
    parents = jnp.broadcast_to(index - 1, drafts.shape) if tree is None else jnp.clip(tree.parents, -1, index - 1)
    for_host = jnp.concatenate([jnp.where(is_draft, drafts, NO_DRAFT), parents], axis=1)
    proposed = Drafts(jnp.where(is_draft, drafts, 0), counts, None if tree is None else tree.parents)
    return proposed, for_host, dataclasses.replace(state, proposer=memory)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Inputs of a step's model, computed on the device.

    Attributes:
      step: metadata of the step.
      rows: the decode rows.
      drafts: drafts of the decode rows.
      reach: attention masks of trees; None for drafts in a line.
      tokens: int32 [T], input tokens: Q = 1 + d of each decode row, then the prefill tokens.
      sampling: int32 [n], index of the input token after which each token is sampled.
      places: int32 [Bd · Q], position of the token sampled after each input of the decode rows.
      metadata: the target's metadata of the step.
    """

    step: PackedStep
    rows: DraftRows
    drafts: Drafts
    reach: Bool[Array, "Bd Q Q"] | None
    tokens: Int32[Array, "T"]
    sampling: Int32[Array, "n"]
    places: Int32[Array, "BdQ"]
    metadata: StepMetadata


def _inputs(
    config: RunnerConfig, bucket: Bucket, state: SpeculativeState, packed: Int32[Array, "n"], drafts: Drafts | None
) -> _Inputs:
    """Compute the inputs of a step. `forward` and `sample` both compute them, because this takes less time than further
    arguments of a program."""
    step, num_rows, queries = PackedStep.of(config, bucket, packed), bucket.decode_rows, 1 + bucket.num_drafts
    if drafts is None:
        drafts = Drafts(jnp.zeros((num_rows, bucket.num_drafts), jnp.int32), jnp.zeros((num_rows,), jnp.int32), None)
    rows, tree = _draft_rows(config, step, state), drafts.tree
    inputs = jnp.concatenate([rows.tokens[:, None], drafts.tokens], axis=1)
    tokens = jnp.concatenate([inputs.reshape(-1), step.prefill_ids])
    prefill_ends = num_rows * queries + jnp.maximum(step.cu_q_lens[1:] - 1, 0)
    sampling = jnp.concatenate([jnp.arange(num_rows * queries, dtype=jnp.int32), prefill_ends])
    logit_rows = jnp.arange(tokens.shape[0], dtype=jnp.int32) if bucket.all_logits else sampling
    q_lens = jnp.where(rows.lens > 0, 1 + drafts.counts, 0)
    kv_lens = jnp.where(rows.lens > 0, rows.lens + drafts.counts, 0)
    reach = None if tree is None else tree.reach()
    metadata = _metadata(config, step, kv_lens, q_lens, queries, logit_rows, reach)
    places = query_lens(kv_lens, q_lens, queries) if reach is None else tree_lens(kv_lens, q_lens, reach)
    return _Inputs(step, rows, drafts, reach, tokens, sampling, places, metadata)


def forward(
    model_step: Any,
    config: RunnerConfig,
    bucket: Bucket,
    weights: Any,
    caches: Caches,
    state: SpeculativeState,
    packed: Int32[Array, "n"],
    drafts: Drafts | None,
) -> tuple[StepOutputs, Caches]:
    """Run the target on the tokens of a step and on the drafts.

    Args:
      model_step, config, bucket, weights, caches, packed: as in `plain.forward`.
      state: state of the running requests, from `propose` if the step has drafts.
      drafts: result of `propose`; None without drafts.

    Returns:
      The outputs for `sample`: logits after the Q inputs of each decode row, then after each prefill row. And the
      caches with the new tokens.
    """
    inputs, num_decode = _inputs(config, bucket, state, packed, drafts), _num_decode(bucket)
    needs_hidden = _proposer(config).needs_hidden
    returns_prompts = bucket.prefill_tokens > 0 and not bucket.skips_layers
    extra = {"return_hidden": True} if needs_hidden or returns_prompts else {}
    logits, caches, *hidden = model_step(weights, inputs.tokens, caches, inputs.metadata, **extra)
    decode_hidden = hidden[0][:num_decode] if needs_hidden else None
    prompt_hidden = hidden[0][num_decode:] if returns_prompts else None
    return make_outputs(bucket, packed, logits, inputs.sampling, prompt_hidden, decode_hidden), caches


def sample(
    config: RunnerConfig,
    bucket: Bucket,
    weights: Any,
    caches: Caches,
    state: SpeculativeState,
    edits: EditState,
    outputs: StepOutputs,
    drafts: Drafts | None,
    masks: UInt32[Array, "n W"],
) -> tuple[Int32[Array, "m"], Int32[Array, "n words"], Caches, SpeculativeState, EditState]:
    """Sample tokens, verify the drafts, and update the state of the running requests.

    Args:
      config, bucket: as in `forward`.
      weights: weights of the proposer.
      caches: caches of all layers if the drafts form trees; otherwise empty.
      state: state of the running requests, as passed to `forward`.
      edits: state of the request slots, for changes of logits.
      outputs: result of `forward`.
      drafts: as in `forward`.
      masks: bit masks of allowed tokens after each input of the decode rows and after each prefill row; ignored for
        rows without a token filter.

    Returns:
      Sampled tokens in the format of `read_tokens`; log probabilities of the Q tokens of each decode row, then of the
      token of each prefill row, as `pack_logprobs`; the caches; and the new state and `edits`.
    """
    proposer, num_decode, queries = _proposer(config), _num_decode(bucket), 1 + bucket.num_drafts
    inputs = _inputs(config, bucket, state, outputs.rows, drafts)
    drafts, rows, reach, tree = inputs.drafts, inputs.rows, inputs.reach, inputs.drafts.tree
    num_rows, logits = bucket.decode_rows, outputs.logits
    parameters = jax.tree.map(lambda x: _repeated(x, num_rows, queries), inputs.step.row_parameters())
    positions = jnp.concatenate([inputs.places, parameters.positions[num_decode:]])
    parameters = dataclasses.replace(parameters, positions=positions)
    sampled, edited = parameters.sampling_rows(), parameters.edit_rows(config, masks)
    before = DraftsBefore(drafts.tokens, _line_reach(num_rows, queries) if reach is None else reach)
    chosen = draw(logits, sampled, make_edit(edited, sampled.position, edits, config.logits_processor, before))
    logprobs = logprobs_of_rows(config, edited, logits, chosen)
    of_rows = chosen[:num_decode].reshape(num_rows, queries)
    if tree is None or reach is None:
        verified, depth = verify(of_rows, drafts.tokens, drafts.counts, rows.lens), drafts.counts
    else:
        verified = verify_tree(of_rows, tree, drafts.counts, rows.lens, proposer.depth(bucket.num_drafts))
        is_input = first(reach, 1 + drafts.counts)
        depth = jnp.max(jnp.where(is_input, jnp.sum(reach, axis=2, dtype=jnp.int32), 1), axis=1) - 1
    of_prefill = chosen[num_decode:]
    hidden = None
    if proposer.needs_hidden:
        # On a mesh, XLA for CPUs crashes if an empty argument is concatenated.
        parts = [x for x in (outputs.decode_hidden, outputs.prompt_hidden) if x is not None and x.shape[0]]
        hidden = jnp.concatenate(parts)
    observed = _observe(inputs.step, inputs.metadata, inputs.tokens, verified, of_prefill, hidden, rows)
    memory = proposer.observe(weights, state.proposer, observed)
    caches = observed.moved(caches)

    state = _next_state(state, observed, verified, of_prefill, memory)
    result = jnp.concatenate([verified.tokens, depth[:, None]], axis=1).reshape(-1)
    result = jnp.concatenate([result, of_prefill])
    edits = edits.with_sampled(edited, jnp.concatenate([verified.tokens.reshape(-1), of_prefill]))
    sampled_after = (jnp.arange(num_rows, dtype=jnp.int32)[:, None] * queries + verified.inputs).reshape(-1)
    logprobs = jnp.concatenate([logprobs[sampled_after], logprobs[num_decode:]])
    return result, logprobs, caches, state, edits


def _proposer(config: RunnerConfig) -> Proposer:
    if config.speculate is None:
        raise ValueError("speculate: expected a Speculation, got None")
    return config.speculate.proposer


def _num_decode(bucket: Bucket) -> int:
    """Number of inputs of all decode rows of a bucket, including padding."""
    return bucket.decode_rows * (1 + bucket.num_drafts)


def _propose(
    proposer: Proposer, weights: Any, memory: Any, rows: DraftRows, bucket: Bucket
) -> tuple[DraftTree | None, Int32[Array, "Bd d"], Any]:
    """Call the proposer and check its result.

    Returns:
      The tree, or None for drafts in a line; the drafts [Bd, d]; and the proposer's state.
    """
    num_rows = bucket.decode_rows
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
    verified: Verified,
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
    """Split the tokens that `sample` returns into rows, on the host.

    Args:
      result: int32 [Bd · (2 + d) + prefill rows]. Each decode row has Q = 1 + d tokens, padded with NOTHING, and then
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
        RowTokens([token for token in tokens if token != NOTHING], drafted)
        for *tokens, drafted in decode.reshape(-1, width)[:num_decode].tolist()
    ]
    return rows, [RowTokens([token]) for token in prefill.tolist()]


def _draft_rows(config: RunnerConfig, step: PackedStep, state: SpeculativeState) -> DraftRows:
    """Return the decode rows, with lengths and newest tokens from the state on the device. A row whose request reached
    its maximum length in an earlier step is idle: the host had not read that step when it planned this one."""
    slots = jnp.maximum(step.decode_request_slots, 0)
    lens = jnp.where((step.decode_request_slots >= 0) & (state.lens[slots] < step.decode_limits), state.lens[slots], 0)
    sampling = step.row_parameters().sampling_rows()
    of_decode = jax.tree.map(lambda values: values[: lens.shape[0]], sampling)
    group, head = lane = proposer_sizes(config, 0).lane
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


def _repeated(values: Array, num_rows: int, queries: int) -> Array:
    """Repeat each of the first `num_rows` entries along axis 0 `queries` times."""
    return jnp.concatenate([jnp.repeat(values[:num_rows], queries, axis=0), values[num_rows:]])


def _line_reach(num_rows: int, queries: int) -> Bool[Array, "Bd Q Q"]:
    """Return `DraftTree.reach` of drafts in a line."""
    index = jnp.arange(queries, dtype=jnp.int32)
    return jnp.broadcast_to(index[:, None] >= index[None], (num_rows, queries, queries))


def _observe(
    step: PackedStep,
    metadata: StepMetadata,
    tokens: Int32[Array, "T"],
    verified: Verified,
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
    counts = verified.next_tokens != NOTHING
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
