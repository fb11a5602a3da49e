"""Validation of values from other processes and from files against declarative tables.

Example:
  PROMPT = {"number": Integer(0), "salt": TextUpTo(100)}
  check_field("prompt", {"number": 1.5, "salt": ""}, PROMPT)
  # ValueError "prompt.number: expected an integer of at least 0, got 1.5"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn.models.config.json_files import shown

DTYPES = {
    name: np.dtype(getattr(jnp, name))
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
}
"""Dtypes that messages and files may name. Names are looked up in this table, because `numpy.dtype(name)` also accepts
records and Python objects."""


UNLIMITED = 2**63 - 1
"""Limit of a number, a length or a number of items that is not limited otherwise."""


@dataclasses.dataclass(frozen=True)
class Integer:
    """A Python or NumPy integer from `least` to `most`; not a bool."""

    least: int = 0
    most: int = UNLIMITED

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        limit = f"of at least {self.least}" if self.most == UNLIMITED else f"from {self.least} to {self.most}"
        return f"an integer {limit}"


@dataclasses.dataclass(frozen=True)
class TextUpTo:
    """A str of at most `longest` characters, without surrogates, which UTF-8 cannot encode."""

    longest: int

    def __str__(self) -> str:
        limit = "" if self.longest == UNLIMITED else f" of at most {self.longest} characters"
        return f"a str{limit} without surrogates"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of the given strings."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return "one of " + ", ".join(self.values)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A list with `least` to `most` items. Every item must fulfil the expectation `item`."""

    item: Kind
    most: int
    least: int = 0

    def __str__(self) -> str:
        limit = f"of at least {self.least}" if self.most == UNLIMITED else f"of {self.least} to {self.most}"
        return f"a list {limit} items"


@dataclasses.dataclass(frozen=True)
class ObjectOf:
    """A JSON object with arbitrary names. Every value must fulfil the expectation `item`; None accepts every value."""

    item: Kind | None = None

    def __str__(self) -> str:
        return "an object"


@dataclasses.dataclass(frozen=True)
class Array:
    """A NumPy array.

    Attributes:
      dtype: name of the dtype.
      shape: expected size of each axis; None accepts every size of that axis.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ", ".join("n" if size is None else str(size) for size in self.shape)
        return f"an array {self.dtype} [{sizes}]"


type Kind = Integer | TextUpTo | OneOf | ListOf | ObjectOf | Array | tuple[Kind, ...] | Mapping[str, Kind]
"""Expectation of a value. A tuple expects a list with one item for each entry. A mapping expects an object that has
exactly these fields."""


def check_field(name: str, value: Any, kind: Kind) -> None:
    """Check a value, and all values inside it.

    Args:
      name: name of the value in error messages, for example "prompt.number".
      value: the value.
      kind: the expectation.

    Raises:
      ValueError: the value, or a value inside it, does not fulfil the expectation. The message contains the name, the
        expectation, and a short description of the value, such as the shape of an array.
    """
    if not _fits(value, kind):
        raise ValueError(f"{name}: expected {_expectation(kind)}, got {_described(value)}")
    match kind:
        case ListOf():
            is_whole = isinstance(kind.item, Integer | TextUpTo | OneOf | Array)  # `_fits` checks these completely
            for i, item in enumerate(value):
                if not (is_whole and _fits(item, kind.item)):
                    check_field(f"{name}[{i}]", item, kind.item)
        case ObjectOf() if kind.item is not None:
            for key, item in value.items():
                check_field(f"{name}[{shown(key)}]", item, kind.item)
        case tuple():
            for i, (item, of_item) in enumerate(zip(value, kind, strict=True)):
                check_field(f"{name}[{i}]", item, of_item)
        case Mapping():
            for key, of_item in kind.items():
                if key not in value:
                    raise ValueError(f"{name}.{key}: expected {_expectation(of_item)}, got nothing")
                check_field(f"{name}.{key}", value[key], of_item)
            if unknown := [key for key in value if key not in kind]:
                raise ValueError(f"{name}: expected the fields {', '.join(kind) or 'none'}, got also {shown(unknown)}")
        case _:
            pass


def _fits(value: Any, kind: Kind) -> bool:
    """Whether a value itself has the expected type, range and size. Values inside it are not checked."""
    match kind:
        case Integer():
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            return is_integer and kind.least <= int(value) <= kind.most
        case TextUpTo():
            if not isinstance(value, str) or len(value) > kind.longest:
                return False
            return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
        case OneOf():
            return isinstance(value, str) and value in kind.values
        case ListOf():
            return isinstance(value, list) and kind.least <= len(value) <= kind.most
        case Array():
            return (
                isinstance(value, np.ndarray)
                and value.dtype == DTYPES[kind.dtype]
                and value.ndim == len(kind.shape)
                and all(want is None or want == size for want, size in zip(kind.shape, value.shape, strict=True))
            )
        case tuple():
            return isinstance(value, list) and len(value) == len(kind)
        case _:
            return isinstance(value, Mapping)


def _expectation(kind: Kind) -> str:
    match kind:
        case tuple():
            return f"a list of {len(kind)} items"
        case Mapping():
            return "an object"
        case _:
            return str(kind)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    return f"{len(value)} items" if isinstance(value, list) and len(value) > 8 else shown(value)
