"""Containers for the weights of routed and shared experts, and the activation function of gpt-oss."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_attn.models.decoder.layers import MLP, swiglu


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """Activation of gpt-oss: gate · sigmoid(alpha · gate) · (up + 1), where gate and up are the halves of the columns.

    Before the activation, gate is clamped to at most `limit`, and up to [-limit, limit].
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Float[Array, "*rows F2"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.split(gate_up, 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of E experts of hidden width F. From x of width D, an expert computes activation(x @ gate_up) @ down,
    where both products have a bias added if the experts have biases.

    Attributes:
      gate_up: [E, D, 2F], weights of GEMM1, the gate projection in the first F columns, the up projection in the
        others.
      down: [E, F, D], weights of GEMM2.
      gate_up_bias, down_bias: biases [E, 2F] and [E, D]; None for no bias.
      activation: function from 2F columns to F columns.
    """

    gate_up: Float[Array, "E D F2"]
    down: Float[Array, "E F D"]
    gate_up_bias: Float[Array, "E F2"] | None = None
    down_bias: Float[Array, "E D"] | None = None
    activation: Callable[[Array], Array] = dataclasses.field(default=swiglu, metadata={"static": True})

    @property
    def is_gated(self) -> bool:
        """Whether the kernels of GEMM1 can compute the activation, which must be SwiGLU without a bias."""
        return self.activation is swiglu and self.gate_up_bias is None


class SharedExperts(NamedTuple):
    """Weights of the S shared experts of a layer, which are applied to every token. They are stored as one MLP that is
    S times as wide as a routed expert.

    Attributes:
      gate_up: [D, 2 · S · F], the gate projection in the first half of the columns, the up projection in the other.
      down: [S · F, D], the down projection.
    """

    gate_up: Float[Array, "D SF2"]
    down: Float[Array, "SF D"]

    @staticmethod
    def of(experts: MLP) -> SharedExperts:
        """Return the weights of a layer's shared experts."""
        return SharedExperts(experts.gate_up_proj.weight[...], experts.down_proj.weight[...])

    def fit(self, experts: Experts) -> bool:
        """Return whether the shared experts can be computed as S further experts in the kernels of the routed experts:
        their width must be a multiple of a routed expert's width, and the dtypes equal."""
        return self.down.dtype == experts.down.dtype and self.down.shape[0] % experts.down.shape[1] == 0
