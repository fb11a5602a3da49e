"""Settings of attention, which belong to a run and not to the model."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention; all but `index_topk` change speed and rounding, never meaning.

    Attributes:
      mla: "auto" absorbs for decode rows and expands for prefill, where `mla_prefill` may absorb short chunks; "absorb"
        and "expand" do one for both.
      implementation: of every attention operation, as `pallas_attn` takes it.
      piece_tokens: cached tokens that are expanded at a time, which bounds prefill's memory; None leaves it to the
        operation.
      index_topk: keys that a token of a sparse model attends to; None for as many as its configuration says.
      batch_invariant: whether a token's result has the same bits whatever stands beside it in steps of one shape: every
        token, of a prompt too, attends as a decode row of its own, by plans of mode "fixed".

    Raises:
      ValueError: another value of mla; index_topk below 1.
      NotImplementedError: batch_invariant with mla="expand".
    """

    mla: Literal["auto", "absorb", "expand"] = "auto"
    implementation: str | tuple[str, ...] | None = None
    piece_tokens: int | None = None
    index_topk: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.mla not in ("auto", "absorb", "expand"):
            raise ValueError(f"mla: expected auto, absorb or expand, got {self.mla!r}")
        if self.index_topk is not None and self.index_topk < 1:
            raise ValueError(f"index_topk: expected at least 1, got {self.index_topk}")
        if self.batch_invariant and self.mla == "expand":
            raise NotImplementedError(
                "batch_invariant: expanded attention merges a chunk with its cached prefix, and where one ends and the"
                " other begins depends on the other requests; mla auto or absorb has no such border"
            )
