"""Interface of speculative decoding: proposers of drafts, and the policy `Speculation`.

A proposer guesses the next tokens of each decoding request; the guesses are called drafts. One step of the model
computes the newest token and all drafts of a row together, and samples after each of them. A draft is accepted if it
equals the token sampled at its position with the draw of plain decoding. The token sampled after the last accepted
draft is added, too. So the output equals plain decoding, whatever was proposed. In distribution this is rejection
sampling (Leviathan et al., arXiv:2211.17192) for a proposal of a single token: draft x is accepted with its probability
p(x) under the model; otherwise the token is drawn from p without x, renormalised.

Drafts may form a tree: several guesses for a position, and several guesses after each of them. All are computed
together, each attending to the drafts before it on its branch. The branch whose tokens are sampled is accepted.

Proposing, verifying and accepting run on the device within the step, so the next step can be launched before a step's
tokens are read.
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

from models.config import ModelConfig
from models.decoder import GroupTables, LayerCache, StepMetadata, move_tokens
from models.engine.group_sizes import GroupSizes
from models.engine.sampler import SamplingRows
from pallas_attn import PAGE_NONE, slot_mapping

NO_DRAFT = -1
"""Padding after the last draft of a row."""


@typing.no_type_check  # a pytree node may hold shapes or shardings instead of arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Drafts that form a tree: several drafts may follow the same token.

    Attributes:
      tokens: int32 [B, d], padded with NO_DRAFT.
      parents: int32 [B, d], index of the draft that each draft follows, smaller than its own index; -1 for the newest
        token.
    """

    tokens: Int32[Array, "B d"]
    parents: Int32[Array, "B d"]

    def reach(self) -> Bool[Array, "B Q Q"]:
        """Return a mask [B, i, j]: whether input j is an ancestor of input i or equals i. Input 0 is the newest token,
        input j + 1 is draft j."""
        batch, count = self.parents.shape
        parents = jnp.clip(self.parents, -1, jnp.arange(count, dtype=jnp.int32)[None] - 1) + 1
        inputs = jnp.arange(count + 1, dtype=jnp.int32)
        of_newest = jnp.zeros((batch, 1), jnp.int32)
        step = jnp.concatenate([of_newest, parents], axis=1)[:, :, None] == inputs[None, None]
        reach = step | (inputs[:, None] == inputs[None])[None]
        for _ in range(count.bit_length()):  # doubles the path length in each iteration
            reach = jnp.any(reach[:, :, :, None] & reach[:, None], axis=2)
        return reach


@dataclasses.dataclass(frozen=True)
class ProposerSizes:
    """Sizes of an engine, for the arrays of a proposer.

    Attributes:
      max_num_seqs: number of request slots.
      page_size: tokens per page.
      table_pages: maximum number of pages per sequence.
      groups: the target's cache groups, with their pages and windows.
      max_drafts: maximum number of drafts per row.
      cache_dtype: dtype of the engine's caches; None for the model's dtype.
      mesh: devices of the engine; None for one device. The other sizes apply to each data rank, pages to each device.
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
        """(cache group, head) with the longest window, whose page rows hold the most tokens of a sequence."""
        lanes = [(group, head) for group, sizes in enumerate(self.groups) for head in range(sizes.num_heads)]
        return max(lanes, key=lambda lane: self.groups[lane[0]].heads.window[lane[1]])


@typing.no_type_check  # a pytree node may hold shapes or shardings instead of arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRows:
    """The B decode rows of a step before it runs. All arrays are int32.

    Attributes:
      slots: [B], request slot of each row; -1 for an idle row.
      tokens: [B], newest token of each row, at position lens - 1, whose K/V is not computed yet.
      lens: [B], number of tokens of each row, including the newest; 0 for an idle row.
      max_drafts: [B], number of drafts that the row has room for. Further drafts are dropped.
      tables: block tables of each cache group, [B, P] or [B, Hkv, P], with pages for the newest token and max_drafts.
      sampling: sampling parameters at the position of the first draft.
      written: [page rows, ps], computed token ids by page row and offset, for `history`.
      token_tables: [B, P], page rows of `written`.
      page_size: ps.
      lane: `ProposerSizes.lane`, the cache group and head of `written`.
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
        """Return the computed token at one position of each row; an arbitrary token if the position has none."""
        entry, offset = jnp.divmod(jnp.maximum(positions, 0), self.page_size)
        rows = jnp.take_along_axis(self.token_tables, entry[:, None], axis=1)[:, 0]
        return self.written[jnp.maximum(rows, 0), offset]

    def history(self) -> Int32[Array, "B N"]:
        """Return the tokens of each row by position, N = P · ps; -1 after its end and in recycled pages."""
        pages = self.written[jnp.maximum(self.token_tables, 0)]
        tokens = jnp.where(self.token_tables[:, :, None] >= 0, pages, -1).reshape(self.token_tables.shape[0], -1)
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        newest = self.lens[:, None] - 1
        tokens = jnp.where(position < newest, tokens, -1)
        return jnp.where(position == newest, self.tokens[:, None], tokens)

    def decode_step(self, ahead: int = 0, queries: int = 1) -> StepMetadata:
        """Return metadata of a step for a model whose cache uses the same pages. Each row has `queries` tokens, the
        last of them `ahead` positions after the newest token. Rows without room are idle. Logits are computed for each
        row's last token."""
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
      queries: number of tokens to which every row is padded.
      page_size: tokens per page.
      logit_rows: as in `StepMetadata`.
      reach: `DraftTree.reach` if the drafts form trees. The drafts of a tree use the same consecutive cache slots as
        drafts in a line.
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
    """Number of tokens that each query attends to in a tree; see `query_lens`."""
    seen = (kv_lens - q_lens)[:, None] + jnp.sum(reach, axis=2, dtype=jnp.int32)
    return jnp.where(jnp.arange(reach.shape[1], dtype=jnp.int32)[None] < q_lens[:, None], seen, 0).reshape(-1)


def query_lens(kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"], queries: int) -> Int32[Array, "BQ"]:
    """Number of tokens that each query of decode rows attends to, including itself; 0 for padding."""
    query = jnp.arange(queries, dtype=jnp.int32)[None]
    ends = jnp.where(query < q_lens[:, None], (kv_lens - q_lens)[:, None] + query + 1, 0)
    return ends.reshape(-1)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedStep:
    """A step of T packed tokens after it ran: decode rows of 1 + num_drafts tokens each, then the prefill tokens.

    Attributes:
      metadata: the target's metadata.
      tokens: int32 [T], input tokens.
      next_tokens: int32 [T], token that follows each input in its sequence; -1 for padding and rejected drafts.
      counts: bool [T], whether an input belongs to its sequence: it is neither padding nor a rejected draft.
      hidden: [T, D] hidden states of the target, if the proposer needs them; else None.
      row_slots: int32 [R], request slots of the decode rows, then of the prefill rows; -1 for idle rows and for prompts
        that continue in a later step.
      last: int32 [R], index of the last input of each row that counts.
      lens: int32 [R], number of tokens of each sequence, including tokens sampled by this step.
      rows: the decode rows before the step, as passed to `propose`.
      num_drafts: number of drafts to which rows are padded.
      lane: `ProposerSizes.lane`.
      places: for trees of drafts, cache slots [T] in each cache group that correspond to the inputs' positions; -1 for
        inputs that do not count. None for drafts in a line, whose slots already correspond to positions.
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
        """Move accepted tokens of a tree to the cache slots that plain decoding uses.

        Args:
          caches: caches of layers of one cache group, written at the slots of `metadata`.
          group: the cache group.
        """
        if self.places is None:
            return caches
        written, places = self.metadata.of_group(group).slots, self.places[group]
        places = jnp.where(places == written, PAGE_NONE, places)
        return tuple(move_tokens(cache, written, places) for cache in caches)

    def kept(self, slots: Array) -> Array:
        """Replace the slots of inputs that do not count by -1, for a cache that holds only accepted tokens."""
        counts = self.counts if slots.ndim == 1 else self.counts[:, None]
        return jnp.where(counts, slots, PAGE_NONE)


class Proposer:
    """Base class of proposers. A proposer without state only defines `propose`.

    The methods are traced into the engine's step, so they are jax functions with static shapes. Their results affect
    the number of steps of a request, but never its tokens.

    On a mesh the methods run on each device inside `jax.shard_map`. Devices that share a request have equal rows,
    hidden states and tokens, and must propose equal drafts. Weights are sharded as those of a model loaded for the
    mesh, or are equal on all devices. Each device has its own state.

    Attributes:
      needs_hidden: whether `observe` needs the target's hidden states.
      makes_trees: whether `propose` returns a `DraftTree`.
      weights: pytree of arrays passed to every call. Steps do not change them. The proposer may replace them between
        steps by arrays of the same shapes.
      draft_bytes: bytes of the weights that are read per draft, from which the cost of a draft is estimated.
    """

    needs_hidden: bool = False
    makes_trees: bool = False
    weights: Any = ()
    draft_bytes: int = 0

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raise ValueError or NotImplementedError if the proposer does not support the model or the sizes."""

    def allocate(self, sizes: ProposerSizes) -> Any:
        """Allocate the initial state, a pytree of arrays on the device. The state is donated to every step. On a mesh
        this method runs on each device, and every array needs at least one axis."""
        return ()

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"] | DraftTree, Any]:
        """Propose tokens after each row's newest token, at the start of the step that verifies them.

        Args:
          weights: the attribute `weights`.
          state: the state from `allocate` or the last call.
          rows: the decode rows. Drafts of idle rows are ignored.
          num_drafts: number of drafts per row, at least 1.

        Returns:
          Drafts in a line, padded with NO_DRAFT, or a tree of drafts; and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__}.propose: a proposer has to define it")

    def depth(self, num_drafts: int) -> int:
        """Length of the longest branch of `num_drafts` drafts; `num_drafts` for drafts in a line."""
        return num_drafts

    def observe(self, weights: Any, state: Any, step: ObservedStep) -> Any:
        """Update the state after a step, also after steps without drafts or without decode rows. Return the state."""
        return state


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Policy of speculative decoding, for `EngineConfig.speculate`.

    Attributes:
      proposer: proposer of drafts.
      num_drafts: maximum number of drafts per request and step.
      adaptive: whether to verify fewer drafts, down to none, if the measured acceptance does not justify the cost of a
        larger step. If False, `num_drafts` drafts are verified unless pages or the request's end limit them.

    Raises:
      ValueError: proposer is not a `Proposer`, or num_drafts is out of range.
    """

    proposer: Proposer
    num_drafts: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.proposer, Proposer):
            raise ValueError(f"proposer: expected a Proposer, got {self.proposer!r}")
        if isinstance(self.num_drafts, bool) or not isinstance(self.num_drafts, int) or not 1 <= self.num_drafts <= 64:
            raise ValueError(f"num_drafts: expected an integer from 1 to 64, got {self.num_drafts!r}")

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Numbers of drafts to which rows are padded, ascending."""
        if not self.adaptive:
            return (self.num_drafts,)
        return (0, *(1 << i for i in range(self.num_drafts.bit_length()) if 1 << i < self.num_drafts), self.num_drafts)
