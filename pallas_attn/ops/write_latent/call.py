"""Arguments of one call of `write_latent`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.types import PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteLatentCall(OperationCall):
    """Validated arguments of `write_latent`.

    Implementations receive `latent` in the cache's dtype, unless the cache has scales.
    """

    op: ClassVar[str] = "write_latent"

    cache: PagedLatent
    latent: Float[Array, "T LR"]
    slots: Int32[Array, "T"]

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_latent(self.cache, dims, unscaled=True, small_groups=True)
        checks.check_new_latents("latent", self.latent, self.cache, dims, cast=True)
        dims.check("slots", self.slots, "T", checks.INT)
