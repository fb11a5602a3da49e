"""The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): queries, weights and keys by which a
token chooses what it attends to.

As in transformers, scores are those of the projections themselves: without the Hadamard rotation that DeepSeek's own
code applies to queries and keys alike, which changes no product.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from models.config import DeepSeekConfig
from models.decoder.layers import LayerNorm, Linear
from models.decoder.rope import CosSin, rotate

KEY_NORM_EPS = 1e-6
"""Epsilon of the norm of index keys, whatever the model's rms_norm_eps."""


class Indexer(nnx.Module):
    """Index heads of one layer, which share one key a token."""

    def __init__(self, config: DeepSeekConfig, dtype: DTypeLike):
        heads, width = config.index_n_heads, config.index_head_dim
        self.heads, self.rotated = heads, config.qk_rope_head_dim
        self.wq_b = Linear(config.q_lora_rank or 0, heads * width, dtype)
        self.wk = Linear(config.hidden_size, width, dtype)
        self.k_norm = LayerNorm(width, KEY_NORM_EPS, dtype)
        self.weights_proj = Linear(config.hidden_size, heads, jnp.float32)

    def queries(
        self, residual: Float[Array, "T rank"], x: Float[Array, "T D"], rope: CosSin
    ) -> tuple[Float[Array, "T Hi Di"], Float32[Array, "T Hi"]]:
        """Index queries, of the normed residual that attention's own queries come from, and the heads' weights."""
        q = self.wq_b(residual).reshape(residual.shape[0], self.heads, -1)
        return self._rotate(q, rope), self.weights_proj(x.astype(jnp.float32)) * self.heads**-0.5

    def keys(self, x: Float[Array, "T D"], rope: CosSin) -> Float[Array, "T Di"]:
        """Index keys, normed and then rotated, as they are cached."""
        return self._rotate(self.k_norm(self.wk(x)), rope)

    def _rotate(self, x: Float[Array, "T *heads Di"], rope: CosSin) -> Float[Array, "T *heads Di"]:
        """Rotates the first columns; in attention's own queries and keys it is the last."""
        first, rest = jnp.split(x, [self.rotated], axis=-1)
        return jnp.concatenate([rotate(first, *rope), rest], axis=-1)
