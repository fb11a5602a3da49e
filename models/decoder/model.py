"""Decoders of the DeepSeek, Qwen3, Llama and gpt-oss families. The module holds the weights; caches are arguments.

Families differ in attention (`mla` or `gqa`) and its cache (`caches`). They share all other code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast, overload, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import DeepSeekConfig, GQAConfig, ModelConfig, cache_groups
from models.decoder.caches import QUANTISED, Caches, IndexedLatent, KVScales, LayerCache, allocate_caches, cache_spec
from models.decoder.gqa import GQA, GQAStep, plan_step
from models.decoder.layers import MLP, Linear, RMSNorm
from models.decoder.mesh import (
    COLUMNS,
    CONTEXT,
    HEADS,
    ExpertSplit,
    device_part,
    normal_mesh,
    num_contexts,
    num_devices,
    own_kv_heads,
)
from models.decoder.mla import MLA, Choice, Part, plan_rows, step_parts
from models.decoder.rope import CosSin, rope_table
from models.decoder.settings import AttentionSettings
from models.decoder.step_metadata import StepMetadata
from models.moe.layer import BiasedMoE, MoE
from pallas_attn import CacheSpec, PagedKV, PagedLatent

type AttentionStep = list[Part] | GQAStep
"""Metadata and plans of a step for the attention of a family, the same for all layers of a cache group."""

type GroupStep = tuple[Int32[Array, "T"] | Int32[Array, "T Hkv"], AttentionStep]
"""Cache slots of a step's tokens in the layers of a cache group, and the input of their attention."""


@runtime_checkable
class Step(Protocol):
    """(weights, tokens, caches, metadata) -> (logits, caches), as `Decoder.__call__`.

    With return_hidden it returns the results of `Decoder.with_hidden`.
    """

    @overload
    def __call__(self, weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata) -> tuple[Array, Caches]: ...
    @overload
    def __call__(
        self, weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata, *, return_hidden: Literal[True]
    ) -> tuple[Array, Caches, Array]: ...


class DecoderLayer(nnx.Module):
    """Attention, then a dense feed-forward layer or a mixture of experts, each with a norm before it and a residual.

    On a mesh, the outputs of the devices are summed after attention and after the feed-forward layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        settings: AttentionSettings,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
    ):
        """Make one device's part of a layer. `config` is the `device_part` of the mesh."""
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = _attention(config, index, settings, dtype, num_contexts(mesh))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = _feed_forward(config, index, dtype, ExpertSplit.over(mesh))
        self.axes = () if mesh is None else COLUMNS

    @property
    def shares_choice(self) -> bool:
        """Whether the layer attends to the keys that an earlier layer selected."""
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
        attend: Callable[..., Any] = self.self_attn
        arguments = (self.input_layernorm(x), rope, cache, slots, step)
        if isinstance(self.self_attn, MLA):
            attended, cache, choice = attend(*arguments, choice)
        else:
            attended, cache = attend(*arguments)
        x = x + self._added_up(attended)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE | BiasedMoE):
            is_live = slots >= 0 if slots.ndim == 1 else jnp.any(slots >= 0, axis=1)
            return x + self._added_up(self.mlp(normed, is_live)), cache, choice
        return x + self._added_up(self.mlp(normed)), cache, choice

    def _added_up(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return jax.lax.psum(x, self.axes) if self.axes else x


class Decoder(nnx.Module):
    """Decoder of any family. `checkpoints.load_model` and `checkpoints.random_model` create one with weights.

    Attributes:
      config: configuration of the model.
      settings: settings of attention.
      mesh: devices that the model is split over (module `mesh`); it then runs inside `jax.shard_map` over this mesh.
        None for one device.
      part: configuration of one device's part of the model; `config` without a mesh.
      contexts: number of devices that contexts are split over.
    """

    def __init__(self, config: ModelConfig, settings: AttentionSettings, dtype: DTypeLike, mesh: Mesh | None = None):
        self.config, self.settings = config, settings
        self.mesh = None if mesh is None else normal_mesh(mesh)
        self.part = part = device_part(config, self.mesh)
        self.contexts = num_contexts(self.mesh)
        self.embed_tokens = nnx.Param(jnp.zeros((part.vocab_size, part.hidden_size), dtype))
        layers = range(part.num_hidden_layers)
        self.layers = nnx.List([DecoderLayer(part, i, settings, dtype, self.mesh) for i in layers])
        self.norm = RMSNorm(part.hidden_size, part.rms_norm_eps, dtype)
        self.lm_head = None if part.tie_word_embeddings else Linear(part.hidden_size, part.vocab_size, dtype)

    def __call__(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float32[Array, "n V"], Caches]:
        """Run one step over packed tokens: write their cache entries, attend, and compute logits.

        Padding rows and idle rows do not affect other rows, and their results are not NaN.

        Args:
          tokens: ids, decode rows first, then prefill chunks, then padding (any valid id).
          caches: one per layer, from `allocate_caches`. Donated caches are written in place.
          metadata: sequences, positions and cache slots of the tokens.

        Returns:
          float32 logits of the rows `metadata.logit_rows`, and the caches.

        Raises:
          ValueError: inconsistent shapes, or a model on a mesh is called outside `jax.shard_map`.
        """
        x, caches = self._apply_layers(tokens, caches, metadata)
        return self.finish(x, metadata.logit_rows), caches

    def with_hidden(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float32[Array, "n V"], Caches, Float[Array, "T D"]]:
        """Run a step, and also return the hidden state of every token after the final norm.

        Logits are computed from these states, and `mtp` uses them as its input.
        """
        x, caches = self._apply_layers(tokens, caches, metadata)
        hidden = self.norm(x)
        return self.logits(hidden[metadata.logit_rows]), caches, hidden

    def _apply_layers(
        self, tokens: Int32[Array, "T"], caches: Caches, metadata: StepMetadata
    ) -> tuple[Float[Array, "T D"], Caches]:
        """Embed the tokens and apply all layers, without the final norm."""
        if len(caches) != len(self.layers):
            raise ValueError(f"caches: expected one per layer, {len(self.layers)}, got {len(caches)}")
        x, rope, groups = self.begin(tokens, caches[0], metadata)
        steps = [groups[self.layer_groups[index]] for index in range(len(self.layers))]
        x, caches, _ = apply_layers(self.layers, x, rope, caches, steps)
        return x, caches

    @property
    def layer_groups(self) -> Mapping[int, int]:
        """Cache group of each layer."""
        return {layer: i for i, group in enumerate(cache_groups(self.part)) for layer in group.layers}

    def begin(
        self, tokens: Int32[Array, "T"], cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Float[Array, "T D"], CosSin, Sequence[GroupStep]]:
        """Compute the inputs of the layers of a step. It takes the arguments and raises the errors of `__call__`.

        Args:
          tokens: ids.
          cache: cache of the first layer.
          metadata: sequences, positions and cache slots of the tokens.

        Returns:
          Embeddings, rotations, and for each cache group its slots and the input of its attention.
        """
        if self.mesh is not None:
            check_inside_shard_map()
        if tokens.shape != metadata.positions.shape:
            raise ValueError(f"tokens: expected {metadata.num_tokens} as metadata has, got {list(tokens.shape)}")
        metadata.check()
        metadata = rows_to_attend(metadata, self.settings, self.contexts)
        x = self.embed(tokens)
        rope = rope_table(self.config, metadata.positions)
        steps = self._attention_steps(metadata, cache)
        return x, rope, [(metadata.of_group(group).slots, step) for group, step in enumerate(steps)]

    def finish(self, x: Float[Array, "T D"], logit_rows: Int32[Array, "n"]) -> Float32[Array, "n V"]:
        """Return the logits of some rows of the last layer's output."""
        return self.logits(self.norm(x[logit_rows]))

    def embed(self, tokens: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """Return the embeddings of tokens."""
        return embed(tokens, self.embed_tokens, self.config.vocab_size)

    def logits(self, x: Float[Array, "n D"]) -> Float32[Array, "n V"]:
        """Return the logits of normed hidden states."""
        return vocabulary_logits(x, self.embed_tokens, self.lm_head, self.config.vocab_size)

    def _attention_steps(self, metadata: StepMetadata, cache: LayerCache) -> Sequence[AttentionStep]:
        """Prepare the attention of a step, once per cache group."""
        match self.part, cache:
            case DeepSeekConfig() as config, (PagedLatent() | IndexedLatent()) as cache:
                parts = step_parts(metadata, self.settings.mla)
                return [plan_rows(parts, config, self.settings, cache, self.embed_tokens.dtype, self.contexts)]
            case GQAConfig() as config, PagedKV() as cache:
                return plan_step(config, self.settings, metadata, cache, self.embed_tokens.dtype, self.contexts)
            case config, cache:
                raise ValueError(f"caches: a {config.model_type} model cannot attend to a {type(cache).__name__}")

    def cache_spec(
        self,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
        *,
        layer: int = 0,
    ) -> CacheSpec:
        """Return the shapes of one layer's cache on a device. The default dtype is the dtype of the model.

        See `caches.cache_spec` for the arguments. If contexts are split, each device has a part of the tokens of every
        page.

        Raises:
          ValueError: as `caches.cache_spec`, or page_size is not a multiple of the number of contexts.
          NotImplementedError: quantised keys and values with split contexts.
        """
        dtype = dtype or self.embed_tokens.dtype
        if page_size % self.contexts:
            raise ValueError(f"page_size: expected a multiple of {CONTEXT}={self.contexts}, got {page_size}")
        if self.contexts > 1 and jnp.dtype(dtype) in QUANTISED and isinstance(self.config, GQAConfig):
            raise NotImplementedError(f"cache_dtype: a chunk is not attended to as it is stored, over {CONTEXT}")
        page_size //= self.contexts
        spec = cache_spec(self.config, num_pages, page_size, dtype, scales, layer=layer)
        if self.mesh is None:
            return spec
        scales = scales and scales.of_part(self.part)
        return cache_spec(self.part, num_pages, page_size, dtype, scales, layer=layer)

    def cache_specs(
        self,
        num_pages: int | Sequence[int],
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
    ) -> list[CacheSpec]:
        """Return the shapes of the caches of all layers. `num_pages` may be per layer; else as `cache_spec`."""
        pages = [num_pages] * len(self.layers) if isinstance(num_pages, int) else num_pages
        return [self.cache_spec(n, page_size, dtype, scales, layer=layer) for layer, n in enumerate(pages)]

    def allocate_caches(
        self,
        num_pages: int | Sequence[int],
        page_size: int,
        dtype: DTypeLike | None = None,
        scales: KVScales | None = None,
    ) -> Caches:
        """Allocate empty caches of all layers. See `cache_specs` for the arguments.

        On a mesh, call it inside `jax.shard_map`; it allocates the caches of one device.
        """
        specs = self.cache_specs(num_pages, page_size, dtype, scales)
        if scales is None or self.mesh is None:
            return allocate_caches(self.config, specs, scales)
        return allocate_caches(self.part, specs, scales, own_kv_heads(self.config, num_devices(self.mesh, HEADS)))


def with_settings(model: Decoder, settings: AttentionSettings) -> Decoder:
    """Return the model with other attention settings and the same weights."""
    if settings == model.settings:
        return model
    shapes = nnx.eval_shape(lambda: Decoder(model.config, settings, model.embed_tokens[...].dtype, model.mesh))
    return nnx.merge(nnx.graphdef(shapes), nnx.state(model))


def _attention(
    config: ModelConfig, index: int, settings: AttentionSettings, dtype: DTypeLike, contexts: int
) -> MLA | GQA:
    """Make the attention module of a layer: (x, rope, cache, slots, step) -> (output, cache).

    MLA also takes and returns the selected keys.
    """
    if isinstance(config, DeepSeekConfig):
        return MLA(config, index, settings, dtype, contexts)
    return GQA(config, settings, dtype, contexts)


def _feed_forward(config: ModelConfig, index: int, dtype: DTypeLike, split: ExpertSplit) -> MLP | MoE | BiasedMoE:
    """Make the feed-forward module of a layer."""
    if config.is_dense(index):
        return MLP(config.hidden_size, config.intermediate_size, dtype)
    return MoE(config, dtype, split) if isinstance(config, DeepSeekConfig) else BiasedMoE(config, dtype, split)


def embed(tokens: Int32[Array, "T"], embed_tokens: nnx.Param, vocab_size: int) -> Float[Array, "T D"]:
    """Return the embeddings of tokens.

    If a device has a part of the `vocab_size` rows, the embeddings of other rows are zero on this device, and the
    result is the sum over the devices. The sum is exact.
    """
    weight = embed_tokens[...]
    if weight.shape[0] == vocab_size:
        return weight[tokens]
    rows = tokens - jax.lax.axis_index(COLUMNS) * weight.shape[0]
    is_own = (rows >= 0) & (rows < weight.shape[0])
    own = weight[jnp.where(is_own, rows, 0)]
    return jax.lax.psum(jnp.where(is_own[:, None], own, jnp.zeros_like(own)), COLUMNS)


def vocabulary_logits(
    x: Float[Array, "n D"], embed_tokens: nnx.Param, lm_head: Linear | None, vocab_size: int
) -> Float32[Array, "n V"]:
    """Return the logits of all tokens, with the weights of the head or the tied input embedding.

    Devices that have a part of the `vocab_size` tokens gather the logits of all devices.
    """
    weight = embed_tokens[...].T if lm_head is None else lm_head.weight[...]
    logits = jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    is_whole = weight.shape[1] == vocab_size
    return logits if is_whole else jax.lax.all_gather(logits, COLUMNS, axis=1, tiled=True)


def rows_to_attend(metadata: StepMetadata, settings: AttentionSettings, contexts: int) -> StepMetadata:
    """Return metadata of a step with the rows that attention computes.

    With split contexts, the queries of a row see different numbers of a device's tokens, so each query becomes a row.
    """
    if settings.batch_invariant:
        return metadata.as_decode_rows()
    return metadata.one_query_a_row() if contexts > 1 else metadata


def check_inside_shard_map() -> None:
    """Raise ValueError unless the caller is traced inside `jax.shard_map` over a model's mesh."""
    if not {*COLUMNS} <= {*jax.sharding.get_abstract_mesh().manual_axes}:
        raise ValueError("mesh: expected a call inside jax.shard_map over the model's mesh, got a call outside")


def apply_layers(
    layers: Sequence[DecoderLayer],
    x: Float[Array, "T D"],
    rope: CosSin,
    caches: Caches,
    steps: Sequence[GroupStep],
    choice: Choice | None = None,
) -> tuple[Float[Array, "T D"], Caches, Choice | None]:
    """Apply consecutive layers.

    Args:
      layers: the layers.
      x: output of the layers before, or the embeddings of `Decoder.begin`.
      rope: rotations.
      caches: cache of each layer.
      steps: input of each layer's attention, from `Decoder.begin`.
      choice: keys that the layers before selected, if any.

    Returns:
      Inputs of the next layers: x, the written caches, and the last selected keys, if layers select keys.
    """
    apply_layer = layer_function()
    written = []
    for layer, cache, step in zip(layers, caches, steps, strict=True):
        given = choice if layer.shares_choice else None  # equal inputs, so that other layers compile to one function
        x, cache, choice = apply_layer(*nnx.split(layer), x, rope, cache, *step, given)
        written.append(cache)
    return x, tuple(written), choice


def layer_function() -> Callable[..., tuple[Array, Any, Choice | None]]:
    """Return a new jitted `_apply_layer` for each trace.

    A trace depends on implementations and tuned configurations, which may change between calls.
    """
    return jax.jit(functools.partial(_apply_layer), static_argnums=0)


def _apply_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "T D"],
    rope: CosSin,
    cache: LayerCache,
    slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
    step: AttentionStep,
    choice: Choice | None = None,
) -> tuple[Float[Array, "T D"], LayerCache, Choice | None]:
    """Apply a layer as a pure function. When jitted, it is lowered and compiled once for all equal layers."""
    return nnx.merge(graph, state)(x, rope, cache, slots, step, choice)


def split_module[Module: nnx.Module](module: Module) -> tuple[Callable[[Any], Module], list[jax.Array]]:
    """Split a module into its weights and a function that rebuilds the module from weights inside jit.

    The weights are a flat list, which has the least overhead in a jitted call.
    """
    graph, state = nnx.split(module)
    weights, structure = jax.tree.flatten(state)
    return lambda weights: nnx.merge(graph, jax.tree.unflatten(structure, weights)), weights


def split_model(model: Decoder) -> tuple[Step, list[jax.Array]]:
    """Split the model into a pure function and its weights. Jit it with `jax.jit(step, donate_argnums=2)`."""
    rebuild, weights = split_module(model)

    def step(
        weights: Any, tokens: Array, caches: Caches, metadata: StepMetadata, *, return_hidden: bool = False
    ) -> tuple[Any, ...]:
        whole = rebuild(weights)
        return (whole.with_hidden if return_hidden else whole)(tokens, caches, metadata)

    return cast(Step, step), weights
