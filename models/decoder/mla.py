"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged latent cache.

Per token, only a latent of L columns and a rotated key of R columns are cached. The projections W_UK and W_UV compute
the keys and values of all heads from the latent. There are two equivalent forms of attention:

- Absorbed: multiply the queries by W_UK and the outputs by W_UV, and attend to the latents as one KV head of width L +
  R that all query heads share. This form reads the least memory and is used for decode rows.
- Expanded: compute keys and values of each head from the latents, and attend to these. They are narrower than the
  latents, so this form needs the fewest operations. It is used for prefill.

In sparse attention, tokens attend only to keys that an indexer selects, in absorbed form. A layer without an indexer
may use the selection of an earlier layer.

A decode row has the newest token of a sequence, and, with speculation, drafts (guesses of later tokens) that the step
verifies. A cache slot is the index of a token's place in the cache: page · page size + offset.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import (
    DecodePlan,
    PagedIndexKeys,
    PagedLatent,
    index_top_k,
    mla_decode,
    mla_prefill,
    mla_sparse,
    parallel,
    plan_decode,
    token_slots,
    write_index_keys,
    write_latent,
)
from pallas_attn.models.config import DeepSeekConfig
from pallas_attn.models.decoder import contexts as split_contexts
from pallas_attn.models.decoder.caches import IndexedLatent, LatentCache
from pallas_attn.models.decoder.indexer import Indexer
from pallas_attn.models.decoder.layers import Linear, RMSNorm
from pallas_attn.models.decoder.mesh import CONTEXT
from pallas_attn.models.decoder.rope import CosSin, rotate
from pallas_attn.models.decoder.settings import AttentionSettings
from pallas_attn.models.decoder.step_metadata import StepMetadata

INNER_NORM_EPS = 1e-6
"""Epsilon of the norms of queries and latents inside attention, independent of the model's rms_norm_eps."""


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Part of a step that uses absorbed attention: B rows of Q consecutive tokens of one sequence each.

    Attributes:
      tokens: indices of the part's tokens among the packed tokens of the step.
      block_tables: int32 [B, P], page ids.
      kv_lens: int32 [B], number of cached tokens that the last token of each row sees, including itself; 0 for an idle
        row.
      q_lens: int32 [B], number of tokens of each row without padding; None if no row is padded.
      queries: Q, number of tokens per row, including padding.
      draft_mask: bool [B, Q, Q], for trees of drafts: entry [b, i, j] is True if token i of the row sees token j.
      plan: decode plan (assignment of pages to thread blocks); None until `plan_rows` computes it.
    """

    tokens: slice = dataclasses.field(metadata={"static": True})
    block_tables: Int32[Array, "B P"]
    kv_lens: Int32[Array, "B"]
    q_lens: Int32[Array, "B"] | None = None
    queries: int = dataclasses.field(default=1, metadata={"static": True})
    draft_mask: Bool[Array, "B Q Q"] | None = None
    plan: DecodePlan | None = None


@typing.no_type_check  # fields may be shapes or shardings (jax.tree.map), which run-time type checks would reject
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Part of a step that uses `mla_prefill`: one chunk of consecutive tokens of each of S sequences.

    `mla_prefill` expands latents, but may use the absorbed form for the cached prefix of short chunks.

    Attributes:
      tokens: indices of the part's tokens among the packed tokens of the step.
      block_tables: int32 [S, P], page ids.
      cu_q_lens: int32 [S + 1], prefix sum of the lengths of the chunks.
      kv_lens: int32 [S], number of tokens of each sequence, including its chunk.
    """

    tokens: slice = dataclasses.field(metadata={"static": True})
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S+1"]
    kv_lens: Int32[Array, "S"]


type Part = Rows | Chunks

type Choice = list[Int32[Array, "_ K"] | None]
"""Selected keys of sparse attention, one entry for each part of a step: the cache slots that each token attends to,
int32 [T, K], padded with -1. None for a part that attends to all keys."""


def step_parts(metadata: StepMetadata, mla: Literal["auto", "absorb", "expand"]) -> list[Part]:
    """Split a step into the decode rows and the prefill tokens, in the form of attention that `mla` selects (see
    `AttentionSettings`). A part without tokens is left out."""
    num_tokens, num_decode = metadata.num_tokens, metadata.num_decode
    parts = []
    if num_decode:
        parts.append((_decode_chunks if mla == "expand" else _decode_rows)(metadata))
    if num_decode < num_tokens:
        parts.append((_prefill_rows if mla == "absorb" else _prefill_chunks)(metadata))
    return parts


def _decode_rows(metadata: StepMetadata) -> Rows:
    """Return the decode rows for absorbed attention."""
    tokens = slice(0, metadata.num_decode)
    tables = metadata.of_group(0).decode_block_tables
    q_lens, queries, mask = metadata.decode_q_lens, metadata.decode_queries, metadata.decode_draft_mask
    return Rows(tokens, tables, metadata.decode_kv_lens, q_lens, queries, mask)


def _decode_chunks(metadata: StepMetadata) -> Chunks:
    """Return the decode rows as chunks of one token, for expanded attention. An idle row becomes a sequence of one
    token, whose result is ignored."""
    if metadata.decode_queries > 1:
        raise NotImplementedError(
            "mla: expanded decode rows take one token each, without drafts; mla auto or absorb supports drafts"
        )
    offsets = jnp.arange(metadata.num_decode + 1, dtype=jnp.int32)
    kv_lens = jnp.maximum(metadata.decode_kv_lens, 1)
    return Chunks(slice(0, metadata.num_decode), metadata.of_group(0).decode_block_tables, offsets, kv_lens)


def _prefill_chunks(metadata: StepMetadata) -> Chunks:
    """Return the prefill tokens for expanded attention."""
    tokens = slice(metadata.num_decode, metadata.num_tokens)
    return Chunks(tokens, metadata.of_group(0).prefill_block_tables, metadata.cu_q_lens, metadata.prefill_kv_lens)


def _prefill_rows(metadata: StepMetadata) -> Rows:
    """Return the prefill tokens for absorbed attention: each token is a row that sees its sequence up to itself."""
    tokens = slice(metadata.num_decode, metadata.num_tokens)
    rows = dataclasses.replace(metadata, decode_draft_mask=None).as_decode_rows()
    return Rows(tokens, rows.of_group(0).decode_block_tables[tokens], rows.decode_kv_lens[tokens])


def is_sparse(config: DeepSeekConfig, settings: AttentionSettings, capacity: int) -> bool:
    """Return whether a step uses sparse attention, in which tokens attend only to selected keys.

    If the block tables have room for at most `index_topk` tokens, all keys would be selected, so the selection is
    skipped. With batch_invariant it is never skipped, because the width of the tables may depend on other requests.

    Args:
      config: configuration of the model.
      settings: attention settings.
      capacity: number of tokens that the block tables have entries for.
    """
    return config.is_sparse and (settings.batch_invariant or capacity > (settings.index_topk or config.index_topk))


def packed_rows(part: Part) -> tuple[Int32[Array, "S P"], Int32[Array, "S+1"], Int32[Array, "S"]]:
    """Return a part in the format of packed sequences: block tables [S, P], prefix sums of the numbers of new tokens [S
    + 1], and sequence lengths [S].

    Every token of `Rows` becomes a sequence with one new token, which ends with this token.
    """
    if isinstance(part, Chunks):
        return part.block_tables, part.cu_q_lens, part.kv_lens
    query = jnp.arange(part.queries, dtype=jnp.int32)[None]
    q_lens = jnp.full_like(part.kv_lens, part.queries) if part.q_lens is None else part.q_lens
    ends = part.kv_lens[:, None] - q_lens[:, None] + query + 1
    kv_lens = jnp.where((query < q_lens[:, None]) & (part.kv_lens[:, None] > 0), ends, 0).reshape(-1)
    tables = jnp.repeat(part.block_tables, part.queries, axis=0)
    return tables, jnp.arange(kv_lens.shape[0] + 1, dtype=jnp.int32), kv_lens


def newest_mask(part: Part) -> Bool[Array, "T Q"] | None:
    """Return the draft mask of a part in the format of `index_top_k`; None if the part has no draft mask.

    Entry [t, j] is True if token t of the part sees the key that is Q - 1 - j cache slots before its own key. Other
    earlier keys are visible to all tokens of the row.
    """
    if isinstance(part, Chunks) or part.draft_mask is None:
        return None
    query = jnp.arange(part.queries, dtype=jnp.int32)
    # [Q, Q], index of the key among the tokens of its row; negative for earlier tokens of the sequence
    draft = query[:, None] - part.queries + 1 + query[None]
    index = jnp.broadcast_to(jnp.maximum(draft, 0)[None], part.draft_mask.shape)
    shown = (draft < 0)[None] | jnp.take_along_axis(part.draft_mask, index, axis=2)
    return shown.reshape(-1, part.queries)


def plan_rows(
    parts: list[Part],
    config: DeepSeekConfig,
    settings: AttentionSettings,
    cache: LatentCache,
    dtype: DTypeLike,
    contexts: int = 1,
) -> list[Part]:
    """Return the parts of a step with decode plans, which all layers share. Only `Rows` that attend to all keys have a
    plan.

    Args:
      parts: parts of the step.
      config: configuration of the model, or of one device's part.
      settings: attention settings.
      cache: cache of any layer; only its shapes and dtypes are used.
      dtype: dtype of the queries.
      contexts: number of devices that the tokens of each page are split over. If it is above 1, `kv_lens` of `Rows` are
        replaced by the numbers of cached tokens on this device.
    """
    latents = latents_of(cache)

    def planned(part: Part) -> Part:
        if contexts > 1 and isinstance(part, Rows):
            part = dataclasses.replace(part, kv_lens=split_contexts.own_lens(part.kv_lens, latents.page_size))
        if isinstance(part, Chunks) or is_sparse(config, settings, part.block_tables.shape[1] * latents.page_size):
            return part
        rows, heads = part.kv_lens.shape[0], config.num_attention_heads
        q_latent, q_rope = (
            jax.ShapeDtypeStruct((rows, part.queries, heads, width), jnp.dtype(dtype))
            for width in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        plan = plan_decode(
            (q_latent, q_rope),
            latents,
            part.block_tables,
            part.kv_lens,
            q_lens=part.q_lens,
            mode="fixed" if settings.batch_invariant else "balanced",
            implementation=settings.implementation,
        )
        return dataclasses.replace(part, plan=plan)

    return [planned(part) for part in parts]


def latents_of(cache: LatentCache) -> PagedLatent:
    """Return the latents of a layer's cache."""
    return cache.latent if isinstance(cache, IndexedLatent) else cache


class MLA(nnx.Module):
    """Latent attention of one layer, with an indexer if the layer selects keys.

    `contexts` is the number of devices that the tokens of each page are split over. If it is above 1, each device
    merges the results for 1 / contexts of the heads, so its output projection has only the rows of these heads.

    Attributes:
      indexer: the layer's indexer; None if the layer does not select keys.
      shares_choice: whether the layer attends to the keys that an earlier layer selected.
    """

    def __init__(
        self, config: DeepSeekConfig, index: int, settings: AttentionSettings, dtype: DTypeLike, contexts: int = 1
    ):
        """Make layer `index` with zero weights.

        Raises:
          NotImplementedError: a model with sparse attention and `settings.mla` "expand".
        """
        self.config, self.settings, self.contexts = config, settings, contexts
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        query_width = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(config.hidden_size, query_width, dtype)
        else:
            self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, dtype, config.attention_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, INNER_NORM_EPS, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, query_width, dtype)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.latent_width, dtype, config.attention_bias)
        self.kv_a_layernorm = RMSNorm(rank, INNER_NORM_EPS, dtype)
        self.w_uk = nnx.Param(jnp.zeros((heads, config.qk_nope_head_dim, rank), dtype))
        self.w_uv = nnx.Param(jnp.zeros((heads, config.v_head_dim, rank), dtype))
        self.o_proj = Linear(heads // contexts * config.v_head_dim, config.hidden_size, dtype, config.attention_bias)
        if config.is_sparse and settings.mla == "expand":
            raise NotImplementedError(
                f"mla: expand does not support the sparse attention of a {config.model_type}; use auto or absorb"
            )
        self.indexer = Indexer(config, dtype) if config.has_indexer(index) else None
        self.shares_choice = config.shares_choice(index)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: CosSin,
        cache: LatentCache,
        slots: Int32[Array, "T"],
        parts: list[Part],
        choice: Choice | None = None,
    ) -> tuple[Float[Array, "T D"], LatentCache, Choice | None]:
        """Write the latents of a step's tokens to the cache, and attend.

        Args:
          x: normed hidden states.
          rope: cosines and sines of the rotation angles of the tokens.
          cache: cache of the layer.
          slots: cache slot of each token; negative for padding.
          parts: parts of the step, from `plan_rows`.
          choice: keys that an earlier layer selected; required if `shares_choice`.

        Returns:
          Attention output of every token; the cache with the new tokens; and the keys that this layer attends to. The
          last result is None if no layer of the model uses the selection of an earlier layer. A compiled layer then has
          no unused output.

        Raises:
          ValueError: `choice` is missing; a layer with an indexer gets a cache without index keys; or a layer without
            an indexer gets a cache with index keys.
        """
        residual = None if self.config.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q_nope, q_rope = self._queries(self.q_proj(x) if residual is None else self.q_b_proj(residual), rope)
        latent, latents = self._latent(x, rope), latents_of(cache)
        if not latents.is_quantised:
            latent = latent.astype(latents.pages.dtype)
        if self.contexts > 1:
            slots = split_contexts.own_slots(slots, latents.page_size)
        latents = write_latent(latents, latent, slots, implementation=self.settings.implementation)
        written: LatentCache = latents
        if self.indexer is None:
            choice = self._given_choice(cache, parts, choice)
        else:
            index, choice = self._choices(self.indexer, cache, x, residual, rope, slots, parts)
            written = IndexedLatent(latents, index)
        outputs = [
            self._sparse(q_nope[part.tokens], q_rope[part.tokens], latents, slots_of_keys)
            if slots_of_keys is not None
            else self._absorbed(q_nope[part.tokens], q_rope[part.tokens], latents, part)
            if isinstance(part, Rows)
            else self._expanded(q_nope[part.tokens], q_rope[part.tokens], latent[part.tokens], latents, part)
            for part, slots_of_keys in zip(parts, choice, strict=True)
        ]
        handed_on = None if self.config.indexer_types is None else choice
        return self.o_proj(jnp.concatenate(outputs).reshape(x.shape[0], -1)), written, handed_on

    def _given_choice(self, cache: LatentCache, parts: list[Part], choice: Choice | None) -> Choice:
        """Return the keys that this layer, which has no indexer, attends to: the selection of an earlier layer if
        `shares_choice`, otherwise all (None for each part)."""
        if isinstance(cache, IndexedLatent):
            raise ValueError("cache: expected no index keys, the layer has no indexer")
        if not self.shares_choice:
            return [None] * len(parts)
        if choice is None:
            raise ValueError("choice: expected the selection of the layer before, this layer has no indexer")
        return choice

    def _choices(
        self,
        indexer: Indexer,
        cache: LatentCache,
        x: Float[Array, "T D"],
        residual: Float[Array, "T rank"] | None,
        rope: CosSin,
        slots: Int32[Array, "T"],
        parts: list[Part],
    ) -> tuple[PagedIndexKeys, Choice]:
        """Write the index keys of the step's tokens to the cache, and select the keys that each token attends to."""
        if not isinstance(cache, IndexedLatent) or residual is None:
            raise ValueError("cache: expected index keys, the layer has an indexer")
        keys = indexer.keys(x, rope)
        index = write_index_keys(cache.index, keys, slots, implementation=self.settings.implementation)
        queries, weights = indexer.queries(residual, x, rope)
        return index, [self._choose(queries[part.tokens], weights[part.tokens], index, part) for part in parts]

    def _choose(
        self, q: Float[Array, "T Hi Di"], weights: Float32[Array, "T Hi"], index: PagedIndexKeys, part: Part
    ) -> Int32[Array, "T K"] | None:
        """Return the cache slots that each token of the part attends to; None if tokens attend to all keys."""
        if not is_sparse(self.config, self.settings, part.block_tables.shape[1] * index.page_size):
            return None
        tables, cu_q_lens, kv_lens = packed_rows(part)
        positions = index_top_k(
            q,
            weights,
            index,
            tables,
            cu_q_lens,
            kv_lens,
            top_k=self.settings.index_topk or self.config.index_topk,
            draft_mask=newest_mask(part),
            implementation=self.settings.implementation,
        )
        return token_slots(positions, tables, cu_q_lens, page_size=index.page_size)

    def _queries(
        self, q: Float[Array, "T Hq_times_D"], rope: CosSin
    ) -> tuple[Float[Array, "T Hq nope"], Float[Array, "T Hq R"]]:
        """Split the projected queries into the columns without and with rotation, and rotate the latter."""
        q = q.reshape(q.shape[0], self.config.num_attention_heads, self.config.qk_head_dim)
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return q_nope, rotate(q_rope, *rope)

    def _latent(self, x: Float[Array, "T D"], rope: CosSin) -> Float[Array, "T LR"]:
        """Return the cache entry of each token: the normed latent [:L] and the rotated key [L:]."""
        latent, key = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        return jnp.concatenate([self.kv_a_layernorm(latent), rotate(key, *rope)], axis=-1)

    def _absorbed(
        self, q_nope: Float[Array, "T Hq nope"], q_rope: Float[Array, "T Hq R"], cache: PagedLatent, part: Rows
    ) -> Float[Array, "T own v"]:
        """Attend in absorbed form. If `contexts` is above 1, merge the results of all devices for this device's share
        of the heads."""
        q_latent, q_rope = (
            q.reshape(-1, part.queries, *q.shape[1:]) for q in (_per_head(q_nope, self.w_uk[...]), q_rope)
        )
        found = mla_decode(
            q_latent,
            q_rope,
            cache,
            part.block_tables,
            part.kv_lens,
            q_lens=part.q_lens,
            draft_mask=part.draft_mask,
            sm_scale=self.config.sm_scale,
            plan=part.plan,
            return_lse=self.contexts > 1,
            implementation=self.settings.implementation,
        )
        w_uv = self.w_uv[...].swapaxes(1, 2)
        if isinstance(found, tuple):
            found, _ = parallel.merge_over_contexts(*found, axis=CONTEXT)
            first = jax.lax.axis_index(CONTEXT) * found.shape[2]
            w_uv = jax.lax.dynamic_slice_in_dim(w_uv, first, found.shape[2])
        return _per_head(found.reshape(-1, *found.shape[2:]), w_uv)

    def _sparse(
        self,
        q_nope: Float[Array, "T Hq nope"],
        q_rope: Float[Array, "T Hq R"],
        cache: PagedLatent,
        slots: Int32[Array, "T K"],
    ) -> Float[Array, "T Hq v"]:
        """Attend in absorbed form to the selected cache slots."""
        out = mla_sparse(
            _per_head(q_nope, self.w_uk[...]),
            q_rope,
            cache,
            slots,
            sm_scale=self.config.sm_scale,
            implementation=self.settings.implementation,
        )
        return _per_head(out, self.w_uv[...].swapaxes(1, 2))  # pyrefly: ignore[bad-argument-type]

    def _expanded(
        self,
        q_nope: Float[Array, "T Hq nope"],
        q_rope: Float[Array, "T Hq R"],
        latent: Float[Array, "T LR"],
        cache: PagedLatent,
        part: Chunks,
    ) -> Float[Array, "T own v"]:
        """Attend with `mla_prefill`. If `contexts` is above 1, merge the results of all devices for this device's share
        of the heads."""
        weights = [self.w_uk[...], self.w_uv[...]]
        attend: Callable[..., Any] = functools.partial(
            mla_prefill,
            sm_scale=self.config.sm_scale,
            absorbed=False if self.settings.mla == "expand" else None,
            piece_tokens=self.settings.piece_tokens,
            implementation=self.settings.implementation,
        )
        if self.contexts == 1:
            places = (part.block_tables, part.cu_q_lens, part.kv_lens)
            return attend(q_nope, q_rope, latent, cache, *weights, *places)
        # This device attends to its cached tokens of the prefix with all heads (`found`). All devices have the new
        # tokens of the chunk, so this device attends to them with its share of the heads (`own`).
        q_lens = jnp.diff(part.cu_q_lens)
        prefix = split_contexts.own_lens(jnp.maximum(part.kv_lens - q_lens, 0), cache.page_size)
        places = (part.block_tables, part.cu_q_lens)
        found = attend(q_nope, q_rope, None, cache, *weights, *places, prefix, return_lse=True)
        count = q_nope.shape[1] // self.contexts
        queries = [split_contexts.own_heads(q, count) for q in (q_nope, q_rope)]
        first = jax.lax.axis_index(CONTEXT) * count
        weights = [jax.lax.dynamic_slice_in_dim(w, first, count) for w in weights]
        own = attend(*queries, latent, cache, *weights, *places, q_lens, return_lse=True)
        return parallel.merge_over_contexts(*found, axis=CONTEXT, own=own)[0]


def _per_head(x: Float[Array, "T Hq D"], weight: Float[Array, "Hq D F"]) -> Float[Array, "T Hq F"]:
    """Return x[:, h] @ weight[h] for each head h.

    It is written as a matmul with the heads as first axis. For an einsum, XLA would swap the operands, which is 10
    times slower on a CPU.
    """
    return jnp.matmul(x.swapaxes(0, 1), weight, precision=jax.lax.Precision.HIGHEST).swapaxes(0, 1)
