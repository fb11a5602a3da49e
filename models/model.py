"""DeepSeek-V2 and V3 decoders: the weights live in the module, the cache outside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import ModelConfig
from models.layers import MLP, Linear, RMSNorm
from models.metadata import StepMetadata
from models.mla import MLA, AttentionSettings, Part, plan_rows, step_parts
from models.moe import MoE
from models.rope import rope_table
from pallas_attn import CacheSpec, PagedLatent, latent_cache_spec

type Caches = tuple[PagedLatent, ...]
"""The paged latent cache of every layer."""

type Step = Callable[[Any, Int32[Array, "T"], Caches, StepMetadata], tuple[Float32[Array, "n V"], Caches]]
"""(weights, tokens, caches, metadata) -> (logits, caches)."""


class DecoderLayer(nnx.Module):
    """Attention, then a dense or a mixed feed-forward layer, each with its norm before and its residual around."""

    def __init__(self, config: ModelConfig, index: int, settings: AttentionSettings, dtype: DTypeLike):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = MLA(config, settings, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype) if dense else MoE(config, dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: tuple[Float32[Array, "T half"], Float32[Array, "T half"]],
        cache: PagedLatent,
        slots: Int32[Array, "T"],
        parts: list[Part],
    ) -> tuple[Float[Array, "T D"], PagedLatent]:
        attended, cache = self.self_attn(self.input_layernorm(x), rope, cache, slots, parts)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class DeepSeek(nnx.Module):
    """A decoder of the V2 or V3 family; `weights.load_model` and `weights.random_model` make filled ones.

    Attributes:
      config: what it is.
      settings: how it attends.
    """

    def __init__(self, config: ModelConfig, settings: AttentionSettings, dtype: DTypeLike):
        self.config, self.settings = config, settings
        self.embed_tokens = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([DecoderLayer(config, i, settings, dtype) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype)

    def __call__(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float32[Array, "n V"], Caches]:
        """One step over packed tokens: writes their latents into the caches, attends, and predicts.

        What padding rows and idle rows hold changes no other row, and none of theirs becomes NaN.

        Args:
          tokens: ids, decode rows first, then prefill chunks, then padding (any valid id).
          caches: one a layer, in `cache_spec`'s layout; donate them, and they are written in place.
          metadata: where the tokens belong.

        Returns:
          float32 logits of the rows `metadata.logit_rows` names, and the caches.

        Raises:
          ValueError: shapes that do not fit each other.
        """
        if len(caches) != len(self.layers):
            raise ValueError(f"caches: expected one for each of {len(self.layers)} layers, got {len(caches)}")
        if tokens.shape != metadata.positions.shape:
            raise ValueError(f"tokens: expected {metadata.num_tokens} as metadata has, got {list(tokens.shape)}")
        x = self.embed_tokens[...][tokens]
        rope = rope_table(self.config, metadata.positions)
        parts = step_parts(metadata, self.settings.mla)
        parts = plan_rows(parts, self.config, self.settings, caches[0], self.embed_tokens.dtype)
        # A function of this call alone: what a trace depends on (implementations, tunings) may be another next time.
        apply_layer = jax.jit(functools.partial(_apply_layer), static_argnums=0)
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = apply_layer(*nnx.split(layer), x, rope, cache, metadata.slots, parts)
            written.append(cache)
        return self._logits(self.norm(x[metadata.logit_rows])), tuple(written)

    def _logits(self, x: Float[Array, "n D"]) -> Float32[Array, "n V"]:
        weight = self.embed_tokens[...].T if self.lm_head is None else self.lm_head.weight[...]
        return jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def cache_spec(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> CacheSpec:
        """Shapes of one layer's cache, in the model's dtype unless told otherwise."""
        return latent_cache_spec(
            num_pages=num_pages,
            page_size=page_size,
            latent_dim=self.config.kv_lora_rank,
            rope_dim=self.config.qk_rope_head_dim,
            dtype=dtype or self.embed_tokens.dtype,
        )


def _apply_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "T D"],
    rope: tuple[Float32[Array, "T half"], Float32[Array, "T half"]],
    cache: PagedLatent,
    slots: Int32[Array, "T"],
    parts: list[Part],
) -> tuple[Float[Array, "T D"], PagedLatent]:
    """A layer as a function: jitted, it is lowered once for all that are alike, and its kernels compiled once."""
    return nnx.merge(graph, state)(x, rope, cache, slots, parts)


def split_model(model: DeepSeek) -> tuple[Step, list[jax.Array]]:
    """The model as a pure function of its weights, to be jitted: `jax.jit(step, donate_argnums=2)`.

    The weights are a flat list because that is what passes through a jitted call fastest.
    """
    graph, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)

    def step(weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata) -> tuple[Array, Caches]:
        return nnx.merge(graph, jax.tree.unflatten(structure, weights))(tokens, caches, metadata)

    return step, weights
