"""Division of a cache's memory between the cache groups of a model."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from models.config import CacheGroup, HeadWindows, LayerWindow, ModelConfig, cache_groups
from pallas_attn import FULL
from pallas_attn.cache import GroupPools, HeadPagePool


@dataclasses.dataclass(frozen=True)
class GroupSizes:
    """Sizes and windows of one cache group.

    Attributes:
      layers: indices of its layers.
      heads: windows that its pool recycles by: one for each KV head if heads have windows of their own, else one for
        all.
      head_wise: whether heads have windows of their own, so that tables hold row ids.
      num_pages: pages of each layer.
    """

    layers: tuple[int, ...]
    heads: HeadWindows
    head_wise: bool
    num_pages: int

    @property
    def num_heads(self) -> int:
        """Rows of a page."""
        return len(self.heads.window)

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return self.num_pages * self.num_heads


def group_sizes(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    step_tokens: int,
    recycling: bool,
) -> tuple[GroupSizes, ...]:
    """Divides the memory of `num_pages` in every layer between the cache groups.

    Every group gets the pages that one step's chunk takes beyond those that stay. The rest is divided in proportion to
    the pages that a sequence holds in each group, for sequences as long as `max_num_seqs` of them can be at once and as
    the model takes.

    If it were divided for the longest sequences of the model, the groups with windows would hold as few sequences as
    the others, and short sequences would run out of room there while the others are nearly empty. As it is, fewer and
    longer sequences than expected leave pages of the groups with windows unused, so `max_num_seqs` should be the number
    that is meant to run.

    A single group gets all `num_pages`, and so does every group if pages are not recycled.

    Args:
      config: the model.
      num_pages: pages of every layer if the memory were divided evenly.
      page_size: tokens of a page.
      max_model_len: tokens of a sequence.
      max_num_seqs: sequences that run at once.
      step_tokens: new tokens of a sequence in one step at most.
      recycling: whether pages that windows leave behind are given back; if not, pools get no windows.
    """
    groups = cache_groups(config)
    heads = [_heads(group.window if recycling else _unlimited(group.window)) for group in groups]
    total = num_pages * config.num_hidden_layers

    def share(pages: int) -> tuple[Fraction, list[Fraction], list[Fraction]]:
        """Number of sequences of so many pages that fit, and the pages of each group that one holds and that a chunk
        adds."""
        held = [_peak_pages(seen, page_size, pages, 1) for seen in heads]
        chunk = [_peak_pages(seen, page_size, pages, step_tokens) - h for seen, h in zip(heads, held, strict=True)]
        return (total - _memory(groups, chunk)) / _memory(groups, held), held, chunk

    lengths = range(1, -(-max_model_len // page_size) + 1)
    too_long = bisect.bisect_left(lengths, True, key=lambda pages: share(pages)[0] < max_num_seqs)
    sequences, held, chunk = share(max(too_long, 1))
    return tuple(
        GroupSizes(group.layers, seen, isinstance(group.window, HeadWindows), max(int(c + sequences * h), 1))
        for group, seen, c, h in zip(groups, heads, chunk, held, strict=True)
    )


def make_pools(
    groups: Sequence[GroupSizes],
    *,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    whole_tables: bool = False,
) -> GroupPools:
    """Makes the pools, with tables for sequences of `max_model_len` or, unless tables are to be whole, as long as the
    pools hold."""

    def with_tables(num_pages: int) -> GroupPools:
        sizes = {"page_size": page_size, "max_num_seqs": max_num_seqs, "max_pages_per_seq": num_pages}
        return GroupPools([HeadPagePool(group.num_rows, group.heads, **sizes) for group in groups])

    whole = with_tables(-(-max_model_len // page_size))
    return whole if whole_tables else with_tables(max(whole.max_tokens // page_size, 1))


def _peak_pages(seen: HeadWindows, page_size: int, num_pages: int, step_tokens: int) -> Fraction:
    """Upper bound of a sequence's pages, as `HeadPagePool.peak_rows`, which holds for pools of all sizes."""
    pool = HeadPagePool(1, seen, page_size=page_size, max_num_seqs=1, max_pages_per_seq=1)
    return Fraction(pool.peak_rows(num_pages * page_size, step_tokens=step_tokens), pool.num_heads)


def _memory(groups: Sequence[CacheGroup], pages: Sequence[Fraction]) -> Fraction:
    """Pages in all layers, given the pages of each group."""
    return sum((len(group.layers) * n for group, n in zip(groups, pages, strict=True)), Fraction(0))


def _heads(window: LayerWindow) -> HeadWindows:
    if isinstance(window, HeadWindows):
        return window
    return HeadWindows((FULL if window is None else window,), (0,))


def _unlimited(window: LayerWindow) -> LayerWindow:
    """Replaces a window by none, for as many heads."""
    return HeadWindows((FULL,) * len(window.window), window.sink_tokens) if isinstance(window, HeadWindows) else None
