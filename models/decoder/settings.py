"""Settings of attention, which belong to a run and not to the model."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """How to compute attention; changes speed and rounding, never meaning.

    Attributes:
      mla: "auto" absorbs for decode rows and expands for prefill; "absorb" and "expand" do one for both.
      implementation: of every attention operation, as `pallas_attn` takes it.
      piece_tokens: cached tokens that are expanded at a time, which bounds prefill's memory; None leaves it to the
        operation.
    """

    mla: Literal["auto", "absorb", "expand"] = "auto"
    implementation: str | tuple[str, ...] | None = None
    piece_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.mla not in ("auto", "absorb", "expand"):
            raise ValueError(f"mla: expected auto, absorb or expand, got {self.mla!r}")
