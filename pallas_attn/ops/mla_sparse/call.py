"""Arguments of one call of `mla_sparse`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import LatentCall
from pallas_attn.types import PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaSparseCall(LatentCall):
    """Validated arguments of `mla_sparse` without `return_lse` and `implementation`."""

    op: ClassVar[str] = "mla_sparse"

    q_latent: Float[Array, "T Hq L"]
    q_rope: Float[Array, "T Hq R"]
    cache: PagedLatent
    slots: Int32[Array, "T K"]
    sm_scale: float = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})

    @property
    def chosen(self) -> Bool[Array, "T K"]:
        """Mask of the slots that are inside the pool."""
        num_pages, page_size, _ = self.cache.pages.shape
        end = min(num_pages * page_size, 2**31)
        return self.slots.astype(jnp.uint32) < jnp.uint32(end)  # negative slots become large

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q_latent", self.q_latent, "T Hq L", checks.PLAIN)
        dims.check("q_rope", self.q_rope, "T Hq R", (self.q_latent.dtype,))
        checks.check_latent(self.cache, dims)
        dims.check("slots", self.slots, "T K", checks.INT)
        checks.output_dtype(self.out_dtype, self.q_latent.dtype)
