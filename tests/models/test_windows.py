"""Attention windows of layers and heads: reading from a config.json or a file, and cache groups.

A cache group has all layers with the same windows.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_attn import FULL
from pallas_attn.models.config import (
    GQA_PRESETS,
    PRESETS,
    CacheGroup,
    GQAConfig,
    HeadWindows,
    cache_groups,
    load_windows,
    with_windows,
)
from pallas_attn.models.config.windows import read_head_windows

TINY = GQA_PRESETS["qwen3-tiny"]  # three layers of two KV heads
SPLIT = HeadWindows((FULL, 8), (0, 4))
ENTRIES = [None, 16, {"window": [None, 8], "sink_tokens": [0, 4]}]


def read(**entries: Any) -> GQAConfig:
    return GQAConfig.from_hf({**TINY.to_hf(), **entries})


def test_head_windows_round_trip():
    config = read(head_windows=ENTRIES)
    assert config.windows == (None, 16, SPLIT)
    assert config.to_hf()["head_windows"] == ENTRIES
    assert GQAConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


WIDTHS = st.integers(1, 40) | st.just(FULL)
LAYERS = st.none() | WIDTHS | st.tuples(st.tuples(WIDTHS, WIDTHS), st.tuples(*[st.integers(0, 40)] * 2))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["qwen3-tiny", "gpt-oss-tiny"]), st.none() | st.tuples(*[LAYERS] * 4))
def test_arbitrary_windows_round_trip(name: str, drawn: tuple | None):
    windows = drawn and tuple(HeadWindows(*layer) if isinstance(layer, tuple) else layer for layer in drawn)
    config = dataclasses.replace(GQA_PRESETS[name], num_hidden_layers=4, windows=windows)
    assert GQAConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    groups = cache_groups(config)
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2, 3]
    assert [group.layers[0] for group in groups] == sorted(group.layers[0] for group in groups)
    for group in groups:
        assert {(windows or [None] * 4)[layer] for layer in group.layers} == {group.window}


def test_llama_writes_head_windows():
    config = dataclasses.replace(TINY, model_type="llama", windows=(None, 16, 16))
    assert config.to_hf()["head_windows"] == [None, 16, 16]
    assert GQAConfig.from_hf(config.to_hf()) == config


def test_sink_tokens_default_to_0():
    assert read_head_windows([{"window": [3, None]}]) == (HeadWindows((3, FULL), (0, 0)),)


def test_windows_as_arrays():
    window = SPLIT.array()
    np.testing.assert_array_equal(np.asarray(window.window), [FULL, 8])
    np.testing.assert_array_equal(np.asarray(window.sink_tokens), [0, 4])
    assert window.window.dtype == window.sink_tokens.dtype == np.int32


def test_equal_windows_form_one_cache_group():
    five = dataclasses.replace(TINY, num_hidden_layers=5, windows=(16, SPLIT, 16, None, HeadWindows((FULL, 8), (0, 4))))
    assert cache_groups(five) == (CacheGroup(16, (0, 2)), CacheGroup(SPLIT, (1, 4)), CacheGroup(None, (3,)))


@pytest.mark.parametrize("config", [TINY, PRESETS["v3-tiny"]], ids=["gqa", "mla"])
def test_no_windows_form_one_cache_group(config):
    assert cache_groups(config) == (CacheGroup(None, tuple(range(config.num_hidden_layers))),)


@pytest.mark.parametrize(
    ("entries", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, (None, 32, 32)),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (32, None, 32),
        ),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 3}, None),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0, "head_windows": ENTRIES[:1] * 3},
         (None, None, None)),
    ],
)  # fmt: skip
def test_sliding_layers_equal_transformers(entries: dict, windows: tuple | None):
    config = read(**entries)
    assert config.windows == windows
    assert GQAConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"head_windows": ENTRIES[:2]}, "head_windows: expected one for each of 3 layers, got 2"),
        (
            {"head_windows": [None, None, {"window": [1, 2, 3]}]},
            "head_windows of layer 2: expected one for each of 2 KV heads, got 3",
        ),
        ({"head_windows": {}}, r"head_windows: expected a list with one entry per layer, got \{\}"),
        ({"head_windows": [0, None, None]}, "head_windows of layer 0: expected null, a window from 1, or lists"),
        ({"head_windows": [None, True, None]}, "head_windows of layer 1: expected null, a window from 1, or lists"),
        ({"head_windows": [FULL + 1, None, None]}, "head_windows of layer 0: expected null, a window from 1"),
        ({"head_windows": [None, {"windows": [1, 2]}, None]}, "head_windows of layer 1: expected null, a window"),
        ({"head_windows": [None, {"window": 8}, None]}, "expected window as a list of integers and nulls, got 8"),
        ({"head_windows": [None, {"window": [8, 0]}, None]}, "head_windows of layer 1: window: expected 1 to"),
        (
            {"head_windows": [None, {"window": [8, 8], "sink_tokens": [None, 1]}, None]},
            r"expected sink_tokens as a list of integers, got \[None, 1\]",
        ),
        (
            {"head_windows": [None, {"window": [8, 8], "sink_tokens": [1, -1]}, None]},
            "sink_tokens: expected 0 to .*, got -1",
        ),
        (
            {"head_windows": [None, {"window": [8, 8], "sink_tokens": [1]}, None]},
            "expected a window and sink_tokens for each KV head, got 2 and 1",
        ),
        ({"use_sliding_window": True, "sliding_window": 32}, "max_window_layers: expected the first layer"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_window: expected the window of"),
        ({"use_sliding_window": 1}, "use_sliding_window: expected true or false"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, "contradict each other"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: expected one for each of 3 layers"),
    ],
)
def test_invalid_windows_raise(entries: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read(**entries)


def test_models_without_windows_raise():
    with pytest.raises(NotImplementedError, match="llama has full_attention throughout"):
        read(model_type="llama", use_sliding_window=True)
    with pytest.raises(NotImplementedError, match="layer_types 'chunked_attention'"):
        read(layer_types=["chunked_attention"] * 3)
    latent = PRESETS["v3-tiny"]
    with pytest.raises(NotImplementedError, match="head_windows: all heads of latent attention share one latent"):
        type(latent).from_hf({**latent.to_hf(), "head_windows": ENTRIES})
    with pytest.raises(NotImplementedError, match="head_windows: all heads of latent attention share one latent"):
        with_windows(latent, (None, None, None))


def test_windows_file(tmp_path: Path):
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(ENTRIES))
    assert with_windows(TINY, load_windows(path)).windows == (None, 16, SPLIT)
    path.write_text("[null")
    with pytest.raises(ValueError, match="windows.json: not JSON: "):
        load_windows(path)
    path.write_text('{"window": [1]}')
    with pytest.raises(ValueError, match="windows.json: head_windows: expected a list with one entry per layer"):
        load_windows(path)


@pytest.mark.parametrize(
    ("window", "message"),
    [(0, "window: expected 1 to"), (FULL + 1, "window: expected 1 to"), (-3, "got -3")],
)
def test_windows_out_of_range_raise(window: int, message: str):
    with pytest.raises(ValueError, match=message):
        HeadWindows((window,), (0,))
    with pytest.raises(ValueError, match=message.replace("window:", "window of layer 1:")):
        dataclasses.replace(TINY, windows=(None, window, None))
