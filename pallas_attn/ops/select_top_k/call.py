"""One call of `select_top_k`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float32

from pallas_attn import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectTopKCall:
    """The arguments of `select_top_k`, described there."""

    op: ClassVar[str] = "select_top_k"

    scores: Float32[Array, "T K"]
    top_k: int = dataclasses.field(metadata={"static": True})

    def bounded(self) -> SelectTopKCall:
        """The call itself: there are no lengths."""
        return self

    def validate(self) -> None:
        """Raises ValueError unless the scores are right."""
        checks.Dims().check("scores", self.scores, "T K", checks.F32)
