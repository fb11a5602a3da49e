"""What the kernel of `paged_prefill` is compiled for, and what it is given."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from pallas_attn.types import HeadWindow, ScaleLayout


class Inputs(NamedTuple):
    """Arrays, or in the kernel references to them.

    Attributes:
      q: [T, Hq, D] each, T padded to a multiple of 8 and what a copy brings; queries are their sum.
      k, v: [N·Hkv, ps, D], or with several tokens in a row (`sm90.dequantise.tokens_per_smem_row`).
      k_scale, v_scale: [Hkv], [Hkv, D] (k_scale is None then, being part of q), [N·Hkv·g] or None.
      blocks, count: as they are `Listed`.
      window: a `HeadWindow` or None.
      sinks: [Hq] or None.
    """

    q: tuple[Any, ...]
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    block_tables: Any
    blocks: Any
    count: Any
    window: HeadWindow | None
    sinks: Any


@dataclasses.dataclass(frozen=True)
class Paged:
    """What a kernel is compiled for, beside `Static`.

    Attributes:
      num_tokens: T.
      block_queries: that a block has, for each of its heads.
      heads: of a group, that share a block.
      apart: consumers that have the same queries, of other heads.
      group: query heads of a KV head.
      window: of all heads, if there is no `HeadWindow`.
      beside: tokens in a row of the pools.
    """

    num_tokens: int
    block_queries: int
    heads: int
    apart: int
    group: int
    num_kv_heads: int
    page_size: int
    window: int | None
    scales: ScaleLayout
    beside: int

    @property
    def groups(self) -> int:
        """Groups of tokens in a page that have a scale each; 0 if scales do not come with the tokens."""
        return self.scales if isinstance(self.scales, int) else 0
