"""Division of the cache memory between the cache groups of a model.

A cache group is a set of layers with equal attention windows, which share a page pool. A layer of DeepSeek-V4 is in
several groups. A sequence needs fewer pages in a group with windows, because pages before the windows are recycled:
released while the sequence runs. If layers have keys of different widths, a page of a layer with wider keys takes more
memory.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from pallas_attn import FULL
from pallas_attn.cache import GroupPools, HeadPagePool
from pallas_attn.models.config import (
    CacheGroup,
    DeepSeekConfig,
    DeepseekV4Config,
    HeadWindows,
    LayerWindow,
    ModelConfig,
    cache_groups,
)


@dataclasses.dataclass(frozen=True)
class GroupSizes:
    """Sizes and windows of one cache group.

    Attributes:
      layers: indices of its layers.
      heads: attention windows that determine which pages its pool recycles: one per KV head if the heads have different
        windows, otherwise one for all heads.
      head_wise: whether the KV heads have different windows. If True, pages are allocated per head: block tables [B,
        Hkv, P] have page rows (one page of one KV head). If False, block tables [B, P] have page ids.
      num_pages: number of pages of each layer.
      caches: names of the caches of each layer that are in this group, if a layer has caches in several groups; empty
        for the whole cache of a layer.
    """

    layers: tuple[int, ...]
    heads: HeadWindows
    head_wise: bool
    num_pages: int
    caches: tuple[str, ...] = ()

    def has_array(self, name: str) -> bool:
        """Return whether an array of a layer's cache, named as in its `CacheSpec`, is in this group."""
        return not self.caches or name.split(".")[0] in self.caches

    @property
    def num_heads(self) -> int:
        """Page rows per page: the number of KV heads if head_wise, otherwise 1."""
        return len(self.heads.window)

    @property
    def num_rows(self) -> int:
        """Number of page rows of the pool."""
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
    """Choose the number of pages of each cache group, for the memory of `num_pages` pages of each layer.

    The memory is divided for `max_num_seqs` sequences of equal length:

    1. Each group gets pages for the new tokens of one step. A sequence needs them only during the step: pages that the
       new tokens move out of a window are released before the next step.
    2. The remaining pages are divided in proportion to the pages that one sequence occupies in each group between
       steps. This proportion depends on the length of the sequence. The length used is the largest one, up to
       `max_model_len`, at which `max_num_seqs` sequences fit.

    A division for sequences of `max_model_len` would give groups with windows too few pages for many short sequences.
    If fewer and longer sequences run than `max_num_seqs`, pages of the groups with windows remain unused. Therefore
    `max_num_seqs` should be the expected number of running sequences.

    If the model has a single group, or without recycling, every group gets `num_pages` pages.

    Args:
      config: the model's configuration.
      num_pages: average number of pages per layer, weighted by the memory of a page of the layer.
      page_size: tokens per page.
      max_model_len: maximum number of tokens per sequence.
      max_num_seqs: maximum number of running sequences.
      step_tokens: maximum number of new tokens of a sequence per step.
      recycling: whether pages before the windows are released while a sequence runs. If False, `heads` of the result
        has windows that see all tokens, so the pools release no pages early.
    """
    groups = cache_groups(config)
    heads = [_heads(group.window if recycling else _unlimited(group.window)) for group in groups]
    weights = _page_weights(config, groups, page_size)
    total = num_pages * sum(weights)

    def share(pages: int) -> tuple[Fraction, list[Fraction], list[Fraction]]:
        """Return for sequences of `pages` pages: the number of sequences that fit; the pages that one sequence occupies
        in a layer of each group between steps; and the further pages that it occupies during a step."""
        held = [_peak_pages(seen, page_size, pages, 1) for seen in heads]
        chunk = [_peak_pages(seen, page_size, pages, step_tokens) - h for seen, h in zip(heads, held, strict=True)]
        return (total - _memory(weights, chunk)) / _memory(weights, held), held, chunk

    lengths = range(1, -(-max_model_len // page_size) + 1)
    too_long = bisect.bisect_left(lengths, True, key=lambda pages: share(pages)[0] < max_num_seqs)
    sequences, held, chunk = share(max(too_long, 1))
    return tuple(
        GroupSizes(
            group.layers, seen, isinstance(group.window, HeadWindows), max(int(c + sequences * h), 1), group.caches
        )
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
    """Make the page pools of all cache groups.

    Args:
      groups: sizes of the cache groups.
      page_size: tokens per page.
      max_num_seqs: maximum number of running sequences.
      max_model_len: maximum number of tokens per sequence.
      whole_tables: whether block tables have entries for `max_model_len` tokens, even if the pools cannot hold a
        sequence of this length. Otherwise the tables end at the longest sequence that fits the pools.
    """

    def with_tables(num_pages: int) -> GroupPools:
        sizes = {"page_size": page_size, "max_num_seqs": max_num_seqs, "max_pages_per_seq": num_pages}
        return GroupPools([HeadPagePool(group.num_rows, group.heads, **sizes) for group in groups])

    whole = with_tables(-(-max_model_len // page_size))
    return whole if whole_tables else with_tables(max(whole.max_tokens // page_size, 1))


def _peak_pages(seen: HeadWindows, page_size: int, num_pages: int, step_tokens: int) -> Fraction:
    """Return an upper bound of the pages that a sequence occupies at one time in one layer.

    Args:
      seen: windows of the layer.
      page_size: tokens per page.
      num_pages: length of the sequence in pages.
      step_tokens: maximum number of new tokens per step. Pages before the windows are released before each step.
    """
    # `peak_rows` does not depend on the sizes of the pool, so a pool of one row is enough.
    pool = HeadPagePool(1, seen, page_size=page_size, max_num_seqs=1, max_pages_per_seq=1)
    return Fraction(pool.peak_rows(num_pages * page_size, step_tokens=step_tokens), pool.num_heads)


def _page_weights(config: ModelConfig, groups: Sequence[CacheGroup], page_size: int) -> list[int]:
    """Return for each group the memory of one page in all of its layers, in units that all groups share: layers, or
    numbers of values per token if layers have different numbers; for DeepSeek-V4, bytes."""
    if isinstance(config, DeepseekV4Config):
        return [config.page_bytes(number, page_size) for number in range(len(groups))]
    if isinstance(config, DeepSeekConfig):
        return [len(group.layers) for group in groups]
    heads = [config.kv_heads(group.layers[0]) for group in groups]
    return [len(group.layers) * n * width for group, (n, width) in zip(groups, heads, strict=True)]


def _memory(weights: Sequence[int], pages: Sequence[Fraction]) -> Fraction:
    """Return the memory of all layers, given the pages per layer of each group and their weights."""
    return sum((weight * n for weight, n in zip(weights, pages, strict=True)), Fraction(0))


def _heads(window: LayerWindow) -> HeadWindows:
    """Return the windows of a layer per KV head; a single window if all heads have the same window."""
    if isinstance(window, HeadWindows):
        return window
    return HeadWindows((FULL if window is None else window,), (0,))


def _unlimited(window: LayerWindow) -> LayerWindow:
    """Return windows that see all tokens, per KV head if `window` is per KV head."""
    return HeadWindows((FULL,) * len(window.window), window.sink_tokens) if isinstance(window, HeadWindows) else None
