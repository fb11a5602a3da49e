"""Arguments of one call of `paged_decode`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import DecodeCall, PagedAttentionCall
from pallas_attn.types import DecodePlan, HeadWindow, PagedKV

type DecodeOutput = Float[Array, "B Q Hq Dv"] | Float[Array, "T Hq Dv"]
"""A separate output, or the packed output `out` with the tokens of the call written into it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedDecodeCall(PagedAttentionCall, DecodeCall):
    """Validated arguments of `paged_decode` without `return_lse` and `implementation`."""

    op: ClassVar[str] = "paged_decode"

    q: Float[Array, "B Q Hq D"]
    kv: PagedKV
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"]
    kv_lens: Int32[Array, "B"]
    q_lens: Int32[Array, "B"] | None
    window: int | HeadWindow | None
    sinks: Float[Array, "Hq"] | None
    draft_mask: Bool[Array, "B Q Q"] | None
    q_scale: Float[Array, "Hq"] | Float[Array, "B Q Hq"] | None
    plan: DecodePlan | None
    out: Float[Array, "T Hq Dv"] | None
    sm_scale: float | None = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def num_queries(self) -> int:
        return self.q.shape[1]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[2]

    @property
    def plan_page_size(self) -> int:
        return self.kv.plan_page_size

    @property
    def queries(self) -> Float[Array, "B Q Hq D"]:
        """q, or q · `q_scale` in float32 if the call has a `q_scale`."""
        return self.q if self.q_scale is None else self.q.astype(jnp.float32) * self.q_scale[..., None]

    def without_queries(self) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
        """Return the output and LSE of a call without sequences or without queries."""
        out = jnp.zeros((*self.q.shape[:3], self.value_dim), self.output_dtype)
        return self.place(out), jnp.zeros(self.q.shape[:3], jnp.float32)

    def place(self, result: Float[Array, "B Q Hq Dv"]) -> DecodeOutput:
        """Return `result`, or `out` with `result` written into its first tokens, in place where XLA permits it."""
        if self.out is None:
            return result
        return self.out.at[: math.prod(result.shape[:2])].set(result.reshape(-1, *result.shape[2:]))

    def bounded(self) -> PagedDecodeCall:
        """Return the call that implementations receive: windows are clipped.

        With a `q_scale`, q holds float8 values in a wider dtype and `q_scale` has shape [B, Q, Hq].
        """
        q, q_scale = self.q, self.q_scale
        if q_scale is not None:
            q_scale = jnp.broadcast_to(q_scale, q.shape[:3])
            q = self.rounded_queries(q_scale[..., None])
        return dataclasses.replace(self, q=q, q_scale=q_scale, window=checks.bound_window(self.window))

    def validate(self) -> None:
        """Check that the arguments fit each other.

        Raises:
          ValueError: the arguments do not fit each other.
          NotImplementedError: `q_scale` has scales per block of columns.
        """
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        dims.check("q", self.q, "B Q Hq D", checks.query_dtypes(self.kv, self.q_scale))
        checks.check_kv(self.kv, dims, mixed_dtypes=True)
        checks.check_heads(dims["Hq"], dims["Hkv"], advice=checks.view_advice(self.kv, dims["Hq"]))
        checks.check_block_tables(self.block_tables, dims, rows="B")
        dims.check("kv_lens", self.kv_lens, "B", checks.INT)
        if self.q_lens is not None:
            dims.check("q_lens", self.q_lens, "B", checks.INT)
        checks.check_window(self.window, dims["Hkv"])
        if self.sinks is not None:
            dims.check("sinks", self.sinks, "Hq", checks.F32)
        if self.draft_mask is not None:
            dims.check("draft_mask", self.draft_mask, "B Q Q", checks.BOOL)
        checks.check_positive("sm_scale", self.sm_scale)
        checks.check_positive("soft_cap", self.soft_cap)
        if self.q_scale is not None:
            self._check_q_scale(self.q_scale, dims)
        checks.output_dtype(self.out_dtype, self.q.dtype)
        if self.out is not None:
            self._check_out(self.out, dims)
        if self.plan is not None:
            checks.check_plan(self.plan, self.plan_key)

    def _check_out(self, out: Any, dims: checks.Dims) -> None:
        dims.check("out", out, "T Hq Dv", (self.output_dtype,))
        if dims["T"] < dims["B"] * dims["Q"]:
            raise ValueError(
                f"out: expected at least the {dims['B'] * dims['Q']} tokens of q, {list(self.q.shape)}; "
                f"got {list(out.shape)}"
            )

    def _check_q_scale(self, q_scale: Any, dims: checks.Dims) -> None:
        checks.check_dtype("q_scale", q_scale, checks.F32)
        shape = tuple(q_scale.shape)
        if len(shape) == 4 and shape[:3] == tuple(self.q.shape[:3]):
            raise NotImplementedError(
                "q_scale: takes a scale for each head [Hq], or for each head of each token [B, Q, Hq]; scales of "
                f"blocks of columns are not interpreted, got {list(shape)}"
            )
        dims.check("q_scale", q_scale, "Hq" if len(shape) == 1 else "B Q Hq")
        checks.check_8_bit_queries(self.q, self.kv, self.out_dtype)
