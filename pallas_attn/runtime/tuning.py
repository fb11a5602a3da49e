"""Kernel configurations by (operation, device, shape): measured ones from packaged JSON, else the caller's heuristic.

`tuned/<device>.json` maps an operation to a list of entries {"key": {...}, "config": {...}}. A key names the static
facts of a call that the best configuration depends on; an entry matches a call whose key has the same items.
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
    """The card that a call is traced for, as a file name such as "nvidia_h200" or "cpu"."""
    return device.current().file_name


@functools.cache
def _tuned(name: str) -> Mapping[str, list[dict[str, Any]]]:
    file = resources.files("pallas_attn.runtime") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


type Decide = Callable[[str, Mapping[str, Any], Any], Any]
"""decide(op, key, config) -> config: has the last word on a configuration that was looked up."""

_decide: ContextVar[Decide | None] = ContextVar("decide", default=None)


def is_deciding() -> bool:
    """Whether somebody may have another configuration than a call would get by itself."""
    return _decide.get() is not None


@contextlib.contextmanager
def deciding(decide: Decide) -> Iterator[None]:
    """A context in which calls are traced with the configurations that `decide` returns, for tuners and reports.

    Of several around each other the outer ones decide first, and hand what they decided to the inner ones.
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
    """The configuration for a call of `op` on the card that it is traced for.

    Args:
      op: operation and implementation, such as "paged_decode/xla".
      key: static facts of the call (JSON values).
      make: builds a configuration from the fields of a packaged one.
      heuristic: gives one where none was measured.
    """
    tuned = (entry["config"] for entry in _tuned(device_name()).get(op, ()) if entry["key"] == dict(key))
    config = next(tuned, None)
    config = heuristic() if config is None else make(**config)
    decide = _decide.get()
    return config if decide is None else decide(op, key, config)
