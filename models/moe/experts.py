"""Weights of experts, and the activation of gpt-oss."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.decoder.layers import MLP, swiglu


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """gate · sigmoid(alpha · gate) · (up + 1) of the two halves of the columns.

    Gates are clamped to at most `limit`, up columns to [-limit, limit].
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@typing.no_type_check  # the leaves of a pytree may be shapes or shardings instead of arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of E experts of hidden width F. An expert computes down(activation(gate_up(x))).

    Attributes:
      gate_up: [E, D, 2F], gates in the first half of the columns.
      down: [E, F, D].
      gate_up_bias, down_bias: [E, 2F] and [E, D], or None.
      activation: maps 2F columns to F columns.
    """

    gate_up: Float[Array, "E D F2"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E F2"] | None = None
    down_bias: Float[Array, "E D"] | None = None
    activation: Callable[[Array], Array] = dataclasses.field(default=swiglu, metadata={"static": True})

    @property
    def is_gated(self) -> bool:
        """Whether GEMM1 kernels can compute the activation: SwiGLU without a bias."""
        return self.activation is swiglu and self.gate_up_bias is None


class SharedExperts(NamedTuple):
    """Joined weights of shared experts, S times as wide as a routed expert."""

    gate_up: Float[Array, "D SF2"]
    down: Float[Array, "SF D"]

    @staticmethod
    def of(experts: MLP) -> SharedExperts:
        """Return the weights of a layer's shared experts."""
        return SharedExperts(experts.gate_up_proj.weight[...], experts.down_proj.weight[...])

    def fit(self, experts: Experts) -> bool:
        """Return whether the shared experts can be computed as S more routed experts."""
        return self.down.dtype == experts.down.dtype and self.down.shape[0] % experts.down.shape[1] == 0
