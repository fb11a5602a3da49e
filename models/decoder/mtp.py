"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): modules that draft tokens from hidden states.

The input of a module at position i is the hidden state at i joined with the embedding of token i + 1. The module
computes logits of token i + 2 and a hidden state, from which the next token can be drafted: the input at i + 1 joins
this state with the drafted token i + 2. Each module is one decoder layer. It has a latent cache in the same pages and
slots as the decoder: the entry at position i is in the slot of token i.

Hidden states are used after the norm before the head: `norm` of the decoder, `shared_head.norm` of a module. The paper
does not specify this. vLLM's deepseek_v2.py and SGLang's deepseek_nextn.py also return normed states. Pull requests
47448 of vLLM and 1764 of ROCm/ATOM report that fewer drafts are accepted if the unnormed state of a module is used for
the next draft. vLLM omits the embedding at position 0; this implementation includes it, as SGLang and the paper do.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import DeepSeekConfig, require_mtp
from models.decoder.caches import LatentCache, allocate_latents, cache_spec
from models.decoder.layers import Linear, RMSNorm
from models.decoder.mla import plan_rows, step_parts
from models.decoder.model import (
    Decoder,
    DecoderLayer,
    check_inside_shard_map,
    embed,
    layer_function,
    rows_to_attend,
    vocabulary_logits,
)
from models.decoder.rope import rope_table
from models.decoder.settings import AttentionSettings
from models.decoder.step_metadata import StepMetadata

type MTPCaches = tuple[LatentCache, ...]
"""Caches of all modules."""


class MTPModule(nnx.Module):
    """Weights of one module, on a mesh one device's part. Modules use the embedding and the head of the decoder."""

    def __init__(
        self,
        config: DeepSeekConfig,
        index: int,
        settings: AttentionSettings,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
    ):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps, dtype), RMSNorm(width, eps, dtype)
        self.eh_proj = Linear(2 * width, width, dtype)
        self.layer = DecoderLayer(config, index, settings, dtype, mesh)
        self.norm = RMSNorm(width, eps, dtype)

    def join(self, embedded: Float[Array, "T D"], hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return the input of the decoder layer. The embedding comes first, as in vLLM's deepseek_mtp.py."""
        return self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))


class MTP(nnx.Module):
    """Multi-token prediction modules of a model, split over the model's mesh as its layers.

    `checkpoints.load_mtp` and `checkpoints.random_mtp` create them.

    Attributes:
      config, part, settings, mesh, contexts: attributes of the model.
      embed_tokens, lm_head: the model's parameters, not copies.
      depths: modules; module k drafts the (k + 1)-th token ahead.
    """

    def __init__(self, model: Decoder, depths: Sequence[MTPModule]):
        self.config, self.part, self.settings = require_mtp(model.config), require_mtp(model.part), model.settings
        self.mesh, self.contexts = model.mesh, model.contexts
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.depths = nnx.List(depths)

    def __call__(
        self,
        next_tokens: Int32[Array, "T"],
        hidden: Float[Array, "T D"],
        caches: MTPCaches,
        metadata: StepMetadata,
        depth: int = 0,
    ) -> tuple[Float[Array, "T D"], MTPCaches]:
        """Run a module over packed positions: write its cache entries, and attend.

        With several modules, the module of depth k joins token i + 1 with the hidden state of the previous module at
        position i - 1, so that all modules have the same tokens in the same slots.

        Args:
          next_tokens: token after each position.
          hidden: hidden states. At depth 0, hidden states of the decoder at the same positions.
          caches: one per module, from `allocate_caches`. Donated caches are written in place.
          metadata: sequences, positions and cache slots; logit_rows are not used.
          depth: number of tokens drafted so far. The module is depth modulo the number of modules.

        Returns:
          Hidden states, the input of `logits` and of the next depth, and the caches.

        Raises:
          ValueError: inconsistent shapes, or modules on a mesh are called outside `jax.shard_map`.
        """
        if self.mesh is not None:
            check_inside_shard_map()
        if len(caches) != len(self.depths):
            raise ValueError(f"caches: expected one per module, {len(self.depths)}, got {len(caches)}")
        if not next_tokens.shape == metadata.positions.shape == hidden.shape[:1]:
            raise ValueError(
                f"next_tokens, hidden: expected {metadata.num_tokens} rows as metadata has,"
                f" got {list(next_tokens.shape)} and {list(hidden.shape)}"
            )
        metadata.check()
        metadata = rows_to_attend(metadata, self.settings, self.contexts)
        index = depth % len(self.depths)
        module, cache = self.depths[index], caches[index]
        x = module.join(embed(next_tokens, self.embed_tokens, self.config.vocab_size), hidden)
        rope = rope_table(self.config, metadata.positions)
        parts = step_parts(metadata, self.settings.mla)
        parts = plan_rows(parts, self.part, self.settings, cache, self.embed_tokens.dtype, self.contexts)
        x, cache, _ = layer_function()(*nnx.split(module.layer), x, rope, cache, metadata.of_group(0).slots, parts)
        return module.norm(x), (*caches[:index], cache, *caches[index + 1 :])

    def logits(self, hidden: Float[Array, "n D"]) -> Float32[Array, "n V"]:
        """Return logits of the token after the next token, from the hidden states of a module."""
        return vocabulary_logits(hidden, self.embed_tokens, self.lm_head, self.config.vocab_size)

    def allocate_caches(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> MTPCaches:
        """Allocate an empty cache per module, with the shapes of the decoder's layers on a device."""
        dtype, page_size = dtype or self.embed_tokens.dtype, page_size // self.contexts
        layers = self.config.mtp_layers
        return tuple(allocate_latents(cache_spec(self.part, num_pages, page_size, dtype, layer=i)) for i in layers)
