"""Sources of parameters: the tensors of a checkpoint that a parameter is made from, and the change of layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from pallas_attn.models.checkpoints.files import Slices

type Shape = tuple[int, ...]
type Read = Callable[[str, Slices], np.ndarray]
"""Function (name of a checkpoint tensor, part of the tensor) -> values."""

type Order = Callable[[], np.ndarray]
"""Function that returns the permutation of a projection's outputs. It is called after the headers have been checked."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Checkpoint tensors that a parameter is made from.

    Attributes:
      tensors: shapes of the tensors by name, in the order in which `pack` takes them.
      pack: makes the parameter from the tensors.
      in_f32: whether the parameter is float32 for every dtype of the model, unless `keeps_bf16`, or made from float32
        tensors by `split_weights` if the module has it in bfloat16.
      keeps_bf16: whether a bfloat16 model has the parameter in bfloat16, instead of in float32, if the checkpoint has
        it in bfloat16.
      in_int32: whether the parameter is int32.
      of_heads: whether the parameter belongs to heads and is therefore the same on all devices along `context`.
      added_once: whether the parameter is a bias of a sum over devices. On a mesh, it is zero on all devices except the
        first.
      of_experts: whether the parameter belongs to whole experts. If there are fewer experts than a device has, the
        remaining experts are zero.
      experts: the experts to take from tensors that contain all experts; None if each expert has its own tensors.
      in_halves: whether axis 1 of the tensor has two halves, gate and up, each of which is split over devices. `pack`
        takes the parts of both halves.
    """

    tensors: Mapping[str, Shape]
    pack: Callable[[Iterator[np.ndarray]], np.ndarray] = next
    in_f32: bool = False
    keeps_bf16: bool = False
    in_int32: bool = False
    of_heads: bool = False
    added_once: bool = False
    of_experts: bool = False
    experts: range | None = None
    in_halves: bool = False


def under(prefix: str, sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources with a prefix before their paths."""
    return {f"{prefix}.{path}": source for path, source in sources.items()}


def norm(name: str, width: int) -> Source:
    """Return the source of the weight of a norm."""
    return Source({f"{name}.weight": (width,)})


def linear(name: str, out_width: int, in_width: int, order: Order | None = None) -> Source:
    """Return the source of a projection, which is transposed to [in, out]. `order` permutes its outputs."""
    return Source({f"{name}.weight": (out_width, in_width)}, lambda t: ordered(next(t), order).T)


def ordered(tensor: np.ndarray, order: Order | None) -> np.ndarray:
    """Reorder the rows if an order is given."""
    return tensor if order is None else tensor[order()]
