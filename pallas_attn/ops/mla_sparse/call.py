"""Arguments of one call of `mla_sparse`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import LatentCall
from pallas_attn.types import POWER_OF_TWO, PagedLatent, SlotRange

NO_PAGE = -(2**31)
"""Slot of an absent page in `SlotRangeInputs.first_slots`. The sum with an offset in a page is negative, too."""


class SlotRangeInputs(NamedTuple):
    """Ranges of keys as kernels read them.

    Attributes:
      first_slots: slot of the first token of each page of the block tables of all caches, or NO_PAGE; then NO_PAGE.
      keys: for each token and cache, index of the first page of the token's sequence in `first_slots`, position of the
        first key, and number of keys.
    """

    first_slots: Int32[Array, "pages"]
    keys: Int32[Array, "T caches 3"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaSparseCall(LatentCall):
    """Validated arguments of `mla_sparse` without `return_lse` and `implementation`."""

    op: ClassVar[str] = "mla_sparse"

    q_latent: Float[Array, "T Hq L"]
    q_rope: Float[Array, "T Hq R"] | None
    cache: PagedLatent
    slots: Int32[Array, "T K"] | SlotRange
    extra_cache: PagedLatent | None
    extra_slots: Int32[Array, "T Ke"] | SlotRange | None
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
    def caches(self) -> list[PagedLatent]:
        """One cache, or two."""
        return [self.cache] if self.extra_cache is None else [self.cache, self.extra_cache]

    @property
    def pools(self) -> list[tuple[PagedLatent, Int32[Array, "T K"] | SlotRange]]:
        """Each cache with its slots."""
        return list(zip(self.caches, (self.slots, self.extra_slots), strict=False))  # pyrefly: ignore[bad-return]

    @property
    def max_slots(self) -> list[int]:
        """Maximum number of slots of a token in each cache."""
        return [slots.size if isinstance(slots, SlotRange) else slots.shape[1] for _, slots in self.pools]

    @property
    def ranges(self) -> SlotRangeInputs | None:
        """Inputs of kernels for ranges; None for lists of slots."""
        first_slots, keys, first_page = [], [], 0
        for cache, slots in self.pools:
            if not isinstance(slots, SlotRange):
                return None
            tables, page_size = slots.block_tables, cache.page_size
            num_pages = min(cache.pages.shape[0], (2**31 - 1) // page_size)
            exists = (tables >= 0) & (tables < num_pages)
            first_slots.append(jnp.where(exists, tables * page_size, NO_PAGE).reshape(-1))
            page = first_page + slots.sequence * tables.shape[1]
            keys.append(jnp.stack([page, slots.first, slots.count], axis=1))
            first_page += tables.size
        first_slots.append(jnp.full(1, NO_PAGE, jnp.int32))
        return SlotRangeInputs(jnp.concatenate(first_slots), jnp.stack(keys, axis=1))

    def bounded(self) -> MlaSparseCall:
        """Return the call with ranges clipped to their block tables."""
        slots, *extra_slots = (
            checks.bound_range(slots, cache.page_size) if isinstance(slots, SlotRange) else slots
            for cache, slots in self.pools
        )
        return dataclasses.replace(self, slots=slots, extra_slots=next(iter(extra_slots), None))

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("q_latent", self.q_latent, "T Hq L", checks.PLAIN)
        if self.q_rope is None:
            dims.bind("R", 0)
        else:
            dims.check("q_rope", self.q_rope, "T Hq R", (self.q_latent.dtype,))
        checks.check_latent(self.cache, dims, small_groups=True)
        _check_slots("slots", self.slots, dims, "K")
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
            if isinstance(self.slots, SlotRange) != isinstance(self.extra_slots, SlotRange):
                wanted = "a SlotRange" if isinstance(self.slots, SlotRange) else "an array"
                raise ValueError(f"extra_slots: expected {wanted}, like slots, got {type(self.extra_slots).__name__}")
            _check_slots("extra_slots", self.extra_slots, dims, "Ke")
        elif self.extra_slots is not None:
            raise ValueError("extra_slots: expected None without extra_cache")
        if self.sinks is not None:
            dims.check("sinks", self.sinks, "Hq", checks.F32)
        checks.output_dtype(self.out_dtype, self.q_latent.dtype)


def _check_slots(name: str, slots: Any, dims: checks.Dims, symbol: str) -> None:
    """Check a list of slots or a range against the number of tokens."""
    if not isinstance(slots, SlotRange):
        dims.check(name, slots, f"T {symbol}", checks.INT)
        return
    tables = checks.Dims()
    tables.check(f"{name}.block_tables", slots.block_tables, "S P", checks.INT)
    if not (tables["S"] and tables["P"]):
        raise ValueError(
            f"{name}.block_tables: expected at least one row and one page, got {list(slots.block_tables.shape)}"
        )
    for field in ("sequence", "first", "count"):
        dims.check(f"{name}.{field}", getattr(slots, field), "T", checks.INT)
    checks.size(f"{name}.size", slots.size)


def inside_pool(cache: PagedLatent, slots: Int32[Array, "T K"]) -> Int32[Array, "T K"]:
    """Return slots, -1 for slots outside the pool."""
    num_pages, page_size, _ = cache.pages.shape
    end = min(num_pages * page_size, 2**31)
    return jnp.where(slots.astype(jnp.uint32) < jnp.uint32(end), slots, -1)  # negative slots become large
