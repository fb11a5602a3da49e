"""Division of the cache memory between cache groups.

A cache group has all layers with the same attention windows. In a group with windows per head, the unit of allocation
is a page row: one page of one KV head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pallas_attn import FULL
from pallas_attn.models.config import GQA_PRESETS, HeadWindows, LayerWindow
from pallas_attn.models.engine.group_sizes import GroupSizes, group_sizes, make_pools
from tests.models.engine_case import CONFIG as LATENT

HEADS = HeadWindows((FULL, 40), (0, 4))


def sizes(*windows: LayerWindow, num_pages: int = 64, max_model_len: int = 512, **options) -> tuple[GroupSizes, ...]:
    config = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], num_hidden_layers=len(windows), windows=windows)
    defaults: dict[str, Any] = {"page_size": 8, "max_num_seqs": 4, "step_tokens": 32, "recycling": True}
    return group_sizes(config, num_pages=num_pages, max_model_len=max_model_len, **(defaults | options))


@pytest.mark.parametrize("window", [None, 40, HEADS])
@pytest.mark.parametrize("recycling", [True, False])
def test_one_group_has_all_pages(window, recycling):
    [group] = sizes(window, window, num_pages=77, recycling=recycling)
    assert (group.layers, group.num_pages) == ((0, 1), 77)
    assert group.head_wise == isinstance(window, HeadWindows)
    assert group.num_rows == 77 * (2 if group.head_wise else 1)


def test_latent_models_have_one_group():
    common = {"page_size": 8, "max_model_len": 64, "max_num_seqs": 3, "step_tokens": 8, "recycling": True}
    assert group_sizes(LATENT, num_pages=5, **common) == (GroupSizes((0, 1), HeadWindows((FULL,), (0,)), False, 5),)


def test_without_recycling_groups_are_equal_and_pools_have_no_windows():
    groups = sizes(None, 40, HEADS, num_pages=31, recycling=False)
    assert [group.num_pages for group in groups] == [31] * 3
    assert [group.heads.window for group in groups] == [(FULL,), (FULL,), (FULL, FULL)]


def test_division_is_proportional_to_pages_of_long_sequences():
    """Each group gets memory in proportion to the pages of a sequence of the maximum length, plus pages for one chunk.

    A sequence of 512 tokens holds 64 pages, or six pages with a window of 40 tokens. A prefill chunk of 32 tokens needs
    four more pages in the group with a window.
    """
    full, windowed = sizes(None, 40, 40, num_pages=300)
    assert (full.layers, windowed.layers) == ((0,), (1, 2))
    sequences = (3 * 300 - 2 * 4) / (64 + 2 * 6)
    assert (full.num_pages, windowed.num_pages) == (int(64 * sequences), int(6 * sequences + 4))
    assert full.num_pages + 2 * windowed.num_pages <= 900


def test_heads_count_as_parts_of_a_page():
    full, mixed = sizes(None, HEADS, num_pages=300)
    # Mean over two heads: 64 pages without a window; one page of sink tokens and six pages of a window.
    held = (64 + 1 + 6) / 2
    sequences = (2 * 300 - 4 / 2) / (64 + held)
    assert (full.num_pages, mixed.num_pages) == (int(64 * sequences), int(held * sequences + 4 / 2))


def test_division_for_max_num_seqs_sequences():
    """The memory is divided for `max_num_seqs` sequences of equal length, and for the longest sequences that fit.

    16 sequences of 30 pages and one chunk fit in the memory, and 16 sequences of 31 pages do not fit. In the group with
    a window of 40 tokens, a sequence holds six pages.
    """
    full, windowed = sizes(None, 40, num_pages=291, max_num_seqs=16)
    assert (full.num_pages, windowed.num_pages) == (int(30 * (582 - 4) / 36), int(6 * (582 - 4) / 36) + 4)
    assert 31 * 16 + 6 * 16 + 4 > 582


@pytest.mark.parametrize("num_pages", [1, 7, 64])
def test_memory_smaller_than_windows_is_divided_equally(num_pages):
    assert [group.num_pages for group in sizes(None, 40, num_pages=num_pages, max_num_seqs=64)] == [num_pages] * 2


def test_table_length_is_the_longest_sequence():
    pools = make_pools(sizes(None, num_pages=20), page_size=8, max_num_seqs=2, max_model_len=512)
    assert pools.table_tokens == 160
    pools = make_pools(sizes(40, num_pages=20), page_size=8, max_num_seqs=2, max_model_len=510)
    assert pools.table_tokens == 512
    pools = make_pools(sizes(HEADS, num_pages=20), page_size=8, max_num_seqs=2, max_model_len=512)
    assert pools.table_tokens == (40 - 7) * 8, "of 40 rows the window and sink tokens of one head take 7"
    assert pools.max_num_seqs == 2
