"""Arguments of one call of `ragged_attention`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import AttentionCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedAttentionCall(AttentionCall):
    """Validated arguments of `ragged_attention` without `implementation`."""

    op: ClassVar[str] = "ragged_attention"

    q: Float[Array, "T Hq Dk"]
    k: Float[Array, "U Hkv Dk"]
    v: Float[Array, "U Hkv Dv"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    cu_kv_lens: Int32[Array, "S_plus_1"]
    sinks: Float[Array, "Hq"] | None
    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    sm_scale: float | None = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})
    return_lse: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def num_keys(self) -> int:
        return self.k.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_q_lens.shape[0] - 1

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def key_dim(self) -> int:
        return self.k.shape[2]

    @property
    def value_dim(self) -> int:
        return self.v.shape[2]

    def without_keys(self) -> tuple[Float[Array, "T Hq Dv"], Float[Array, "T Hq"]]:
        """Return the output and LSE of a call in which no query sees a key."""
        out = jnp.zeros((self.num_tokens, self.num_q_heads, self.value_dim), self.output_dtype)
        return out, jnp.full(out.shape[:2], -jnp.inf, jnp.float32)

    def bounded(self) -> RaggedAttentionCall:
        """Return the call that implementations receive: lengths are clipped to the sizes of the arrays.

        A window of at least U keys, which hides no key, becomes None.
        """
        hides = self.window is not None and self.window < self.num_keys
        return dataclasses.replace(
            self,
            window=self.window if hides else None,
            cu_q_lens=checks.bound_sums(self.cu_q_lens, self.num_tokens),
            cu_kv_lens=checks.bound_sums(self.cu_kv_lens, self.num_keys),
        )

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q", self.q, "T Hq Dk", checks.PLAIN)
        dims.check("k", self.k, "U Hkv Dk", (self.q.dtype,))
        dims.check("v", self.v, "U Hkv Dv", (self.q.dtype,))
        checks.check_heads(dims["Hq"], dims["Hkv"])
        checks.check_dtype("cu_q_lens", self.cu_q_lens, checks.INT)
        if self.cu_q_lens.ndim != 1 or not self.cu_q_lens.shape[0]:
            raise ValueError(f"cu_q_lens: expected shape [S+1], got {list(self.cu_q_lens.shape)}")
        checks.Dims(S=self.num_sequences).check("cu_kv_lens", self.cu_kv_lens, "S+1", checks.INT)
        checks.check_int_window(self.window)
        checks.check_causal_window(self.window, causal=self.causal)
        if self.sinks is not None:
            dims.check("sinks", self.sinks, "Hq", checks.F32)
        checks.check_positive("sm_scale", self.sm_scale)
        checks.check_positive("soft_cap", self.soft_cap)
        checks.output_dtype(self.out_dtype, self.q.dtype)
