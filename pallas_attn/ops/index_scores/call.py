"""Arguments that implementations of `index_scores` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from pallas_attn.ops.call_base import IndexKeysCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexScoresCall(IndexKeysCall):
    """Validated arguments of `index_scores`; see its docstring."""

    op: ClassVar[str] = "index_scores"
