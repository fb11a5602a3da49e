"""Arguments that implementations of `write_kv` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.types import PagedKV, Rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteKVCall(OperationCall):
    """Validated arguments of `write_kv`; see its docstring."""

    op: ClassVar[str] = "write_kv"

    kv: PagedKV
    k: Float[Array, "T Hkv D"]
    v: Float[Array, "T Hkv Dv"]
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"]
    rope: Rope | None
    q: Float[Array, "T Hq D"] | None

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def key_columns(self) -> slice:
        """Columns of `kv.k` that the call writes keys to."""
        return slice(0, self.k.shape[-1])

    @property
    def value_columns(self) -> slice:
        """Columns that the call writes values to: of `kv.v`, or of `kv.k` if keys and values are fused."""
        _, first = self.kv.values
        return slice(first, first + self.v.shape[-1])

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        if self.kv.is_fused:  # D is not determined by the columns of kv.k, so bind it from k first
            dims.check("k", self.k, "T Hkv D", checks.PLAIN)
        checks.check_kv(self.kv, dims)
        checks.check_array("k", self.k)
        advice = checks.view_advice(self.kv, self.k.shape[1]) if self.k.ndim == 3 else ""
        dims.check("k", self.k, "T Hkv D", checks.PLAIN, advice=advice)
        dims.check("v", self.v, "T Hkv Dv", checks.PLAIN)
        checks.check_array("slots", self.slots)
        dims.check("slots", self.slots, "T Hkv" if self.slots.ndim == 2 else "T", checks.INT)
        if self.q is not None:
            if self.rope is None:
                raise ValueError("q: expected None without rope, which defines how q is rotated; got an array")
            dims.check("q", self.q, "T Hq D", checks.PLAIN)
            checks.check_heads(dims["Hq"], dims["Hkv"], advice=checks.view_advice(self.kv, dims["Hq"]))
        if self.rope is not None:
            checks.check_rope(self.rope, dims, has_q=self.q is not None)
