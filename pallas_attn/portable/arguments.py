"""The arguments of a call as arrays and a static rest, and functions that act on all arrays of a call.

A call is a pytree of arrays and static values. Each operation passes its call through these steps (`runtime.dispatch`):

    arrays, rest = split_arrays(call)       # the rest is hashable, and a cache key
    arrays = refuse_gradients(op, arrays)   # differentiation raises NotImplementedError
    call_unvarying(kernel, arrays)          # inside `jax.shard_map`, kernels take arrays that vary over no mesh axis

The type of an array inside `jax.shard_map` says over which mesh axes the array varies. `check_vma` requires equal types
of the carries of a loop, so initial carries are cast with `varying_like`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as jax_config  # JAX has no public way to disable `check_vma` for part of a function
from jax.sharding import AbstractMesh


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a pytree is an array or a `jax.ShapeDtypeStruct`."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@dataclasses.dataclass(frozen=True)
class Rest:
    """A pytree without its arrays. Hashable if the static leaves are.

    Attributes:
      tree: tree definition of the whole pytree.
      static: leaves that are no arrays.
      is_array: for each leaf, whether the leaf is an array.
    """

    tree: Any
    static: tuple[Any, ...]
    is_array: tuple[bool, ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with these arrays, given in the order in which `split_arrays` returned them."""
        of_arrays, of_static = iter(arrays), iter(self.static)
        return jax.tree.unflatten(self.tree, [next(of_arrays if flag else of_static) for flag in self.is_array])


def split_arrays(tree: Any) -> tuple[list[Any], Rest]:
    """Split a pytree into its arrays and the rest."""
    leaves, definition = jax.tree.flatten(tree)
    flags = tuple(map(is_array, leaves))
    static = tuple(leaf for leaf, flag in zip(leaves, flags, strict=True) if not flag)
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag], Rest(definition, static, flags)


def refuse_gradients[Tree](op: str, tree: Tree) -> Tree:
    """Return the pytree unchanged, but raise NotImplementedError when JAX differentiates with respect to its arrays.

    Without this check, portable implementations would be differentiated and kernels would raise internal JAX errors.
    The compiled program does not change.

    Args:
      op: name of the operation, for the message.
      tree: a pytree; floating-point arrays are checked.
    """
    leaves, definition = jax.tree.flatten(tree)
    floating = [i for i, leaf in enumerate(leaves) if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)]
    for i, leaf in zip(floating, _pass(op, tuple(leaves[i] for i in floating)), strict=True):
        leaves[i] = leaf
    return definition.unflatten(leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pass(op: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return arrays


@_pass.defjvp
def _refuse(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op} has no gradient: pallas_attn is for inference; jax.lax.stop_gradient around its arguments makes its "
        "result a constant"
    )


def call_unvarying(function: Callable[[list[Any]], Any], arrays: list[Any]) -> Any:
    """Return `function(arrays)`, with arrays whose type does not vary over mesh axes of `jax.shard_map`.

    The results vary over each axis that an array varies over. Kernels need this: Pallas does not support references to
    arrays that vary over a mesh axis (jax 0.11).
    """
    axes = varying_axes(arrays)
    if not axes:
        return function(arrays)
    with jax_config._check_vma(False):
        # Adding and removing a dimension makes a new array, whose type varies over no axis. XLA removes both.
        same = [lax.squeeze(lax.expand_dims(x, (0,)), (0,)) if isinstance(x, jax.Array) else x for x in arrays]
        out = function(same)
    return varying_like(out, arrays)


# --- types of arrays on a mesh


def meshes_of(arrays: Sequence[Any]) -> list[AbstractMesh]:
    """Return the mesh in the type of each JAX array."""
    return [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Return the mesh axes that an array of a pytree varies over; empty outside `jax.shard_map` and with
    `check_vma=False`.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    axes = {axis: None for array in arrays for axis in sorted(jax.typeof(array).manual_axis_type.varying)}
    return tuple(axes)


def varying_like[Tree](tree: Tree, like: Any) -> Tree:
    """Return the arrays with a type that also varies over the axes of `like`, for the initial carry of a loop over
    `like`.
    """
    axes = varying_axes(like)
    if not axes:
        return tree

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
