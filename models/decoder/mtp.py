"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): modules that draft tokens from hidden states.

A module is one decoder layer with an input projection. At position i, its input joins the hidden state of position i
with the embedding of token i + 1. Its outputs are logits of token i + 2 and a hidden state. To draft another token, the
hidden state is joined with the drafted token i + 2 as the input of position i + 1. Each module has a latent cache with
the same pages as the decoder's caches: the entry of position i has the same page and offset as token i in the decoder's
caches.

Hidden states are used after the norm that precedes the output head: `norm` of the decoder, `shared_head.norm` of a
module. The paper does not specify this. vLLM's deepseek_v2.py and SGLang's deepseek_nextn.py also return normed states.
Pull requests 47448 of vLLM and 1764 of ROCm/ATOM report that fewer drafts are accepted if the unnormed state of a
module is used for the next draft. At position 0, vLLM omits the embedding; this implementation includes it, like SGLang
and the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn.models.config import DeepSeekConfig, require_mtp
from pallas_attn.models.decoder.caches import LatentCache, allocate_latents, cache_spec
from pallas_attn.models.decoder.layers import Linear, RMSNorm
from pallas_attn.models.decoder.mla import plan_rows, step_parts
from pallas_attn.models.decoder.model import (
    Decoder,
    DecoderLayer,
    check_inside_shard_map,
    embed,
    layer_function,
    rows_to_attend,
    vocabulary_logits,
)
from pallas_attn.models.decoder.rope import rope_table
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import StepMetadata

type MTPCaches = tuple[LatentCache, ...]
"""Latent cache of each module. The modules of DeepSeek-V4 have tuples of `CompressedCache` in their place."""


class MTPModule(nnx.Module):
    """Weights of one module, on a mesh one device's part. The embedding and the output head of the decoder are used."""

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
        """Return the input of the module's layer: the projection of the normed embeddings and the normed hidden states.
        The embedding is the first half of the projection's input, as in vLLM's deepseek_mtp.py."""
        return self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))


class MTP(nnx.Module):
    """Multi-token prediction modules of a model. On a mesh they are split like the model's layers.

    `checkpoints.load_mtp` and `checkpoints.random_mtp` return modules with weights.

    Attributes:
      config, part, settings, mesh, contexts: attributes of the model, see `Decoder`.
      hidden_width: columns of a hidden state.
      embed_tokens, lm_head: embedding and output head of the model, not copies.
      depths: the modules. After the decoder has computed the next token, module 0 drafts the token after it, module 1
        the token after this draft, and so on.
    """

    def __init__(self, model: Decoder, depths: Sequence[MTPModule]):
        config, part = require_mtp(model.config), require_mtp(model.part)
        if not isinstance(config, DeepSeekConfig) or not isinstance(part, DeepSeekConfig):
            raise ValueError(f"model: expected a model of DeepSeek-V2 to V3.2 or GLM-5, got a {config.model_type}")
        self.config, self.part, self.settings = config, part, model.settings
        self.hidden_width = model.hidden_width
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
        """Run one module on the packed tokens of a step: write its cache entries, and attend.

        At every depth, the input for position i is token i + 1 and a hidden state, and the output predicts token i + 2.
        At depth 0 the hidden state is the decoder's at position i. At a depth above 0 it is the previous module's at
        position i - 1, which predicted token i + 1. Therefore the caches of all modules use the same cache slots (page
        · page size + offset).

        Args:
          next_tokens: for each position i of `metadata`, token i + 1.
          hidden: for each position i, the decoder's hidden state at i (depth 0), or the previous module's at i - 1.
          caches: cache of each module, from `allocate_caches`. Donated caches are written in place.
          metadata: sequences, positions and cache slots; `logit_rows` is not used.
          depth: number of tokens that have been drafted before. Module depth % (number of modules) is used.

        Returns:
          Hidden states, which are the input of `logits` and of the next depth; and the caches.

        Raises:
          ValueError: inconsistent shapes, or modules on a mesh are called outside `jax.shard_map`.
        """
        if self.mesh is not None:
            check_inside_shard_map()
        check_mtp_inputs(next_tokens, hidden, caches, metadata, len(self.depths))
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
        """Return the logits of token i + 2, given the hidden state of a module at position i."""
        return vocabulary_logits(hidden, self.embed_tokens, self.lm_head, self.config.vocab_size)

    def allocate_caches(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> MTPCaches:
        """Allocate an empty cache for each module, with pages like the decoder's caches. On a mesh, allocate the caches
        of one device.

        `page_size` is the number of tokens per page on all devices together. The default dtype is the model's.
        """
        dtype, page_size = dtype or self.embed_tokens.dtype, page_size // self.contexts
        layers = self.config.mtp_layers
        return tuple(allocate_latents(cache_spec(self.part, num_pages, page_size, dtype, layer=i)) for i in layers)


def check_mtp_inputs(
    next_tokens: Array, hidden: Array, caches: Sequence[Any], metadata: StepMetadata, num_modules: int
) -> None:
    """Raise ValueError unless the arguments of a call of prediction modules fit each other."""
    if len(caches) != num_modules:
        raise ValueError(f"caches: expected one per module, {num_modules}, got {len(caches)}")
    if not next_tokens.shape == metadata.positions.shape == hidden.shape[:1]:
        raise ValueError(
            f"next_tokens, hidden: expected {metadata.num_tokens} rows as metadata has,"
            f" got {list(next_tokens.shape)} and {list(hidden.shape)}"
        )
    metadata.check()
