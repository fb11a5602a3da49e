"""Layers of Gemma 4: local layers with a window, and global layers with wider heads.

    x = x + norm(attention(norm(x)))
    x = x + norm(y)                           y = MLP(norm(x)), or norm(MLP(norm(x))) + norm(experts(norm(x)))
    x = x + norm(W · (gelu(W' · x) · ple))    only with per-layer embeddings (PLE) [Dp], one per token and layer
    x = x · layer_scalar

The last layers may have no cache. Their queries attend to the cache of an earlier layer of the same kind, and they
write nothing. Tokens without logits may therefore skip these layers.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import PagedKV, Rope, write_kv
from pallas_attn.models.config import Gemma4Config
from pallas_attn.models.decoder import contexts as split_contexts
from pallas_attn.models.decoder.gqa import GQAStep, attend, attend_over_contexts
from pallas_attn.models.decoder.layers import MLP, Linear, WideRMSNorm, geglu, rms_scaled
from pallas_attn.models.decoder.mesh import COLUMNS, ExpertSplit, embed, num_contexts, sum_over
from pallas_attn.models.decoder.rope import CosSin, inverse_frequencies, rotate
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.moe.layer import ScaledMoE


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GemmaInputs:
    """Inputs of the layers that depend only on the tokens of a step and their positions.

    Attributes:
      of_local, of_global: cosines and sines of the rotation angles of each token, float32 [T, D / 2] each, for local
        and for global layers. Pairs of columns that are not rotated have the angle 0.
      ple: per-layer embeddings [T, layers, Dp], or [T, Dp] for one layer; None for a model without them.
    """

    of_local: CosSin
    of_global: CosSin
    ple: Float[Array, "T *layers Dp"] | None

    def of_layer(self, layer: int) -> GemmaInputs:
        """Return the inputs of one layer."""
        return self if self.ple is None else dataclasses.replace(self, ple=self.ple[:, layer])

    def of_layers(self, layers: slice) -> GemmaInputs:
        """Return the inputs of some layers."""
        return self if self.ple is None else dataclasses.replace(self, ple=self.ple[:, layers])


class PerLayerInputs(nnx.Module):
    """Per-layer embeddings (PLE): for each token and layer, the sum of a projection of the token's embedding and of a
    row of a second table of embeddings."""

    def __init__(self, config: Gemma4Config, dtype: DTypeLike, vocab_size: int):
        """Make the module with zero weights, on a mesh one device's part. `vocab_size` is the number of rows of the
        whole table."""
        self.width, self.vocab_size = config.hidden_size_per_layer_input, vocab_size
        columns = config.num_hidden_layers * self.width
        self.embed_tokens = nnx.Param(jnp.zeros((config.vocab_size_per_layer_input, columns), dtype))
        self.projection = Linear(config.hidden_size, columns, dtype)
        self.norm = WideRMSNorm(self.width, config.rms_norm_eps, dtype)

    def __call__(self, tokens: Int32[Array, "T"], x: Float[Array, "T D"]) -> Float[Array, "T layers Dp"]:
        """Return the per-layer embeddings of tokens with the embeddings x."""
        rows = (tokens.shape[0], -1, self.width)
        projected = self.norm((self.projection(x) * x.shape[1] ** -0.5).reshape(rows))
        looked_up = scaled_embedding(tokens, self.embed_tokens, self.vocab_size, self.width).reshape(rows)
        return (projected + looked_up) * 2.0**-0.5


def scaled_embedding(
    tokens: Int32[Array, "T"], table: nnx.Param, vocab_size: int, width: int
) -> Float[Array, "T columns"]:
    """Return the rows of a table of embeddings, multiplied by the square root of `width`. The factor is rounded to the
    dtype of the table, as in the training of Gemma."""
    rows = embed(tokens, table, vocab_size)
    return rows * jnp.asarray(width**0.5, rows.dtype)


def gemma_inputs(
    config: Gemma4Config, positions: Int32[Array, "T"], ple: Float[Array, "T layers Dp"] | None
) -> GemmaInputs:
    """Return the inputs of all layers for tokens at these positions."""

    def angles(frequencies: Float32[np.ndarray, "half"]) -> CosSin:
        of_tokens = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
        return jnp.cos(of_tokens), jnp.sin(of_tokens)

    return GemmaInputs(angles(inverse_frequencies(config)), angles(global_frequencies(config)), ple)


def global_frequencies(config: Gemma4Config) -> Float32[np.ndarray, "half"]:
    """Return the frequency of each pair of columns in global layers. Only the first pairs are rotated; the frequency of
    the others is 0. The exponents are shares of the whole width of a head, not of the rotated columns."""
    width = config.global_head_dim
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    frequencies = config.global_rope_theta**-exponents / config.global_rope_factor
    rotated = int(config.global_rotary_share * width // 2)
    return np.where(np.arange(width // 2) < rotated, frequencies, 0).astype(np.float32)


class GemmaAttention(nnx.Module):
    """Attention of one layer. Queries and keys are normalised and rotated; values are normalised without a weight.

    A global layer of a model with `attention_k_eq_v` has one projection for keys and values. Values are made from the
    projection before the norm and the rotation of keys. A layer without a cache computes only queries.

    `contexts` is the number of devices along the mesh axis `context`. If it is above 1, each device has the results of
    1 / contexts of the heads. In global layers it caches a part of the tokens of each page, and results are exchanged;
    in local layers it caches only the KV heads of its results.
    """

    def __init__(
        self, config: Gemma4Config, index: int, settings: AttentionSettings, dtype: DTypeLike, contexts: int = 1
    ):
        """Make the layer with zero weights.

        Raises:
          ValueError: `settings.mla` is not "auto".
        """
        if settings.mla != "auto":
            raise ValueError(f"mla: expected auto, a {config.model_type} has no latents to {settings.mla}")
        self.config, self.settings, self.contexts = config, settings, contexts
        self.is_global, self.has_cache = config.is_global(index), index in config.cached_layers
        self.kv_heads, self.width = config.kv_heads(index)
        self.k_eq_v = config.attention_k_eq_v and self.is_global
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        projected = heads + (self.kv_heads * (1 if self.k_eq_v else 2) if self.has_cache else 0)
        self.qkv_proj = Linear(config.hidden_size, projected * self.width, dtype)
        self.q_norm = WideRMSNorm(self.width, eps, dtype)
        self.k_norm = WideRMSNorm(self.width, eps, dtype) if self.has_cache else None
        self.o_proj = Linear(heads // contexts * self.width, config.hidden_size, dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: GemmaInputs,
        cache: PagedKV,
        slots: Int32[Array, "T"],
        step: GQAStep,
    ) -> tuple[Float[Array, "T D"], PagedKV | None]:
        """Write keys and values of a step's tokens to the cache, and attend.

        Args:
          x: normed hidden states.
          inputs: rotation angles of the tokens.
          cache: cache of the layer. For a layer without a cache, the cache of another layer, with all tokens of the
            step.
          slots: cache slot of each token; negative for padding.
          step: metadata and plan of the layer's cache group.

        Returns:
          Attention output of every token, and the cache with the new tokens; None for a layer without a cache.
        """
        heads, eps = self.config.num_attention_heads, self.config.rms_norm_eps
        projected = self.qkv_proj(x).reshape(x.shape[0], -1, self.width)
        q, kv = projected[:, :heads], projected[:, heads:]
        k = v = written = None
        if self.has_cache:
            k, v = kv[:, : self.kv_heads], normed_values(kv[:, -self.kv_heads :], eps)
        splits_tokens = self.contexts > 1 and self.is_global
        if self.contexts > 1 and not splits_tokens:
            q = split_contexts.own_heads(q, heads // self.contexts)
            k, v = (None if x is None else split_contexts.own_kv_heads(x, heads) for x in (k, v))
        cos, sin = inputs.of_global if self.is_global else inputs.of_local
        if k is None or v is None or self.k_norm is None:
            q = rotate(self.q_norm(q), cos, sin)
        elif splits_tokens:
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
            slots = split_contexts.own_slots(slots, cache.page_size)
            written = cache = write_kv(cache, k, v, slots, implementation=self.settings.implementation)
        else:
            norms = {"q_norm": self.q_norm.weight[...], "k_norm": self.k_norm.weight[...], "norm_eps": eps}
            rope = Rope(cos, sin, **norms)
            cache, q = write_kv(cache, k, v, slots, rope=rope, q=q, implementation=self.settings.implementation)
            written = cache
        if splits_tokens:
            out = attend_over_contexts(q, k, v, cache, step, self.config.sm_scale, None, self.settings)
        else:
            out = attend(q, cache, step, self.config.sm_scale, None, self.settings)
        return self.o_proj(out.reshape(x.shape[0], -1)), written


def normed_values(v: Float[Array, "T Hkv D"], eps: float) -> Float[Array, "T Hkv D"]:
    """Return the values as they are cached: an RMS norm of each head without a weight."""
    return rms_scaled(v, eps).astype(v.dtype)


class GemmaLayer(nnx.Module):
    """One layer; the module docstring has the formula. On a mesh, the outputs of attention, MLP and experts are summed
    over the devices before they are normed.

    Attributes:
      cache_source: layer whose cache this layer uses; None if it has its own cache.
      shares_choice: False: the layer has no sparse attention.
    """

    def __init__(
        self,
        config: Gemma4Config,
        index: int,
        settings: AttentionSettings,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
    ):
        """Make a layer with zero weights, on a mesh one device's part of the layer. Arguments as in `DecoderLayer`."""
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = WideRMSNorm(width, eps, dtype)
        self.self_attn = GemmaAttention(config, index, settings, dtype, num_contexts(mesh))
        self.post_attention_layernorm = WideRMSNorm(width, eps, dtype)
        self.pre_feedforward_layernorm = WideRMSNorm(width, eps, dtype)
        self.mlp = MLP(width, config.mlp_width(index), dtype, geglu)
        self.post_feedforward_layernorm = WideRMSNorm(width, eps, dtype)
        self.experts = None if config.is_dense(index) else ScaledMoE(config, dtype, ExpertSplit.over(mesh))
        if self.experts is not None:
            self.post_feedforward_layernorm_1 = WideRMSNorm(width, eps, dtype)
            self.pre_feedforward_layernorm_2 = WideRMSNorm(width, eps, dtype)
            self.post_feedforward_layernorm_2 = WideRMSNorm(width, eps, dtype)
        ple = config.hidden_size_per_layer_input
        self.per_layer_input_gate = Linear(width, ple, dtype) if ple else None
        if ple:
            self.per_layer_projection = Linear(ple, width, dtype)
            self.post_per_layer_input_norm = WideRMSNorm(width, eps, dtype)
        self.layer_scalar = nnx.Param(jnp.ones(1, dtype))
        self.cache_source = None if index in config.cached_layers else config.cache_source(index)
        self.shares_choice = False
        self.axes = () if mesh is None else COLUMNS

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: GemmaInputs,
        cache: PagedKV,
        slots: Int32[Array, "T"],
        step: GQAStep,
        choice: None = None,
    ) -> tuple[Float[Array, "T D"], PagedKV | None, None]:
        """Apply the layer. Arguments and results as in `GemmaAttention`, and as in `DecoderLayer`, which has selected
        keys as a further argument and result."""
        attended, cache_of_layer = self.self_attn(self.input_layernorm(x), inputs, cache, slots, step)
        x = x + self.post_attention_layernorm(sum_over(attended, self.axes))
        x = x + self.post_feedforward_layernorm(self._feed_forward(x, slots >= 0))
        if self.per_layer_input_gate is not None and inputs.ple is not None:
            gated = jax.nn.gelu(self.per_layer_input_gate(x), approximate=True) * inputs.ple
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar[...][None, :], cache_of_layer, None

    def _feed_forward(self, x: Float[Array, "T D"], is_live: Bool[Array, "T"]) -> Float[Array, "T D"]:
        """Return the result of the MLP, or the sum of the normed results of the MLP and of the experts."""
        y = sum_over(self.mlp(self.pre_feedforward_layernorm(x)), self.axes)
        if self.experts is None:
            return y
        routed = self.experts(x, self.pre_feedforward_layernorm_2(x), is_live)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(sum_over(routed, self.axes))
