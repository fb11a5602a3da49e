"""One call of `write_index_keys`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.types import PagedIndexKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteIndexKeysCall:
    """The arguments of `write_index_keys`, described there."""

    op: ClassVar[str] = "write_index_keys"

    index: PagedIndexKeys
    keys: Float[Array, "T Di"]
    slots: Int32[Array, "T"]

    def bounded(self) -> WriteIndexKeysCall:
        """The call itself: slots outside the pool write nothing."""
        return self

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_index_keys(self.index, dims)
        dims.check("keys", self.keys, "T Di", checks.PLAIN)
        dims.check("slots", self.slots, "T", checks.INT)
