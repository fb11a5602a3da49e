"""Metadata of one step: positions, block tables, cache slots and lengths of its tokens.

A step is one forward pass over packed tokens: first the decode rows (newest tokens of sequences), then the prefill
tokens (chunks of prompts).
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupTables:
    """Block tables and cache slots of a step's tokens for one cache group, a set of layers with equal attention
    windows.

    All arrays are int32. If the KV heads of the group have different windows, pages are allocated per head: entries are
    page rows, each one page of one KV head. Otherwise entries are page ids.

    Attributes:
      slots: cache slot of each token: page · page_size + offset [T], or page_row · page_size + offset per head [T,
        Hkv]; -1 for padding, which is not cached.
      decode_block_tables: page ids [Bd, Pd], or page rows [Bd, Hkv, Pd].
      prefill_block_tables: page ids [S, Pp], or page rows [S, Hkv, Pp]. They have the pages of the visible cached
        prefix and of the new tokens.
    """

    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"]
    decode_block_tables: Int32[Array, "Bd Pd"] | Int32[Array, "Bd Hkv Pd"]
    prefill_block_tables: Int32[Array, "S Pp"] | Int32[Array, "S Hkv Pp"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """Positions and lengths of a step's T packed tokens: Bd decode rows of Q tokens, then the prefill tokens.

    A decode row has the newest token of a sequence. With Q > 1 it also has drafts after the newest token, which are
    verified in this step (speculation), and is padded to Q tokens. The sizes are static and determine the compiled
    program: Bd decode rows, and T - Bd · Q prefill tokens of at most S sequences. Either part may be empty. All arrays
    are int32 unless stated otherwise.

    Attributes:
      positions: [T], position of each token in its sequence; 0 for padding.
      groups: block tables and slots of each cache group of the model. A single entry is used for all groups.
      decode_kv_lens: [Bd], number of tokens of each sequence including this step; 0 for an idle row.
      decode_q_lens: [Bd], number of tokens of each decode row that are not padding, at most Q; None for Q.
      decode_queries: Q.
      decode_draft_mask: bool [Bd, Q, Q], for trees of drafts: entry [b, i, j] is True if token i of row b sees token j
        of the row. None if each token sees the tokens of its row up to itself. The cache slots of a row are consecutive
        and in order of j, also where positions are not.
      shared_pages: [], number of leading pages that all decode rows which are not idle share in the cache group without
        windows. The layers of this group then call `cascade_decode`. None for `paged_decode`. Must be None with Q > 1,
        prefill tokens or draft masks.
      cu_q_lens: [S + 1], prefix sum of the new tokens per prefill sequence, starting at 0, not at Bd. Prefill tokens
        at or past its last entry are padding.
      prefill_kv_lens: [S], number of tokens of each sequence including this step; 0 for an idle row.
      logit_rows: [n], indices in [0, T) of the tokens for which logits are computed, in this order.
    """

    positions: Int32[Array, "T"]
    groups: tuple[GroupTables, ...]
    decode_kv_lens: Int32[Array, "Bd"]
    cu_q_lens: Int32[Array, "S+1"]
    prefill_kv_lens: Int32[Array, "S"]
    logit_rows: Int32[Array, "n"]
    decode_q_lens: Int32[Array, "Bd"] | None = None
    decode_queries: int = dataclasses.field(default=1, metadata={"static": True})
    decode_draft_mask: Bool[Array, "Bd Q Q"] | None = None
    shared_pages: Int32[Array, ""] | None = None

    def of_group(self, group: int) -> GroupTables:
        """Return block tables and slots of the cache group with this index."""
        return self.groups[group if len(self.groups) > 1 else 0]

    def as_decode_rows(self) -> StepMetadata:
        """Return metadata of the same tokens in which every token, also of prompts, is a decode row with one token.
        Each row sees its sequence up to and including its token."""
        metadata, index = self.one_query_a_row(), jnp.arange(self.num_tokens - self.num_decode, dtype=jnp.int32)
        ends = self.cu_q_lens[1:]
        if not index.size:
            return metadata
        sequence = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
        kv_lens = jnp.where(index < ends[-1], self.positions[self.num_decode :] + 1, 0)
        sequence = jnp.minimum(sequence, ends.shape[0] - 1)

        def rows(tables: GroupTables) -> GroupTables:
            of_tokens = tables.prefill_block_tables[sequence]
            return GroupTables(
                tables.slots, jnp.concatenate([tables.decode_block_tables, of_tokens]), tables.prefill_block_tables[:0]
            )

        return dataclasses.replace(
            metadata,
            groups=tuple(map(rows, metadata.groups)),
            decode_kv_lens=jnp.concatenate([metadata.decode_kv_lens, kv_lens]),
            cu_q_lens=self.cu_q_lens[:1],
            prefill_kv_lens=self.prefill_kv_lens[:0],
        )

    def of_tokens(self, rows: Int32[Array, "n"]) -> StepMetadata:
        """Return metadata of some tokens of the step. Each token, also of prompts, is a decode row with one token,
        which sees its sequence up to and including itself.

        Args:
          rows: indices of the tokens in [0, T), in any order.

        Raises:
          NotImplementedError: the drafts form trees.
        """
        single, ends = self.one_query_a_row(), self.cu_q_lens[1:]
        num_decode = single.num_decode
        index, sequence = rows - num_decode, None
        if num_decode < self.num_tokens:
            sequence = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
            sequence = jnp.minimum(sequence, ends.shape[0] - 1)

        def chosen(of_decode: Array, of_prefill: Array | None) -> Array:
            """Select values of decode rows for rows before `num_decode`, and of prefill tokens for the others."""
            if of_prefill is None:
                return of_decode[rows]
            if not num_decode:
                return of_prefill
            is_decode = (rows < num_decode).reshape(-1, *[1] * (of_prefill.ndim - 1))
            return jnp.where(is_decode, of_decode[jnp.minimum(rows, num_decode - 1)], of_prefill)

        def of_group(tables: GroupTables) -> GroupTables:
            of_prefill = None if sequence is None else tables.prefill_block_tables[sequence]
            return GroupTables(
                tables.slots[rows], chosen(tables.decode_block_tables, of_prefill), tables.prefill_block_tables[:0]
            )

        positions = self.positions[rows]
        prefill_lens = None if sequence is None else jnp.where(index < ends[-1], positions + 1, 0)
        return dataclasses.replace(
            single,
            positions=positions,
            groups=tuple(map(of_group, single.groups)),
            decode_kv_lens=chosen(single.decode_kv_lens, prefill_lens),
            cu_q_lens=self.cu_q_lens[:1],
            prefill_kv_lens=self.prefill_kv_lens[:0],
            logit_rows=jnp.arange(rows.shape[0], dtype=jnp.int32),
        )

    def one_query_a_row(self) -> StepMetadata:
        """Return metadata of the same tokens in which decode rows of several tokens are split into rows of one token.

        Raises:
          NotImplementedError: the drafts form trees.
        """
        queries = self.decode_queries
        if queries == 1:
            return self
        if self.decode_draft_mask is not None:
            raise NotImplementedError("draft_mask: a tree of drafts cannot be split into rows of one token")
        query = jnp.arange(self.num_decode, dtype=jnp.int32) % queries
        q_lens = jnp.full_like(self.decode_kv_lens, queries) if self.decode_q_lens is None else self.decode_q_lens
        q_lens, kv_lens = jnp.repeat(q_lens, queries), jnp.repeat(self.decode_kv_lens, queries)
        return dataclasses.replace(
            self,
            groups=tuple(
                dataclasses.replace(group, decode_block_tables=jnp.repeat(group.decode_block_tables, queries, axis=0))
                for group in self.groups
            ),
            decode_kv_lens=jnp.where((query < q_lens) & (kv_lens > 0), kv_lens - q_lens + query + 1, 0),
            decode_q_lens=None,
            decode_queries=1,
            decode_draft_mask=None,
        )

    def check(self) -> None:
        """Raise ValueError if the decode rows have more tokens than the step, or if the step has prefill tokens but no
        prefill sequence."""
        num_sequences = self.prefill_kv_lens.shape[0]
        if self.num_decode > self.num_tokens or (self.num_decode < self.num_tokens and not num_sequences):
            raise ValueError(
                f"metadata: {self.num_tokens} tokens do not fit {self.num_decode} decode tokens and the prefill tokens"
                f" of {num_sequences} sequences"
            )

    @property
    def num_tokens(self) -> int:
        """T: number of tokens of the step, including padding."""
        return self.positions.shape[0]

    @property
    def num_decode(self) -> int:
        """Number of tokens of the decode rows, Bd · Q, including idle rows and padding."""
        return self.decode_kv_lens.shape[0] * self.decode_queries
