"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): modules beside the decoder that draft tokens from its
hidden states.

A module's entry at position i joins the hidden state there with the embedding of token i + 1; from it follow logits of
token i + 2, and the module's own hidden state, from which the next token can be drafted in turn: its entry at i + 1
joins that with token i + 2, drafted. Each module is one decoder layer with a latent cache of its own, in the same pages
and slots as the decoder's: entry i lies where token i does.

Hidden states are taken after the norm that precedes the head: the decoder's after `norm`, a module's after
`shared_head.norm`. The report leaves that open. vLLM's deepseek_v2.py and SGLang's deepseek_nextn.py return normed
states, and pull requests vLLM 47448 and ROCm/ATOM 1764 found fewer drafts accepted where a module's own state went
unnormed into the next draft. vLLM alone leaves the embedding out of the entry at position 0; here it is like all
others, as in SGLang and the report.
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
"""Caches of every module."""


class MTPModule(nnx.Module):
    """Weights of one module, on a mesh what one device has of them; embedding and head are the decoder's."""

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
        """Input of the decoder layer: the embedding first, as in vLLM's deepseek_mtp.py."""
        return self.eh_proj(jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))


class MTP(nnx.Module):
    """The modules of a model, split over its mesh as its layers are; `checkpoints.load_mtp` and
    `checkpoints.random_mtp` make them.

    Attributes:
      config, part, settings, mesh, contexts: the model's.
      embed_tokens, lm_head: the model's own parameters, which take no memory twice.
      depths: module k drafts the (k + 1)-th token ahead.
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
        """Runs a module over packed entries: writes them to its cache, and attends.

        With several modules, that of depth k joins token i + 1 with the hidden state that the module before it gave at
        i - 1, so that all of them have the same tokens in the same slots.

        Args:
          next_tokens: the token after each position.
          hidden: hidden states, of the decoder at the same positions for depth 0.
          caches: one a module, as `allocate_caches` makes them; donate them, and they are written in place.
          metadata: where the entries belong; its logit_rows are not used.
          depth: tokens drafted so far. Where there are fewer modules they take turns: a single one chains with itself.

        Returns:
          Hidden states, to be given to `logits` or to the next depth, and the caches.

        Raises:
          ValueError: shapes that do not fit each other, or a call outside `jax.shard_map` of modules on a mesh.
        """
        if self.mesh is not None:
            check_inside_shard_map()
        if len(caches) != len(self.depths):
            raise ValueError(f"caches: expected one for each of {len(self.depths)} modules, got {len(caches)}")
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
        """Logits of the token after the next one, of hidden states that a module gave."""
        return vocabulary_logits(hidden, self.embed_tokens, self.lm_head, self.config.vocab_size)

    def allocate_caches(self, num_pages: int, page_size: int, dtype: DTypeLike | None = None) -> MTPCaches:
        """Allocates an empty cache for each module, like those of the decoder's layers on a device."""
        dtype, page_size = dtype or self.embed_tokens.dtype, page_size // self.contexts
        layers = self.config.mtp_layers
        return tuple(allocate_latents(cache_spec(self.part, num_pages, page_size, dtype, layer=i)) for i in layers)
