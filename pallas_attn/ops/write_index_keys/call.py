"""Arguments that implementations of `write_index_keys` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.types import PagedIndexKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteIndexKeysCall(OperationCall):
    """Validated arguments of `write_index_keys`; see its docstring."""

    op: ClassVar[str] = "write_index_keys"

    index: PagedIndexKeys
    keys: Float[Array, "T Di"]
    slots: Int32[Array, "T"]

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_index_keys(self.index, dims)
        dims.check("keys", self.keys, "T Di", checks.PLAIN)
        dims.check("slots", self.slots, "T", checks.INT)
