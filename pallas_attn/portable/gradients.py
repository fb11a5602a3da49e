"""Refusal of gradients in our own words: without it some implementations differentiate, others raise errors of jax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def refuse_gradients[Tree](op: str, arguments: Tree) -> Tree:
    """The arguments as they are. Differentiating anything computed from them with respect to them raises
    NotImplementedError, which names the operation; what is compiled stays the same.
    """
    leaves, tree = jax.tree.flatten(arguments)
    held = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)]
    for i, leaf in zip(held, _pass(op, tuple(leaves[i] for i in held)), strict=True):
        leaves[i] = leaf
    return tree.unflatten(leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pass(op: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return arrays


@_pass.defjvp
def _refuse(op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op} has no gradient: pallas_attn is for inference; jax.lax.stop_gradient around its arguments makes its "
        "result a constant"
    )
