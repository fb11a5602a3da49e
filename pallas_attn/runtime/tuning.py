"""Kernel configurations by operation, device and shape: measured ones from packaged JSON files, else a heuristic.

`tuned/<device>.json` maps an operation to a list of entries {"key": {...}, "config": {...}}. A key contains the static
facts of a call that the best configuration depends on. An entry applies to a call with an equal key.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import resources
from typing import Any

from pallas_attn.runtime import device


def device_name() -> str:
    """Return the device that a call is traced for as a file name, for example "nvidia_h200" or "cpu"."""
    return device.current().file_name


@functools.cache
def _tuned(name: str) -> Mapping[str, list[dict[str, Any]]]:
    file = resources.files("pallas_attn.runtime") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


type Decide = Callable[[str, Mapping[str, Any], Any], Any]
"""decide(op, key, config) -> config: replaces the configuration that `lookup` found."""

_decide: ContextVar[Decide | None] = ContextVar("decide", default=None)


def is_deciding() -> bool:
    """Return whether a `deciding` context is open, which may replace the configuration of a call."""
    return _decide.get() is not None


@contextlib.contextmanager
def deciding(decide: Decide) -> Iterator[None]:
    """Within this context, calls are traced with the configurations that `decide` returns. Tuners and reports use it.

    In nested contexts, the outer function decides first, and the inner function receives its result.
    """
    outer = _decide.get()
    both: Decide = lambda op, key, config: decide(op, key, outer(op, key, config) if outer else config)  # noqa: E731
    token = _decide.set(both)
    try:
        yield
    finally:
        _decide.reset(token)


def lookup[Config](
    op: str, key: Mapping[str, Any], make: Callable[..., Config], heuristic: Callable[[], Config]
) -> Config:
    """Return the configuration of a call of `op` on the device that the call is traced for.

    Args:
      op: operation and implementation, for example "paged_decode/xla".
      key: static facts of the call (JSON values).
      make: returns a configuration from the fields of a packaged configuration.
      heuristic: returns the configuration if no measured one applies.
    """
    tuned = (entry["config"] for entry in _tuned(device_name()).get(op, ()) if entry["key"] == dict(key))
    config = next(tuned, None)
    config = heuristic() if config is None else make(**config)
    decide = _decide.get()
    return config if decide is None else decide(op, key, config)
