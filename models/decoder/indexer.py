"""Indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

A token attends only to the keys with the highest index scores. The indexer computes index queries, index keys and head
weights, from which `pallas_attn.index_top_k` computes the scores. DeepSeek's code also multiplies index queries and
index keys by a Hadamard matrix, which does not change their products. This module leaves it out, as transformers does.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder.layers import LayerNorm, Linear
from pallas_attn.models.decoder.rope import CosSin, rotate

KEY_NORM_EPS = 1e-6
"""Epsilon of the norm of index keys, independent of the model's rms_norm_eps."""


class Indexer(nnx.Module):
    """Indexer of one layer: Hi index heads of width Di, which share one index key per token."""

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
        """Return the index queries, and the weight of each index head in the score.

        Args:
          residual: normed low-rank projection of x, from which attention computes its queries as well.
          x: normed hidden states.
          rope: cosines and sines of the rotation angles of the tokens.
        """
        q = self.wq_b(residual).reshape(residual.shape[0], self.heads, -1)
        return self._rotate(q, rope), self.weights_proj(x.astype(jnp.float32)) * self.heads**-0.5

    def keys(self, x: Float[Array, "T D"], rope: CosSin) -> Float[Array, "T Di"]:
        """Return the index keys of the tokens, normed and rotated, as they are cached."""
        return self._rotate(self.k_norm(self.wk(x)), rope)

    def _rotate(self, x: Float[Array, "T *heads Di"], rope: CosSin) -> Float[Array, "T *heads Di"]:
        """Rotate the first `qk_rope_head_dim` columns. (In queries and keys of attention, the last columns are
        rotated.)"""
        first, rest = jnp.split(x, [self.rotated], axis=-1)
        return jnp.concatenate([rotate(first, *rope), rest], axis=-1)
