"""Division of the cache memory between the cache groups of a model."""

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
      heads: windows that determine which pages its pool recycles: one per KV head if heads have different windows,
        otherwise one for all heads.
      head_wise: whether heads have different windows; then tables have page rows per head.
      num_pages: pages of each layer.
    """

    layers: tuple[int, ...]
    heads: HeadWindows
    head_wise: bool
    num_pages: int

    @property
    def num_heads(self) -> int:
        """Page rows per page."""
        return len(self.heads.window)

    @property
    def num_rows(self) -> int:
        """Page rows of the pool."""
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
    """Divide the memory of `num_pages` pages per layer between the cache groups.

    Each group first gets the pages that a step's new tokens need temporarily, before pages outside of windows are
    recycled. The remaining memory is divided in proportion to the pages that one sequence holds in each group. The
    sequence length for this is the largest length, up to `max_model_len`, at which `max_num_seqs` sequences fit.

    A division for the model's longest sequences would give groups with windows too few pages for many short sequences.
    With this division, if fewer and longer sequences run, pages of the groups with windows remain unused. So
    `max_num_seqs` should be the expected number of running sequences.

    A single group gets all `num_pages`. So does every group without recycling.

    Args:
      config: the model's configuration.
      num_pages: pages of every layer if the memory is divided evenly.
      page_size: tokens per page.
      max_model_len: maximum number of tokens per sequence.
      max_num_seqs: maximum number of running sequences.
      step_tokens: maximum number of new tokens of a sequence per step.
      recycling: whether pages outside of windows are released; if False, the pools have no windows.
    """
    groups = cache_groups(config)
    heads = [_heads(group.window if recycling else _unlimited(group.window)) for group in groups]
    total = num_pages * config.num_hidden_layers

    def share(pages: int) -> tuple[Fraction, list[Fraction], list[Fraction]]:
        """Return the number of sequences of `pages` pages that fit; the pages that a sequence holds in each group; and
        the additional pages that a step needs temporarily in each group."""
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
    """Make the page pools. Tables have room for `max_model_len` tokens, or, unless `whole_tables`, for the longest
    sequence that fits the pools if that is shorter."""

    def with_tables(num_pages: int) -> GroupPools:
        sizes = {"page_size": page_size, "max_num_seqs": max_num_seqs, "max_pages_per_seq": num_pages}
        return GroupPools([HeadPagePool(group.num_rows, group.heads, **sizes) for group in groups])

    whole = with_tables(-(-max_model_len // page_size))
    return whole if whole_tables else with_tables(max(whole.max_tokens // page_size, 1))


def _peak_pages(seen: HeadWindows, page_size: int, num_pages: int, step_tokens: int) -> Fraction:
    """Upper bound of a sequence's pages, from `HeadPagePool.peak_rows`. It does not depend on the pool's size."""
    pool = HeadPagePool(1, seen, page_size=page_size, max_num_seqs=1, max_pages_per_seq=1)
    return Fraction(pool.peak_rows(num_pages * page_size, step_tokens=step_tokens), pool.num_heads)


def _memory(groups: Sequence[CacheGroup], pages: Sequence[Fraction]) -> Fraction:
    """Sum of pages over all layers, given the pages per layer of each group."""
    return sum((len(group.layers) * n for group, n in zip(groups, pages, strict=True)), Fraction(0))


def _heads(window: LayerWindow) -> HeadWindows:
    if isinstance(window, HeadWindows):
        return window
    return HeadWindows((FULL if window is None else window,), (0,))


def _unlimited(window: LayerWindow) -> LayerWindow:
    """Replace a window by no window, for the same number of heads."""
    return HeadWindows((FULL,) * len(window.window), window.sink_tokens) if isinstance(window, HeadWindows) else None
