"""Mesh axes that arrays vary over inside `jax.shard_map`, whose `check_vma` holds the carries of loops to them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_axes(tree: Any) -> tuple[str, ...]:
    """Mesh axes that some array of a tree varies over; none outside `jax.shard_map`, and with `check_vma=False`."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    axes = {axis: None for array in arrays for axis in sorted(jax.typeof(array).manual_axis_type.varying)}
    return tuple(axes)


def varying_like[Tree](tree: Tree, like: Any) -> Tree:
    """The arrays, said to vary over what some array of `like` varies over, too: a carry that a loop adds those to."""
    axes = varying_axes(like)
    if not axes:
        return tree

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
