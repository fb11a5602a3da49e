"""Arguments of one call of `write_kv`."""

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
        """Columns of `kv.k` that keys are written to."""
        return slice(0, self.k.shape[-1])

    @property
    def value_columns(self) -> slice:
        """Columns that values are written to, in the array that holds the values."""
        _, first = self.kv.values
        return slice(first, first + self.v.shape[-1])

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_class("kv", self.kv, PagedKV)
        if self.kv.is_fused:  # the number of columns does not determine D
            dims.check("k", self.k, "T Hkv D", checks.PLAIN)
        checks.check_kv(self.kv, dims)
        dims.check("k", self.k, "T Hkv D", checks.PLAIN)
        dims.check("v", self.v, "T Hkv Dv", checks.PLAIN)
        checks.check_array("slots", self.slots)
        dims.check("slots", self.slots, "T Hkv" if self.slots.ndim == 2 else "T", checks.INT)
        if self.q is not None:
            if self.rope is None:
                raise ValueError("q: expected None without rope, there is nothing to do to it")
            dims.check("q", self.q, "T Hq D", checks.PLAIN)
            checks.check_heads(dims["Hq"], dims["Hkv"])
        if self.rope is not None:
            checks.check_rope(self.rope, dims, has_q=self.q is not None)
