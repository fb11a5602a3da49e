"""Layers of DeepSeek-V4: attention to a window of tokens and to compressed entries, and N residual streams.

    streams = hyper_connection(streams, attention)
    streams = hyper_connection(streams, experts)

All layers attend to the newest W tokens. A compressor pools the keys of each block of tokens into an entry. Compressed
sparse attention (CSA) also attends to the entries that an indexer selects, heavily compressed attention (HCA) to all
entries. There is one KV head; each row is key and value. Values contain rotated columns, so the output of
attention is rotated back by the position of the query.

On a mesh, each device has some of the query heads, with whole groups of the output projection. Keys, entries,
compressors, indexers and residual streams are the same on all devices that heads are split over.

Rotated columns are the last R columns, in interleaved pairs as in checkpoints (`rope.rotate_pairs`).
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import (
    PAGE_NONE,
    PagedIndexKeys,
    PagedLatent,
    SlotRange,
    compress_and_write,
    entry_range,
    entry_slots,
    index_top_k,
    mla_sparse,
    token_slots,
    window_range,
    window_slots,
    write_latent,
)
from pallas_attn.models.config import DeepseekV4Config
from pallas_attn.models.decoder.caches import CompressedCache
from pallas_attn.models.decoder.hyper_connections import HyperConnection, merge
from pallas_attn.models.decoder.layers import Linear, WideRMSNorm, project, rms_scaled
from pallas_attn.models.decoder.mesh import COLUMNS, ExpertSplit, sum_over
from pallas_attn.models.decoder.rope import CosSin, rotate_pairs, scaled_frequencies
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import GroupTables, StepMetadata
from pallas_attn.models.moe.layer import HashedMoE


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class V4Inputs:
    """Inputs of the layers that depend only on the tokens of a step and their positions. Cosines and sines are float32
    [T, R / 2] each.

    Attributes:
      tokens: token ids.
      positions: positions of the tokens.
      of_window: cosines and sines of the angles of each token in layers without a compressor.
      of_compressed: the same in layers with a compressor.
      of_blocks: by tokens per block (rate of a layer), cosines and sines for the first position of each token's block.
    """

    tokens: Int32[Array, "T"]
    positions: Int32[Array, "T"]
    of_window: CosSin
    of_compressed: CosSin
    of_blocks: dict[int, CosSin]


def v4_inputs(config: DeepseekV4Config, tokens: Int32[Array, "T"], positions: Int32[Array, "T"]) -> V4Inputs:
    """Return the inputs of all layers for tokens at these positions."""
    width = config.qk_rope_head_dim
    compressed = scaled_frequencies(width, config.compress_rope_theta, config.yarn)
    rates = {config.rate(layer) for layer in range(config.num_hidden_layers)} - {0}
    return V4Inputs(
        tokens,
        positions,
        _angles(positions, scaled_frequencies(width, config.rope_theta, None)),
        _angles(positions, compressed),
        {rate: _angles(positions - positions % rate, compressed) for rate in sorted(rates)},
    )


def _angles(positions: Int32[Array, "T"], frequencies: Float32[np.ndarray, "half"]) -> CosSin:
    of_tokens = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(of_tokens), jnp.sin(of_tokens)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateRows:
    """Places of the compressor rows of a step's tokens, for all layers of a kind.

    `compress_and_write` gets each page of `DeepseekV4Config.state_rows` rows as smaller pages of `page_size` rows.

    Attributes:
      tables: block tables [S, P] of the smaller pages. If `slots` is given, only the pages up to the page of the first
        new token are present.
      slots: int32 [T], slots of the newest rows of each page, which are written after `compress_and_write`; -1 for
        other rows. None if `compress_and_write` writes all rows.
      page_size: rows per smaller page.
    """

    tables: Int32[Array, "S P"]
    slots: Int32[Array, "T"] | None
    page_size: int = dataclasses.field(metadata={"static": True})


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class V4Step:
    """Metadata of a step in the format of packed sequences. Each sequence has consecutive tokens of the step. Idle rows
    and padding are sequences of length 0.

    Attributes:
      tables: block tables [S, P] of each cache group.
      cu_q_lens: int32 [S + 1], prefix sums of the new tokens.
      kv_lens: int32 [S], number of tokens of each sequence, including the new tokens; 0 for padding.
      window: int32 [T, W], slots of the keys in the window of each token; -1 for no key.
      window_range: the keys in the window of each token, for layers without an indexer; None if these layers use
        `window`.
      entries: int32 [T, K], slots of all entries that each token sees in HCA layers; -1 for no entry. A range if
        `window_range` is given. None without HCA layers.
      states: places of compressor rows, by the index of the cache group.
    """

    tables: tuple[Int32[Array, "S P"], ...]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    window: Int32[Array, "T W"]
    window_range: SlotRange | None
    entries: Int32[Array, "T K"] | SlotRange | None
    states: dict[int, StateRows]


def v4_step(config: DeepseekV4Config, metadata: StepMetadata, page_size: int, *, slot_ranges: bool = False) -> V4Step:
    """Return the metadata of a step that all layers share. `slot_ranges` is a field of `AttentionSettings`.

    Raises:
      NotImplementedError: the drafts form trees, or decode rows have more tokens than `most_queries`.
    """
    if metadata.decode_draft_mask is not None:
        raise NotImplementedError(f"draft_mask: a {config.model_type} pools the tokens of a row in order; got a tree")
    check_queries(config, metadata.decode_queries, page_size)
    cu_q_lens, kv_lens = _packed_lens(metadata)
    repeats = 1 if metadata.decode_q_lens is None else 2
    groups = range(len(config.cache_groups))
    tables = tuple(_packed_tables(metadata.of_group(group), metadata, repeats) for group in groups)
    lengths = {"cu_q_lens": cu_q_lens, "kv_lens": kv_lens, "length": metadata.num_tokens}
    window = window_slots(tables[0], **lengths, page_size=page_size, window=config.sliding_window)
    seen = window_range(tables[0], **lengths, window=config.sliding_window) if slot_ranges else None
    entries = None
    if config.has_hca:
        all_entries, rate = entry_range if slot_ranges else entry_slots, config.hca_rate
        entries = all_entries(tables[1], **lengths, ratio=rate, page_size=page_size // rate)
    states = {}
    for number, group in enumerate(config.cache_groups):
        if "state" in group.caches:
            has_chunks = metadata.num_decode < metadata.num_tokens
            starts = jnp.maximum(kv_lens - jnp.diff(cu_q_lens), 0) if has_chunks else None
            places = tables[number], metadata.of_group(number).slots, page_size, starts
            states[number] = _state_rows(config, group.layers[0], *places)
    return V4Step(tables, cu_q_lens, kv_lens, window, seen, entries, states)


def check_queries(config: DeepseekV4Config, queries: int, page_size: int) -> None:
    """Raise NotImplementedError if decode rows of `queries` tokens would overwrite compressor rows that are needed."""
    most = config.most_queries(page_size)
    if most is not None and queries > most:
        raise NotImplementedError(
            f"speculate: expected at most {most - 1} drafts, because a page of a {config.model_type} has the compressor"
            f" rows of its newest tokens only; got {queries - 1}"
        )


def _state_rows(
    config: DeepseekV4Config,
    layer: int,
    tables: Int32[Array, "S P"],
    slots: Int32[Array, "T"],
    page_size: int,
    starts: Int32[Array, "S"] | None,
) -> StateRows:
    """Return the places of compressor rows of the layers of a kind.

    `compress_and_write` reads rows of earlier steps while it writes rows of new tokens. The few tokens of a decode row
    overwrite no row that is read. A prompt chunk may have more tokens than a page has rows. Therefore
    `compress_and_write` gets only the pages up to the page of the first new token, and the newest rows of each page are
    written afterwards. Entries that need other new rows read these rows from the chunk itself.

    Args:
      config: configuration of the model.
      layer: any layer of the kind.
      tables: block tables of the cache group, in pages of `page_size` tokens.
      slots: slot of each token in pages of `page_size` tokens; -1 for padding.
      page_size: tokens per page.
      starts: position of the first new token of each sequence; None for a step without chunks of prompts.
    """
    rows, window = config.state_rows(layer, page_size), config.state_window(layer)
    if rows == page_size:
        return StateRows(tables, None, page_size)
    pages = jnp.repeat(tables, page_size // window, axis=1)
    number = jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    parts = rows // window
    smaller = jnp.where(pages >= 0, pages * parts + number % parts, PAGE_NONE)
    if starts is None:
        return StateRows(smaller, None, window)
    # The slots of a sequence are consecutive within a page. If token t + window has the slot of token t plus `window`,
    # in the same page, then token t is not among the newest `window` tokens of this sequence and page.
    later = jnp.pad(slots[window:], (0, min(window, slots.shape[0])), constant_values=PAGE_NONE)
    ends_page = slots % page_size >= page_size - window
    is_newest = (slots >= 0) & (ends_page | (later != slots + window))
    written = jnp.where(is_newest, slots // page_size * rows + slots % rows, PAGE_NONE)
    return StateRows(jnp.where(number <= (starts // window)[:, None], smaller, PAGE_NONE), written, window)


def _packed_lens(metadata: StepMetadata) -> tuple[Int32[Array, "S_plus_1"], Int32[Array, "S"]]:
    """Return prefix sums of the new tokens and sequence lengths of all rows of a step.

    A decode row of Q tokens is one sequence. If rows have different numbers of tokens, the padding at the end
    of a row is another sequence, with kv_lens 0.
    """
    num_decode, queries, q_lens = metadata.num_decode, metadata.decode_queries, metadata.decode_q_lens
    first = jnp.arange(0, num_decode, queries, dtype=jnp.int32)
    starts, lens = first, metadata.decode_kv_lens
    if q_lens is not None:
        starts = jnp.stack([first, first + jnp.minimum(q_lens, queries)], axis=1).reshape(-1)
        lens = jnp.stack([lens, jnp.zeros_like(lens)], axis=1).reshape(-1)
    return jnp.concatenate([starts, num_decode + metadata.cu_q_lens]), jnp.concatenate([lens, metadata.prefill_kv_lens])


def _packed_tables(tables: GroupTables, metadata: StepMetadata, repeats: int) -> Int32[Array, "S P"]:
    """Return the block tables of the sequences of `_packed_lens`. Shorter tables are padded."""
    parts = (jnp.repeat(tables.decode_block_tables, repeats, axis=0), tables.prefill_block_tables)
    width = max(part.shape[1] for part in parts)
    return jnp.concatenate(
        [jnp.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PAGE_NONE) for part in parts]
    )


class Compressor(nnx.Module):
    """Pools the keys of each block of tokens into an entry of D columns.

    In CSA layers, half of a row's columns is pooled into the entry of its block, the other half into the next entry.
    """

    def __init__(self, config: DeepseekV4Config, rate: int, overlaps: bool, width: int, dtype: DTypeLike):
        columns = (2 if overlaps else 1) * width
        self.rate, self.columns, self.eps = rate, columns, config.rms_norm_eps
        self.kv_gate_proj = Linear(config.hidden_size, 2 * columns, dtype)
        self.gate_bias = nnx.Param(jnp.zeros((rate, columns), jnp.float32))
        self.norm = nnx.Param(jnp.ones(width, dtype))

    def __call__[Entries: PagedLatent | PagedIndexKeys](
        self,
        x: Float[Array, "T D"],
        inputs: V4Inputs,
        state: PagedLatent,
        entries: Entries,
        tables: Int32[Array, "S P"],
        places: StateRows,
        step: V4Step,
        settings: AttentionSettings,
    ) -> tuple[PagedLatent, Entries]:
        """Write rows of the tokens to `state`, and the entries of completed blocks to `entries`.

        Args:
          x: normed hidden states.
          inputs: rotation angles of the tokens.
          state, entries: caches of the compressor.
          tables: block tables of the entries.
          places: places of the rows in `state`.
          step: metadata of the step.
          settings: attention settings.
        """
        rows = project(x, self.kv_gate_proj.weight[...], jnp.float32)
        bias = self.gate_bias[...][inputs.positions % self.rate]
        rows = jnp.concatenate([rows[:, : self.columns], rows[:, self.columns :] + bias], axis=1)
        smaller = PagedLatent(state.pages.reshape(-1, places.page_size, rows.shape[1]))
        written: typing.Any = compress_and_write(
            smaller,
            entries,
            rows,
            self.norm[...],
            *inputs.of_blocks[self.rate],
            places.tables,
            tables,
            step.cu_q_lens,
            step.kv_lens,
            ratio=self.rate,
            norm_eps=self.eps,
            implementation=settings.implementation,
        )
        smaller, entries = written
        if places.slots is not None:
            smaller = write_latent(smaller, rows, places.slots, implementation=settings.implementation)
        return PagedLatent(smaller.pages.reshape(state.pages.shape)), entries


class EntryIndexer(nnx.Module):
    """Indexer of a CSA layer: Hi index heads of width Di, which share one index key per entry."""

    def __init__(self, config: DeepseekV4Config, dtype: DTypeLike):
        heads, width = config.index_n_heads, config.index_head_dim
        self.heads, self.width, self.rate, self.count = heads, width, config.csa_rate, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, heads * width, dtype)
        self.weights_proj = Linear(config.hidden_size, heads, jnp.float32)
        self.compressor = Compressor(config, config.csa_rate, True, width, dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        residual: Float[Array, "T rank"],
        inputs: V4Inputs,
        index: PagedIndexKeys,
        entry_tables: Int32[Array, "S P"],
        step: V4Step,
        settings: AttentionSettings,
    ) -> Int32[Array, "T K"]:
        """Return the cache slots of the entries that each token selects; -1 if a token sees fewer entries.

        Args:
          x: normed hidden states.
          residual: normed low-rank projection of x, from which attention computes its queries as well.
          inputs: rotation angles of the tokens.
          index: index keys, including the new ones.
          entry_tables: block tables of the entries.
          step: metadata of the step.
          settings: attention settings.
        """
        q = rotate_pairs(self.wq_b(residual).reshape(x.shape[0], self.heads, self.width), *inputs.of_compressed)
        weights = self.weights_proj(x.astype(jnp.float32)) * self.heads**-0.5
        chosen = index_top_k(
            q,
            weights,
            index,
            entry_tables,
            step.cu_q_lens,
            step.kv_lens,
            top_k=settings.index_topk or self.count,
            ratio=self.rate,
            implementation=settings.implementation,
        )
        return token_slots(chosen, entry_tables, step.cu_q_lens, page_size=index.page_size)


class CompressedAttention(nnx.Module):
    """Attention of one layer. `compressor` is None in layers with only a window, and `indexer` in layers that attend to
    all entries."""

    def __init__(self, config: DeepseekV4Config, index: int, settings: AttentionSettings, dtype: DTypeLike):
        """Make layer `index` with zero weights.

        Raises:
          ValueError: `settings.mla` is not "auto".
        """
        if settings.mla != "auto":
            raise ValueError(f"mla: expected auto, a {config.model_type} has no latents to {settings.mla}")
        self.config, self.settings, self.groups = config, settings, config.groups_of(index)
        heads, width = config.num_attention_heads, config.head_dim
        rate, eps = config.rate(index), config.rms_norm_eps
        self.rate = rate
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, dtype)
        self.q_norm = WideRMSNorm(config.q_lora_rank, eps, dtype)
        self.wq_b = Linear(config.q_lora_rank, heads * width, dtype)
        self.wkv = Linear(config.hidden_size, width, dtype)
        self.kv_norm = WideRMSNorm(width, eps, dtype)
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32))
        groups, rank = config.o_groups, config.o_lora_rank
        self.wo_a = nnx.Param(jnp.zeros((groups, heads * width // groups, rank), dtype))
        self.wo_b = Linear(groups * rank, config.hidden_size, dtype)
        overlaps = config.has_indexer(index)
        self.compressor = Compressor(config, rate, overlaps, width, dtype) if rate else None
        self.indexer = EntryIndexer(config, dtype) if overlaps else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: V4Inputs,
        cache: CompressedCache,
        slots: Int32[Array, "T"],
        step: V4Step,
    ) -> tuple[Float[Array, "T D"], CompressedCache]:
        """Write keys, entries and compressor rows of a step's tokens to the caches, and attend.

        Args:
          x: normed hidden states.
          inputs: rotation angles of the tokens.
          cache: caches of the layer.
          slots: slot of each token in the cache of the window; negative for padding.
          step: metadata of the step.

        Returns:
          Attention output of every token, and the caches with the new tokens.
        """
        cos, sin = inputs.of_compressed if self.rate else inputs.of_window
        residual = self.q_norm(self.wq_a(x))
        q = rotate_pairs(self._queries(residual), cos, sin)
        kv = rotate_pairs(self.kv_norm(self.wkv(x)), cos, sin)
        if not cache.window.is_quantised:
            kv = kv.astype(cache.window.pages.dtype)
        window = write_latent(cache.window, kv, slots, implementation=self.settings.implementation)
        cache, chosen = self._compress(dataclasses.replace(cache, window=window), x, residual, inputs, step)
        extra: dict[str, typing.Any] = {}
        if chosen is not None:
            extra = {"extra_cache": cache.entries, "extra_slots": chosen}
        seen = step.window if self.indexer is not None or step.window_range is None else step.window_range
        out: typing.Any = mla_sparse(
            q,
            None,
            cache.window,
            seen,
            sm_scale=self.config.sm_scale,
            sinks=self.sinks[...],
            **extra,
            implementation=self.settings.implementation,
        )
        return self._project(rotate_pairs(out, cos, -sin)), cache

    def _queries(self, residual: Float[Array, "T rank"]) -> Float[Array, "T Hq D"]:
        """Return queries before the rotation, with an RMS norm without a weight over each head."""
        q = self.wq_b(residual).reshape(residual.shape[0], -1, self.config.head_dim)
        return rms_scaled(q, self.config.rms_norm_eps).astype(q.dtype)

    def _compress(
        self,
        cache: CompressedCache,
        x: Float[Array, "T D"],
        residual: Float[Array, "T rank"],
        inputs: V4Inputs,
        step: V4Step,
    ) -> tuple[CompressedCache, Int32[Array, "T K"] | SlotRange | None]:
        """Write compressor rows and entries. Return the caches, and the slots of the entries that each token attends
        to; None without a compressor."""
        if self.compressor is None:
            return cache, None
        _, of_entries, of_rows = self.groups
        tables = step.tables[of_entries]
        shared = (tables, step.states[of_rows], step, self.settings)
        state, entries = self.compressor(x, inputs, _of(cache.state), _of(cache.entries), *shared)
        cache = dataclasses.replace(cache, state=state, entries=entries)
        if self.indexer is None:
            return cache, step.entries
        state, index = self.indexer.compressor(x, inputs, _of(cache.index_state), _of(cache.index), *shared)
        cache = dataclasses.replace(cache, index_state=state, index=index)
        return cache, self.indexer(x, residual, inputs, index, tables, step, self.settings)

    def _project(self, out: Float[Array, "T Hq D"]) -> Float[Array, "T hidden"]:
        """Return the output projection: each group of heads by its own matrix, then all together."""
        weight = self.wo_a[...]
        grouped = out.reshape(out.shape[0], weight.shape[0], -1).swapaxes(0, 1)  # [groups, T, heads · D]
        narrow = jnp.matmul(grouped, weight, precision=jax.lax.Precision.HIGHEST).swapaxes(0, 1)
        return self.wo_b(narrow.reshape(out.shape[0], -1))


def _of[Cache](cache: Cache | None) -> Cache:
    """Return a cache that the layer needs. Raises ValueError if it is missing."""
    if cache is None:
        raise ValueError("cache: expected entries and compressor rows, the layer has a compressor")
    return cache


class V4Layer(nnx.Module):
    """One layer; the module docstring has the formula.

    On a mesh, the outputs of attention and of the experts are summed over the devices before they are added to the
    streams.

    Attributes:
      cache_source: None: the layer uses its own caches.
      shares_choice: False: the layer does not use the selection of another layer.
    """

    cache_source: None = None
    shares_choice = False

    def __init__(
        self,
        config: DeepseekV4Config,
        index: int,
        settings: AttentionSettings,
        dtype: DTypeLike,
        mesh: Mesh | None = None,
        vocab_size: int | None = None,
    ):
        """Make layer `index` of the model with zero weights, on a mesh one device's part of the layer.

        Args:
          config: configuration of the model; on a mesh, of one device's part.
          index: index of the layer.
          settings: attention settings.
          dtype: dtype of the weights.
          mesh: devices that the model is split over; None for one device.
          vocab_size: size of the vocabulary of the whole model; None for the size in `config`.
        """
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn, self.hc_ffn = (HyperConnection(config, settings, dtype) for _ in range(2))
        self.attn_norm = WideRMSNorm(width, eps, dtype)
        self.attn = CompressedAttention(config, index, settings, dtype)
        self.ffn_norm = WideRMSNorm(width, eps, dtype)
        self.ffn = HashedMoE(config, index, dtype, ExpertSplit.over(mesh), vocab_size)
        self.axes = () if mesh is None else COLUMNS

    def __call__(
        self,
        streams: Float[Array, "T N D"],
        inputs: V4Inputs,
        cache: CompressedCache,
        slots: Int32[Array, "T"],
        step: V4Step,
        choice: None = None,
    ) -> tuple[Float[Array, "T N D"], CompressedCache, None]:
        """Apply the layer to all streams of the tokens. `apply_layers` describes arguments and results."""
        x, weights = self.hc_attn(streams)
        attended, cache = self.attn(self.attn_norm(x), inputs, cache, slots, step)
        streams = merge(streams, sum_over(attended, self.axes), weights)
        x, weights = self.hc_ffn(streams)
        y = sum_over(self.ffn(self.ffn_norm(x), inputs.tokens, slots >= 0), self.axes)
        return merge(streams, y, weights), cache, choice
