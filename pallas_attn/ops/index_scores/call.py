"""One call of `index_scores`, as every implementation takes it."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.types import PagedIndexKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexScoresCall:
    """The arguments of `index_scores`, described there."""

    op: ClassVar[str] = "index_scores"

    q: Float[Array, "T Hi Di"]
    weights: Float32[Array, "T Hi"]
    index: PagedIndexKeys
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    draft_mask: Bool[Array, "T M"] | None
    sm_scale: float | None = dataclasses.field(metadata={"static": True})

    @property
    def scale(self) -> float:
        """`sm_scale`, or Di**-0.5 for None."""
        return 1.0 / math.sqrt(self.q.shape[2]) if self.sm_scale is None else self.sm_scale

    def bounded(self) -> IndexScoresCall:
        """The call as implementations take it: lengths held to what there is room for."""
        return dataclasses.replace(
            self,
            cu_q_lens=checks.bound_sums(self.cu_q_lens, self.q.shape[0]),
            kv_lens=checks.bound_lens(self.kv_lens, self.block_tables.shape[1] * self.index.page_size),
        )

    def validate(self) -> None:
        """Raises ValueError unless the arguments fit each other."""
        lengths = (self.block_tables, self.cu_q_lens, self.kv_lens)
        checks.check_indexed(self.q, self.weights, self.index, *lengths, self.draft_mask)
