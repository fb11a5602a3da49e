"""Routers of DeepSeek's and Gemma's mixtures of experts: compute scores of all experts for each token, and select the
best experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, Gemma4Config
from pallas_attn.models.decoder.layers import project, rms_scaled

MAX_COMPARISONS = 2**23
"""Maximum of rows · experts² for which experts are ranked by comparing all experts of a row with each other, instead of
sorting them: 2,048 rows of DeepSeek-V2-Lite (64 experts), 128 rows of DeepSeek-V3 (256 experts)."""


class Router(nnx.Module):
    """Router of DeepSeek-V2 and V3. Weights and scores are float32, independent of the model's dtype."""

    def __init__(self, config: DeepSeekConfig):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((config.hidden_size, config.n_routed_experts), jnp.float32))
        biased = config.topk_method == "noaux_tc"
        self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32)) if biased else None

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Return the k selected experts of each token, and the weights of their results."""
        config = self.config
        logits = project(x, self.weight[...])
        scores = jax.nn.softmax(logits) if config.scoring_func == "softmax" else jax.nn.sigmoid(logits)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias[...][None, :]
        if config.topk_method != "greedy" and config.topk_group < config.n_group:
            choice = _mask_groups(choice, config)
        experts, weights = best_experts(choice, scores, config.num_experts_per_tok)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        # Without the barrier, XLA fuses the selection into the kernels that use it, where every thread block repeats
        # it.
        return jax.lax.optimization_barrier((experts, weights * config.routed_scaling_factor))


class ScaledRouter(nnx.Module):
    """Router of Gemma 4. Weights and scores are float32, independent of the model's dtype.

    The rows are normalised without a weight and scaled per column. The weights of a token's selected experts are
    normalised to a sum of 1, then multiplied by a learned scale per expert.
    """

    def __init__(self, config: Gemma4Config):
        self.config = config
        self.scale = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
        self.weight = nnx.Param(jnp.zeros((config.hidden_size, config.num_experts), jnp.float32))
        self.per_expert_scale = nnx.Param(jnp.ones(config.num_experts, jnp.float32))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Return the k selected experts of each token, and the weights of their results."""
        config = self.config
        scale = self.scale[...] * config.hidden_size**-0.5
        scores = jax.nn.softmax(project(rms_scaled(x, config.rms_norm_eps) * scale[None, :], self.weight[...]))
        experts, weights = best_experts(scores, scores, config.top_k_experts)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return jax.lax.optimization_barrier((experts, weights * self.per_expert_scale[...][experts]))


class HashRouter(nnx.Module):
    """Router of DeepSeek-V4. Scores and the bias are float32, independent of the model's dtype. The gate is float32, or
    bfloat16 if model and checkpoint are: products of bfloat16 rows and gates are exact in float32.

    A layer selects experts by their scores plus a learned bias, or by the token id, with a table [vocab, k]. In both
    cases the weights of the selected experts are their scores without the bias, normalised to a sum of 1 and scaled.
    """

    def __init__(self, config: DeepseekV4Config, dtype: DTypeLike, is_hashed: bool, vocab_size: int | None = None):
        """Make a router with zero weights.

        Args:
          config: configuration of the model; on a mesh, of one device's part.
          dtype: dtype of the model; the loader may store the gate in float32.
          is_hashed: whether experts are selected by the token id.
          vocab_size: size of the vocabulary of the whole model, because every device has the whole table; None for the
            size in `config`.
        """
        self.config = config
        experts, table = config.n_routed_experts, (vocab_size or config.vocab_size, config.num_experts_per_tok)
        self.weight = nnx.Param(jnp.zeros((config.hidden_size, experts), dtype))
        self.bias = None if is_hashed else nnx.Param(jnp.zeros(experts, jnp.float32))
        self.experts_of_tokens = nnx.Param(jnp.zeros(table, jnp.int32)) if is_hashed else None

    def __call__(
        self, x: Float[Array, "T D"], tokens: Int32[Array, "T"]
    ) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
        """Return the k selected experts of each token, and the weights of their results."""
        scores = _SCORES[self.config.scoring_func](project(x, self.weight[...], jnp.float32))
        if self.experts_of_tokens is not None:
            experts = self.experts_of_tokens[...][tokens]
            weights = jnp.take_along_axis(scores, experts, axis=1)
        else:
            bias = 0.0 if self.bias is None else self.bias[...][None]
            experts, weights = best_experts(scores + bias, scores, self.config.num_experts_per_tok)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return jax.lax.optimization_barrier((experts, weights * self.config.routed_scaling_factor))


_SCORES = {
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
    "sigmoid": jax.nn.sigmoid,
    "softmax": jax.nn.softmax,
}
"""Functions from router logits to scores of DeepSeek-V4."""


def best_experts(
    choice: Float32[Array, "T E"], scores: Float32[Array, "T E"], count: int
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Return the `count` experts of each row with the largest `choice`, in descending order, and their `scores`.

    Of experts with equal `choice`, the first is selected. A row with NaN selects arbitrary valid experts. Few rows are
    ranked by counting the better experts of each expert, which takes two kernels. XLA's top_k and the gather of the
    scores take two kernels and two copies.

    Args:
      choice: value of each expert by which experts are selected: the scores, with the router's bias if it has one.
      scores: score of each expert.
      count: k, number of experts to select.
    """
    if choice.shape[0] * choice.shape[1] ** 2 > MAX_COMPARISONS:
        experts = jax.lax.top_k(choice, count)[1]
        return experts, jnp.take_along_axis(scores, experts, axis=-1)
    number = jnp.arange(choice.shape[1], dtype=jnp.int32)
    one, other = choice[:, :, None], choice[:, None]
    comes_after = (other > one) | ((other == one) & (number[None] < number[:, None])[None])  # [T, E, E]
    rank = jnp.sum(comes_after, axis=2, dtype=jnp.int32)
    is_chosen = rank[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :, None]  # [T, k, E]
    experts = jnp.sum(jnp.where(is_chosen, number[None, None], 0), axis=2)
    return jnp.minimum(experts, len(number) - 1), jnp.sum(jnp.where(is_chosen, scores[:, None], 0), axis=2)


def _mask_groups(choice: Float32[Array, "T E"], config: DeepSeekConfig) -> Float32[Array, "T E"]:
    """Return `choice` (the value of each expert by which experts are selected) with -inf for experts outside the
    `topk_group` best groups of experts.

    The score of a group is the largest choice of its experts in DeepSeek-V2, and the sum of the two largest in V3.
    """
    grouped = choice.reshape(choice.shape[0], config.n_group, -1)  # [T, groups, E / groups]
    counted = 2 if config.topk_method == "noaux_tc" else 1
    group_scores = jnp.sum(jax.lax.top_k(grouped, counted)[0], axis=-1)
    best = jax.lax.top_k(group_scores, config.topk_group)[1]
    selected = jnp.any(best[:, :, None] == jnp.arange(config.n_group, dtype=jnp.int32)[None, None, :], axis=1)
    return jnp.where(selected[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
