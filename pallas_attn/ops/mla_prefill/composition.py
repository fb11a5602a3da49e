"""The algorithm of `mla_prefill`, composed of `gather_latent`, `ragged_attention` and `mla_decode`.

A sequence has a prefix (cached latents) and new tokens. The attention to the prefix has two forms:

    state = attention of the new tokens to each other               expanded, causal
    expanded form:      for each chunk of the prefix                all new tokens at once
                          gather the latents of the chunk
                          expand: multiply by W_UK and W_UV to keys and values per head
                          merge the attention to them, without a mask, into state
    absorbed form:      for each block of new tokens                the whole prefix at once
                          multiply the queries by W_UK
                          attend to the latents in their pages, which all heads share
                          multiply the outputs by W_UV, merge them into state

`state` is the output and the LSE (log of the softmax denominator) of all new tokens, for the keys that have been
processed. A merge weights two states by their LSE.

- Expanded: the memory for keys and values depends on the length of a chunk, not on the length of the prefix.
- Absorbed: keys and values need no memory, but each pair of a query and a key takes 2·L + R multiply-adds instead of
  nope + R + v. The loop starts at the first block whose tokens have a prefix, and ends after the last such block.
- With a window, the new tokens and all cached tokens that a query sees are gathered and expanded at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.ops.gather_latent import gather_latent
from pallas_attn.ops.mla_decode import mla_decode
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_prefill import config
from pallas_attn.ops.ragged_attention import ragged_attention
from pallas_attn.portable.latents import as_read_back
from pallas_attn.portable.merge import finite_or_zero
from pallas_attn.portable.query_rows import QueryRows
from pallas_attn.runtime import dispatch
from pallas_attn.types import Implementation, PagedLatent

type PrefillState = tuple[Float32[Array, "T Hq v"], Float32[Array, "T Hq"]]
"""Output and LSE of the attention of the new tokens to the keys processed until now."""


@dataclasses.dataclass(frozen=True)
class MlaPrefillCall:
    """Arguments of one call of `mla_prefill`, and the steps of its algorithm.

    Attributes:
      q: [T, Hq, nope + R], queries: columns without, then with rotary embedding.
      latent_new: [T, L + R], latents and rotated keys of the new tokens, or None if queries see cached tokens only.
      cache, w_uk, w_uv, block_tables, sm_scale, soft_cap, implementation: see `mla_prefill`.
      cu_q_lens: int32 [S+1], prefix sums of the numbers of new tokens, clipped: never decreasing, from 0 to T.
      num_cached: int32 [S], tokens of the prefix of each sequence.
    """

    q: Float[Array, "T Hq nope_plus_R"]
    latent_new: Float[Array, "T LR"] | None
    cache: PagedLatent
    w_uk: Float[Array, "Hq nope L"]
    w_uv: Float[Array, "Hq v L"]
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    num_cached: Int32[Array, "S"]
    sm_scale: float
    soft_cap: float | None
    implementation: Implementation

    def new_tokens(self) -> PrefillState:
        """Return the attention of the new tokens to each other, causal and expanded.

        With a quantised cache, the latents are rounded to the values that a later read from the cache returns.
        """
        if self.latent_new is None:
            shape = *self.q.shape[:2], self.w_uv.shape[1]
            return jnp.zeros(shape, jnp.float32), jnp.full(shape[:2], -jnp.inf, jnp.float32)
        return self._attend_expanded(as_read_back(self.latent_new, self.cache), self.cu_q_lens, causal=True)

    def in_window(self, window: int) -> PrefillState:
        """Return the attention of the new tokens to all keys in their windows, cached and new, in the expanded form."""
        latent, cu_kv_lens = self._latents_in_window(window)
        return self._attend_expanded(latent, cu_kv_lens, causal=True, window=window)

    def with_prefix(self, state: PrefillState, absorbed: bool | None, piece_tokens: int) -> PrefillState:
        """Merge attention to the prefix into `state`.

        Args:
          absorbed: True for the absorbed form, False for the expanded form, None for the form that is expected to be
            faster.
          piece_tokens: prefix tokens per chunk in the expanded form.
        """
        if absorbed is not None:
            return self._absorbed_in_blocks(state) if absorbed else self._expanded_in_chunks(state, piece_tokens)
        max_new = max_absorbed_tokens(self)
        num_tokens, heads = self.q.shape[:2]
        if num_tokens <= min(max_new, config.block_tokens(num_tokens, heads)):
            return self._absorbed_at_once(state)
        if not max_new:
            return self._expanded_in_chunks(state, piece_tokens)
        # Only the device knows the form. Both loops are compiled, and the loop of the other form ends immediately. A
        # `lax.cond` would copy the state.
        absorb = is_short(max_new, self.cu_q_lens, self.num_cached)
        return self._expanded_in_chunks(self._absorbed_in_blocks(state, absorb), piece_tokens, ~absorb)

    # Expanded form

    def _expanded_in_chunks(
        self, state: PrefillState, piece_tokens: int, is_wanted: Bool[Array, ""] | bool = True
    ) -> PrefillState:
        """Expand the prefix chunk by chunk and merge the attention to each chunk into `state`.

        If `is_wanted` is False, return `state` unchanged.
        """
        if self.latent_new is not None:
            dtype = self.latent_new.dtype
        else:
            dtype = jnp.dtype(self.q.dtype) if self.cache.is_quantised else self.cache.pages.dtype
        chunks = PrefixChunks(self.cache, dtype, self.block_tables, self.num_cached, piece_tokens)
        count = jnp.where(is_wanted, chunks.count, 0)

        def attend(carry):
            i, state = carry
            latent, cu_kv_lens = chunks.load(i, self.implementation)
            return i + 1, merge(state, self._attend_expanded(latent, cu_kv_lens, causal=False))

        start = jnp.zeros((), jnp.int32), state
        return lax.while_loop(lambda carry: carry[0] < count, attend, start)[1]

    def _attend_expanded(
        self,
        latent: Float[Array, "U LR"],
        cu_kv_lens: Int32[Array, "S_plus_1"],
        *,
        causal: bool,
        window: int | None = None,
    ) -> Any:
        """Expand latents and return the attention of all new tokens to them.

        Args:
          latent: [U, L + R], packed latents and rotated keys.
          cu_kv_lens: int32 [S+1], prefix sums of the latents of each sequence.
          causal: whether the last latents of a sequence are its new tokens, which see no later tokens. Otherwise every
            new token sees all latents of its sequence.
        """
        k, v = expand(latent.astype(self.q.dtype), self.w_uk, self.w_uv)
        return ragged_attention(
            self.q,
            k,
            v,
            self.cu_q_lens,
            cu_kv_lens,
            causal=causal,
            window=window,
            soft_cap=self.soft_cap,
            sm_scale=self.sm_scale,
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=self.implementation,
        )

    def _latents_in_window(self, window: int) -> tuple[Float[Array, "U LR"], Int32[Array, "S_plus_1"]]:
        """Gather the latents that queries see with a window. Return them packed, [U, L + R], and the prefix sums of
        their numbers per sequence, int32 [S + 1].

        For each sequence, these are the cached pages with its last window - 1 cached tokens, and its new tokens.
        """
        latent_new: Any = self.latent_new
        page_size, tables = self.cache.page_size, self.block_tables
        skipped = jnp.maximum(self.num_cached - (window - 1), 0) // page_size  # [S], pages before the window
        width = min(-(-(window - 1) // page_size) + 1, tables.shape[1])
        lens = self.num_cached - skipped * page_size + jnp.diff(self.cu_q_lens)
        latent = gather_latent(
            self.cache,
            latent_new,
            _tables_from(tables, skipped, width),
            self.cu_q_lens,
            lens,
            length=tables.shape[0] * width * page_size + latent_new.shape[0],
            implementation=self.implementation,
        )
        return latent, jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])

    # Absorbed form

    def _absorbed_at_once(self, state: PrefillState) -> PrefillState:
        """Merge the attention of all new tokens to their prefix into `state`, in the absorbed form, in one block."""
        return merge(state, self._latent_prefix(self.cu_q_lens, self.q.shape[0]).attend(self.q, self.w_uk, self.w_uv))

    def _absorbed_in_blocks(self, state: PrefillState, is_wanted: Bool[Array, ""] | bool = True) -> PrefillState:
        """Merge the attention to the prefix into `state` in the absorbed form, one block of packed new tokens at a
        time.

        If `is_wanted` is False, return `state` unchanged.
        """
        num_tokens = self.q.shape[0]
        has_prefix = is_wanted & (self.num_cached > 0) & (jnp.diff(self.cu_q_lens) > 0)
        size = config.block_tokens(*self.q.shape[:2])
        end = jnp.max(jnp.where(has_prefix, self.cu_q_lens[1:], 0))

        def attend(carry):
            first, state = carry
            block = TokenBlock(self.cu_q_lens, first, size, num_tokens)
            found = self._latent_prefix(block.cu_q_lens, size).attend(block.take(self.q), self.w_uk, self.w_uv)
            return first + size, block.put(state, merge(block.take(state), found))

        start = jnp.min(jnp.where(has_prefix, self.cu_q_lens[:-1], num_tokens)), state
        return lax.while_loop(lambda carry: carry[0] < end, attend, start)[1]

    def _latent_prefix(self, cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int) -> LatentPrefix:
        """Return the prefix for the absorbed attention of `num_tokens` packed queries.

        Args:
          cu_q_lens: prefix sums of the queries of each sequence.
        """
        rows = QueryRows(cu_q_lens, num_tokens, min(num_tokens, max(1, config.FILLED_ROWS // self.q.shape[1])))
        options = {"sm_scale": self.sm_scale, "soft_cap": self.soft_cap, "implementation": self.implementation}
        return LatentPrefix(self.cache, self.block_tables, rows, self.num_cached, **options)


# --- choice between the absorbed and the expanded form


def max_absorbed_tokens(call: MlaPrefillCall) -> int:
    """Return the number of new tokens per sequence up to which the absorbed form is faster.

    Return 0 if the absorbed form would not run on Mosaic's `mla_decode`: the limit was measured for this kernel only.
    """
    (heads, nope, latent_dim), (rows, _) = call.w_uk.shape, call.block_tables.shape
    takes: list[bool] = []

    def try_kernel(
        q_latent: Array, q_rope: Array, cache: PagedLatent, block_tables: Array, kv_lens: Int32[Array, "_"]
    ) -> None:
        decode = MlaDecodeCall(
            q_latent,
            q_rope,
            cache,
            block_tables,
            kv_lens,
            q_lens=None,
            draft_mask=None,
            plan=None,
            sm_scale=1.0,
            out_dtype=None,
            soft_cap=call.soft_cap,
        )

        def is_kernel(name: str, found: Any) -> bool:
            return name == "mosaic" and found.load().num_programs(decode) > 0

        takes.append(dispatch.choose("mla_decode", call.implementation, is_kernel))

    heads_of_row = heads * max(1, config.FILLED_ROWS // heads)
    widths = latent_dim, call.q.shape[2] - nope
    queries = [jax.ShapeDtypeStruct((rows, 1, heads_of_row, width), call.q.dtype) for width in widths]
    with contextlib.suppress(NotImplementedError, ExceptionGroup):
        lens = jax.ShapeDtypeStruct((rows,), jnp.int32)
        jax.eval_shape(try_kernel, *queries, call.cache, call.block_tables, lens)
    if not any(takes):
        return 0
    expanded = nope + call.w_uv.shape[1]
    return config.absorption_config(heads, latent_dim, expanded, quantised=call.cache.is_quantised).max_new_tokens


def is_short(max_new: int, cu_q_lens: Int32[Array, "S_plus_1"], num_cached: Int32[Array, "S"]) -> Bool[Array, ""]:
    """Return whether sequences have at most `max_new` new tokens on average, weighted by their cached tokens.

    The cost of both forms is proportional to the cached tokens.
    """
    cached, new = num_cached.astype(jnp.float32), jnp.diff(cu_q_lens).astype(jnp.float32)
    return jnp.sum(cached * new) <= max_new * jnp.sum(cached)


# --- expanded form


class PrefixChunks:
    """The pages of the prefixes of all sequences, one sequence after the other, in chunks of ceil(piece_tokens / ps)
    pages.

    For each sequence, a chunk contains a range of entries of its block table, which can be empty.

    Attributes:
      count: int32 [], number of chunks.
    """

    def __init__(
        self,
        cache: PagedLatent,
        dtype: jax.typing.DTypeLike,
        block_tables: Int32[Array, "S P"],
        num_cached: Int32[Array, "S"],
        piece_tokens: int,
    ):
        self._cache, self._dtype, self._tables, self._num_cached = cache, dtype, block_tables, num_cached
        self._page_size = cache.page_size
        self._pages = -(-piece_tokens // self._page_size)  # pages per chunk
        num_pages = -(-num_cached // self._page_size)
        self._end_page = jnp.cumsum(num_pages, dtype=jnp.int32)
        self._first_page = self._end_page - num_pages
        self.count = -(-self._end_page[-1] // self._pages)

    def load(
        self, i: Int32[Array, ""], implementation: Implementation
    ) -> tuple[Float[Array, "U LR"], Int32[Array, "S_plus_1"]]:
        """Gather the latents of chunk `i`. Return them packed, [U, L + R], and the prefix sums of their numbers per
        sequence, int32 [S + 1].
        """
        start = i * self._pages
        skipped = jnp.maximum(start - self._first_page, 0)  # pages of each sequence in earlier chunks
        stop = jnp.clip(start + self._pages - self._first_page, 0, self._end_page - self._first_page)
        lens = jnp.maximum(jnp.minimum(stop * self._page_size, self._num_cached) - skipped * self._page_size, 0)
        tables = _tables_from(self._tables, skipped, min(self._pages, self._tables.shape[1]))
        latent = gather_latent(
            self._cache,
            jnp.zeros((0, self._cache.width), self._dtype),
            tables,
            jnp.zeros((lens.shape[0] + 1,), jnp.int32),
            lens,
            length=self._pages * self._page_size,
            implementation=implementation,
        )
        zero = jnp.zeros((1,), jnp.int32)
        return latent, jnp.concatenate([zero, jnp.cumsum(lens, dtype=jnp.int32)])


def expand(
    latent: Float[Array, "U LR"], w_uk: Float[Array, "Hq nope L"], w_uv: Float[Array, "Hq v L"]
) -> tuple[Float[Array, "U Hq nope_plus_R"], Float[Array, "U Hq v"]]:
    """Compute the keys and values of each head from latents and rotated keys [U, L + R].

    A key consists of nope columns that are computed from the latent, and of the rotated key, which all heads share.
    """
    latent_dim = w_uk.shape[-1]
    normed, rotated = latent[:, :latent_dim], latent[:, latent_dim:]
    precision = lax.Precision.HIGHEST if latent.dtype == jnp.float32 else None
    k_nope = jnp.einsum("ul,hnl->uhn", normed, w_uk, precision=precision)
    v = jnp.einsum("ul,hvl->uhv", normed, w_uv, precision=precision)
    k_rope = jnp.broadcast_to(rotated[:, None, :], (*k_nope.shape[:2], rotated.shape[-1]))
    return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _tables_from(block_tables: Int32[Array, "S P"], first: Int32[Array, "S"], width: int) -> Int32[Array, "S width"]:
    """Return `width` entries of each block table from entry `first` on, padded with copies of its last entry."""
    entry = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(block_tables, jnp.minimum(entry, block_tables.shape[1] - 1), axis=1)


# --- absorbed form


class LatentPrefix:
    """The prefixes of all sequences, to which packed queries attend in the absorbed form, with `mla_decode`.

    A row is a group of up to Q query tokens of one sequence. Every query sees the whole prefix of its sequence, so no
    scores are masked. `mla_decode` therefore receives a row as one sequence with one query token of Q·Hq heads.
    """

    def __init__(
        self,
        cache: PagedLatent,
        block_tables: Int32[Array, "S P"],
        rows: QueryRows,
        num_cached: Int32[Array, "S"],
        **options: Any,
    ):
        """Look up the block table and the number of cached tokens of each row's sequence.

        Args:
          rows: division of the packed queries into rows of up to Q query tokens of one sequence.
          num_cached: tokens of the prefix of each sequence.
          **options: arguments of `mla_decode`.
        """
        self._rows, self._cache, self._options = rows, cache, options
        self._tables = block_tables[rows.sequence]
        self._lens = jnp.where(rows.count > 0, num_cached[rows.sequence], 0)

    def attend(
        self,
        q: Float[Array, "T Hq nope_plus_R"],
        w_uk: Float[Array, "Hq nope L"],
        w_uv: Float[Array, "Hq v L"],
    ) -> PrefillState:
        """Return the attention of packed queries to the prefix of their sequence."""
        nope, rows = w_uk.shape[1], self._rows
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def pack(x: Float[Array, "T Hq D"]) -> Float[Array, "rows_times_Q Hq D"]:
            return rows.pack(x).reshape(-1, *x.shape[1:])

        def as_one_query(x: Float[Array, "rows_times_Q Hq D"]) -> Float[Array, "rows 1 Q_times_Hq D"]:
            return x.reshape(-1, 1, rows.queries * x.shape[1], x.shape[2])

        # Pack before the product with W_UK and unpack after the product with W_UV: there a query head has nope or v
        # columns, which are fewer than L.
        out: Any = mla_decode(
            as_one_query(jnp.einsum("thn,hnl->thl", pack(q[..., :nope]), w_uk, precision=precision)),
            as_one_query(pack(q[..., nope:])),
            self._cache,
            self._tables,
            self._lens,
            return_lse=True,
            **self._options,
        )
        latent, lse = (x.reshape(-1, q.shape[1], *x.shape[3:]) for x in out)
        values = jnp.einsum("thl,hvl->thv", latent, w_uv, precision=precision, preferred_element_type=jnp.float32)
        values, lse = (x.reshape(-1, rows.queries, *x.shape[1:]) for x in (values, lse))
        return rows.unpack(values), rows.unpack(lse, -jnp.inf)


class TokenBlock:
    """A block of `size` consecutive packed tokens.

    Attributes:
      cu_q_lens: int32 [S+1], where the tokens of each sequence start in the block; last where they end.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], first: Int32[Array, ""], size: int, num_tokens: int):
        """Create the block that starts at packed token `first`, out of `num_tokens`.

        If fewer than `size` tokens follow, the block starts earlier. Its tokens before `first` have been processed with
        an earlier block, so they belong to no sequence of this block.
        """
        self._start, self._size = jnp.minimum(first, num_tokens - size), size
        self.cu_q_lens = jnp.clip(cu_q_lens - self._start, first - self._start, size)

    def take(self, x: Any) -> Any:
        """Return the block's tokens of arrays [T, ...], [size, ...]."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self._start, self._size), x)

    def put(self, x: Any, own: Any) -> Any:
        """Return the arrays `x` [T, ...] with the block's tokens replaced by `own` [size, ...]."""
        return jax.tree.map(lambda x, own: lax.dynamic_update_slice_in_dim(x, own, self._start, 0), x, own)


def merge(one: PrefillState, other: PrefillState) -> PrefillState:
    """Merge the attention to two disjoint sets of keys, weighted by LSE.

    The formula is the formula of `merge_states`. It is elementwise here, so that XLA updates the loop's state in place.
    """
    highest = finite_or_zero(jnp.maximum(one[1], other[1]))
    weights = [jnp.exp(lse - highest) for _, lse in (one, other)]
    total = weights[0] + weights[1]
    seen = total != 0
    divisor = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, highest + jnp.log(divisor), -jnp.inf)
    scaled = [out * (weight / divisor)[..., None] for (out, _), weight in zip((one, other), weights, strict=True)]
    return scaled[0] + scaled[1], lse
