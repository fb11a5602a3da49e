"""One call of the planner, as its implementations take it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Int32

from pallas_attn.portable.schedule import Sharing
from pallas_attn.types import HeadWindow, PlanKey


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanDecodeCall:
    """The lengths and sizes of a decode step, and how its pages are to be shared.

    Attributes:
      kv_lens: tokens each sequence holds, the new ones included; 0 for an idle row.
      q_lens: real queries of each sequence; None for one each.
      window: what the decode call is given.
      sharing: costs of rows and cuts.
      num_programs: programs that share the pages.
      made_for, implementation: of the `DecodePlan`.
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

    def bounded(self) -> PlanDecodeCall:
        """The call itself, whose lengths are those of a decode call that is."""
        return self
