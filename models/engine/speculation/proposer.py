"""Interface of speculative decoding: the base class of draft proposers, and the option `Speculation` of an engine.

A draft is a guess of a later token of a decoding request, made by a proposer. One step of the engine's model, called
the target, computes the newest token and all drafts of a row together, and samples a token after each of them. The
sampled token of a position is the token that decoding without drafts would give, because a draw depends only on the
request's seed and the position.

A draft is accepted if it equals the token sampled at its position, and all drafts before it are accepted. The row gains
the accepted drafts and the token sampled after the last accepted draft. Therefore the output does not depend on the
drafts. A draft x is accepted with its probability p(x) under the target. If x is rejected, the sampled token has the
distribution p without x, renormalised. Rejection sampling (Leviathan et al., arXiv:2211.17192) has the same
probabilities if its proposal distribution always gives x.

Drafts are in a line (one draft per position), or form a tree, in which several drafts may follow the same token. In a
tree, each draft attends to the drafts before it on its branch. The drafts of one branch are accepted: the drafts that
equal the tokens sampled at their positions.

Drafts are proposed, verified and accepted on the device within one step. Therefore the host can launch the next step
before it has read the tokens of this one.

A page row is the unit of cache allocation: one page of one KV head if the heads of a layer have different windows,
otherwise one page of all heads. The entries of a block table are indices of page rows; indices of pages of all heads
are called page ids. A cache slot is the index of a token's place in the cache: page row · page size + offset.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import PAGE_NONE, slot_mapping
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import GroupTables, LayerCache, StepMetadata, move_tokens
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.sampler import SamplingRows

NO_DRAFT = -1
"""Entry of a row's drafts after its last draft, if it has fewer drafts than the array has columns."""


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Drafts of B rows that form trees: several drafts may follow the same token.

    Attributes:
      tokens: int32 [B, d], token ids of the drafts; NO_DRAFT after the last draft of a row.
      parents: int32 [B, d], index of the draft that precedes each draft on its branch, smaller than the index of the
        draft itself; -1 if the draft follows the row's newest token.
    """

    tokens: Int32[Array, "B d"]
    parents: Int32[Array, "B d"]

    def reach(self) -> Bool[Array, "B Q Q"]:
        """Return the attention mask of each row: entry [b, i, j] is True if input j is input i or precedes it on its
        branch. Input 0 is the newest token, and input j + 1 is draft j; Q = 1 + d."""
        batch, count = self.parents.shape
        parents = jnp.clip(self.parents, -1, jnp.arange(count, dtype=jnp.int32)[None] - 1) + 1
        inputs = jnp.arange(count + 1, dtype=jnp.int32)
        of_newest = jnp.zeros((batch, 1), jnp.int32)
        step = jnp.concatenate([of_newest, parents], axis=1)[:, :, None] == inputs[None, None]
        reach = step | (inputs[:, None] == inputs[None])[None]
        for _ in range(count.bit_length()):  # each iteration doubles the distance to the ancestors that are found
            reach = jnp.any(reach[:, :, :, None] & reach[:, None], axis=2)
        return reach


@dataclasses.dataclass(frozen=True)
class ProposerSizes:
    """Sizes of an engine, which determine the shapes of a proposer's arrays.

    On a mesh, a data rank is a group of devices with its own requests. All sizes are per data rank. Each device of a
    data rank has the numbers of pages in `groups`.

    Attributes:
      max_num_seqs: number of request slots: indices of running requests in device arrays.
      page_size: tokens per page.
      table_pages: maximum number of pages per sequence.
      groups: the target's cache groups (layers with equal attention windows), with their windows and numbers of pages.
      max_drafts: maximum number of drafts per row.
      cache_dtype: dtype of the engine's caches; None for the model's dtype.
      mesh: devices of the engine; None for one device.
    """

    max_num_seqs: int
    page_size: int
    table_pages: int
    groups: tuple[GroupSizes, ...]
    max_drafts: int
    cache_dtype: DTypeLike | None = None
    mesh: Mesh | None = None

    @property
    def lane(self) -> tuple[int, int]:
        """Indices (cache group, head) of the head with the longest window. Its pages have the most tokens of a
        sequence, so a proposer uses its block table to store data per token. The head is 0 if all heads have equal
        windows."""
        lanes = [(group, head) for group, sizes in enumerate(self.groups) for head in range(sizes.num_heads)]
        return max(lanes, key=lambda lane: self.groups[lane[0]].heads.window[lane[1]])


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRows:
    """The B decode rows of a step before it runs. All arrays are int32.

    Attributes:
      slots: [B], request slot of each row; -1 for an idle row (padding).
      tokens: [B], newest token of each row, at position lens - 1. Its keys and values are not in the cache yet.
      lens: [B], number of tokens of each row, including the newest; 0 for an idle row.
      max_drafts: [B], number of drafts that the row has room for. Further drafts are ignored.
      tables: block tables of each cache group, [B, P] of page ids or [B, Hkv, P] of page rows. They have pages for the
        newest token and max_drafts drafts.
      sampling: sampling parameters of the token after the newest token, which is at the position of the first draft.
      written: [page rows, ps], token ids of all cached tokens, by page row and offset in the page.
      token_tables: [B, P], page rows of each sequence in `written`: the block table of the cache group and head `lane`.
      page_size: ps, tokens per page.
      lane: `ProposerSizes.lane`.
    """

    slots: Int32[Array, "B"]
    tokens: Int32[Array, "B"]
    lens: Int32[Array, "B"]
    max_drafts: Int32[Array, "B"]
    tables: tuple[Int32[Array, "B P"] | Int32[Array, "B Hkv P"], ...]
    sampling: SamplingRows
    written: Int32[Array, "rows ps"]
    token_tables: Int32[Array, "B P"]
    page_size: int = dataclasses.field(metadata={"static": True})
    lane: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def written_at(self, positions: Int32[Array, "B"]) -> Int32[Array, "B"]:
        """Return the token id at one position of each row, [B]; an arbitrary id if the position is not cached."""
        entry, offset = jnp.divmod(jnp.maximum(positions, 0), self.page_size)
        rows = jnp.take_along_axis(self.token_tables, entry[:, None], axis=1)[:, 0]
        return self.written[jnp.maximum(rows, 0), offset]

    def history(self) -> Int32[Array, "B N"]:
        """Return the tokens of each row by position, [B, N] with N = P · ps. Positions after the newest token, and
        positions whose page has been released because it lies before all windows, have -1."""
        pages = self.written[jnp.maximum(self.token_tables, 0)]
        tokens = jnp.where(self.token_tables[:, :, None] >= 0, pages, -1).reshape(self.token_tables.shape[0], -1)
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        newest = self.lens[:, None] - 1
        tokens = jnp.where(position < newest, tokens, -1)
        return jnp.where(position == newest, self.tokens[:, None], tokens)

    def decode_step(self, ahead: int = 0, queries: int = 1) -> StepMetadata:
        """Return metadata of a decode step of another model, such as a draft model, whose cache has the same block
        tables.

        Each row computes `queries` tokens. The last one is `ahead` positions after the newest token, and logits are
        computed for it. Rows without room for `ahead` drafts are idle.
        """
        rows = self.lens.shape[0]
        is_real = (self.lens > 0) & (ahead <= self.max_drafts)
        kv_lens = jnp.where(is_real, self.lens + ahead, 0)
        return decode_metadata(
            self.tables,
            kv_lens,
            jnp.where(is_real, jnp.minimum(kv_lens, queries), 0),
            queries,
            page_size=self.page_size,
            logit_rows=(jnp.arange(rows, dtype=jnp.int32) + 1) * queries - 1,
        )


def decode_metadata(
    tables: tuple[Array, ...],
    kv_lens: Int32[Array, "B"],
    q_lens: Int32[Array, "B"],
    queries: int,
    *,
    page_size: int,
    logit_rows: Int32[Array, "n"],
    reach: Bool[Array, "B Q Q"] | None = None,
) -> StepMetadata:
    """Make the metadata of a step that has only decode rows.

    Args:
      tables: block tables of each cache group.
      kv_lens: number of tokens of each row, including new tokens; 0 for an idle row.
      q_lens: number of new tokens of each row, at most `queries`.
      queries: number of new tokens to which every row is padded.
      page_size: tokens per page.
      logit_rows: indices of the tokens for which logits are computed.
      reach: `DraftTree.reach` if the drafts form trees; None for drafts in a line. The inputs of a tree are written to
        consecutive cache slots in order of their index, like drafts in a line. Positions are by depth in the tree.
    """
    ends = query_lens(kv_lens, q_lens, queries)
    depths = None if reach is None else tree_lens(kv_lens, q_lens, reach)
    each = jnp.arange(ends.shape[0] + 1, dtype=jnp.int32)
    groups = []
    for table in tables:
        of_tokens = jnp.repeat(table, queries, axis=0)
        slots = slot_mapping(of_tokens, each, ends, page_size=page_size, length=ends.shape[0])
        groups.append(GroupTables(slots, table, table[:0]))
    return StepMetadata(
        positions=jnp.maximum((ends if depths is None else depths) - 1, 0),
        groups=tuple(groups),
        decode_kv_lens=kv_lens,
        cu_q_lens=jnp.zeros(1, jnp.int32),
        prefill_kv_lens=jnp.zeros(0, jnp.int32),
        logit_rows=logit_rows,
        decode_q_lens=None if queries == 1 else q_lens,
        decode_queries=queries,
        decode_draft_mask=reach,
    )


def tree_lens(kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"], reach: Bool[Array, "B Q Q"]) -> Int32[Array, "BQ"]:
    """Return the number of tokens that each input of a tree attends to, including itself; 0 for padding. The position
    of the input is this number minus 1."""
    seen = (kv_lens - q_lens)[:, None] + jnp.sum(reach, axis=2, dtype=jnp.int32)
    return jnp.where(jnp.arange(reach.shape[1], dtype=jnp.int32)[None] < q_lens[:, None], seen, 0).reshape(-1)


def query_lens(kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"], queries: int) -> Int32[Array, "BQ"]:
    """Return the number of tokens that each input of drafts in a line attends to, including itself; 0 for padding.

    Args:
      kv_lens: number of tokens of each row, including its inputs.
      q_lens: number of inputs of each row.
      queries: Q, number of inputs to which rows are padded.
    """
    query = jnp.arange(queries, dtype=jnp.int32)[None]
    ends = jnp.where(query < q_lens[:, None], (kv_lens - q_lens)[:, None] + query + 1, 0)
    return ends.reshape(-1)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedStep:
    """Inputs and results of a step after verification, for `Proposer.observe`.

    The T inputs are 1 + num_drafts tokens of each decode row, then the prefill tokens. R is the number of decode
    rows and prefill rows. Both include padding.

    Attributes:
      metadata: the target's metadata of the step.
      tokens: int32 [T], input tokens.
      next_tokens: int32 [T], token that follows each input in its sequence; -1 for padding and rejected drafts.
      counts: bool [T], whether an input belongs to its sequence: it is neither padding nor a rejected draft.
      hidden: [T, D], hidden states of the target; None unless the proposer needs them.
      row_slots: int32 [R], request slot of each row, decode rows first; -1 for idle rows and for prompts that continue
        in a later step.
      last: int32 [R], index in [0, T) of the last input of each row that belongs to its sequence.
      lens: int32 [R], number of tokens of each sequence, including tokens sampled by this step.
      rows: the decode rows before the step, as passed to `propose`.
      num_drafts: number of drafts to which decode rows are padded.
      lane: `ProposerSizes.lane`.
      places: for trees of drafts, int32 [T] for each cache group: the cache slot of each input's position, where
        decoding without drafts would write it; -1 for inputs that do not belong to their sequence. None for drafts in a
        line, which are written to these slots in the first place.
    """

    metadata: StepMetadata
    tokens: Int32[Array, "T"]
    next_tokens: Int32[Array, "T"]
    counts: Bool[Array, "T"]
    hidden: Float[Array, "T D"] | None
    row_slots: Int32[Array, "R"]
    last: Int32[Array, "R"]
    lens: Int32[Array, "R"]
    rows: DraftRows
    num_drafts: int = dataclasses.field(metadata={"static": True})
    lane: tuple[int, int] = dataclasses.field(metadata={"static": True})
    places: tuple[Int32[Array, "T"], ...] | None = None

    def moved(self, caches: tuple[LayerCache, ...], group: int = 0) -> tuple[LayerCache, ...]:
        """Move the cache entries of accepted drafts of a tree from the slots where the step wrote them to the slots of
        their positions. Drafts in a line are already there.

        Args:
          caches: caches of layers of one cache group.
          group: index of the cache group.

        Returns:
          The caches after the move.
        """
        if self.places is None:
            return caches
        written, places = self.metadata.of_group(group).slots, self.places[group]
        places = jnp.where(places == written, PAGE_NONE, places)
        return tuple(move_tokens(cache, written, places) for cache in caches)

    def kept(self, slots: Array) -> Array:
        """Return `slots` (cache slots, [T] or [T, Hkv]) with -1 for padding and rejected drafts, whose cache entries
        are then not written."""
        counts = self.counts if slots.ndim == 1 else self.counts[:, None]
        return jnp.where(counts, slots, PAGE_NONE)


class Proposer:
    """Base class of proposers. A proposer without state overrides only `propose`.

    `propose` and `observe` are traced into the engine's step, so they must be jax functions with static shapes. Their
    results affect the number of steps of a request, but never its tokens.

    On a mesh both run on each device inside `jax.shard_map`. Devices of one data rank get equal rows, hidden states and
    tokens, and must propose equal drafts. The weights are sharded like the weights of a model that was loaded for the
    mesh, or are equal on all devices. The state may differ on each device.

    Attributes:
      needs_hidden: whether `observe` needs the target's hidden states.
      makes_trees: whether `propose` returns a `DraftTree`.
      weights: pytree of arrays that is passed to `propose` and `observe`. Steps do not change it. The proposer may
        replace it between steps by arrays of the same shapes.
      weight_names: names of the leaves of `weights`, for `Engine.update_weights`; None for their paths in the tree.
      draft_bytes: bytes of weights that the proposer reads to make one draft for all rows. The engine estimates the
        cost of a draft from this number.
    """

    needs_hidden: bool = False
    makes_trees: bool = False
    weights: Any = ()
    weight_names: tuple[str, ...] | None = None
    draft_bytes: int = 0

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raise ValueError or NotImplementedError if the proposer does not support the model or the sizes."""

    def allocate(self, sizes: ProposerSizes) -> Any:
        """Return the initial state, a pytree of arrays on the device. The state is donated to every step. On a mesh
        this method runs inside `jax.shard_map` on each device, and every array needs at least one axis."""
        return ()

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"] | DraftTree, Any]:
        """Propose tokens after each row's newest token. Called at the start of the step that verifies the drafts.

        Args:
          weights: the attribute `weights`.
          state: the state, as returned by `allocate` or by the last `observe`.
          rows: the decode rows. Drafts of idle rows are ignored.
          num_drafts: number of drafts per row, at least 1.

        Returns:
          Drafts in a line, padded with NO_DRAFT, or a tree of drafts; and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__}.propose: a proposer has to define it")

    def depth(self, num_drafts: int) -> int:
        """Return the number of positions that `num_drafts` drafts cover: the length of the longest branch of a tree, or
        `num_drafts` for drafts in a line."""
        return num_drafts

    def observe(self, weights: Any, state: Any, step: ObservedStep) -> Any:
        """Return the state after a step. Called in every step, also in steps without drafts or without decode rows."""
        return state


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Options of speculative decoding, for `EngineConfig.speculate`.

    Attributes:
      proposer: proposer of drafts.
      num_drafts: maximum number of drafts per request and step.
      adaptive: whether steps verify fewer drafts, or none, if measured acceptance rates and step times suggest that
        this gives more tokens per second. If False, steps verify `num_drafts` drafts per request, or fewer if free
        pages or the request's maximum length limit them.
      few_programs: whether an adaptive engine chooses only between 0 and `num_drafts` drafts, so that fewer programs
        are compiled. It then adapts less well to low acceptance rates.

    Raises:
      ValueError: proposer is not a `Proposer`, or num_drafts is out of range.
    """

    proposer: Proposer
    num_drafts: int = 4
    adaptive: bool = True
    few_programs: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.proposer, Proposer):
            raise ValueError(f"proposer: expected a Proposer, got {self.proposer!r}")
        if isinstance(self.num_drafts, bool) or not isinstance(self.num_drafts, int) or not 1 <= self.num_drafts <= 64:
            raise ValueError(f"num_drafts: expected an integer from 1 to 64, got {self.num_drafts!r}")

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Numbers of drafts to which decode rows are padded, ascending: 0, 1, 2, 4, ... and `num_drafts` if adaptive (0
        and `num_drafts` with few_programs), otherwise only `num_drafts`."""
        if not self.adaptive:
            return (self.num_drafts,)
        if self.few_programs:
            return (0, self.num_drafts)
        return (0, *(1 << i for i in range(self.num_drafts.bit_length()) if 1 << i < self.num_drafts), self.num_drafts)
