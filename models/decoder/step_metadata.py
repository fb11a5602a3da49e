"""Metadata of one step: positions, tables, slots and lengths of its tokens."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


@typing.no_type_check  # a pytree node may hold shapes or shardings in place of its arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupTables:
    """Tables and slots of a step's tokens in the layers of a cache group. All arrays int32.

    Attributes:
      slots: [T], page·ps + offset of each token's place in the cache, or [T, Hkv], row·ps + offset for each head; -1
        for padding, which is not cached.
      decode_block_tables: [Bd, Pd] page ids, or [Bd, Hkv, Pd] row ids.
      prefill_block_tables: [S, Pp] page ids, or [S, Hkv, Pp] row ids; they cover the visible part of the cached prefix,
        and this step's slots.
    """

    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"]
    decode_block_tables: Int32[Array, "Bd Pd"] | Int32[Array, "Bd Hkv Pd"]
    prefill_block_tables: Int32[Array, "S Pp"] | Int32[Array, "S Hkv Pp"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """Places of a step's T packed tokens: first Bd rows of Q decode tokens, then the prefill tokens.

    A decode row is a sequence's newest token or, with Q > 1, its newest token and the drafts after it, padded to Q.
    Sizes are static and determine the compiled program: Bd rows of decode attention, T - Bd·Q prefill tokens of at most
    S sequences. Either part may be empty. All arrays int32.

    Attributes:
      positions: [T], of each token in its sequence. Padding takes 0.
      groups: tables and slots of each of the model's cache groups; a single one serves all of them.
      decode_kv_lens: [Bd], tokens of each sequence, this step's included; 0 for an idle row.
      decode_q_lens: [Bd], tokens of each decode row that are no padding, at most Q; None for all.
      decode_queries: Q.
      decode_draft_mask: bool [Bd, Q, Q], which of a row's tokens each of them sees, as those of a tree do; None where
        that is every one up to itself. Token j lies in the j-th slot of the row's, whatever its position.
      cu_q_lens: [S + 1], prefix sum of the new tokens per prefill sequence, from 0 (not from Bd). Prefill tokens at or
        past its last entry are padding.
      prefill_kv_lens: [S], tokens of each sequence, this step's included; 0 for an idle row.
      logit_rows: [n], rows of the packed step whose logits are wanted, in that order.
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

    def of_group(self, group: int) -> GroupTables:
        """Tables and slots of a cache group."""
        return self.groups[group if len(self.groups) > 1 else 0]

    def as_decode_rows(self) -> StepMetadata:
        """Makes every token a decode row of its own, which sees its sequence up to itself."""
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

    def one_query_a_row(self) -> StepMetadata:
        """Splits decode rows of several queries into rows of one."""
        queries = self.decode_queries
        if queries == 1:
            return self
        if self.decode_draft_mask is not None:
            raise NotImplementedError("draft_mask: tokens of a tree are computed as one row, not as rows of one token")
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
        """Raises ValueError for more decode rows than tokens, or prefill tokens without a prefill sequence."""
        num_sequences = self.prefill_kv_lens.shape[0]
        if self.num_decode > self.num_tokens or (self.num_decode < self.num_tokens and not num_sequences):
            raise ValueError(
                f"metadata: {self.num_tokens} tokens cannot be {self.num_decode} decode tokens and the prefill tokens"
                f" of {num_sequences} sequences"
            )

    @property
    def num_tokens(self) -> int:
        """T: all tokens of the step, padding included."""
        return self.positions.shape[0]

    @property
    def num_decode(self) -> int:
        """Tokens of the decode rows: Bd·Q, idle rows and padding included."""
        return self.decode_kv_lens.shape[0] * self.decode_queries
