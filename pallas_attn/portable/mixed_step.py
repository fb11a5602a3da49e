"""Metadata of a step in the format of JAX engines for TPUs: decodes and prompt chunks in one packed array.

Table entries past a sequence's tokens may have any value, and so may entries of tables, lengths and sums past the last
sequence. The number of sequences may be known on the device only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_attn import checks


@dataclasses.dataclass(frozen=True)
class MixedStep:
    """Tables and lengths of S sequences with packed new tokens.

    Attributes:
      block_tables: int32 [S, P], or [S, Hkv, P] of row ids.
      cu_q_lens: int32 [S + 1], never decreasing, from 0 to T; sequences past the last have no new tokens.
      kv_lens: int32 [S], including the new tokens; 0 for sequences past the last.
      distribution: int32 [3] or None: ends of the decode sequences, the prefill sequences, and all sequences.
    """

    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    distribution: Int32[Array, "3"] | None

    @staticmethod
    def of(page_indices: Any, kv_lens: Any, cu_q_lens: Any, distribution: Any, dims: checks.Dims) -> MixedStep:
        """Check and clip a step's arrays. `dims` has T bound, and also Hkv if tables of row ids are accepted.

        Args:
          page_indices: [S·P], [S, P], or [S, Hkv, P].
          distribution: [3], or only the number of sequences, [1] or []; None for S.

        Raises:
          ValueError: arrays do not fit each other.
        """
        page_indices, kv_lens, cu_q_lens, distribution = checks.int32(
            page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens, distribution=distribution
        )
        dims.check("kv_lens", kv_lens, "S", checks.INT)
        dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
        block_tables = as_tables(page_indices, dims)
        if distribution is not None:
            distribution = _as_distribution(distribution, dims)
            place = jnp.arange(dims["S"] + 1, dtype=jnp.int32)
            cu_q_lens = jnp.where(place <= distribution[2], cu_q_lens, 0)  # zeros at the end mean no new tokens
            kv_lens = jnp.where(place[:-1] < distribution[2], kv_lens, 0)
        capacity = block_tables.shape[-1] * dims["ps"]
        return MixedStep(
            jnp.asarray(block_tables),
            checks.bound_sums(jnp.asarray(cu_q_lens), dims["T"]),
            checks.bound_lens(jnp.asarray(kv_lens), capacity),
            distribution,
        )

    @property
    def single(self) -> Bool[Array, "S"]:
        """Sequences that decode: they have one new token and are not among the prefills of `distribution`."""
        single = jnp.diff(self.cu_q_lens) == 1
        if self.distribution is None:
            return single
        sequence = jnp.arange(single.shape[0], dtype=jnp.int32)
        return single & ~((sequence >= self.distribution[0]) & (sequence < self.distribution[1]))


def _as_distribution(distribution: Any, dims: checks.Dims) -> Int32[Array, "3"]:
    """Return the three ends; the ends of decode and prefill are 0 if only the number of sequences is given."""
    checks.check_array("distribution", distribution)
    if distribution.ndim == 1 and distribution.shape[0] != 1:
        dims.check("distribution", distribution, "3", checks.INT)
        return jnp.asarray(distribution)
    dims.check("distribution", distribution, "1" if distribution.ndim else "", checks.INT)
    return jnp.pad(jnp.reshape(distribution, 1), (2, 0))


def as_tables(page_indices: Any, dims: checks.Dims) -> Any:
    """Return tables of rank 2, or of rank 3 if Hkv is bound; bind P. S must be bound."""
    checks.check_array("page_indices", page_indices)
    num_sequences = dims["S"]
    if page_indices.ndim == 1:
        checks.check_dtype("page_indices", page_indices, checks.INT)
        width, rest = divmod(page_indices.shape[0], num_sequences) if num_sequences else (1, 0)
        if rest or not width:
            raise ValueError(
                f"page_indices: expected [S·P] with S={num_sequences} and P of at least 1, or [S, P];"
                f" got {list(page_indices.shape)}"
            )
        page_indices = page_indices[: num_sequences * width].reshape(num_sequences, width)
    by_head = page_indices.ndim == 3 and "Hkv" in dims
    dims.check("page_indices", page_indices, "S Hkv P" if by_head else "S P", checks.INT)
    checks.check_token_entries("page_indices", page_indices, dims["P"], dims)
    return page_indices
