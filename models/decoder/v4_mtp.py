"""Multi-token prediction of DeepSeek-V4: a module that drafts tokens from the residual streams of a token.

    X[n] = e_proj(norm(embedding of the next token)) + h_proj(norm(stream n))

The streams X pass through a layer with a window and score-routed experts. A sum of the streams with weights of its own,
a norm, and the output head of the model give the logits of the token after the next. The interface is that of
`pallas_attn.models.decoder.mtp.MTP`: a hidden state has all N streams of a token, [N · D]. The layer's output streams
are the hidden state for the next draft.

vLLM zeroes the embedding at position 0. This implementation keeps it, like DeepSeek's code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder.caches import CompressedCache, allocate_compressed, cache_spec
from pallas_attn.models.decoder.deepseek_v4 import V4Layer, v4_inputs, v4_step
from pallas_attn.models.decoder.hyper_connections import StreamHead
from pallas_attn.models.decoder.layers import Linear, WideRMSNorm
from pallas_attn.models.decoder.mesh import embed
from pallas_attn.models.decoder.model import (
    Decoder,
    check_inside_shard_map,
    layer_function,
    vocabulary_logits,
)
from pallas_attn.models.decoder.mtp import check_mtp_inputs
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import StepMetadata


class V4MTPModule(nnx.Module):
    """Weights of one module, on a mesh one device's part. The embedding and the output head of the decoder are used."""

    def __init__(
        self, config: DeepseekV4Config, settings: AttentionSettings, dtype: DTypeLike, mesh: Mesh | None = None
    ):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = WideRMSNorm(width, eps, dtype), WideRMSNorm(width, eps, dtype)
        self.e_proj, self.h_proj = Linear(width, width, dtype), Linear(width, width, dtype)
        self.layer = V4Layer(config.of_module, 0, settings, dtype, mesh)
        self.stream_head = StreamHead(config, dtype)
        self.norm = WideRMSNorm(width, eps, dtype)

    def join(self, embedded: Float[Array, "T D"], streams: Float[Array, "T N D"]) -> Float[Array, "T N D"]:
        """Return the input streams of the module's layer."""
        of_streams = self.h_proj(self.hnorm(streams).reshape(-1, embedded.shape[1]))
        return self.e_proj(self.enorm(embedded))[:, None] + of_streams.reshape(streams.shape)


class V4MTP(nnx.Module):
    """Multi-token prediction modules of a DeepSeek-V4 model, in place of `MTP`.

    On a mesh they are split like the model's layers.

    Attributes:
      config, part, settings, mesh, contexts: attributes of the model, see `Decoder`.
      hidden_width: columns of a hidden state, N · D.
      embed_tokens, lm_head: embedding and output head of the model, not copies.
      depths: the modules.
    """

    def __init__(self, model: Decoder, depths: Sequence[V4MTPModule]):
        if not isinstance(model.config, DeepseekV4Config) or not isinstance(model.part, DeepseekV4Config):
            raise ValueError(f"model: expected a DeepSeek-V4 model, got a {model.config.model_type}")
        self.config, self.part = model.config, model.part
        self.settings, self.mesh, self.contexts = model.settings, model.mesh, model.contexts
        self.hidden_width = model.hidden_width
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.depths = nnx.List(depths)

    def __call__(
        self,
        next_tokens: Int32[Array, "T"],
        hidden: Float[Array, "T ND"],
        caches: tuple[CompressedCache, ...],
        metadata: StepMetadata,
        depth: int = 0,
    ) -> tuple[Float[Array, "T ND"], tuple[CompressedCache, ...]]:
        """Run one module on the packed tokens of a step: write its cache rows, and attend. Arguments, results and
        errors as in `MTP.__call__`."""
        if self.mesh is not None:
            check_inside_shard_map()
        check_mtp_inputs(next_tokens, hidden, caches, metadata, len(self.depths))
        metadata = dataclasses.replace(metadata, groups=(metadata.of_group(0),))  # the group of windows
        index, config = depth % len(self.depths), self.part.of_module
        module, cache = self.depths[index], caches[index]
        streams = hidden.reshape(hidden.shape[0], self.config.hc_mult, -1)
        x = module.join(embed(next_tokens, self.embed_tokens, self.config.vocab_size), streams)
        inputs = v4_inputs(config, next_tokens, metadata.positions)
        ranges, slots = module.layer.attn.settings.slot_ranges, metadata.of_group(0).slots
        step = v4_step(config, metadata, cache.window.page_size, slot_ranges=ranges)
        x, cache, _ = layer_function()(*nnx.split(module.layer), x, inputs, cache, slots, step)
        return x.reshape(hidden.shape), (*caches[:index], cache, *caches[index + 1 :])

    def logits(self, hidden: Float[Array, "n ND"]) -> Float32[Array, "n V"]:
        """Return the logits of token i + 2, given the output of the first module at position i."""
        module = self.depths[0]
        streams = hidden.reshape(hidden.shape[0], self.config.hc_mult, -1)
        x = module.norm(module.stream_head(streams))
        return vocabulary_logits(x, self.embed_tokens, self.lm_head, self.config.vocab_size)

    def allocate_caches(
        self, num_pages: int, page_size: int, dtype: DTypeLike | None = None
    ) -> tuple[CompressedCache, ...]:
        """Allocate an empty cache for each module, with pages like the windows of the decoder. The default dtype is the
        model's."""
        spec = cache_spec(self.part.of_module, num_pages, page_size, dtype or self.embed_tokens.dtype)
        return tuple(allocate_compressed(spec) for _ in self.depths)
