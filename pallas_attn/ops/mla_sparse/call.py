"""Arguments of one call of `mla_sparse`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import LatentCall
from pallas_attn.types import POWER_OF_TWO, PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaSparseCall(LatentCall):
    """Validated arguments of `mla_sparse` without `return_lse` and `implementation`."""

    op: ClassVar[str] = "mla_sparse"

    q_latent: Float[Array, "T Hq L"]
    q_rope: Float[Array, "T Hq R"] | None
    cache: PagedLatent
    slots: Int32[Array, "T K"]
    extra_cache: PagedLatent | None
    extra_slots: Int32[Array, "T Ke"] | None
    sinks: Float[Array, "Hq"] | None
    sm_scale: float = dataclasses.field(metadata={"static": True})
    out_dtype: jax.typing.DTypeLike | None = dataclasses.field(metadata={"static": True})

    @property
    def small_groups(self) -> bool:
        """Whether latents have scales that are powers of two; rotated columns are then values, too."""
        return self.cache.scale is not None and self.cache.scale.dtype == POWER_OF_TWO

    @property
    def rope_dim(self) -> int:
        """R, 0 for caches without rotated keys."""
        return 0 if self.q_rope is None else self.q_rope.shape[2]

    @property
    def queries(self) -> Float[Array, "T Hq LR"]:
        """Queries for all columns of a key."""
        return self.q_latent if self.q_rope is None else jnp.concatenate([self.q_latent, self.q_rope], axis=-1)

    @property
    def pools(self) -> list[tuple[PagedLatent, Int32[Array, "T K"]]]:
        """Each cache with its slots. Slots outside the pool are -1."""
        pools = [(self.cache, _inside(self.cache, self.slots))]
        if self.extra_cache is not None and self.extra_slots is not None:
            pools.append((self.extra_cache, _inside(self.extra_cache, self.extra_slots)))
        return pools

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q_latent", self.q_latent, "T Hq L", checks.PLAIN)
        if self.q_rope is None:
            dims.bind("R", 0)
        else:
            dims.check("q_rope", self.q_rope, "T Hq R", (self.q_latent.dtype,))
        checks.check_latent(self.cache, dims, small_groups=True)
        dims.check("slots", self.slots, "T K", checks.INT)
        if self.extra_cache is not None:
            checks.check_class("extra_cache", self.extra_cache, PagedLatent)
            checks.check_dtype("extra_cache.pages", self.extra_cache.pages, (self.cache.pages.dtype,))
            own = checks.Dims(L=dims["L"], R=dims["R"])
            checks.check_latent(self.extra_cache, own, small_groups=True, name="extra_cache")
            if self.cache.scale is not None:
                checks.check_dtype("extra_cache.scale", self.extra_cache.scale, (self.cache.scale.dtype,))
            if self.cache.rope is not None:
                checks.check_dtype("extra_cache.rope", self.extra_cache.rope, (self.cache.rope.dtype,))
            if (got := self.extra_cache.pages.shape[2]) != (expected := self.cache.pages.shape[2]):
                raise ValueError(f"extra_cache.pages: expected {expected} columns, as in cache.pages, got {got}")
            dims.check("extra_slots", self.extra_slots, "T Ke", checks.INT)
        elif self.extra_slots is not None:
            raise ValueError("extra_slots: expected None without extra_cache")
        if self.sinks is not None:
            dims.check("sinks", self.sinks, "Hq", checks.F32)
        checks.output_dtype(self.out_dtype, self.q_latent.dtype)


def _inside(cache: PagedLatent, slots: Int32[Array, "T K"]) -> Int32[Array, "T K"]:
    """Return slots, -1 for slots outside the pool."""
    num_pages, page_size, _ = cache.pages.shape
    end = min(num_pages * page_size, 2**31)
    return jnp.where(slots.astype(jnp.uint32) < jnp.uint32(end), slots, -1)  # negative slots become large
