"""One call of `paged_decode`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.portable.quantise import divide, rounded_to_float8
from pallas_attn.types import FLOAT8, DecodePlan, HeadWindow, PagedKV, PlanKey

type DecodeOutput = Float[Array, "B Q Hq Dv"] | Float[Array, "T Hq Dv"]
"""An output of its own, or the packed one that its tokens were put into."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedDecodeCall:
    """The arguments of `paged_decode`, described there; `return_lse` and `implementation` are not the kernel's."""

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
    def num_queries(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.kv.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[2] // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

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

    @property
    def queries(self) -> Float[Array, "B Q Hq D"]:
        """q as it is meant: in float32 and times `q_scale` where there is one."""
        return self.q if self.q_scale is None else self.q.astype(jnp.float32) * self.q_scale[..., None]

    def without_queries(self) -> tuple[DecodeOutput, Float[Array, "B Q Hq"]]:
        """Output and LSE of a call without sequences or without queries."""
        out = jnp.zeros((*self.q.shape[:3], self.value_dim), self.output_dtype)
        return self.place(out), jnp.zeros(self.q.shape[:3], jnp.float32)

    def place(self, result: Float[Array, "B Q Hq Dv"]) -> DecodeOutput:
        """Put an output where `out` wants it: into its first tokens, in place where XLA may."""
        if self.out is None:
            return result
        return self.out.at[: math.prod(result.shape[:2])].set(result.reshape(-1, *result.shape[2:]))

    @property
    def plan_key(self) -> PlanKey:
        batch, num_queries, num_q_heads, _ = self.q.shape
        return PlanKey(
            op=self.op,
            batch=batch,
            num_queries=num_queries,
            num_q_heads=num_q_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=self.page_size,
            table_pages=self.block_tables.shape[-1],
            window=checks.window_key(self.window),
            q_lens=self.q_lens is not None,
        )

    def bounded(self) -> PagedDecodeCall:
        """The call as implementations take it: lengths and windows held to what there is room for. Where there is a
        `q_scale`, q holds float8 values in a wider dtype, of which [B, Q, Hq] has the scales.
        """
        q, q_scale = self._rounded_queries()
        return dataclasses.replace(
            self,
            q=q,
            q_scale=q_scale,
            kv_lens=checks.bound_lens(self.kv_lens, self.block_tables.shape[-1] * self.page_size),
            q_lens=None if self.q_lens is None else checks.bound_lens(self.q_lens, self.num_queries),
            window=checks.bound_window(self.window),
        )

    def _rounded_queries(self) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"] | None]:
        """Queries rounded to the cache's float8, as numbers of q's dtype or of float16, and a scale for each row."""
        if self.q_scale is None:
            return self.q, None
        q_scale = jnp.broadcast_to(self.q_scale, self.q.shape[:3])
        if self.q.dtype in FLOAT8:
            return self.q.astype(jnp.float16), q_scale
        rounded = rounded_to_float8(divide(self.q.astype(jnp.float32), q_scale[..., None]), self.kv.k.dtype)
        return rounded.astype(self.q.dtype), q_scale

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other, NotImplementedError for scales of another kind."""
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        dims.check("q", self.q, "B Q Hq D", checks.query_dtypes(self.kv, self.q_scale))
        checks.check_kv(self.kv, dims)
        checks.check_heads(dims["Hq"], dims["Hkv"])
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
