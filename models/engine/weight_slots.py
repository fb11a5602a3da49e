"""Replacement of the weights of an engine: checks of new weights, and their copies to the devices.

New weights are trees with the names, shapes and dtypes of the present weights. Compiled programs take weights as
arguments, so arrays of equal shapes, dtypes and shardings need no compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from pallas_attn.models.decoder import Decoder, named_weights, split_module
from pallas_attn.models.engine.speculation.proposer import Proposer
from pallas_attn.models.engine.step.compiler import StepCompiler

type Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of weights by name."""


class NewWeights(NamedTuple):
    """Weights that replace the present ones, in the order of the compiled programs.

    Attributes:
      model: weights of the model.
      draft: leaves of the proposer's weights; None to continue with the present ones, except weights that the proposer
        shares with the model.
    """

    model: list[Any]
    draft: list[Any] | None


class WeightSlots:
    """Names, shapes, dtypes and shardings of the weights of a model and of its proposer.

    Attributes:
      model: the model's weights by name, in the order of the compiled programs.
    """

    def __init__(self, model: Decoder, proposer: Proposer | None):
        """Record the weights. Weights that the proposer shares with the model, such as the embedding, are recognised by
        their identity."""
        _, weights = split_module(model)
        self.model: Shapes = dict(zip(named_weights(model), map(_shape, weights), strict=True))
        self._proposer = proposer
        self._draft: Shapes = {}
        self._shared: dict[int, int] = {}  # indices in the proposer's leaves: indices in the model's weights
        if proposer is not None:
            leaves = jax.tree.leaves(proposer.weights)
            names = named_weights(proposer.weights) if proposer.weight_names is None else proposer.weight_names
            self._draft = dict(zip(names, map(_shape, leaves), strict=True))
            numbers = {id(array): number for number, array in enumerate(weights)}
            self._shared = {i: numbers[id(array)] for i, array in enumerate(leaves) if id(array) in numbers}

    def check(self, weights: Any, draft: Any) -> NewWeights:
        """See `Runner.check_weights`."""
        of_model = _checked("weights", weights, self.model)
        if draft is None:
            return NewWeights(of_model, None)
        if not self._draft:
            raise ValueError("draft: expected None, because the engine has no proposer with weights")
        return NewWeights(of_model, _checked("draft", draft, self._draft))

    def place(self, new: NewWeights, released: StepCompiler | None, *, copy: bool) -> NewWeights:
        """See `Runner.place_weights`.

        Args:
          new: the new weights.
          released: compiler whose present weights are released one by one; None to release no weight.
          copy: as in `Runner.place_weights`.
        """
        placed: list[Any] = [None] * len(new.model)
        if released is not None:
            placed = released.take_weights() or placed
            if self._proposer is not None:  # it must not hold the shared weights either
                self._set_draft(dict.fromkeys(self._shared))
        for i, (array, shape) in enumerate(zip(new.model, self.model.values(), strict=True)):
            placed[i] = None  # the present weight is released before the new one is allocated
            placed[i] = _placed(array, shape, copy=copy)
        draft = None
        if new.draft is not None:
            draft = [
                placed[self._shared[i]] if i in self._shared else _placed(array, shape, copy=copy)
                for i, (array, shape) in enumerate(zip(new.draft, self._draft.values(), strict=True))
            ]
        # Errors of the copies must be raised before the present weights are replaced. After this call, the caller may
        # change, donate or delete the originals.
        jax.block_until_ready((placed, draft))
        return NewWeights(placed, draft)

    def use(self, new: NewWeights, programs: StepCompiler) -> None:
        """See `Runner.use_weights`."""
        if self._proposer is not None:
            draft = {} if new.draft is None else dict(enumerate(new.draft))
            self._set_draft(draft | {i: new.model[number] for i, number in self._shared.items()})
        programs.weights = new.model

    def _set_draft(self, changed: Mapping[int, Any]) -> None:
        """Replace leaves of the proposer's weights by index."""
        proposer = self._proposer
        if proposer is None or not changed:
            return
        leaves, structure = jax.tree.flatten(proposer.weights, is_leaf=lambda x: x is None)
        leaves = [changed.get(i, leaf) for i, leaf in enumerate(leaves)]
        proposer.weights = jax.tree.unflatten(structure, leaves)


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _checked(argument: str, given: Any, wanted: Shapes) -> list[Any]:
    """Return the arrays of a tree in the order of `wanted`.

    Raises:
      ValueError: a weight is missing, unknown, deleted or not an array, or has another shape or dtype. The message
        names the first one.
    """
    arrays = named_weights(given)
    for name, shape in wanted.items():
        expected = f"{argument}: expected {name} as {shape.dtype.name}{list(shape.shape)}"
        if name not in arrays:
            raise ValueError(f"{expected}, got no weight of this name")
        array = arrays[name]
        if not isinstance(array, jax.Array | np.ndarray) or isinstance(array, jax.core.Tracer):
            raise ValueError(f"{expected}, got a {type(array).__name__}")
        if (array.shape, array.dtype) != (shape.shape, shape.dtype):
            raise ValueError(f"{expected}, got {array.dtype.name}{list(array.shape)}")
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(f"{expected}, got an array that was deleted or donated")
    if unknown := [name for name in arrays if name not in wanted]:
        raise ValueError(f"{argument}: expected only the weights of the engine, got {unknown[0]!r}, too")
    return [arrays[name] for name in wanted]


def _placed(array: Array | np.ndarray, shape: jax.ShapeDtypeStruct, *, copy: bool) -> Array:
    """Copy an array to the devices and the sharding of a weight. Without `copy`, return an array that already has
    them."""
    sharding: Any = shape.sharding
    if not copy and isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if isinstance(array, np.ndarray):
        array = array.copy()  # on a CPU, `device_put` may use the memory of a NumPy array in spite of `may_alias`
    return jax.device_put(array, sharding, may_alias=False)
