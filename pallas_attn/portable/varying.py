"""Mesh axes that arrays vary over inside `jax.shard_map`, whose `check_vma` holds the carries of loops to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax._src import config as jax_config  # nothing public switches the check off for a part of a function


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


def call_unvarying(function: Callable[[Any], Any], call: Any) -> Any:
    """`function(call)`, of arrays that it takes to vary over nothing; the results vary over all axes that some does.

    For kernels: references to arrays that vary over an axis are not implemented in Pallas (as of jax 0.11).
    """
    axes = varying_axes(call)
    if not axes:
        return function(call)
    with jax_config._check_vma(False):
        # Each axis that comes and goes makes an array anew, which then varies over nothing; XLA has no part in it.
        same = jax.tree.map(
            lambda x: lax.squeeze(lax.expand_dims(x, (0,)), (0,)) if isinstance(x, jax.Array) else x, call
        )
        out = function(same)
    return varying_like(out, call)
