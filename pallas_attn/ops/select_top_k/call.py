"""Arguments that implementations of `select_top_k` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectTopKCall(OperationCall):
    """Validated arguments of `select_top_k`; see its docstring."""

    op: ClassVar[str] = "select_top_k"

    scores: Float32[Array, "T K"]
    top_k: int = dataclasses.field(metadata={"static": True})

    def validate(self) -> None:
        """Raise ValueError unless `scores` has the right shape and dtype."""
        checks.Dims().check("scores", self.scores, "T K", checks.F32)
