"""Choice of kernel configurations (tile sizes and the like): measured configurations from JSON files, else a heuristic.

`tuned/<device>.json` maps the name of an operation to a list of entries {"key": {...}, "config": {...}}. A key has the
sizes and options of a call that the best configuration depends on. An entry applies to calls with an equal key.
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
    """Return the name of the device that a call is compiled for, as in file names: "nvidia_h200" or "cpu"."""
    return device.current().file_name


@functools.cache
def _tuned(name: str) -> Mapping[str, list[dict[str, Any]]]:
    """Read the measured configurations of a device; empty if none were measured."""
    file = resources.files("pallas_attn.runtime") / "tuned" / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else {}


type Decide = Callable[[str, Mapping[str, Any], Any], Any]
"""A function decide(op, key, config) that returns the configuration to use instead of `config`, which `lookup` found.
"""

_decide: ContextVar[Decide | None] = ContextVar("decide", default=None)


def is_deciding() -> bool:
    """Return whether a `deciding` context is active, so that configurations may be replaced."""
    return _decide.get() is not None


@contextlib.contextmanager
def deciding(decide: Decide) -> Iterator[None]:
    """Replace the configurations of the calls that are traced within this context by the results of `decide`.

    Tuners try configurations in this way, and reports record them. In nested contexts, the outer function is called
    first, and the inner function receives its result.
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
    """Return the configuration of a call on the device that the call is compiled for.

    Args:
      op: name of the operation in the JSON files, for example "paged_decode/xla".
      key: sizes and options of the call, as JSON values.
      make: creates a configuration from the fields in the JSON file.
      heuristic: creates the configuration if none was measured for this key.
    """
    tuned = (entry["config"] for entry in _tuned(device_name()).get(op, ()) if entry["key"] == dict(key))
    config = next(tuned, None)
    config = heuristic() if config is None else make(**config)
    decide = _decide.get()
    return config if decide is None else decide(op, key, config)
