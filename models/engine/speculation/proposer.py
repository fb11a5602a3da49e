"""Speculation as a user sees it: which object proposes drafts, how many, and the interface of such objects.

A proposer guesses the next tokens of each decoding request, its drafts. One step of the model then computes the newest
token and all drafts of a row side by side, and samples after each of them. A draft is accepted if it is the very token
that is sampled in its place, with the draw that plain decoding would make there; what is sampled after the last
accepted draft is a token, too. So the output is that of plain decoding, whatever was proposed. In distribution this is
rejection sampling (Leviathan et al., arXiv:2211.17192) for a proposal that is a single token: the draft x is accepted
with its probability p(x) under the model, and otherwise the token comes from p without x, renormalised.

Drafts may also be a tree: several guesses at a place, and at those that follow each. All are computed side by side,
each seeing those before it on its own branch, and the branch is accepted whose tokens are sampled.

All of it runs on the device, within the step, so that the next step can be launched before a step's tokens are read.
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
"""In place of a draft, from the first one on that a proposer does not give."""


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Drafts of which several may follow the same token.

    Attributes:
      tokens: int32 [B, d]; NO_DRAFT from the first one on that is not given.
      parents: int32 [B, d], which draft each one follows, one of those before it in the row; -1 for the newest token.
    """

    tokens: Int32[Array, "B d"]
    parents: Int32[Array, "B d"]

    def reach(self) -> Bool[Array, "B Q Q"]:
        """Whether input j is on the way to input i, or i itself: the newest token is input 0, draft j input j + 1."""
        batch, count = self.parents.shape
        parents = jnp.clip(self.parents, -1, jnp.arange(count, dtype=jnp.int32)[None] - 1) + 1
        inputs = jnp.arange(count + 1, dtype=jnp.int32)
        of_newest = jnp.zeros((batch, 1), jnp.int32)
        step = jnp.concatenate([of_newest, parents], axis=1)[:, :, None] == inputs[None, None]
        reach = step | (inputs[:, None] == inputs[None])[None]
        for _ in range(count.bit_length()):  # ways twice as long each time
            reach = jnp.any(reach[:, :, :, None] & reach[:, None], axis=2)
        return reach


@dataclasses.dataclass(frozen=True)
class ProposerSizes:
    """Sizes of an engine, for the arrays that a proposer keeps.

    Attributes:
      max_num_seqs: batch slots.
      page_size, table_pages: tokens of a page, and pages of a sequence.
      groups: the target's cache groups with the pages and windows of each.
      max_drafts: drafts of a row at most.
      cache_dtype: that of the engine's caches; None for the model's.
      mesh: devices of the engine; None for one. Other sizes are those of each rank along `data`, and pages those of
        each device.
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
        """The cache group, and the head in it, whose rows keep the most of a sequence."""
        lanes = [(group, head) for group, sizes in enumerate(self.groups) for head in range(sizes.num_heads)]
        return max(lanes, key=lambda lane: self.groups[lane[0]].heads.window[lane[1]])


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRows:
    """The B decode rows of a step, before it runs. All arrays int32.

    Attributes:
      slots: [B], batch slot of each request; -1 for an idle row.
      tokens: [B], its newest token, at position lens - 1, which is not computed yet.
      lens: [B], number of its tokens, the newest included; 0 for an idle row.
      max_drafts: [B], drafts that the row has room for; any more are dropped.
      tables: block tables of each cache group, [B, P] or [B, Hkv, P], with pages for the newest token and max_drafts.
      sampling: sampling parameters of the first draft's place.
      written: [rows, ps], the computed tokens by row and offset, for `history`.
      token_tables: [B, P], the rows of `written`.
      page_size: ps.
      lane: that of `ProposerSizes`, whose rows `written` has.
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
        """The computed token at one position of each request; any token where there is none."""
        entry, offset = jnp.divmod(jnp.maximum(positions, 0), self.page_size)
        rows = jnp.take_along_axis(self.token_tables, entry[:, None], axis=1)[:, 0]
        return self.written[jnp.maximum(rows, 0), offset]

    def history(self) -> Int32[Array, "B N"]:
        """Tokens of each request by position, N = P·ps; -1 past its end and where its pages were recycled."""
        pages = self.written[jnp.maximum(self.token_tables, 0)]
        tokens = jnp.where(self.token_tables[:, :, None] >= 0, pages, -1).reshape(self.token_tables.shape[0], -1)
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        newest = self.lens[:, None] - 1
        tokens = jnp.where(position < newest, tokens, -1)
        return jnp.where(position == newest, self.tokens[:, None], tokens)

    def decode_step(self, ahead: int = 0, queries: int = 1) -> StepMetadata:
        """Metadata of a step over `queries` tokens of each row, the last of them `ahead` after the newest, for a model
        whose cache lies in the same pages. Rows without room for it are idle; logits are of each row's last token."""
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
    """Metadata of a step of decode rows alone.

    Args:
      tables: of each cache group.
      kv_lens: tokens of each row, the new ones included; 0 for an idle row.
      q_lens: new tokens of each row, at most `queries`.
      queries: tokens that every row is padded to.
      page_size: tokens of a page.
      logit_rows: as `StepMetadata` has them.
      reach: as `DraftTree.reach`, of rows whose drafts are trees: they lie in the slots that drafts in a line would.
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
    """Number of tokens that each query sees in a tree; see `query_lens`."""
    seen = (kv_lens - q_lens)[:, None] + jnp.sum(reach, axis=2, dtype=jnp.int32)
    return jnp.where(jnp.arange(reach.shape[1], dtype=jnp.int32)[None] < q_lens[:, None], seen, 0).reshape(-1)


def query_lens(kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"], queries: int) -> Int32[Array, "BQ"]:
    """Tokens that each query of decode rows sees, itself included; 0 for padding."""
    query = jnp.arange(queries, dtype=jnp.int32)[None]
    ends = jnp.where(query < q_lens[:, None], (kv_lens - q_lens)[:, None] + query + 1, 0)
    return ends.reshape(-1)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedStep:
    """A step of T packed tokens, after it ran: decode rows of 1 + num_drafts tokens, then the prefill tokens.

    Attributes:
      metadata: the target's.
      tokens: int32 [T], its input.
      next_tokens: int32 [T], the token that follows each one in its sequence; -1 for padding and rejected drafts.
      counts: bool [T], whether a token is one of its sequence: no padding, no rejected draft.
      hidden: [T, D] hidden states of the target, if the proposer needs them.
      row_slots: int32 [R], batch slots of the decode rows, then of the prefill rows; -1 for rows that are idle or whose
        prompt goes on.
      last: int32 [R], index among the T tokens of the last one that counts in each row.
      lens: int32 [R], tokens of each sequence now, those sampled by this step included.
      rows: the decode rows as `propose` gets them, before the step ran.
      num_drafts: drafts that rows are padded to.
      lane: that of `ProposerSizes`.
      places: of a step whose drafts are trees, slots [T] where what the step wrote for each token belongs in each cache
        group, -1 for what does not count; else None, and it belongs where it was written.
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
        """Caches of layers of one cache group in whose slots of `metadata` a tree's tokens were written, with accepted
        ones where those of plain decoding are."""
        if self.places is None:
            return caches
        written, places = self.metadata.of_group(group).slots, self.places[group]
        places = jnp.where(places == written, PAGE_NONE, places)
        return tuple(move_tokens(cache, written, places) for cache in caches)

    def kept(self, slots: Array) -> Array:
        """Slots in a cache group, -1 where a token does not count: for a cache that only holds accepted tokens."""
        counts = self.counts if slots.ndim == 1 else self.counts[:, None]
        return jnp.where(counts, slots, PAGE_NONE)


class Proposer:
    """Base of all proposers. One that needs no memory of its own defines `propose` and nothing else.

    Its methods are traced into the engine's step, so they are jax functions of static shapes. Whatever they return
    changes how many steps a request takes, and never its tokens.

    On a mesh the step is what each device does, inside `jax.shard_map`. Devices that share a request have the same
    rows, hidden states and tokens, and must propose the same drafts for them. Weights lie on the mesh as those of a
    model that was loaded for it, or anywhere if they are the same for all; each device has a state of its own.

    Attributes:
      needs_hidden: whether `observe` wants the target's hidden states.
      makes_trees: whether `propose` returns a `DraftTree`.
      weights: pytree of arrays that every call gets, and that no step changes; the proposer may exchange them between
        steps for others of the same shapes.
      draft_bytes: bytes of them that are read for each draft, from which its cost is estimated.
    """

    needs_hidden: bool = False
    makes_trees: bool = False
    weights: Any = ()
    draft_bytes: int = 0

    def check(self, target: ModelConfig, sizes: ProposerSizes) -> None:
        """Raises ValueError or NotImplementedError if it cannot serve this model in these sizes."""

    def allocate(self, sizes: ProposerSizes) -> Any:
        """Makes its state, a pytree of arrays on the device, as before any token. It is donated to every step. On a
        mesh it is called for each device, and every array has at least one axis."""
        return ()

    def propose(
        self, weights: Any, state: Any, rows: DraftRows, num_drafts: int
    ) -> tuple[Int32[Array, "B num_drafts"] | DraftTree, Any]:
        """Proposes the tokens after each row's newest one, at the start of a step that verifies them.

        Args:
          weights: as `weights` has them.
          state: as `allocate` made it or the last call returned it.
          rows: the requests. Idle rows may get anything.
          num_drafts: drafts of each row, at least 1.

        Returns:
          Drafts in a line, NO_DRAFT from the first one on that it does not give, or a tree of them; and the state.
        """
        raise NotImplementedError(f"{type(self).__name__}.propose: a proposer has to define it")

    def depth(self, num_drafts: int) -> int:
        """Drafts of the longest branch of so many: all of them in a line."""
        return num_drafts

    def observe(self, weights: Any, state: Any, step: ObservedStep) -> Any:
        """Takes note of a step after it ran, also of steps without drafts or without decode rows; returns the state."""
        return state


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Policy of speculative decoding, as `EngineConfig.speculate` takes it.

    Attributes:
      proposer: what proposes drafts.
      num_drafts: drafts of a request in one step at most.
      adaptive: whether fewer are verified, down to none, where their measured acceptance does not pay for the larger
        step; if not, always `num_drafts` as far as pages and the request's end allow.

    Raises:
      ValueError: another kind of proposer, or num_drafts out of range.
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
        """Numbers of drafts that rows are padded to, ascending."""
        if not self.adaptive:
            return (self.num_drafts,)
        return (0, *(1 << i for i in range(self.num_drafts.bit_length()) if 1 << i < self.num_drafts), self.num_drafts)
