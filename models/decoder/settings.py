"""Settings of attention. They belong to a run, not to the model."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention. All settings except `index_topk` change only speed and rounding.

    Attributes:
      mla: form of latent attention. "auto" uses the absorbed form for decode rows and the expanded form for prefill, in
        which `mla_prefill` may absorb short chunks. "absorb" and "expand" use one form for both.
      implementation: implementation of every attention operation, an argument of `pallas_attn` operations.
      piece_tokens: number of cached tokens that are expanded at a time, which limits the memory of prefill; None for
        the default of the operation.
      index_topk: number of keys that a token of a sparse model attends to; None for the number in its configuration.
      batch_invariant: whether the result of a token has the same bits for any other tokens in steps of the same shape.
        Every token, including prompt tokens, then attends as a decode row, with decode plans of mode "fixed".

    Raises:
      ValueError: unknown value of mla, or index_topk below 1.
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
                "batch_invariant: expanded attention merges a chunk with its cached prefix, and where the chunk starts"
                " depends on the other requests; use mla auto or absorb"
            )
