"""Arguments that implementations of `plan_decode` receive."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Int32

from pallas_attn.ops.call_base import OperationCall
from pallas_attn.portable.schedule import Sharing
from pallas_attn.types import HeadWindow, PlanKey


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanDecodeCall(OperationCall):
    """Lengths of a decode step, and parameters of the plan.

    Attributes:
      kv_lens: int32 [B], tokens per sequence, including the new tokens; 0 for an idle sequence. Clipped to the
        capacity of the block tables.
      q_lens: int32 [B], queries per sequence, clipped to Q; None if each sequence has one query.
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
    def page_size(self) -> int:
        return self.made_for.page_size
