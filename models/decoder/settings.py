"""Settings of attention that are chosen when a model is run. They are not part of the model's configuration."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention. All settings except `index_topk` change only speed and rounding.

    Attributes:
      mla: form of latent attention (MLA). "absorb" attends to the latents, with W_UK and W_UV folded into queries and
        outputs. "expand" computes keys and values of each head from the latents. "auto" absorbs in decode rows and
        expands in prefill, except that `mla_prefill` may choose the absorbed form for short chunks.
      implementation: argument `implementation` of all `pallas_attn` operations.
      piece_tokens: number of cached tokens that are expanded at a time, which limits the memory of prefill; None for
        the default of `mla_prefill`.
      index_topk: number of keys that each token attends to in sparse attention; None for the number in the model's
        configuration.
      batch_invariant: whether the result of a token has the same bits in all steps of the same shape, independent of
        the other tokens. Every token, including prompt tokens, then attends as a decode row, with decode plans of mode
        "fixed" (argument `mode` of `plan_decode`).
      cascade_saved_bytes: argument `min_saved_bytes` of `cascade_decode`, which engines with
        `EngineConfig.cascade_attention` call: minimum number of bytes of page reads per layer that a step must save.
        None for the default of `cascade_decode`.
      slot_ranges: whether layers of DeepSeek-V4 without an indexer give `mla_sparse` ranges of keys (`SlotRange`)
        instead of lists of slots. Kernels for GPUs have not run in this form, so the default is False.

    Raises:
      ValueError: unknown value of mla, index_topk below 1, or cascade_saved_bytes below 0.
      NotImplementedError: batch_invariant with mla="expand".
    """

    mla: Literal["auto", "absorb", "expand"] = "auto"
    implementation: str | tuple[str, ...] | None = None
    piece_tokens: int | None = None
    index_topk: int | None = None
    batch_invariant: bool = False
    cascade_saved_bytes: int | None = None
    slot_ranges: bool = False

    def __post_init__(self) -> None:
        if self.mla not in ("auto", "absorb", "expand"):
            raise ValueError(f"mla: expected auto, absorb or expand, got {self.mla!r}")
        if self.index_topk is not None and self.index_topk < 1:
            raise ValueError(f"index_topk: expected at least 1, got {self.index_topk}")
        if self.cascade_saved_bytes is not None and self.cascade_saved_bytes < 0:
            raise ValueError(f"cascade_saved_bytes: expected at least 0, got {self.cascade_saved_bytes}")
        if self.batch_invariant and self.mla == "expand":
            raise NotImplementedError(
                "batch_invariant: expanded attention computes chunk and cached prefix separately, and the start of the"
                " chunk depends on other requests; use mla auto or absorb"
            )
