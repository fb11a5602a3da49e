"""Arguments that implementations of `plan_decode` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Int32

from pallas_attn.ops.call_base import OperationCall
from pallas_attn.portable.schedule import Sharing
from pallas_attn.types import DecodePlan, HeadWindow, PlanKey

type PlanResult = tuple[DecodePlan, Int32[Array, "B"], Int32[Array, "B"] | None]
"""Result of an implementation of `plan_decode`: the plan, and the clipped `kv_lens` and `q_lens` of the call. `q_lens`
is None if the call has none.

A call without a plan runs the decode kernel on the clipped lengths. The kernel of a plan reads all lengths anyway, so
the call needs no other kernel to clip them.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanDecodeCall(OperationCall):
    """Lengths of a decode step, and parameters of the plan.

    Attributes:
      kv_lens: int32 [B], tokens per sequence, including the new tokens; 0 for an idle sequence. Implementations clip
        them to `table_tokens`.
      q_lens: int32 [B], queries per sequence, which implementations clip to `num_queries`; None if each sequence has
        `num_queries` queries.
      window: window of the decode call.
      sharing: cost model, and the arithmetic of shares and splits.
      num_programs: number of CTAs in the plan.
      made_for, implementation: values for the fields of the resulting `DecodePlan`.
    """

    op: ClassVar[str] = "plan_decode"

    kv_lens: Int32[Array, "B"]
    q_lens: Int32[Array, "B"] | None
    window: int | HeadWindow | None
    sharing: Sharing = dataclasses.field(metadata={"static": True})
    num_programs: int = dataclasses.field(metadata={"static": True})
    made_for: PlanKey = dataclasses.field(metadata={"static": True})
    implementation: str = dataclasses.field(metadata={"static": True})

    @property
    def num_kv_heads(self) -> int:
        return self.made_for.num_kv_heads

    @property
    def num_queries(self) -> int:
        return self.made_for.num_queries

    @property
    def page_size(self) -> int:
        return self.made_for.page_size

    @property
    def table_tokens(self) -> int:
        """Tokens of a full block table, at most 2**31 - 1."""
        return min(self.made_for.table_pages * self.page_size, 2**31 - 1)
