"""Decoder models of the DeepSeek, Qwen3, Llama, gpt-oss and Gemma 4 families as Flax NNX modules.

A `Decoder` has the weights. Caches are arguments and results of a call. A step is one call of the model on the packed
new tokens of several sequences. The families differ in attention (`mla` or `gqa`), in the cache (`caches`) and in the
mixture of experts (`pallas_attn.models.moe.layer`). Gemma 4 (`gemma`) and DeepSeek-V4 (`deepseek_v4`) also have their
own layers. All other code is shared.

A cache group is a set of layers with equal attention windows. A layer of DeepSeek-V4 is in several cache groups. A
cache slot is the index of a token's place in the cache: page · page size + offset. If the KV heads of a cache group
have different windows, each head has its own pages, and a token has one cache slot per head. A decode plan assigns the
pages of decode rows (newest tokens of sequences) to thread blocks. It is computed once per step for all layers of a
cache group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast, overload, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import CacheSpec, PagedKV, PagedLatent
from pallas_attn.models.config import (
    DeepSeekConfig,
    DeepseekV4Config,
    Gemma4Config,
    GQAConfig,
    ModelConfig,
    cache_groups,
)
from pallas_attn.models.decoder.caches import (
    QUANTISED,
    Caches,
    CompressedCache,
    IndexedLatent,
    KVScales,
    LayerCache,
    PageCount,
    allocate_caches,
    cache_spec,
)
from pallas_attn.models.decoder.deepseek_v4 import V4Inputs, V4Layer, V4Step, v4_inputs, v4_step
from pallas_attn.models.decoder.gemma import GemmaInputs, GemmaLayer, PerLayerInputs, gemma_inputs, scaled_embedding
from pallas_attn.models.decoder.gqa import GQA, GQAStep, plan_step
from pallas_attn.models.decoder.hyper_connections import StreamHead
from pallas_attn.models.decoder.layers import MLP, Linear, RMSNorm, WideRMSNorm
from pallas_attn.models.decoder.mesh import (
    COLUMNS,
    CONTEXT,
    HEADS,
    ExpertSplit,
    cached_part,
    device_part,
    embed,
    normal_mesh,
    num_contexts,
    num_devices,
    own_kv_heads,
    splits_heads,
    sum_over,
)
from pallas_attn.models.decoder.mla import MLA, Choice, Part, plan_rows, step_parts
from pallas_attn.models.decoder.rope import CosSin, rope_table
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import StepMetadata
from pallas_attn.models.moe.layer import BiasedMoE, MoE

type AttentionStep = list[Part] | GQAStep | V4Step
"""Inputs of attention that the layers of a cache group share in a step: metadata and decode plans. A list of the parts
of the step for MLA, `GQAStep` for GQA, `V4Step` for DeepSeek-V4."""

type SharedInputs = CosSin | GemmaInputs | V4Inputs
"""Inputs that depend only on the tokens of a step and their positions: cosines and sines of rotation angles; for Gemma
4 `GemmaInputs`, for DeepSeek-V4 `V4Inputs`."""

type GroupStep = tuple[Int32[Array, "T"] | Int32[Array, "T Hkv"], AttentionStep]
"""For the layers of a cache group: cache slots of a step's tokens, and metadata and decode plans of attention."""


@runtime_checkable
class Step(Protocol):
    """Model as a pure function: (weights, tokens, caches, metadata) -> (logits, caches), like `Decoder.__call__`.

    With return_hidden=True it returns (logits, caches, hidden states), like `Decoder.with_hidden`.
    """

    @overload
    def __call__(self, weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata) -> tuple[Array, Caches]: ...
    @overload
    def __call__(
        self, weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata, *, return_hidden: Literal[True]
    ) -> tuple[Array, Caches, Array]: ...


class DecoderLayer(nnx.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)), which is dense or a mixture of experts.

    On a mesh, the outputs of attention and of the feed-forward layer are summed over the devices.

    Attributes:
      cache_source: None: the layer uses its own cache.
    """

    cache_source: None = None

    def __init__(
        self,
        config: DeepSeekConfig | GQAConfig,
        index: int,
        settings: AttentionSettings,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
    ):
        """Make a layer with zero weights, on a mesh one device's part of the layer.

        Args:
          config: configuration of the model; on a mesh, the result of `device_part`.
          index: index of the layer.
          settings: attention settings.
          dtype: dtype of the weights.
          mesh: devices that the model is split over; None for one device.
        """
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = _attention(config, index, settings, dtype, num_contexts(mesh))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = _feed_forward(config, index, dtype, ExpertSplit.over(mesh))
        self.axes = () if mesh is None else COLUMNS

    @property
    def shares_choice(self) -> bool:
        """Whether the layer uses sparse attention with the keys that an earlier layer selected."""
        return isinstance(self.self_attn, MLA) and self.self_attn.shares_choice

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: CosSin,
        cache: LayerCache,
        slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
        step: AttentionStep,
        choice: Choice | None = None,
    ) -> tuple[Float[Array, "T D"], LayerCache, Choice | None]:
        """Apply the layer. `apply_layers` describes arguments and results; (slots, step) is an entry of its `steps`."""
        attend: Callable[..., Any] = self.self_attn
        arguments = (self.input_layernorm(x), rope, cache, slots, step)
        if isinstance(self.self_attn, MLA):
            attended, cache, choice = attend(*arguments, choice)
        else:
            attended, cache = attend(*arguments)
        x = x + sum_over(attended, self.axes)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE | BiasedMoE):
            is_live = slots >= 0 if slots.ndim == 1 else jnp.any(slots >= 0, axis=1)
            return x + sum_over(self.mlp(normed, is_live), self.axes), cache, choice
        return x + sum_over(self.mlp(normed), self.axes), cache, choice


class Decoder(nnx.Module):
    """Decoder of any family. The constructor sets weights to zero; `checkpoints.load_model` and
    `checkpoints.random_model` return models with weights.

    Attributes:
      config: configuration of the model.
      settings: attention settings.
      mesh: devices that the model is split over (see module `mesh`). The model must then be called inside
        `jax.shard_map` over this mesh. None for one device.
      part: configuration of one device's part of the model; `config` without a mesh.
      contexts: number of devices that the tokens of each page are split over; 1 if they are not split.
    """

    def __init__(self, config: ModelConfig, settings: AttentionSettings, dtype: DTypeLike, mesh: Mesh | None = None):
        self.config, self.settings = config, settings
        self.mesh = None if mesh is None else normal_mesh(mesh)
        self.part = part = device_part(config, self.mesh)
        self.contexts = num_contexts(self.mesh)
        self.embed_tokens = nnx.Param(jnp.zeros((part.vocab_size, part.hidden_size), dtype))
        layers = range(part.num_hidden_layers)
        self.layers = nnx.List([_layer(part, i, settings, dtype, self.mesh, config.vocab_size) for i in layers])
        self.per_layer_inputs = _per_layer_inputs(config, part, dtype)
        is_v4 = isinstance(part, DeepseekV4Config)
        self.stream_head = StreamHead(part, dtype) if is_v4 else None
        self.norm = (WideRMSNorm if is_v4 else RMSNorm)(part.hidden_size, part.rms_norm_eps, dtype)
        self.lm_head = None if part.tie_word_embeddings else Linear(part.hidden_size, part.vocab_size, dtype)

    def __call__(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float32[Array, "n V"], Caches]:
        """Run one step over packed tokens: write their cache entries, attend, and compute logits.

        Padding does not affect other tokens, and its logits are not NaN.

        Args:
          tokens: token ids of the decode rows, then of the prefill chunks, then padding (any valid id).
          caches: cache of each layer, from `allocate_caches`. Donated caches are written in place.
          metadata: sequences, positions and cache slots of the tokens.

        Returns:
          Logits of the tokens `metadata.logit_rows`, and the caches with the new tokens.

        Raises:
          ValueError: inconsistent shapes, or a model on a mesh is called outside `jax.shard_map`.
        """
        # Layers without a cache write nothing, so only tokens with logits need them.
        rows = metadata.logit_rows
        skips = self.has_readers and rows.shape[0] < metadata.num_tokens and metadata.decode_draft_mask is None
        x, caches = self._apply_layers(tokens, caches, metadata, rows if skips else None)
        return self.finish(x, jnp.arange(rows.shape[0], dtype=jnp.int32) if skips else rows), caches

    def with_hidden(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float32[Array, "n V"], Caches, Float[Array, "T width"]]:
        """Run a step like `__call__`, and also return the hidden states of all tokens after the final norm. For
        DeepSeek-V4, a hidden state has all residual streams of a token before the final norm, [N · D].

        The logits are computed from these hidden states. Multi-token prediction (`mtp`) uses them as its input.
        """
        x, caches = self._apply_layers(tokens, caches, metadata)
        hidden = self.hidden_states(x)
        return self.hidden_logits(hidden[metadata.logit_rows]), caches, hidden

    def hidden_states(self, x: Float[Array, "T *streams D"]) -> Float[Array, "T width"]:
        """Return hidden states as in `with_hidden`, given the output of the last layer."""
        return self.norm(x) if self.stream_head is None else x.reshape(x.shape[0], -1)

    @property
    def hidden_width(self) -> int:
        """Number of columns of a hidden state of `with_hidden`."""
        return self.config.hidden_size * (self.config.hc_mult if isinstance(self.config, DeepseekV4Config) else 1)

    def hidden_logits(self, hidden: Float[Array, "n width"]) -> Float32[Array, "n V"]:
        """Return the logits, given hidden states of `with_hidden`."""
        if not isinstance(self.config, DeepseekV4Config):
            return self.logits(hidden)
        return self.logits(self._final_hidden(hidden.reshape(hidden.shape[0], self.config.hc_mult, -1)))

    def _apply_layers(
        self,
        tokens: Int32[Array, "T"],
        caches: Caches,
        metadata: StepMetadata,
        rows: Int32[Array, "n"] | None = None,
    ) -> tuple[Float[Array, "T *streams D"] | Float[Array, "n *streams D"], Caches]:
        """Embed the tokens and apply all layers.

        Args:
          tokens, caches, metadata: as in `__call__`.
          rows: indices of the tokens that layers without a cache are applied to; None for all tokens.

        Returns:
          Hidden states before the final norm, of all tokens, or of the tokens `rows`; and the caches.
        """
        if len(caches) != len(self.layers):
            raise ValueError(f"caches: expected one per layer, {len(self.layers)}, got {len(caches)}")
        x, inputs, groups = self.begin(tokens, caches[0], metadata)
        if self.has_readers and self.contexts > 1 and rows is None:
            # A device has the cached keys of a part of a chunk, and these layers do not compute the keys of the chunk.
            # Its tokens therefore become decode rows.
            rows = jnp.arange(metadata.num_tokens, dtype=jnp.int32)
        layers, numbers = [*self.layers], self.layer_groups
        all_tokens = len(layers) if rows is None else len(self.part.cached_layers)
        steps = [groups[numbers[index]] for index in range(all_tokens)]
        x, written, _ = apply_layers(layers[:all_tokens], x, inputs, caches[:all_tokens], steps)
        if rows is None:
            return x, written
        inputs, groups = self.inputs_of_rows(inputs, metadata, caches[0], rows)
        steps = [groups[numbers[index]] for index in range(all_tokens, len(layers))]
        rest = layers[all_tokens:], x[rows], inputs.of_layers(slice(all_tokens, None))
        x, unwritten, _ = apply_layers(*rest, caches[all_tokens:], steps, earlier=dict(enumerate(written)))
        return x, written + unwritten

    @property
    def has_readers(self) -> bool:
        """Whether the last layers have no cache, and use the caches of earlier layers."""
        return len(self.part.cached_layers) < len(self.layers)

    def inputs_of_rows(
        self, inputs: GemmaInputs, metadata: StepMetadata, cache: LayerCache, rows: Int32[Array, "n"]
    ) -> tuple[GemmaInputs, Sequence[GroupStep]]:
        """Return the inputs of layers without a cache that are applied only to some tokens.

        Args:
          inputs: inputs of all tokens, from `begin`.
          metadata, cache: as in `begin`.
          rows: indices of the tokens.

        Returns:
          The inputs of these tokens; and for each cache group the cache slots, metadata and decode plans.
        """
        groups = self._group_steps(metadata.of_tokens(rows), cache)
        return jax.tree.map(lambda of_tokens: of_tokens[rows], inputs), groups

    @property
    def layer_groups(self) -> Mapping[int, int]:
        """Index of the cache group of each layer, whose cache it writes or only reads. For DeepSeek-V4, the cache group
        of its window."""
        if isinstance(self.part, DeepseekV4Config):
            return dict.fromkeys(range(self.part.num_hidden_layers), 0)  # one `V4Step` has the tables of all groups
        groups = {layer: i for i, group in enumerate(cache_groups(self.part)) for layer in group.layers}
        if not isinstance(self.part, Gemma4Config):
            return groups
        return {layer: groups[self.part.cache_source(layer)] for layer in range(self.part.num_hidden_layers)}

    def begin(
        self, tokens: Int32[Array, "T"], cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Float[Array, "T *streams D"], Any, Sequence[GroupStep]]:
        """Compute the inputs that the layers of a step share. Raises the errors of `__call__`.

        Args:
          tokens: token ids.
          cache: cache of the first layer. Only its shapes and dtypes are used.
          metadata: sequences, positions and cache slots of the tokens.

        Returns:
          Embeddings of the tokens (for DeepSeek-V4, a copy for each residual stream); inputs of all layers
          (`SharedInputs`); and for each cache group the cache slots, metadata and decode plans.
        """
        if self.mesh is not None:
            check_inside_shard_map()
        if tokens.shape != metadata.positions.shape:
            raise ValueError(f"tokens: expected {metadata.num_tokens} as metadata has, got {list(tokens.shape)}")
        metadata.check()
        if not isinstance(self.config, DeepseekV4Config):  # V4 attends to slots of each token, in any row
            metadata = rows_to_attend(metadata, self.settings, self.contexts)
        x = self.embed(tokens)
        if isinstance(self.config, Gemma4Config):
            ple = None if self.per_layer_inputs is None else self.per_layer_inputs(tokens, x)
            inputs = gemma_inputs(self.config, metadata.positions, ple)
        elif isinstance(self.config, DeepseekV4Config):
            inputs = v4_inputs(self.config, tokens, metadata.positions)
            x = jnp.broadcast_to(x[:, None], (x.shape[0], self.config.hc_mult, x.shape[1]))
        else:
            inputs = rope_table(self.config, metadata.positions)
        return x, inputs, self._group_steps(metadata, cache)

    def _group_steps(self, metadata: StepMetadata, cache: LayerCache) -> Sequence[GroupStep]:
        """Return cache slots, metadata and decode plans of each cache group."""
        steps = self._attention_steps(metadata, cache)
        return [(metadata.of_group(group).slots, step) for group, step in enumerate(steps)]

    def finish(self, x: Float[Array, "T *streams D"], logit_rows: Int32[Array, "n"]) -> Float32[Array, "n V"]:
        """Return the logits of the tokens `logit_rows`, given the output x of the last layer."""
        return self.logits(self._final_hidden(x[logit_rows]))

    def _final_hidden(self, x: Float[Array, "n *streams D"]) -> Float[Array, "n D"]:
        """Return the hidden states after the final norm, given the output of the last layer."""
        return self.norm(x if self.stream_head is None else self.stream_head(x))

    def embed(self, tokens: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens."""
        if isinstance(self.config, Gemma4Config):
            return scaled_embedding(tokens, self.embed_tokens, self.config.vocab_size, self.config.hidden_size)
        return embed(tokens, self.embed_tokens, self.config.vocab_size)

    def logits(self, x: Float[Array, "n D"]) -> Float32[Array, "n V"]:
        """Return the logits, given hidden states after the final norm."""
        logits = vocabulary_logits(x, self.embed_tokens, self.lm_head, self.config.vocab_size)
        cap = self.config.final_logit_softcapping if isinstance(self.config, Gemma4Config) else None
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _attention_steps(self, metadata: StepMetadata, cache: LayerCache) -> Sequence[AttentionStep]:
        """Compute metadata and decode plans of attention for each cache group."""
        match self.part, cache:
            case DeepSeekConfig() as config, (PagedLatent() | IndexedLatent()) as cache:
                parts = step_parts(metadata, self.settings.mla)
                return [plan_rows(parts, config, self.settings, cache, self.embed_tokens.dtype, self.contexts)]
            case (GQAConfig() | Gemma4Config()) as config, PagedKV() as cache:
                return plan_step(config, self.settings, metadata, cache, self.embed_tokens.dtype, self.contexts)
            case DeepseekV4Config() as config, CompressedCache() as cache:
                return [v4_step(config, metadata, cache.window.page_size, slot_ranges=self.settings.slot_ranges)]
            case config, cache:
                raise ValueError(f"caches: a {config.model_type} model cannot attend to a {type(cache).__name__}")

    def cache_spec(
        self,
        num_pages: PageCount,
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
        *,
        layer: int = 0,
    ) -> CacheSpec:
        """Return the shapes and dtypes of one layer's cache on a device.

        `caches.cache_spec` describes the arguments. The default of dtype is the dtype of the model. `page_size` is the
        number of tokens per page on all devices together: if `contexts` is above 1, each device has a part of the
        tokens of every page.

        Raises:
          ValueError: as `caches.cache_spec`, or page_size is not a multiple of `contexts`.
          NotImplementedError: quantised keys and values, and `contexts` is above 1.
        """
        dtype = dtype or self.embed_tokens.dtype
        if page_size % self.contexts:
            raise ValueError(f"page_size: expected a multiple of {CONTEXT}={self.contexts}, got {page_size}")
        if self.contexts > 1 and jnp.dtype(dtype) in QUANTISED and not isinstance(self.config, DeepSeekConfig):
            raise NotImplementedError(
                f"cache_dtype: quantised keys and values are not supported over {CONTEXT}, because chunks would attend"
                " to their unquantised keys and values"
            )
        if not splits_heads(self.config, layer, self.contexts):
            page_size //= self.contexts
        spec = cache_spec(self.config, num_pages, page_size, dtype, scales, layer=layer)
        if self.mesh is None:
            return spec
        scales = scales and scales.of_part(self.part)
        part = cached_part(self.part, self.contexts)
        return cache_spec(part, num_pages, page_size, dtype, scales, layer=layer)

    def cache_specs(
        self,
        num_pages: int | Sequence[PageCount],
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
    ) -> list[CacheSpec]:
        """Return the result of `cache_spec` for each layer. `num_pages` is one number for all layers, or a sequence
        with one entry per layer."""
        pages: Sequence[PageCount] = [num_pages] * len(self.layers) if isinstance(num_pages, int) else num_pages
        return [self.cache_spec(n, page_size, dtype, scales, layer=layer) for layer, n in enumerate(pages)]

    def allocate_caches(
        self,
        num_pages: int | Sequence[PageCount],
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
    ) -> Caches:
        """Allocate empty caches of all layers. Arguments and errors as in `cache_specs`.

        On a mesh, call this method inside `jax.shard_map`, where it returns the caches of one device.
        """
        specs = self.cache_specs(num_pages, page_size, dtype, scales)
        if scales is None or self.mesh is None or isinstance(self.config, DeepSeekConfig | DeepseekV4Config):
            return allocate_caches(self.config, specs, scales)
        return allocate_caches(self.part, specs, scales, own_kv_heads(self.config, num_devices(self.mesh, HEADS)))


def with_settings(model: Decoder, settings: AttentionSettings) -> Decoder:
    """Return the model with other attention settings and the same weights."""
    if settings == model.settings:
        return model
    shapes = nnx.eval_shape(lambda: Decoder(model.config, settings, model.embed_tokens[...].dtype, model.mesh))
    return nnx.merge(nnx.graphdef(shapes), nnx.state(model))


def _per_layer_inputs(config: ModelConfig, part: ModelConfig, dtype: DTypeLike) -> PerLayerInputs | None:
    """Make the module of per-layer embeddings, given the configurations of the model and of one device's part; None if
    the model has none."""
    if not isinstance(config, Gemma4Config) or not isinstance(part, Gemma4Config):
        return None
    has_embeddings = config.hidden_size_per_layer_input > 0
    return PerLayerInputs(part, dtype, config.vocab_size_per_layer_input) if has_embeddings else None


def _layer(
    config: ModelConfig, index: int, settings: AttentionSettings, dtype: DTypeLike, mesh: Mesh | None, vocab_size: int
) -> Any:
    """Make a `V4Layer`, a `GemmaLayer` or a `DecoderLayer`. Arguments as in `V4Layer`."""
    if isinstance(config, DeepseekV4Config):
        return V4Layer(config, index, settings, dtype, mesh, vocab_size)
    if isinstance(config, Gemma4Config):
        return GemmaLayer(config, index, settings, dtype, mesh)
    return DecoderLayer(config, index, settings, dtype, mesh)


def _attention(
    config: DeepSeekConfig | GQAConfig, index: int, settings: AttentionSettings, dtype: DTypeLike, contexts: int
) -> MLA | GQA:
    """Make the attention module of a layer. GQA maps (x, rope, cache, slots, step) to (output, cache). MLA has the
    selected keys of sparse attention as an additional argument and result."""
    if isinstance(config, DeepSeekConfig):
        return MLA(config, index, settings, dtype, contexts)
    return GQA(config, settings, dtype, contexts)


def _feed_forward(
    config: DeepSeekConfig | GQAConfig, index: int, dtype: DTypeLike, split: ExpertSplit
) -> MLP | MoE | BiasedMoE:
    """Make the feed-forward module of a layer: dense, or a mixture of experts."""
    if config.is_dense(index):
        return MLP(config.hidden_size, config.intermediate_size, dtype)
    return MoE(config, dtype, split) if isinstance(config, DeepSeekConfig) else BiasedMoE(config, dtype, split)


def vocabulary_logits(
    x: Float[Array, "n D"], embed_tokens: nnx.Param, lm_head: Linear | None, vocab_size: int
) -> Float32[Array, "n V"]:
    """Return the logits of all `vocab_size` tokens, given hidden states x after the final norm.

    The weights are `lm_head`, or the tied input embedding if `lm_head` is None. On a mesh that splits the vocabulary,
    each device computes the logits of its part, and the logits of all devices are gathered.
    """
    weight = embed_tokens[...].T if lm_head is None else lm_head.weight[...]
    logits = jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    is_whole = weight.shape[1] == vocab_size
    return logits if is_whole else jax.lax.all_gather(logits, COLUMNS, axis=1, tiled=True)


def rows_to_attend(metadata: StepMetadata, settings: AttentionSettings, contexts: int) -> StepMetadata:
    """Convert metadata of a step to the rows that attention operations take.

    With batch_invariant, each token becomes a decode row. If `contexts` is above 1 (the tokens of each page are split
    over devices), decode rows of several tokens are split into rows of one token. The reason: the operations compute
    the number of keys that each token of a row sees from the length of the row, but a device has only some of these
    keys.
    """
    if settings.batch_invariant:
        return metadata.as_decode_rows()
    return metadata.one_query_a_row() if contexts > 1 else metadata


def check_inside_shard_map() -> None:
    """Raise ValueError unless the caller is traced inside `jax.shard_map` over a model's mesh."""
    if not {*COLUMNS} <= {*jax.sharding.get_abstract_mesh().manual_axes}:
        raise ValueError("mesh: expected a call inside jax.shard_map over the model's mesh, got a call outside")


def apply_layers(
    layers: Sequence[Any],
    x: Float[Array, "T *streams D"],
    inputs: SharedInputs,
    caches: Caches,
    steps: Sequence[GroupStep],
    choice: Choice | None = None,
    *,
    earlier: Mapping[int, LayerCache] = MappingProxyType({}),
) -> tuple[Float[Array, "T *streams D"], Caches, Choice | None]:
    """Apply consecutive layers.

    Args:
      layers: the layers.
      x: hidden states before these layers; for DeepSeek-V4, of each residual stream [T, N, D].
      inputs: inputs from `Decoder.begin`. Per-layer embeddings are those of these layers.
      caches: cache of each layer.
      steps: cache slots, metadata and decode plans of attention for each layer, from `Decoder.begin`.
      choice: cache slots of the keys that the last indexer before these layers selected (sparse attention); None
        without an indexer.
      earlier: by index in the model, the caches with the new tokens of the layers before these layers that a layer
        reads. If it is not empty, no layer has a cache of its own.

    Returns:
      Hidden states after the last layer; the caches with the new tokens; and the keys that the last indexer selected,
      None without an indexer.
    """
    apply_layer = layer_function()
    known, written = dict(earlier), []
    for index, (layer, cache, step) in enumerate(zip(layers, caches, steps, strict=True)):
        # None for layers that ignore the argument: layers with and without it would be compiled separately.
        given = choice if layer.shares_choice else None
        of_layer = inputs.of_layer(index) if isinstance(inputs, GemmaInputs) else inputs
        read = cache if layer.cache_source is None else known[layer.cache_source]
        x, cache, choice = apply_layer(*nnx.split(layer), x, of_layer, read, *step, given)
        if layer.cache_source is None:
            known[index] = cache
        written.append(cache)
    return x, tuple(written), choice


def layer_function() -> Callable[..., tuple[Array, Any, Choice | None]]:
    """Return `_apply_layer`, jitted anew.

    The trace of a layer depends on the chosen implementations and kernel settings, which may change between traces of a
    step. A new jitted function does not reuse traces of earlier steps. Equal layers of one step still share a trace.
    """
    return jax.jit(functools.partial(_apply_layer), static_argnums=0)


def _apply_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "T *streams D"],
    inputs: SharedInputs,
    cache: LayerCache,
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    step: AttentionStep,
    choice: Choice | None = None,
) -> tuple[Float[Array, "T *streams D"], LayerCache, Choice | None]:
    """Apply a layer as a pure function of its graph definition and weights, so that jit compiles equal layers once."""
    return nnx.merge(graph, state)(x, inputs, cache, slots, step, choice)


def split_module[Module: nnx.Module](module: Module) -> tuple[Callable[[Any], Module], list[Any]]:
    """Split a module into its weights and a function that rebuilds the module from weights inside jit.

    The weights are a flat list, which has less overhead than a tree as an argument of a jitted call.
    """
    graph, state = nnx.split(module)
    weights, structure = jax.tree.flatten(state)
    return lambda weights: nnx.merge(graph, jax.tree.unflatten(structure, weights)), weights


def named_weights(weights: Any) -> dict[str, Any]:
    """Return the weights of a module, or of a tree such as `nnx.state(module)` or nested dicts, by dotted path.

    The weights of a module are in the order of `split_module`.
    """
    tree = nnx.state(weights) if isinstance(weights, nnx.Module) else weights
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    # The leaves of an `nnx.State` are in the field `value` of variables.
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in leaves
    }


def shapes_of[Module: nnx.Module](module: Module) -> Module:
    """Return a module that has `jax.ShapeDtypeStruct` in place of each weight, and holds no memory."""
    rebuild, weights = split_module(module)
    return rebuild([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in weights])


def split_model(model: Decoder) -> tuple[Step, list[Any]]:
    """Split the model into a pure function and its weights, for the result of `shapes_of` into shapes.

    Jit the function with `jax.jit(step, donate_argnums=2)`, so that caches are written in place.
    """
    rebuild, weights = split_module(model)

    def step(
        weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata, *, return_hidden: bool = False
    ) -> tuple[Any, ...]:
        whole = rebuild(weights)
        return (whole.with_hidden if return_hidden else whole)(tokens, caches, metadata)

    return cast(Step, step), weights
