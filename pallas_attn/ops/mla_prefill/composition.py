"""The algorithm of `mla_prefill`, composed of `gather_latent`, `ragged_attention` and `mla_decode`.

    state = attention of the new tokens among themselves            expanded keys and values, causal
    prefix, expanded:   for each chunk of the prefix                all new tokens at once
                          gather the latents of the chunk, expand them, attend without a mask, merge into state
    prefix, absorbed:   for each block of new tokens                the whole prefix at once
                          queries times W_UK, attend to the latents in their pages, times W_UV, merge into state

`state` is output and LSE of all new tokens, and a merge weights two states by their LSE.

- Expanded, the memory for keys and values depends on the chunk, not on the length of the prefix.
- Absorbed, nothing is expanded, but a query and a key take 2·L + R multiply-adds instead of nope + R + v. The loop
  starts at the first block that has a prefix and ends after the last one.
- With a window, the cached tokens that any query sees and the new tokens are gathered and expanded at once.
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
"""Attention of the new tokens to some of their keys: output and LSE."""


@dataclasses.dataclass(frozen=True)
class MlaPrefillCall:
    """One call of `mla_prefill`.

    Attributes:
      q: [T, Hq, nope + R], unrotated and rotated columns of the queries.
      latent_new: [T, L + R] latents of the new tokens, or None for queries that see cached tokens only.
      cache, w_uk, w_uv, block_tables, sm_scale, soft_cap, implementation: see `mla_prefill`.
      cu_q_lens: int32 [S+1], prefix sums of the new tokens, at most T.
      num_cached: int32 [S], tokens of the prefix per sequence.
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
        """Attention of the new tokens among themselves. Over a quantised cache their latents are rounded as cached."""
        if self.latent_new is None:
            shape = *self.q.shape[:2], self.w_uv.shape[1]
            return jnp.zeros(shape, jnp.float32), jnp.full(shape[:2], -jnp.inf, jnp.float32)
        return self._attend_expanded(as_read_back(self.latent_new, self.cache), self.cu_q_lens, causal=True)

    def in_window(self, window: int) -> PrefillState:
        """Attention to all keys in the window, cached and new, expanded at once."""
        latent, cu_kv_lens = self._latents_in_window(window)
        return self._attend_expanded(latent, cu_kv_lens, causal=True, window=window)

    def with_prefix(self, state: PrefillState, absorbed: bool | None, piece_tokens: int) -> PrefillState:
        """Merge attention to the prefix into `state`.

        Args:
          absorbed: see `mla_prefill`. None chooses the form that is expected to be faster.
          piece_tokens: tokens of a chunk of an expanded prefix.
        """
        if absorbed is not None:
            return self._absorbed_in_blocks(state) if absorbed else self._expanded_in_chunks(state, piece_tokens)
        max_new = max_absorbed_tokens(self)
        num_tokens, heads = self.q.shape[:2]
        if num_tokens <= min(max_new, config.block_tokens(num_tokens, heads)):
            return self._absorbed_at_once(state)
        if not max_new:
            return self._expanded_in_chunks(state, piece_tokens)
        # The loop of the other form ends immediately. A condition would copy the state.
        absorb = is_short(max_new, self.cu_q_lens, self.num_cached)
        return self._expanded_in_chunks(self._absorbed_in_blocks(state, absorb), piece_tokens, ~absorb)

    # Expanded

    def _expanded_in_chunks(
        self, state: PrefillState, piece_tokens: int, is_wanted: Bool[Array, ""] | bool = True
    ) -> PrefillState:
        """Expand the prefix chunk by chunk and attend to each chunk; do nothing unless `is_wanted`."""
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
        """Expand packed latents and attend to them."""
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
        """Gather the latents that some query sees, packed, with the prefix sums of their numbers per sequence.

        For each sequence these are the cached pages that hold its last window - 1 cached tokens, and its new tokens.
        """
        latent_new: Any = self.latent_new
        page_size, tables = self.cache.page_size, self.block_tables
        skipped = jnp.maximum(self.num_cached - (window - 1), 0) // page_size  # pages
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

    # Absorbed

    def _absorbed_at_once(self, state: PrefillState) -> PrefillState:
        """Attend to the prefix with all queries at once."""
        return merge(state, self._latent_prefix(self.cu_q_lens, self.q.shape[0]).attend(self.q, self.w_uk, self.w_uv))

    def _absorbed_in_blocks(self, state: PrefillState, is_wanted: Bool[Array, ""] | bool = True) -> PrefillState:
        """Attend to the prefix block by block of packed tokens; do nothing unless `is_wanted`."""
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
        """The prefix as latents, for `num_tokens` packed queries with these prefix sums."""
        rows = QueryRows(cu_q_lens, num_tokens, min(num_tokens, max(1, config.FILLED_ROWS // self.q.shape[1])))
        options = {"sm_scale": self.sm_scale, "soft_cap": self.soft_cap, "implementation": self.implementation}
        return LatentPrefix(self.cache, self.block_tables, rows, self.num_cached, **options)


# --- which form


def max_absorbed_tokens(call: MlaPrefillCall) -> int:
    """Return the number of new tokens of a sequence up to which absorbed is faster.

    The result is 0 if Mosaic's `mla_decode` does not run the call, because only Mosaic's was measured.
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
    """Return whether sequences have at most `max_new` new tokens on average, weighted by their cached tokens."""
    cached, new = num_cached.astype(jnp.float32), jnp.diff(cu_q_lens).astype(jnp.float32)
    return jnp.sum(cached * new) <= max_new * jnp.sum(cached)


# --- the prefix, expanded


class PrefixChunks:
    """The prefixes of all sequences, packed and cut into chunks of at most `piece_tokens` tokens.

    The packing gives each sequence whole pages, so a chunk starts and ends at page boundaries. The part of a sequence
    in a chunk is its block table from some entry on.

    Attributes:
      count: number of chunks, int32.
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
        self._pages = -(-piece_tokens // self._page_size)  # of a chunk
        num_pages = -(-num_cached // self._page_size)
        self._end_page = jnp.cumsum(num_pages, dtype=jnp.int32)
        self._first_page = self._end_page - num_pages
        self.count = -(-self._end_page[-1] // self._pages)

    def load(
        self, i: Int32[Array, ""], implementation: Implementation
    ) -> tuple[Float[Array, "U LR"], Int32[Array, "S_plus_1"]]:
        """Gather the latents of chunk `i`, packed without gaps, with the prefix sums of its tokens per sequence."""
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
    """Compute keys and values of each head from latents. All heads share the rotated columns of the key."""
    latent_dim = w_uk.shape[-1]
    normed, rotated = latent[:, :latent_dim], latent[:, latent_dim:]
    precision = lax.Precision.HIGHEST if latent.dtype == jnp.float32 else None
    k_nope = jnp.einsum("ul,hnl->uhn", normed, w_uk, precision=precision)
    v = jnp.einsum("ul,hvl->uhv", normed, w_uv, precision=precision)
    k_rope = jnp.broadcast_to(rotated[:, None, :], (*k_nope.shape[:2], rotated.shape[-1]))
    return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _tables_from(block_tables: Int32[Array, "S P"], first: Int32[Array, "S"], width: int) -> Int32[Array, "S width"]:
    """Return `width` entries of each block table from entry `first` on, padded with the last entry."""
    entry = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(block_tables, jnp.minimum(entry, block_tables.shape[1] - 1), axis=1)


# --- the prefix, absorbed


class LatentPrefix:
    """The prefixes of all sequences as latents, to which queries attend absorbed.

    Every query sees the whole prefix of its sequence, so nothing is masked. `mla_decode` therefore gets the heads of
    several queries as heads of one query.
    """

    def __init__(
        self,
        cache: PagedLatent,
        block_tables: Int32[Array, "S P"],
        rows: QueryRows,
        num_cached: Int32[Array, "S"],
        **options: Any,
    ):
        """Look up block tables and lengths of the rows. `options` are arguments of `mla_decode`."""
        self._rows, self._cache, self._options = rows, cache, options
        self._tables = block_tables[rows.sequence]
        self._lens = jnp.where(rows.count > 0, num_cached[rows.sequence], 0)

    def attend(
        self,
        q: Float[Array, "T Hq nope_plus_R"],
        w_uk: Float[Array, "Hq nope L"],
        w_uv: Float[Array, "Hq v L"],
    ) -> PrefillState:
        """Attention of packed queries to the prefix of their sequence."""
        nope, rows = w_uk.shape[1], self._rows
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def pack(x: Float[Array, "T Hq D"]) -> Float[Array, "rows_times_Q Hq D"]:
            return rows.pack(x).reshape(-1, *x.shape[1:])

        def as_one_query(x: Float[Array, "rows_times_Q Hq D"]) -> Float[Array, "rows 1 Q_times_Hq D"]:
            return x.reshape(-1, 1, rows.queries * x.shape[1], x.shape[2])

        # Pack before the product with W_UK and unpack after the product with W_UV, where rows are narrower.
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
    """A block of consecutive packed tokens.

    Attributes:
      cu_q_lens: int32 [S+1], prefix sums of the tokens that each sequence has in the block.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], first: Int32[Array, ""], size: int, num_tokens: int):
        """Describe `size` of `num_tokens` tokens from token `first` on.

        If fewer than `size` tokens are left, the block starts before `first`. Tokens before `first` belong to no
        sequence of the block.
        """
        self._start, self._size = jnp.minimum(first, num_tokens - size), size
        self.cu_q_lens = jnp.clip(cu_q_lens - self._start, first - self._start, size)

    def take(self, x: Any) -> Any:
        """Slice the block out of arrays [T, ...]."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self._start, self._size), x)

    def put(self, x: Any, own: Any) -> Any:
        """Replace the block in arrays [T, ...] by `own`."""
        return jax.tree.map(lambda x, own: lax.dynamic_update_slice_in_dim(x, own, self._start, 0), x, own)


def merge(one: PrefillState, other: PrefillState) -> PrefillState:
    """Merge two states as `merge_states` does, but elementwise, so that XLA updates the state of a loop in place."""
    highest = finite_or_zero(jnp.maximum(one[1], other[1]))
    weights = [jnp.exp(lse - highest) for _, lse in (one, other)]
    total = weights[0] + weights[1]
    seen = total != 0
    divisor = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, highest + jnp.log(divisor), -jnp.inf)
    scaled = [out * (weight / divisor)[..., None] for (out, _), weight in zip((one, other), weights, strict=True)]
    return scaled[0] + scaled[1], lse
