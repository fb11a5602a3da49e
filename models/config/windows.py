"""Attention windows of the KV heads of each layer, read from a config.json or another JSON file.

The entry `head_windows` of a config.json, and the file of the option --head-windows, are a list with one entry per
layer:

- null: every head sees all keys.
- an integer W: every head sees the newest W keys, including the key of the query token.
- {"window": [...], "sink_tokens": [...]}: both lists have one entry per KV head. A head sees the newest `window` keys
  (all keys if it is null) and the first `sink_tokens` keys of the sequence. The default of `sink_tokens` is 0 for all
  heads.

Layers with equal windows form a cache group. They share page pools and block tables, because they stop using a page at
the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from pallas_attn import FULL, HeadWindow
from pallas_attn.models.config.entries import Json, is_integer
from pallas_attn.models.config.json_files import read_json, shown

LOCAL_KIND, GLOBAL_KIND = "sliding_attention", "full_attention"
"""Kinds of layers in the entry `layer_types`: with and without a window."""


@dataclasses.dataclass(frozen=True)
class HeadWindows:
    """Visible keys of each KV head of a layer: the first `sink_tokens` keys and the newest `window` keys.

    Attributes:
      window: window per KV head, at least 1; `pallas_attn.FULL` for all keys.
      sink_tokens: number of first keys per KV head, at least 0.

    Raises:
      ValueError: a number out of range, or lists of different lengths.
    """

    window: tuple[int, ...]
    sink_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.window or len(self.window) != len(self.sink_tokens):
            lengths = f"{len(self.window)} and {len(self.sink_tokens)}"
            raise ValueError(f"head windows: expected a window and sink_tokens for each KV head, got {lengths}")
        for window in self.window:
            _in_range("window", window, 1)
        for count in self.sink_tokens:
            _in_range("sink_tokens", count, 0)

    def array(self) -> HeadWindow:
        """Return the windows in the form that `pallas_attn` operations take."""
        return HeadWindow(jnp.asarray(self.window, jnp.int32), jnp.asarray(self.sink_tokens, jnp.int32))


type LayerWindow = int | HeadWindows | None
"""Visible keys of a layer: all keys (None), the newest W keys (int W) for all heads, or a window per KV head."""

type Windows = tuple[LayerWindow, ...]
"""Window of each layer."""


class HeadShape(NamedTuple):
    """Shape of the keys, and of the values, of one token in the cache of a layer.

    Attributes:
      num_heads: Hkv, number of KV heads.
      width: D, columns of a head.
    """

    num_heads: int
    width: int


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers with equal windows, which share a page pool, block tables, cache slots and decode plans.

    Attributes:
      window: window of the layers. If it is `HeadWindows`, pages are allocated per KV head: block tables [B, Hkv, P]
        have page rows, each one page of one head. Otherwise block tables [B, P] have page ids.
      layers: indices of the layers, ascending.
      caches: names of the caches of each layer that are in this group, if a layer has caches in several groups; empty
        for the whole cache of a layer.
    """

    window: LayerWindow
    layers: tuple[int, ...]
    caches: tuple[str, ...] = ()


@runtime_checkable
class _Windowed(Protocol):
    """The fields of a model configuration that `window_groups` needs."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def cached_layers(self) -> range: ...

    @property
    def windows(self) -> Windows | None: ...


def window_groups(config: _Windowed) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model in which a layer has one cache, sorted by their first layer. Layers without a
    cache are in no group."""
    layers: dict[LayerWindow, list[int]] = {}
    windows = config.windows or (None,) * config.num_hidden_layers
    for layer in config.cached_layers:
        layers.setdefault(windows[layer], []).append(layer)
    return tuple(CacheGroup(window, tuple(members)) for window, members in layers.items())


def check_windows(windows: Windows, num_layers: int, num_kv_heads: int) -> None:
    """Check the windows of a model.

    Raises:
      ValueError: not one window per layer, not one window per KV head in `HeadWindows`, or an integer window that is
        out of range.
    """
    if len(windows) != num_layers:
        raise ValueError(f"head_windows: expected one for each of {num_layers} layers, got {len(windows)}")
    for layer, window in enumerate(windows):
        if isinstance(window, int):
            _in_range(f"window of layer {layer}", window, 1)
        elif window is not None and len(window.window) != num_kv_heads:
            got = len(window.window)
            raise ValueError(
                f"head_windows of layer {layer}: expected one for each of {num_kv_heads} KV heads, got {got}"
            )


def load_windows(path: Path) -> Windows:
    """Read a JSON file of `head_windows`.

    Raises:
      ValueError: the file has other contents.
      OSError: the file cannot be read.
    """
    return read_json(path, read_head_windows)


def read_head_windows(entry: Any) -> Windows:
    """Read the windows of all layers from `head_windows`. The module docstring describes the format.

    Raises:
      ValueError: another format, or a number out of range.
    """
    if not isinstance(entry, list) or not entry:
        raise ValueError(f"head_windows: expected a list with one entry per layer, got {shown(entry)}")
    return tuple(_read_layer(layer, window) for layer, window in enumerate(entry))


def _read_layer(layer: int, entry: Any) -> LayerWindow:
    if entry is None or (is_integer(entry) and 1 <= entry <= FULL):
        return entry
    wanted = "expected null, a window from 1, or lists window and sink_tokens"
    if not isinstance(entry, Mapping) or not {"window"} <= entry.keys() <= {"window", "sink_tokens"}:
        raise ValueError(f"head_windows of layer {layer}: {wanted}, got {shown(entry)}")
    window = _read_list(layer, "window", entry["window"], null=FULL)
    sinks = _read_list(layer, "sink_tokens", entry.get("sink_tokens", [0] * len(window)))
    try:
        return HeadWindows(window, sinks)
    except ValueError as error:
        raise ValueError(f"head_windows of layer {layer}: {error}") from error


def _read_list(layer: int, name: str, entry: Any, null: int | None = None) -> tuple[int, ...]:
    values = [null if value is None else value for value in entry] if isinstance(entry, list) else [None]
    integers = tuple(value for value in values if is_integer(value))
    if len(integers) < len(values):
        wanted = "a list of integers" if null is None else "a list of integers and nulls"
        raise ValueError(f"head_windows of layer {layer}: expected {name} as {wanted}, got {shown(entry)}")
    return integers


def read_layer_types(config: Json, kinds: Sequence[str]) -> Windows | None:
    """Return the windows of all layers from entries of Hugging Face transformers; None if no layer has a window.

    Args:
      config: contents of a config.json, with the entry `sliding_window` if a layer has a window.
      kinds: kind of each layer: "full_attention" for no window, or "sliding_attention" for a window of `sliding_window`
        keys.

    Raises:
      ValueError: a layer is "sliding_attention", and `sliding_window` is missing or invalid.
      NotImplementedError: a kind has another value.
    """
    if unknown := [kind for kind in kinds if kind not in (GLOBAL_KIND, LOCAL_KIND)]:
        raise NotImplementedError(f"layer_types {shown(unknown[0])}: expected {GLOBAL_KIND} or {LOCAL_KIND}")
    if LOCAL_KIND not in kinds:
        return None
    window = config.get("sliding_window")
    if not is_integer(window) or not 1 <= window <= FULL:
        raise ValueError(f"sliding_window: expected the window of sliding_attention layers, got {shown(window)}")
    return tuple(window if kind == LOCAL_KIND else None for kind in kinds)


def layer_kinds(config: Json, num_layers: int) -> list[str] | None:
    """Return the entry `layer_types` of a config.json, a name per layer; None if it is absent, null or empty.

    Raises:
      ValueError: the entry is not a list with one name per layer.
    """
    kinds = config.get("layer_types")
    if not kinds:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or len(kinds) != num_layers:
        raise ValueError(f"layer_types: expected one for each of {num_layers} layers, got {shown(kinds)}")
    return kinds


def window_entries(windows: Windows | None, *, by_layer: bool) -> dict[str, Any]:
    """Return entries of a config.json that represent these windows.

    Args:
      windows: windows of all layers; None for no entries.
      by_layer: whether Hugging Face transformers supports windows of layers for this family. If True, and all layers
        with a window have the same integer, the result has transformers' entries `layer_types` and `sliding_window`.
        Otherwise it has `head_windows`.
    """
    if windows is None:
        return {}
    widths = set(windows) - {None}
    if by_layer and len(widths) == 1 and isinstance(width := widths.pop(), int):
        kinds = [GLOBAL_KIND if window is None else LOCAL_KIND for window in windows]
        return {"sliding_window": width, "layer_types": kinds}
    return {"head_windows": [_layer_entry(window) for window in windows]}


def _layer_entry(window: LayerWindow) -> Any:
    if not isinstance(window, HeadWindows):
        return window
    return {
        "window": [None if width == FULL else width for width in window.window],
        "sink_tokens": list(window.sink_tokens),
    }


def _in_range(name: str, value: int, least: int) -> None:
    if not least <= value <= FULL:
        raise ValueError(f"{name}: expected {least} to {FULL}, got {shown(value)}")
