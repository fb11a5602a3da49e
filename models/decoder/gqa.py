"""Grouped-query attention (Ainslie et al., arXiv:2305.13245) over a paged KV cache.

`write_kv` normalises and rotates keys and queries and writes keys and values of the new tokens to the cache. Then
`paged_decode` computes the decode rows, and `paged_prefill` the prompt chunks. If all decode rows share leading pages,
`cascade_decode` computes the decode rows of layers without windows (`StepMetadata.shared_pages`).

A decode plan (assignment of pages to thread blocks) is computed once per step for all layers of a cache group, a set of
layers with equal windows. A cache slot is the index of a token's place in the cache: page · page size + offset. If the
KV heads of a cache group have different windows, each head has its own pages, and a token has one cache slot per head.

If the tokens of each page are split over devices (`contexts`), queries and keys are rotated before `write_kv`, and each
device attends to its cached tokens.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import (
    DecodePlan,
    HeadWindow,
    PagedKV,
    Rope,
    cascade_decode,
    paged_decode,
    paged_prefill,
    parallel,
    plan_decode,
    ragged_attention,
    write_kv,
)
from pallas_attn.models.config import GQAConfig, HeadsConfig, HeadWindows, LayerWindow, cache_groups
from pallas_attn.models.decoder import contexts as split_contexts
from pallas_attn.models.decoder.caches import cache_spec
from pallas_attn.models.decoder.layers import Linear, RMSNorm
from pallas_attn.models.decoder.mesh import CONTEXT, cached_part, splits_heads
from pallas_attn.models.decoder.rope import CosSin, rotate
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import GroupTables, StepMetadata


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GQAStep:
    """Metadata and decode plan of a step, which the layers of a cache group share.

    Attributes:
      metadata: metadata of the step.
      tables: block tables and cache slots of the group.
      plan: decode plan of the decode rows; None without decode rows or with `has_cascade`.
      decode_kv_lens: [Bd], number of cached tokens of each decode row on this device, including the tokens of this
        step.
      window: attention window of the layers of the group.
    """

    metadata: StepMetadata
    tables: GroupTables
    plan: DecodePlan | None
    decode_kv_lens: Int32[Array, "Bd"]
    window: LayerWindow = dataclasses.field(default=None, metadata={"static": True})

    @property
    def has_cascade(self) -> bool:
        """Whether the decode rows of the group share leading pages that `cascade_decode` reads once."""
        return self.metadata.shared_pages is not None and self.window is None

    def window_argument(self) -> int | HeadWindow | None:
        """Return the window in the form that `pallas_attn` operations take."""
        return self.window.array() if isinstance(self.window, HeadWindows) else self.window


def plan_step(
    config: HeadsConfig,
    settings: AttentionSettings,
    metadata: StepMetadata,
    cache: PagedKV,
    dtype: DTypeLike,
    contexts: int = 1,
) -> tuple[GQAStep, ...]:
    """Compute the decode plan of a step for each cache group.

    Args:
      config: configuration of the model, or of one device's part.
      settings: attention settings.
      metadata: metadata of the step.
      cache: cache of the first layer; only its shapes and dtypes are used.
      dtype: dtype of the queries.
      contexts: number of devices that the tokens of each page are split over.

    Returns:
      One `GQAStep` per entry of `cache_groups(config)`.
    """
    rows, groups = (metadata.decode_kv_lens.shape[0], metadata.decode_queries), cache_groups(config)
    caches = [_cache_of_group(config, cache, group.layers[0], contexts) for group in groups]
    heads_split = [splits_heads(config, group.layers[0], contexts) for group in groups]
    lens = [
        metadata.decode_kv_lens
        if contexts == 1 or is_split
        else split_contexts.own_lens(metadata.decode_kv_lens, of_group.page_size)
        for of_group, is_split in zip(caches, heads_split, strict=True)
    ]
    steps = [GQAStep(metadata, metadata.of_group(i), None, lens[i], group.window) for i, group in enumerate(groups)]
    if not metadata.num_decode:
        return tuple(steps)
    heads = [config.num_attention_heads // (contexts if is_split else 1) for is_split in heads_split]
    plans = (
        None
        if step.has_cascade
        else plan_decode(
            jax.ShapeDtypeStruct((*rows, num_heads, of_group.k.shape[3]), jnp.dtype(dtype)),
            of_group,
            step.tables.decode_block_tables,
            step.decode_kv_lens,
            q_lens=metadata.decode_q_lens,
            window=step.window_argument(),
            mode="fixed" if settings.batch_invariant else "balanced",
            implementation=settings.implementation,
        )
        for of_group, num_heads, step in zip(caches, heads, steps, strict=True)
    )
    return tuple(dataclasses.replace(step, plan=plan) for step, plan in zip(steps, plans, strict=True))


def _cache_of_group(config: HeadsConfig, cache: PagedKV, layer: int, contexts: int) -> PagedKV:
    """Return the shapes of the cache of a layer, given the cache of the first layer."""
    is_split, first_is_split = (splits_heads(config, i, contexts) for i in (layer, 0))
    heads = cached_part(config, contexts).kv_heads(layer)
    if is_split == first_is_split and (heads.num_heads, heads.width) == (cache.k.shape[1], cache.k.shape[3]):
        return cache
    page_size = cache.page_size * (1 if first_is_split else contexts) // (1 if is_split else contexts)
    spec = cache_spec(cached_part(config, contexts), cache.k.shape[0], page_size, cache.k.dtype, layer=layer)
    arrays = dict(spec.arrays)
    if cache.k_scale is not None and cache.k_scale.ndim < 3:  # static scales per head, or also per channel
        shape = heads[: cache.k_scale.ndim]
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct(shape, jnp.float32))
    return PagedKV(**arrays)  # pyrefly: ignore[bad-argument-type]


def attend(
    q: Float[Array, "T Hq D"],
    cache: PagedKV,
    step: GQAStep,
    sm_scale: float,
    sinks: Float32[Array, "Hq"] | None,
    settings: AttentionSettings,
) -> Float[Array, "T Hq D"]:
    """Attend to the cache with all tokens of a step, whose keys and values are in the cache already.

    Args:
      q: normalised and rotated queries.
      cache: cache of the layer, or of the layer whose cache this layer uses.
      step: metadata and plan of the cache group.
      sm_scale: factor of query-key products.
      sinks: learned logits in the softmax denominator; None for none.
      settings: attention settings.
    """
    metadata, num_decode, window = step.metadata, step.metadata.num_decode, step.window_argument()
    if step.has_cascade:
        of_rows: Any = cascade_decode(
            q[:, None],
            cache,
            step.tables.decode_block_tables,
            step.decode_kv_lens,
            shared_pages=metadata.shared_pages,
            min_saved_bytes=settings.cascade_saved_bytes,
            sm_scale=sm_scale,
            sinks=sinks,
            implementation=settings.implementation,
        )
        return of_rows.reshape(q.shape)
    out: Any = None
    if num_decode < metadata.num_tokens:
        # With num_decode added, the prefix sums start after the decode rows, so paged_prefill treats decode rows as
        # padding. Then paged_decode writes the results of decode rows into the same array.
        out = paged_prefill(
            q,
            cache,
            step.tables.prefill_block_tables,
            metadata.cu_q_lens + num_decode,
            metadata.prefill_kv_lens,
            sm_scale=sm_scale,
            window=window,
            sinks=sinks,
            implementation=settings.implementation,
        )
    if num_decode:
        out = paged_decode(
            q[:num_decode].reshape(-1, metadata.decode_queries, *q.shape[1:]),
            cache,
            step.tables.decode_block_tables,
            step.decode_kv_lens,
            q_lens=metadata.decode_q_lens,
            draft_mask=metadata.decode_draft_mask,
            sm_scale=sm_scale,
            window=window,
            sinks=sinks,
            plan=step.plan,
            out=out,
            implementation=settings.implementation,
        )
    return out.reshape(q.shape)


def attend_over_contexts(
    q: Float[Array, "T Hq D"],
    k: Float[Array, "T Hkv D"] | None,
    v: Float[Array, "T Hkv D"] | None,
    cache: PagedKV,
    step: GQAStep,
    sm_scale: float,
    sinks: Float32[Array, "Hq"] | None,
    settings: AttentionSettings,
) -> Float[Array, "T own D"]:
    """Attend if each of n devices along the mesh axis `context` has a part of the cached tokens.

    Each device attends to its cached tokens with all heads. Then results are exchanged and merged, so that each device
    has the results of 1 / n of the heads for all cached tokens.

    Args:
      q: normalised and rotated queries.
      k, v: keys and values of the step's tokens, as they are cached. None if the step has only decode rows.
      cache, step, sm_scale, sinks, settings: as in `attend`.

    Returns:
      Results of this device's share of the heads [T, Hq / n, D].
    """
    metadata, num_decode = step.metadata, step.metadata.num_decode
    options = {"sm_scale": sm_scale, "implementation": settings.implementation}
    outputs = []
    if num_decode:
        out, lse = paged_decode(
            q[:num_decode, None],
            cache,
            step.tables.decode_block_tables,
            step.decode_kv_lens,
            plan=step.plan,
            return_lse=True,
            **options,
        )
        out, _ = parallel.merge_over_contexts(out, lse, axis=CONTEXT, sinks=sinks)
        outputs.append(out[:, 0])
    if k is not None and v is not None and num_decode < metadata.num_tokens:
        # This device attends to its cached tokens of the prefix with all heads (`found`). All devices have the new
        # tokens of the chunk, so this device attends to them with its share of the heads (`own`).
        q, k, v = (x[num_decode:] for x in (q, k, v))
        cu_q_lens = metadata.cu_q_lens
        prefix = jnp.maximum(metadata.prefill_kv_lens - jnp.diff(cu_q_lens), 0)
        found = paged_prefill(
            q,
            cache,
            step.tables.prefill_block_tables,
            cu_q_lens,
            split_contexts.own_lens(prefix, cache.page_size),
            causal=False,
            return_lse=True,
            **options,
        )
        k, v = (split_contexts.own_kv_heads(x, q.shape[1]) for x in (k, v))
        own: Any = ragged_attention(
            split_contexts.own_heads(q, q.shape[1] // lax.axis_size(CONTEXT)),
            k,
            v,
            cu_q_lens,
            cu_q_lens,
            return_lse=True,
            **options,
        )
        outputs.append(parallel.merge_over_contexts(*found, axis=CONTEXT, own=own, sinks=sinks)[0])
    return jnp.concatenate(outputs)


class GQA(nnx.Module):
    """Grouped-query attention of one layer. One projection computes q, k and v.

    `contexts` is the number of devices that the tokens of each page are split over. If it is above 1, each device
    merges the results for 1 / contexts of the heads, so its output projection has only the rows of these heads.
    """

    def __init__(self, config: GQAConfig, settings: AttentionSettings, dtype: DTypeLike, contexts: int = 1):
        """Make the layer with zero weights.

        Raises:
          ValueError: `settings.mla` is not "auto".
        """
        if settings.mla != "auto":
            raise ValueError(f"mla: expected auto, a {config.model_type} has no latents to {settings.mla}")
        self.config, self.settings, self.contexts = config, settings, contexts
        width, heads = config.head_dim, config.num_attention_heads
        joined = (heads + 2 * config.num_key_value_heads) * width
        self.qkv_proj = Linear(config.hidden_size, joined, dtype, config.attention_bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32)) if config.learned_sinks else None
        self.o_proj = Linear(heads // contexts * width, config.hidden_size, dtype, config.attention_bias)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: CosSin,
        cache: PagedKV,
        slots: Int32[Array, "T"] | Int32[Array, "T Hkv"],
        step: GQAStep,
    ) -> tuple[Float[Array, "T D"], PagedKV]:
        """Write keys and values of a step's tokens to the cache, and attend.

        Args:
          x: normed hidden states.
          rope: cosines and sines of the rotation angles of the tokens.
          cache: cache of the layer.
          slots: cache slot of each token; negative for padding.
          step: metadata and plan of the layer's cache group.

        Returns:
          Attention output of every token, and the cache with the new tokens.
        """
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        joined = self.qkv_proj(x).reshape(x.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        q, k, v = jnp.split(joined, [heads, heads + kv_heads], axis=1)
        if self.contexts > 1:
            q, k = self._rotated(q, self.q_norm, *rope), self._rotated(k, self.k_norm, *rope)
            slots = split_contexts.own_slots(slots, cache.page_size)
            cache = write_kv(cache, k, v, slots, implementation=self.settings.implementation)
            sinks = None if self.sinks is None else self.sinks[...]
            out = attend_over_contexts(q, k, v, cache, step, self.config.sm_scale, sinks, self.settings)
        else:
            cache, q = write_kv(
                cache, k, v, slots, rope=self._rope(*rope), q=q, implementation=self.settings.implementation
            )
            out = self._attend(q, cache, step)
        return self.o_proj(out.reshape(x.shape[0], -1)), cache

    def _rope(self, cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]) -> Rope:
        """Return rotation angles and norm weights for `write_kv`."""
        return Rope(
            cos,
            sin,
            q_norm=None if self.q_norm is None else self.q_norm.weight[...],
            k_norm=None if self.k_norm is None else self.k_norm.weight[...],
            norm_eps=self.config.rms_norm_eps,
        )

    def _attend(self, q: Float[Array, "T Hq D"], cache: PagedKV, step: GQAStep) -> Float[Array, "T Hq D"]:
        """Attend to the cache with all tokens of a step, whose keys and values are in the cache already."""
        sinks = None if self.sinks is None else self.sinks[...]
        return attend(q, cache, step, self.config.sm_scale, sinks, self.settings)

    def _rotated(
        self,
        x: Float[Array, "T heads D"],
        norm: RMSNorm | None,
        cos: Float32[Array, "T half"],
        sin: Float32[Array, "T half"],
    ) -> Float[Array, "T heads D"]:
        """Return normalised and rotated queries or keys, as `write_kv` computes them."""
        if norm is not None:
            x = norm(x.reshape(-1, x.shape[2])).reshape(x.shape)
        return rotate(x, cos, sin)
