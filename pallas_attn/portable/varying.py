"""Mesh axes that arrays vary over inside `jax.shard_map`; `check_vma` requires them of loop carries."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


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
