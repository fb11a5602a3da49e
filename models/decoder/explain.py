"""Explain which implementations the attention of a model would use, from shapes only: nothing is allocated or run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn import Explanation, HeadWindow, PagedKV, Rope, explain
from pallas_attn.models.config import (
    CacheGroup,
    DeepSeekConfig,
    DeepseekV4Config,
    GQAConfig,
    HeadsConfig,
    HeadWindows,
    ModelConfig,
    cache_groups,
)
from pallas_attn.models.decoder.caches import IndexedLatent, KVScales, cache_spec, compressed_cache, latent_cache
from pallas_attn.models.decoder.mla import is_sparse, latents_of
from pallas_attn.models.decoder.settings import AttentionSettings


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of an engine's cache and of its largest step, a forward pass over decode rows and prompt chunks.

    Attributes:
      num_pages: number of pages of each layer's cache.
      page_size: tokens per page.
      table_pages: maximum number of pages per sequence.
      decode_rows: number of decode rows.
      prefill_tokens: number of tokens of all prompt chunks.
      prefill_seqs: number of prompt chunks.
      cache_dtype: dtype of the cached latents, or keys and values; None for the dtype of the weights.
      kv_scales: static scales of quantised keys and values; None for one scale per token and head.
      decode_queries: number of tokens per decode row: the newest token and, with speculation, drafts.
    """

    num_pages: int
    page_size: int
    table_pages: int
    decode_rows: int
    prefill_tokens: int
    prefill_seqs: int
    cache_dtype: DTypeLike | None = None
    kv_scales: KVScales | None = None
    decode_queries: int = 1

    @property
    def decode_tokens(self) -> int:
        return self.decode_rows * self.decode_queries


def explain_attention(
    config: ModelConfig, settings: AttentionSettings, sizes: StepSizes, dtype: DTypeLike
) -> dict[str, Explanation]:
    """Call `pallas_attn.explain` for every attention operation of the model, with the shapes of the largest step.

    Args:
      config: configuration of the model.
      settings: attention settings.
      sizes: sizes of the step and the cache.
      dtype: dtype of the weights, and of the cache if `sizes` has no cache_dtype.

    Returns:
      Explanation by name of the operation. If `chosen` of an explanation is None, no implementation supports the
      operation, and steps that call it raise.

    Raises:
      ValueError: unknown implementation, or a dtype or size that the operations do not support.
    """
    if isinstance(config, DeepseekV4Config):
        return _explain_compressed(config, settings, sizes, jnp.dtype(dtype))
    if settings.batch_invariant:  # every token is a decode row
        rows = sizes.decode_tokens + sizes.prefill_tokens
        sizes = dataclasses.replace(sizes, decode_rows=rows, decode_queries=1, prefill_tokens=0)
    if not isinstance(config, DeepSeekConfig):
        return _explain_gqa(config, settings, sizes, jnp.dtype(dtype))
    shapes = _LatentShapes(config, settings, sizes, dtype)
    explained = {"write_latent": shapes.write_latent()}
    if config.is_sparse:
        explained["write_index_keys"] = shapes.write_index_keys()
    if shapes.chooses_keys:
        explained |= shapes.sparse()
        if settings.batch_invariant:  # keys are always selected, see `is_sparse`
            return explained
    if settings.mla != "expand":
        explained["mla_decode"] = shapes.mla_decode()
    if settings.mla != "absorb" and not settings.batch_invariant:
        explained["gather_latent"] = shapes.gather_latent()
        explained["ragged_attention"] = shapes.ragged_attention()
    return explained


def _explain_gqa(
    config: HeadsConfig, settings: AttentionSettings, sizes: StepSizes, dtype: jnp.dtype
) -> dict[str, Explanation]:
    """Explain the operations of GQA. If cache groups (layers with equal windows) have different explanations, return
    the explanation of the group that the fewest implementations support."""
    layers = [_HeadShapes(config, settings, sizes, dtype, group) for group in cache_groups(config)]

    def hardest(explained: list[Explanation]) -> Explanation:
        return max(explained, key=lambda explanation: (explanation.chosen is None, len(explanation.refused)))

    explained = {
        "write_kv": hardest([layer.write_kv() for layer in layers]),
        "paged_decode": hardest([layer.paged_decode() for layer in layers]),
    }
    if not settings.batch_invariant:
        explained["paged_prefill"] = hardest([layer.paged_prefill() for layer in layers])
    return explained


class _HeadShapes:
    """Arguments, as shapes, of the operations of a layer of a cache group. If the windows of the heads differ, block
    tables and slots have an axis for the KV heads."""

    def __init__(
        self,
        config: HeadsConfig,
        settings: AttentionSettings,
        sizes: StepSizes,
        dtype: jnp.dtype,
        group: CacheGroup,
    ):
        self._config, self._settings, self._sizes, self._dtype = config, settings, sizes, dtype
        window, layer = group.window, group.layers[0]
        pool = sizes.num_pages, sizes.page_size, sizes.cache_dtype or dtype, sizes.kv_scales
        spec, self._heads_of_layer = cache_spec(config, *pool, layer=layer), config.kv_heads(layer)
        self._cache = PagedKV(**spec.arrays)  # pyrefly: ignore[bad-argument-type]
        head_wise = isinstance(window, HeadWindows)
        num_heads = self._heads_of_layer.num_heads
        each = jax.ShapeDtypeStruct((num_heads,), jnp.int32)
        self._window = HeadWindow(each, each) if head_wise else window  # pyrefly: ignore[bad-argument-type]
        self._per_head = (num_heads,) if head_wise else ()

    def write_kv(self) -> Explanation:
        config, tokens = self._config, self._sizes.decode_tokens + self._sizes.prefill_tokens
        heads, width = self._heads_of_layer
        kv = self._heads(tokens, num_heads=heads)
        angles = jax.ShapeDtypeStruct((tokens, width // 2), jnp.float32)
        has_norms = not isinstance(config, GQAConfig) or config.qk_norm
        norm = jax.ShapeDtypeStruct((width,), self._dtype) if has_norms else None
        rope = Rope(angles, angles, q_norm=norm, k_norm=norm)  # pyrefly: ignore[bad-argument-type]
        slots = _ints(tokens, *self._per_head)
        return self._explain("write_kv", self._cache, kv, kv, slots, rope=rope, q=self._heads(tokens))

    def paged_decode(self) -> Explanation:
        rows, queries = self._sizes.decode_rows, self._sizes.decode_queries
        q_lens = {} if queries == 1 else {"q_lens": _ints(rows)}
        q = self._heads(rows, queries)
        return self._attend("paged_decode", q, self._cache, self._tables(rows), _ints(rows), **q_lens)

    def paged_prefill(self) -> Explanation:
        q, sequences = self._heads(self._sizes.prefill_tokens), self._sizes.prefill_seqs
        lengths = _ints(sequences + 1), _ints(sequences)
        return self._attend("paged_prefill", q, self._cache, self._tables(sequences), *lengths)

    def _attend(self, op: str, *args: object, **kwargs: object) -> Explanation:
        config = self._config
        has_sinks = isinstance(config, GQAConfig) and config.learned_sinks
        sinks = jax.ShapeDtypeStruct((config.num_attention_heads,), jnp.float32) if has_sinks else None
        return self._explain(op, *args, **kwargs, window=self._window, sinks=sinks)

    def _explain(self, op: str, *args: object, **kwargs: object) -> Explanation:
        return explain(op, *args, **kwargs, implementation=self._settings.implementation)

    def _heads(self, *rows: int, num_heads: int | None = None) -> jax.ShapeDtypeStruct:
        shape = (*rows, num_heads or self._config.num_attention_heads, self._heads_of_layer.width)
        return jax.ShapeDtypeStruct(shape, self._dtype)

    def _tables(self, sequences: int) -> jax.ShapeDtypeStruct:
        return _ints(sequences, *self._per_head, self._sizes.table_pages)


class _LatentShapes:
    """Arguments, as shapes, of the operations of one MLA layer."""

    def __init__(self, config: DeepSeekConfig, settings: AttentionSettings, sizes: StepSizes, dtype: DTypeLike):
        self._config, self._settings, self._sizes, self._dtype = config, settings, sizes, jnp.dtype(dtype)
        spec = cache_spec(config, sizes.num_pages, sizes.page_size, sizes.cache_dtype or dtype, sizes.kv_scales)
        cache = latent_cache(spec, lambda spec, kind: kind(**spec.arrays))
        self._cache, self._index = latents_of(cache), cache.index if isinstance(cache, IndexedLatent) else None
        piece_tokens = settings.piece_tokens or sizes.prefill_tokens
        self._piece_tokens = -(-piece_tokens // sizes.page_size) * sizes.page_size

    def write_latent(self) -> Explanation:
        tokens = self._sizes.decode_tokens + self._sizes.prefill_tokens
        return self._explain("write_latent", self._cache, self._latent(tokens), _ints(tokens))

    def mla_decode(self) -> Explanation:
        config, sizes = self._config, self._sizes
        absorbs_prefill = self._settings.mla == "absorb"
        rows = max(sizes.decode_rows, sizes.prefill_tokens if absorbs_prefill else 0)
        queries, heads = sizes.decode_queries, config.num_attention_heads
        q_latent = self._array(rows, queries, heads, config.kv_lora_rank)
        q_rope = self._array(rows, queries, heads, config.qk_rope_head_dim)
        q_lens = {} if queries == 1 else {"q_lens": _ints(rows)}
        return self._explain(
            "mla_decode",
            q_latent,
            q_rope,
            self._cache,
            _ints(rows, sizes.table_pages),
            _ints(rows),
            **q_lens,
            sm_scale=config.sm_scale,
        )

    @property
    def chooses_keys(self) -> bool:
        """Whether steps with the widest block tables use sparse attention, in which tokens attend to selected keys."""
        capacity = self._sizes.table_pages * self._sizes.page_size
        return is_sparse(self._config, self._settings, capacity)

    def write_index_keys(self) -> Explanation:
        tokens = self._sizes.decode_tokens + self._sizes.prefill_tokens
        keys = self._array(tokens, self._config.index_head_dim)
        return self._explain("write_index_keys", self._index, keys, _ints(tokens))

    def sparse(self) -> dict[str, Explanation]:
        """Explain sparse attention, for the decode rows or for the prompt chunks, whichever have more tokens."""
        config, sizes = self._config, self._sizes
        tokens, heads = max(sizes.decode_tokens, sizes.prefill_tokens), config.num_attention_heads
        top_k = self._settings.index_topk or config.index_topk
        q = self._array(tokens, config.index_n_heads, config.index_head_dim)
        weights = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
        q_latent = self._array(tokens, heads, config.kv_lora_rank)
        q_rope = self._array(tokens, heads, config.qk_rope_head_dim)
        rows = sizes.decode_tokens if sizes.decode_tokens >= sizes.prefill_tokens else sizes.prefill_seqs
        lengths = _ints(rows, sizes.table_pages), _ints(rows + 1), _ints(rows)
        return {
            "index_top_k": self._explain("index_top_k", q, weights, self._index, *lengths, top_k=top_k),
            "mla_sparse": self._explain(
                "mla_sparse", q_latent, q_rope, self._cache, _ints(tokens, top_k), sm_scale=config.sm_scale
            ),
        }

    def gather_latent(self) -> Explanation:
        rows = self._sizes.prefill_seqs
        tables = _ints(rows, min(self._piece_tokens // self._sizes.page_size, self._sizes.table_pages))
        return self._explain(
            "gather_latent",
            self._cache,
            self._latent(0),
            tables,
            _ints(rows + 1),
            _ints(rows),
            length=self._piece_tokens,
        )

    def ragged_attention(self) -> Explanation:
        config, heads = self._config, self._config.num_attention_heads
        q = self._array(self._sizes.prefill_tokens, heads, config.qk_head_dim)
        k = self._array(self._piece_tokens, heads, config.qk_head_dim)
        v = self._array(self._piece_tokens, heads, config.v_head_dim)
        offsets = _ints(self._sizes.prefill_seqs + 1)
        return self._explain(
            "ragged_attention",
            q,
            k,
            v,
            offsets,
            offsets,
            causal=False,
            sm_scale=config.sm_scale,
            return_lse=True,
            out_dtype=jnp.float32,
        )

    def _explain(self, op: str, *args: object, **kwargs: object) -> Explanation:
        return explain(op, *args, **kwargs, implementation=self._settings.implementation)

    def _array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self._dtype)

    def _latent(self, tokens: int) -> jax.ShapeDtypeStruct:
        dtype = self._dtype if self._cache.is_quantised else self._cache.pages.dtype
        return jax.ShapeDtypeStruct((tokens, self._config.latent_width), dtype)


def _explain_compressed(
    config: DeepseekV4Config, settings: AttentionSettings, sizes: StepSizes, dtype: jnp.dtype
) -> dict[str, Explanation]:
    """Explain the operations of DeepSeek-V4, for the layer whose caches are the most numerous."""

    def array(*shape: int, of: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of)

    def explained(op: str, *args: object, **kwargs: object) -> Explanation:
        return explain(op, *args, **kwargs, implementation=settings.implementation)

    layer = max(
        range(config.num_hidden_layers), key=lambda layer: len(config.groups_of(layer)) + config.has_indexer(layer)
    )
    spec = cache_spec(
        config, sizes.num_pages, sizes.page_size, sizes.cache_dtype or dtype, sizes.kv_scales, layer=layer
    )
    cache, rate, f32 = compressed_cache(spec.arrays), config.rate(layer), jnp.dtype(jnp.float32)
    tokens, width = sizes.decode_tokens + sizes.prefill_tokens, config.head_dim
    rows = sizes.decode_rows + sizes.prefill_seqs
    tables, offsets, lens = _ints(rows, sizes.table_pages), _ints(rows + 1), _ints(rows)
    new = array(tokens, width, of=dtype if cache.window.is_quantised else cache.window.pages.dtype)
    found = {"write_latent": explained("write_latent", cache.window, new, _ints(tokens))}
    extra = {}
    if cache.entries is not None and cache.state is not None:
        angles = array(tokens, config.qk_rope_head_dim // 2, of=f32)
        of_rows = array(tokens, config.state_columns(layer), of=f32), array(width), angles, angles
        found["compress_and_write"] = explained(
            "compress_and_write", cache.state, cache.entries, *of_rows, tables, tables, offsets, lens, ratio=rate
        )
        chosen = sizes.table_pages * cache.entries.page_size
        if cache.index is not None:
            chosen = settings.index_topk or config.index_topk
            q = array(tokens, config.index_n_heads, config.index_head_dim)
            weights = array(tokens, config.index_n_heads, of=f32)
            found["index_top_k"] = explained(
                "index_top_k", q, weights, cache.index, tables, offsets, lens, top_k=chosen, ratio=rate
            )
        extra = {"extra_cache": cache.entries, "extra_slots": _ints(tokens, chosen)}
    columns = (2 + config.hc_mult) * config.hc_mult
    found["hyper_connection_weights"] = explained(
        "hyper_connection_weights", array(tokens, columns, of=f32), *(array(n, of=f32) for n in (tokens, 3, columns))
    )
    q = array(tokens, config.num_attention_heads, width)
    seen, sinks = _ints(tokens, config.sliding_window), array(config.num_attention_heads, of=f32)
    found["mla_sparse"] = explained(
        "mla_sparse", q, None, cache.window, seen, sm_scale=config.sm_scale, sinks=sinks, **extra
    )
    return found


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
