"""Base classes of the call objects in `ops/<operation>/call.py`.

A call object is a frozen dataclass, registered as a pytree, with the validated arguments of one call. Every
implementation of an operation takes the operation's call object. Except for `IndexKeysCall`, the base classes have no
fields; a subclass declares the fields that its base classes read. Type checkers do not know these fields, so methods
have `self: Any`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.portable.quantise import divide, rounded_to_float8
from pallas_attn.types import FLOAT8, PagedIndexKeys, PlanKey


class OperationCall:
    """Call of any operation.

    Attributes:
      op: name of the operation.
    """

    op: ClassVar[str]

    def bounded(self: Any) -> Any:
        """Return the call that implementations receive: lengths are clipped to the sizes of the arrays.

        An operation without lengths returns the call itself. Decode calls keep their lengths (`DecodeCall`).
        """
        return self


class ScaledCall(OperationCall):
    """Call with queries `q` [..., D] and `sm_scale`."""

    @property
    def head_dim(self: Any) -> int:
        return self.q.shape[-1]

    @property
    def scale(self: Any) -> float:
        """`sm_scale`, or D**-0.5 if `sm_scale` is None."""
        return 1.0 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale


class AttentionCall(ScaledCall):
    """Call with queries `q` [..., Hq, D], `sm_scale` and `out_dtype`."""

    @property
    def output_dtype(self: Any) -> jnp.dtype:
        """`out_dtype`, or the dtype of `q` if `out_dtype` is None."""
        return checks.output_dtype(self.out_dtype, self.q.dtype)


class PagedAttentionCall(AttentionCall):
    """Attention call over a paged K/V cache `kv`."""

    @property
    def num_kv_heads(self: Any) -> int:
        return self.kv.k.shape[1]

    @property
    def group(self: Any) -> int:
        """Query heads per KV head."""
        return self.q.shape[-2] // self.num_kv_heads

    @property
    def value_dim(self: Any) -> int:
        return self.kv.value_dim(self.head_dim)

    @property
    def page_size(self: Any) -> int:
        return self.kv.page_size

    def rounded_queries(self: Any, q_scale: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return q / q_scale, rounded to the cache's float8 dtype, in q's dtype.

        Float8 queries have been divided by the caller; they are returned in float16.

        Args:
          q_scale: scale of the queries, in a shape that broadcasts against q.
        """
        if self.q.dtype in FLOAT8:
            return self.q.astype(jnp.float16)
        return rounded_to_float8(divide(self.q.astype(jnp.float32), q_scale), self.kv.k.dtype).astype(self.q.dtype)


class LatentCall(OperationCall):
    """Attention call over a latent cache, with queries `q_latent` [..., Hq, L] and `out_dtype`."""

    @property
    def output_dtype(self: Any) -> jnp.dtype:
        """`out_dtype`, or the dtype of `q_latent` if `out_dtype` is None."""
        return checks.output_dtype(self.out_dtype, self.q_latent.dtype)


class DecodeCall(OperationCall):
    """Decode call: Q queries of each of B sequences.

    A subclass has the fields `block_tables`, `kv_lens`, `q_lens`, `window` and `plan`, and the properties `batch`,
    `num_queries`, `num_q_heads`, `num_kv_heads` and `page_size`.

    `bounded` does not clip the lengths. An implementation that follows plans gets clipped lengths from
    `plan_decode.planned`: the kernel that makes a plan clips them too. Other implementations call `with_bounded_lens`.
    """

    @property
    def plan_page_size(self: Any) -> int:
        """Tokens per page of a plan for this call."""
        return self.page_size

    @property
    def plan_key(self: Any) -> PlanKey:
        """Static properties of the call that a `DecodePlan` for this call depends on."""
        return PlanKey(
            op=self.op,
            batch=self.batch,
            num_queries=self.num_queries,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=self.plan_page_size,
            table_pages=self.block_tables.shape[-1] * self.page_size // self.plan_page_size,
            window=checks.window_key(self.window),
            q_lens=self.q_lens is not None,
        )

    def with_bounded_lens(self: Any) -> Any:
        """Return the call with `kv_lens` clipped to the tokens of a full block table, and `q_lens` clipped to Q."""
        kv_lens, q_lens = checks.bound_decode_lens(self.plan_key, self.kv_lens, self.q_lens)
        return dataclasses.replace(self, kv_lens=kv_lens, q_lens=q_lens)


class PackedCall(OperationCall):
    """Call with packed queries `q` [T, ...] of S sequences over pages.

    A subclass has the fields `block_tables`, `cu_q_lens` and `kv_lens`, and the property `page_size`.
    """

    def bounded_lens(self: Any) -> dict[str, Any]:
        """Return the fields `cu_q_lens`, clipped to T, and `kv_lens`, clipped to the tokens of a full block table."""
        return {
            "cu_q_lens": checks.bound_sums(self.cu_q_lens, self.q.shape[0]),
            "kv_lens": checks.bound_lens(self.kv_lens, self.block_tables.shape[-1] * self.page_size),
        }


@dataclasses.dataclass(frozen=True)
class IndexKeysCall(ScaledCall, PackedCall):
    """Call that scores the keys of a sparse-attention indexer. The docstring of `index_scores` describes the fields."""

    q: Float[Array, "T Hi Di"]
    weights: Float32[Array, "T Hi"]
    index: PagedIndexKeys
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    draft_mask: Bool[Array, "T M"] | None
    sm_scale: float | None = dataclasses.field(metadata={"static": True})
    ratio: int = dataclasses.field(metadata={"static": True})

    @property
    def page_size(self) -> int:
        return self.index.page_size

    def bounded(self) -> Any:
        """Return the call that implementations receive: lengths are clipped to the sizes of the arrays."""
        # A full block table has keys for all of these tokens except an unfinished block.
        most_tokens = (self.block_tables.shape[-1] * self.page_size + 1) * self.ratio - 1
        lens = self.bounded_lens() | {"kv_lens": checks.bound_lens(self.kv_lens, most_tokens)}
        return dataclasses.replace(self, **lens)

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        if self.draft_mask is not None and self.ratio > 1:
            raise ValueError(f"draft_mask: expected None with ratio = {self.ratio}, got a mask")
        dims.check("q", self.q, "T Hi Di", checks.PLAIN)
        dims.check("weights", self.weights, "T Hi", checks.F32)
        checks.check_index_keys(self.index, dims)
        dims.check("block_tables", self.block_tables, "S P", checks.INT)
        dims.check("cu_q_lens", self.cu_q_lens, "S+1", checks.INT)
        dims.check("kv_lens", self.kv_lens, "S", checks.INT)
        if self.draft_mask is not None:
            dims.check("draft_mask", self.draft_mask, "T M", checks.BOOL)
