"""Arguments that implementations of `index_top_k` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.ops.call_base import IndexKeysCall
from pallas_attn.types import PagedIndexKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexTopKCall(IndexKeysCall):
    """Validated arguments of `index_top_k`; see its docstring."""

    op: ClassVar[str] = "index_top_k"

    q: Float[Array, "T Hi Di"]
    weights: Float32[Array, "T Hi"]
    index: PagedIndexKeys
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    draft_mask: Bool[Array, "T M"] | None
    sm_scale: float | None = dataclasses.field(metadata={"static": True})
    ratio: int = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(metadata={"static": True})
