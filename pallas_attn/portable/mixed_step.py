"""The sequences of a step as JAX engines for TPUs describe them: decodes and chunks of prompts in one packed array.

Table entries past a sequence's tokens, and entries of tables, lengths and sums past the last sequence, may hold
anything; the number of sequences may be known on the device only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_attn import checks


@dataclasses.dataclass(frozen=True)
class MixedStep:
    """Tables and lengths of S sequences whose new tokens are packed.

    Attributes:
      block_tables: int32 [S, P], or [S, Hkv, P] of row ids.
      cu_q_lens: int32 [S + 1], never falling, within 0 to T; sequences past the last have no new tokens.
      kv_lens: int32 [S], the new tokens included; 0 for sequences past the last.
      distribution: int32 [3] or None: ends of the sequences of decode, of prefill, and of all.
    """

    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    distribution: Int32[Array, "3"] | None

    @staticmethod
    def of(page_indices: Any, kv_lens: Any, cu_q_lens: Any, distribution: Any, dims: checks.Dims) -> MixedStep:
        """Checks and bounds a step's arrays; `dims` has T bound, and Hkv if tables of row ids are taken.

        Args:
          page_indices: [S·P], [S, P], or [S, Hkv, P].
          distribution: [3], or the number of sequences alone, [1] or []; None for S.

        Raises:
          ValueError: arrays that do not fit each other.
        """
        page_indices, kv_lens, cu_q_lens, distribution = checks.int32(
            page_indices=page_indices, kv_lens=kv_lens, cu_q_lens=cu_q_lens, distribution=distribution
        )
        dims.check("kv_lens", kv_lens, "S", checks.INT)
        dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
        block_tables = _as_tables(page_indices, dims)
        if distribution is not None:
            distribution = _as_distribution(distribution, dims)
            place = jnp.arange(dims["S"] + 1, dtype=jnp.int32)
            cu_q_lens = jnp.where(place <= distribution[2], cu_q_lens, 0)  # zeros at the end are no new tokens
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
        """Sequences that decode: those of one new token, unless `distribution` has them among the prefills."""
        single = jnp.diff(self.cu_q_lens) == 1
        if self.distribution is None:
            return single
        sequence = jnp.arange(single.shape[0], dtype=jnp.int32)
        return single & ~((sequence >= self.distribution[0]) & (sequence < self.distribution[1]))


def _as_distribution(distribution: Any, dims: checks.Dims) -> Int32[Array, "3"]:
    """The three ends, of which those of decode and prefill are 0 where the number of sequences alone is given."""
    checks.check_array("distribution", distribution)
    if distribution.ndim == 1 and distribution.shape[0] != 1:
        dims.check("distribution", distribution, "3", checks.INT)
        return jnp.asarray(distribution)
    dims.check("distribution", distribution, "1" if distribution.ndim else "", checks.INT)
    return jnp.pad(jnp.reshape(distribution, 1), (2, 0))


def _as_tables(page_indices: Any, dims: checks.Dims) -> Any:
    """Tables of rank 2 or 3, binding P."""
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
    return page_indices
