"""Arguments of one call of `paged_prefill`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import PackedCall, PagedAttentionCall
from pallas_attn.types import HeadWindow, PagedKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPrefillCall(PagedAttentionCall, PackedCall):
    """Validated arguments of `paged_prefill` without `implementation`."""

    op: ClassVar[str] = "paged_prefill"

    q: Float[Array, "T Hq D"]
    kv: PagedKV
    block_tables: Int32[Array, "S P"] | Int32[Array, "S Hkv P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    window: int | HeadWindow | None
    sinks: Float[Array, "Hq"] | None
    causal: bool = dataclasses.field(metadata={"static": True})
    sm_scale: float | None = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})
    draft_mask: Bool[Array, "T M"] | None = None
    q_scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    return_lse: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.kv_lens.shape[0]

    def without_tokens(self) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
        """Return the output and LSE of a call in which no token belongs to a sequence."""
        out = jnp.zeros((*self.q.shape[:2], self.value_dim), self.output_dtype)
        return out, jnp.full(self.q.shape[:2], -jnp.inf, jnp.float32)

    def bounded(self) -> PagedPrefillCall:
        """Return the call that implementations receive: lengths and windows are clipped to the sizes of the arrays.

        With a `q_scale`, q holds float8 values in a wider dtype and `sm_scale` includes `q_scale`.
        """
        q, sm_scale = self.q, self.sm_scale
        if self.q_scale is not None:
            q, sm_scale = self.rounded_queries(jnp.float32(self.q_scale)), self.scale * self.q_scale
        window = checks.bound_window(self.window)
        return dataclasses.replace(self, q=q, q_scale=None, sm_scale=sm_scale, window=window, **self.bounded_lens())

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        dims.check("q", self.q, "T Hq D", checks.query_dtypes(self.kv, self.q_scale))
        checks.check_kv(self.kv, dims)
        checks.check_heads(dims["Hq"], dims["Hkv"], advice=checks.view_advice(self.kv, dims["Hq"]))
        checks.check_block_tables(self.block_tables, dims, rows="S")
        dims.check("cu_q_lens", self.cu_q_lens, "S+1", checks.INT)
        dims.check("kv_lens", self.kv_lens, "S", checks.INT)
        checks.check_window(self.window, dims["Hkv"])
        checks.check_causal_window(self.window, causal=self.causal)
        if self.draft_mask is not None:
            dims.check("draft_mask", self.draft_mask, "T M", checks.BOOL)
            if not self.causal:
                raise ValueError("draft_mask: expected None with causal=False, where every query sees all keys")
        if self.sinks is not None:
            dims.check("sinks", self.sinks, "Hq", checks.F32)
        checks.check_positive("sm_scale", self.sm_scale)
        checks.check_positive("soft_cap", self.soft_cap)
        if self.q_scale is not None:
            checks.check_8_bit_queries(self.q, self.kv, self.out_dtype)
        checks.output_dtype(self.out_dtype, self.q.dtype)
