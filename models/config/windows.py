"""Windows of the KV heads of each layer, as a config.json or a file gives them, and the cache groups that follow.

In JSON a model's `head_windows` is a list with one entry a layer:

- null: every head sees everything.
- an integer W: every head sees the newest W keys, the query's own included.
- {"window": [...], "sink_tokens": [...]}: one number per KV head, the window null where the head sees everything;
  a head also sees its first `sink_tokens` keys (0 where that list is left out).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from models.config.entries import Json, is_integer
from models.config.json_files import read_json, shown
from pallas_attn import FULL, HeadWindow


@dataclasses.dataclass(frozen=True)
class HeadWindows:
    """Visible keys of each KV head of a layer: its first `sink_tokens` keys and the newest `window` ones.

    Attributes:
      window: one per KV head, at least 1; `pallas_attn.FULL` hides nothing.
      sink_tokens: one per KV head, at least 0.

    Raises:
      ValueError: a number out of range, or lists of unlike lengths.
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
        """Converts to the `HeadWindow` that `pallas_attn`'s operations take."""
        return HeadWindow(jnp.asarray(self.window, jnp.int32), jnp.asarray(self.sink_tokens, jnp.int32))


type LayerWindow = int | HeadWindows | None
"""Visible keys of a layer's KV heads: all (None), the newest W keys, or a window for each head."""

type Windows = tuple[LayerWindow, ...]
"""Windows of every layer."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers with equal windows, which share a pool, tables, slots and plans.

    Attributes:
      window: window of the layers. Tables are [B, Hkv, P] of row ids where it is `HeadWindows`, else [B, P] of page
        ids.
      layers: their indices, ascending.
    """

    window: LayerWindow
    layers: tuple[int, ...]


@runtime_checkable
class _Windowed(Protocol):
    """Part of a model's configuration that determines its cache groups."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def windows(self) -> Windows | None: ...


def cache_groups(config: _Windowed) -> tuple[CacheGroup, ...]:
    """Groups a model's layers by their windows, in the order of each group's first layer."""
    layers: dict[LayerWindow, list[int]] = {}
    for layer, window in enumerate(config.windows or (None,) * config.num_hidden_layers):
        layers.setdefault(window, []).append(layer)
    return tuple(CacheGroup(window, tuple(members)) for window, members in layers.items())


def check_windows(windows: Windows, num_layers: int, num_kv_heads: int) -> None:
    """Raises ValueError unless there is a window for each layer, and for each KV head where heads have their own."""
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
    """Reads a JSON file of `head_windows`.

    Raises:
      ValueError: it is no such file.
      OSError: it cannot be read.
    """
    entry = read_json(path)
    try:
        return read_head_windows(entry)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_head_windows(entry: Any) -> Windows:
    """Reads the windows of all layers from their `head_windows`, in the form that this module describes.

    Raises:
      ValueError: another form, or a number out of range.
    """
    if not isinstance(entry, list) or not entry:
        raise ValueError(f"head_windows: expected a list with one entry a layer, got {shown(entry)}")
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
    """Reads the windows of all layers from their kinds and the `sliding_window` of a config.json; None if no layer has
    any.

    Args:
      config: contents of the config.json.
      kinds: "full_attention" or "sliding_attention", one a layer.

    Raises:
      ValueError: there are sliding layers, but no window.
      NotImplementedError: another kind.
    """
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise NotImplementedError(f"layer_types {shown(unknown[0])}: expected full_attention or sliding_attention")
    if "sliding_attention" not in kinds:
        return None
    window = config.get("sliding_window")
    if not is_integer(window) or not 1 <= window <= FULL:
        raise ValueError(f"sliding_window: expected the tokens that sliding_attention layers see, got {shown(window)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(config: Json, num_layers: int) -> list[str] | None:
    """Reads the `layer_types` of a config.json, None if absent.

    Raises:
      ValueError: they are no list of one name a layer.
    """
    kinds = config.get("layer_types")
    if not kinds:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or len(kinds) != num_layers:
        raise ValueError(f"layer_types: expected one for each of {num_layers} layers, got {shown(kinds)}")
    return kinds


def window_entries(windows: Windows | None, *, by_layer: bool) -> dict[str, Any]:
    """Makes the entries of a config.json that describe these windows.

    Args:
      windows: None for no entries.
      by_layer: whether Hugging Face's own model of the family has windows. Its entries, `layer_types` and
        `sliding_window`, are used where they can: where some layers have one window for all heads, the others none.
    """
    if windows is None:
        return {}
    widths = set(windows) - {None}
    if by_layer and len(widths) == 1 and isinstance(width := widths.pop(), int):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
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
