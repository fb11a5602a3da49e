"""Arguments that implementations of `index_top_k` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_attn.ops.call_base import IndexKeysCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexTopKCall(IndexKeysCall):
    """Validated arguments of `index_top_k`; see its docstring."""

    op: ClassVar[str] = "index_top_k"

    top_k: int = dataclasses.field(metadata={"static": True})
