"""Arguments of one call of `compress_and_write`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.types import PagedIndexKeys, PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressAndWriteCall(OperationCall):
    """Validated arguments of `compress_and_write`; see its docstring."""

    op: ClassVar[str] = "compress_and_write"

    state: PagedLatent
    entries: PagedLatent | PagedIndexKeys
    rows: Float32[Array, "T columns"]
    norm: Float[Array, "D"]
    cos: Float32[Array, "T half"]
    sin: Float32[Array, "T half"]
    state_tables: Int32[Array, "S P"]
    entry_tables: Int32[Array, "S Pe"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    ratio: int = dataclasses.field(metadata={"static": True})
    norm_eps: float = dataclasses.field(metadata={"static": True})

    @property
    def halves(self) -> int:
        """c: 2 if the blocks of adjacent entries overlap, else 1."""
        return self.rows.shape[1] // (2 * self.norm.shape[0])

    @property
    def most_entries(self) -> int:
        """Largest number of entries that the call can write."""
        num_tokens = self.rows.shape[0]
        return min(num_tokens, num_tokens // self.ratio + self.kv_lens.shape[0])

    @property
    def entry_pages(self) -> Array:
        """The array of `entries` that contains contents, [N, ps, D]."""
        return self.entries.keys if isinstance(self.entries, PagedIndexKeys) else self.entries.pages

    def bounded(self) -> CompressAndWriteCall:
        """Return the call that implementations receive: lengths are clipped to the sizes of the arrays."""
        return dataclasses.replace(
            self,
            cu_q_lens=checks.bound_sums(self.cu_q_lens, self.rows.shape[0]),
            kv_lens=checks.bound_lens(self.kv_lens, self.state_tables.shape[1] * self.state.page_size),
        )

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("rows", self.rows, "T columns", checks.F32)
        dims.check("norm", self.norm, "D", checks.PLAIN)
        if dims["columns"] not in (2 * dims["D"], 4 * dims["D"]):
            wanted = f"2·D = {2 * dims['D']} or 4·D = {4 * dims['D']}"
            raise ValueError(f"rows: expected {wanted} columns for norm [D={dims['D']}], got {dims['columns']}")
        _check_unscaled("state", self.state, dims, "N ps columns", checks.F32)
        if isinstance(self.entries, PagedIndexKeys):
            checks.check_index_keys(self.entries, checks.Dims(Di=dims["D"]), name="entries")
        else:
            checks.check_class("entries", self.entries, PagedLatent)
            checks.check_latent(self.entries, checks.Dims(L=dims["D"], R=0), small_groups=True, name="entries")
        dims.check("cos", self.cos, "T half", checks.F32)
        dims.check("sin", self.sin, "T half", checks.F32)
        if 2 * dims["half"] > dims["D"]:
            raise ValueError(f"cos: expected at most D/2 = {dims['D'] // 2} columns, got {dims['half']}")
        dims.check("state_tables", self.state_tables, "S P", checks.INT)
        dims.check("entry_tables", self.entry_tables, "S Pe", checks.INT)
        dims.check("cu_q_lens", self.cu_q_lens, "S+1", checks.INT)
        dims.check("kv_lens", self.kv_lens, "S", checks.INT)


def _check_unscaled(name: str, cache: PagedLatent, dims: checks.Dims, shape: str, dtypes: tuple[Any, ...]) -> None:
    """Check that the cache has only the array `pages` of this shape and one of these dtypes; else raise ValueError."""
    checks.check_class(name, cache, PagedLatent)
    dims.check(f"{name}.pages", cache.pages, shape, dtypes)
    for field in ("scale", "rope"):
        if getattr(cache, field) is not None:
            raise ValueError(f"{name}.{field}: expected None, got an array")
