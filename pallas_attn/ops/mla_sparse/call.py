"""One call of `mla_sparse`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn import checks
from pallas_attn.types import PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaSparseCall:
    """The arguments of `mla_sparse`, described there; `return_lse` and `implementation` are not the kernel's."""

    op: ClassVar[str] = "mla_sparse"

    q_latent: Float[Array, "T Hq L"]
    q_rope: Float[Array, "T Hq R"]
    cache: PagedLatent
    slots: Int32[Array, "T K"]
    sm_scale: float = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})

    @property
    def output_dtype(self) -> jnp.dtype:
        """`out_dtype`, or q_latent's for None."""
        return checks.output_dtype(self.out_dtype, self.q_latent.dtype)

    @property
    def chosen(self) -> Bool[Array, "T K"]:
        """Which slots are inside the pool."""
        num_pages, page_size, _ = self.cache.pages.shape
        end = min(num_pages * page_size, 2**31)
        return self.slots.astype(jnp.uint32) < jnp.uint32(end)  # as negative numbers are not

    def bounded(self) -> MlaSparseCall:
        """The call itself: slots outside the pool are none."""
        return self

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q_latent", self.q_latent, "T Hq L", checks.PLAIN)
        dims.check("q_rope", self.q_rope, "T Hq R", (self.q_latent.dtype,))
        checks.check_latent(self.cache, dims)
        dims.check("slots", self.slots, "T K", checks.INT)
        checks.output_dtype(self.out_dtype, self.q_latent.dtype)
