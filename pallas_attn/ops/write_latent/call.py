"""One call of `write_latent`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.types import PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteLatentCall:
    """The arguments of `write_latent`, described there; implementations get `latent` in the cache's dtype, unless that
    has scales.
    """

    op: ClassVar[str] = "write_latent"

    cache: PagedLatent
    latent: Float[Array, "T LR"]
    slots: Int32[Array, "T"]

    def bounded(self) -> WriteLatentCall:
        """The call itself: slots outside the pool write nothing."""
        return self

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_latent(self.cache, dims, unscaled=True)
        checks.check_new_latents("latent", self.latent, self.cache, dims, cast=True)
        dims.check("slots", self.slots, "T", checks.INT)
