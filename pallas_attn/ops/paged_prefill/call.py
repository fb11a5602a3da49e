"""One call of `paged_prefill`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.portable.quantise import divide, rounded_to_float8
from pallas_attn.types import FLOAT8, HeadWindow, PagedKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPrefillCall:
    """The arguments of `paged_prefill`, described there; `implementation` is not the kernel's."""

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

    @property
    def num_kv_heads(self) -> int:
        return self.kv.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def value_dim(self) -> int:
        return self.kv.value_dim(self.head_dim)

    @property
    def page_size(self) -> int:
        return self.kv.page_size

    @property
    def scale(self) -> float:
        """`sm_scale`, or D**-0.5 for None."""
        return 1.0 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale

    @property
    def output_dtype(self) -> jnp.dtype:
        """`out_dtype`, or q's for None."""
        return checks.output_dtype(self.out_dtype, self.q.dtype)

    def without_tokens(self) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
        """Output and LSE of a call in which no token belongs to a sequence."""
        out = jnp.zeros((*self.q.shape[:2], self.value_dim), self.output_dtype)
        return out, jnp.full(self.q.shape[:2], -jnp.inf, jnp.float32)

    def bounded(self) -> PagedPrefillCall:
        """The call as implementations take it: lengths and windows held to what there is room for. Queries of 8 bits
        are numbers of a wider dtype, and their scale is in that of the scores."""
        return dataclasses.replace(
            self,
            q=self._rounded_queries(),
            q_scale=None,
            sm_scale=self.sm_scale if self.q_scale is None else self.scale * self.q_scale,
            cu_q_lens=checks.bound_sums(self.cu_q_lens, self.num_tokens),
            kv_lens=checks.bound_lens(self.kv_lens, self.block_tables.shape[-1] * self.page_size),
            window=checks.bound_window(self.window),
        )

    def _rounded_queries(self) -> Float[Array, "T Hq D"]:
        if self.q_scale is None:
            return self.q
        if self.q.dtype in FLOAT8:
            return self.q.astype(jnp.float16)
        scaled = divide(self.q.astype(jnp.float32), jnp.float32(self.q_scale))
        return rounded_to_float8(scaled, self.kv.k.dtype).astype(self.q.dtype)

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        dims.check("q", self.q, "T Hq D", checks.query_dtypes(self.kv, self.q_scale))
        checks.check_kv(self.kv, dims)
        checks.check_heads(dims["Hq"], dims["Hkv"])
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
