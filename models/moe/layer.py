"""Mixture-of-experts layers of DeepSeek-V2, V3 and V4, gpt-oss and Gemma 4.

Modules in reading order: this module (a layer: router, routed experts, shared experts), `router` (selects experts),
`split_experts` (experts that are split over devices; `exchange` sends tokens between devices), `dispatch` (applies the
experts of one device), `expert_gemms` (the methods that `dispatch` chooses from), `experts` (weights) and `kernels`
(GEMMs for Hopper GPUs).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, Gemma4Config, GQAConfig
from pallas_attn.models.decoder.layers import MLP, LimitedSwiglu, Linear, geglu
from pallas_attn.models.decoder.mesh import ExpertSplit
from pallas_attn.models.moe import dispatch
from pallas_attn.models.moe.expert_gemms import hopper_all_experts
from pallas_attn.models.moe.experts import ClampedSwiglu, Experts, SharedExperts
from pallas_attn.models.moe.router import HashRouter, Router, ScaledRouter
from pallas_attn.models.moe.split_experts import routed_experts


class MoE(nnx.Module):
    """DeepSeek's mixture of experts: routed experts, and shared experts that are applied to every token (Dai et al.,
    arXiv:2401.06066).

    If the layer is on one device and `hopper_all_experts` computes the routed experts, the same kernel computes the
    shared experts. Otherwise the shared experts are a separate MLP.
    """

    def __init__(self, config: DeepSeekConfig, dtype: DTypeLike, split: ExpertSplit = ExpertSplit()):
        """Make a layer with zero weights, on a mesh one device's part.

        Args:
          config: configuration of the model; on a mesh, of one device's part.
          dtype: dtype of the weights, except the router's.
          split: devices that the experts are split over.
        """
        width, hidden = config.hidden_size, config.moe_intermediate_size
        count = split.num_own(config.n_routed_experts)
        self.split = split
        self.gate = Router(config)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))
        shared = hidden * config.n_shared_experts // split.expert
        self.shared_experts = MLP(width, shared, dtype) if shared else None

    def __call__(self, x: Float[Array, "T D"], is_live: Bool[Array, "T"] | None = None) -> Float[Array, "T D"]:
        """Apply the layer. `is_live` is False for padding, whose result is ignored. On a mesh, the result is one term
        of a sum over the devices that split the layer."""
        chosen, weights = self.gate(x)
        experts = Experts(self.gate_up_proj[...], self.down_proj[...])
        method = dispatch.few_rows_method(x.shape[0], chosen.size, experts) if self.split.devices == 1 else None
        if method is hopper_all_experts and self.shared_experts is not None:
            shared = SharedExperts.of(self.shared_experts)
            if shared.fit(experts):
                y = hopper_all_experts(x, experts, chosen.reshape(-1), shared)
                return dispatch.sum_with_shared(y, weights, x.dtype)
        y = routed_experts(x, chosen, weights, experts, self.split, is_live)
        # Without the barrier, XLA fuses the addition of `y` into the last GEMM of the shared experts. This GEMM could
        # then not run concurrently with the routed experts.
        return y if self.shared_experts is None else y + jax.lax.optimization_barrier(self.shared_experts(x))


class BiasedMoE(nnx.Module):
    """Mixture of experts of gpt-oss (arXiv:2508.10925), without shared experts.

    Projections have biases, and the activation is `ClampedSwiglu`. The weights of a token's selected experts are the
    softmax over their logits.
    """

    def __init__(self, config: GQAConfig, dtype: DTypeLike, split: ExpertSplit = ExpertSplit()):
        """Make a layer with zero weights. Arguments as in `MoE`."""
        width, hidden = config.hidden_size, config.intermediate_size
        count = split.num_own(config.num_local_experts)
        self.config, self.split = config, split
        self.router = Linear(width, config.num_local_experts, jnp.float32, bias=True)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((count, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))
        self.down_proj_bias = nnx.Param(jnp.zeros((count, width), dtype))

    def __call__(self, x: Float[Array, "T D"], is_live: Bool[Array, "T"] | None = None) -> Float[Array, "T D"]:
        """Apply the layer. Arguments and result as in `MoE`."""
        chosen, weights = self._route(x)
        experts = Experts(
            self.gate_up_proj[...],
            self.down_proj[...],
            self.gate_up_proj_bias[...],
            self.down_proj_bias[...],
            ClampedSwiglu(self.config.swiglu_alpha, self.config.swiglu_limit),
        )
        return routed_experts(x, chosen, weights, experts, self.split, is_live)

    def _route(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Return the selected experts of each token and their weights, computed in float32."""
        logits, chosen = jax.lax.top_k(self.router(x), self.config.num_experts_per_tok)
        return chosen, jax.nn.softmax(logits)


class ScaledMoE(nnx.Module):
    """Routed experts of Gemma 4, next to a dense MLP that is not part of this module. The router and the experts have
    different inputs."""

    def __init__(self, config: Gemma4Config, dtype: DTypeLike, split: ExpertSplit = ExpertSplit()):
        """Make a layer with zero weights. Arguments as in `MoE`."""
        width, hidden, count = config.hidden_size, config.moe_intermediate_size, split.num_own(config.num_experts)
        self.split = split
        self.router = ScaledRouter(config)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))

    def __call__(
        self, x: Float[Array, "T D"], normed: Float[Array, "T D"], is_live: Bool[Array, "T"] | None = None
    ) -> Float[Array, "T D"]:
        """Select experts by x, and apply them to `normed`. Other arguments and result as in `MoE`."""
        chosen, weights = self.router(x)
        experts = Experts(self.gate_up_proj[...], self.down_proj[...], activation=geglu)
        return routed_experts(normed, chosen, weights, experts, self.split, is_live)


class HashedMoE(nnx.Module):
    """Mixture of experts of DeepSeek-V4: routed experts, selected by scores or by the token id, and a shared expert
    that is applied to every token. Gate and up projections are clamped."""

    def __init__(
        self,
        config: DeepseekV4Config,
        index: int,
        dtype: DTypeLike,
        split: ExpertSplit = ExpertSplit(),
        vocab_size: int | None = None,
    ):
        """Make layer `index` with zero weights. `vocab_size` is the size of the vocabulary of the whole model; None for
        the size in `config`. Other arguments as in `MoE`."""
        width, hidden, count = config.hidden_size, config.moe_intermediate_size, split.num_own(config.n_routed_experts)
        self.split, self.activation = split, LimitedSwiglu(config.swiglu_limit)
        self.gate = HashRouter(config, dtype, config.is_hashed(index), vocab_size)
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))
        self.shared_experts = MLP(width, hidden // split.expert, dtype, self.activation)

    def __call__(
        self, x: Float[Array, "T D"], tokens: Int32[Array, "T"], is_live: Bool[Array, "T"] | None = None
    ) -> Float[Array, "T D"]:
        """Apply the layer to tokens with these ids. Other arguments and result as in `MoE`."""
        chosen, weights = self.gate(x, tokens)
        experts = Experts(self.gate_up_proj[...], self.down_proj[...], activation=self.activation)
        y = routed_experts(x, chosen, weights, experts, self.split, is_live)
        return y + jax.lax.optimization_barrier(self.shared_experts(x))
