"""One call of `write_kv`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.types import PagedKV, Rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteKVCall:
    """The arguments of `write_kv`, described there."""

    op: ClassVar[str] = "write_kv"

    kv: PagedKV
    k: Float[Array, "T Hkv D"]
    v: Float[Array, "T Hkv D"]
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"]
    rope: Rope | None
    q: Float[Array, "T Hq D"] | None

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    def bounded(self) -> WriteKVCall:
        """The call itself: slots outside the pool write nothing."""
        return self

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_kv(self.kv, dims)
        dims.check("k", self.k, "T Hkv D", checks.PLAIN)
        dims.check("v", self.v, "T Hkv D", checks.PLAIN)
        checks.check_array("slots", self.slots)
        dims.check("slots", self.slots, "T Hkv" if self.slots.ndim == 2 else "T", checks.INT)
        if self.q is not None:
            if self.rope is None:
                raise ValueError("q: expected None without rope, there is nothing to do to it")
            dims.check("q", self.q, "T Hq D", checks.PLAIN)
            checks.check_heads(dims["Hq"], dims["Hkv"])
        if self.rope is not None:
            checks.check_rope(self.rope, dims, has_q=self.q is not None)
