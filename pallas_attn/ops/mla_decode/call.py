"""Arguments of one call of `mla_decode`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import DecodeCall, LatentCall
from pallas_attn.types import DecodePlan, PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaDecodeCall(LatentCall, DecodeCall):
    """Validated arguments of `mla_decode` without `return_lse` and `implementation`."""

    op: ClassVar[str] = "mla_decode"

    q_latent: Float[Array, "B Q Hq L"]
    q_rope: Float[Array, "B Q Hq R"]
    cache: PagedLatent
    block_tables: Int32[Array, "B P"]
    kv_lens: Int32[Array, "B"]
    q_lens: Int32[Array, "B"] | None
    draft_mask: Bool[Array, "B Q Q"] | None
    plan: DecodePlan | None
    sm_scale: float = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.q_latent.shape[0]

    @property
    def num_queries(self) -> int:
        return self.q_latent.shape[1]

    @property
    def num_heads(self) -> int:
        return self.q_latent.shape[2]

    @property
    def num_q_heads(self) -> int:
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """1, because all query heads read the same latents."""
        return 1

    @property
    def query_rows(self) -> int:
        """Q·Hq, the number of query rows of a sequence. All of them read the same latents."""
        return self.num_queries * self.num_heads

    @property
    def latent_dim(self) -> int:
        return self.q_latent.shape[3]

    @property
    def rope_dim(self) -> int:
        return self.q_rope.shape[3]

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    def without_queries(self) -> tuple[Float[Array, "B Q Hq L"], Float[Array, "B Q Hq"]]:
        """Return the output and LSE of a call without sequences or without queries."""
        return jnp.zeros(self.q_latent.shape, self.output_dtype), jnp.zeros(self.q_latent.shape[:3], jnp.float32)

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q_latent", self.q_latent, "B Q Hq L", checks.PLAIN)
        dims.check("q_rope", self.q_rope, "B Q Hq R", (self.q_latent.dtype,))
        checks.check_latent(self.cache, dims, unscaled=True)
        dims.check("block_tables", self.block_tables, "B P", checks.INT)
        dims.check("kv_lens", self.kv_lens, "B", checks.INT)
        if self.q_lens is not None:
            dims.check("q_lens", self.q_lens, "B", checks.INT)
        if self.draft_mask is not None:
            dims.check("draft_mask", self.draft_mask, "B Q Q", checks.BOOL)
        checks.check_int_window(self.window)
        checks.check_positive("sm_scale", self.sm_scale)
        checks.check_positive("soft_cap", self.soft_cap)
        checks.output_dtype(self.out_dtype, self.q_latent.dtype)
        if self.plan is not None:
            checks.check_plan(self.plan, self.plan_key)
