"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) of a chunk over its cached prefix.

A chunk attends to itself over expanded keys and values, and to its prefix in one of two forms, whose results are merged
by their LSE:

- expanded: the prefix is gathered, expanded and attended in pieces of a fixed number of tokens, so that memory does not
  grow with the cached length;
- absorbed: queries take up W_UK and attend to the latents in their pages, and W_UV is applied to the output, for blocks
  of tokens from the first that has a prefix to the last. Nothing is expanded, but a query and a key cost 2·L + R
  products instead of nope + R + v.

With a window, the tokens that it may show are expanded at once. There are no kernels of its own: `gather_latent`,
`ragged_attention` and `mla_decode` do the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn import checks
from pallas_attn.ops.gather_latent import gather_latent
from pallas_attn.ops.mla_decode import mla_decode
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.ragged_attention import ragged_attention
from pallas_attn.portable.arguments import refuse_gradients
from pallas_attn.portable.latents import as_read_back
from pallas_attn.portable.merge import finite_or_zero
from pallas_attn.portable.query_rows import QueryRows
from pallas_attn.portable.varying import varying_like
from pallas_attn.runtime import device, dispatch, sharded_calls, tuning
from pallas_attn.types import Implementation, PagedLatent


@sharded_calls.over_devices
def mla_prefill(
    q_nope: Float[Array, "T Hq nope"],
    q_rope: Float[Array, "T Hq R"],
    latent_new: Float[Array, "T LR"] | None,
    cache: PagedLatent,
    w_uk: Float[Array, "Hq nope L"],
    w_uv: Float[Array, "Hq v L"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    absorbed: bool | None = None,
    piece_tokens: int | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "T Hq v"] | tuple[Float[Array, "T Hq v"], Float[Array, "T Hq"]]:
    """Causal attention of each sequence's new tokens over its cached prefix and themselves.

    Args:
      q_nope, q_rope: packed queries, unrotated and rotated parts; rows of no sequence are padding.
      latent_new: normed latents and rotated keys of the same tokens, in the cache's dtype, or in any 16-bit or 32-bit
        dtype for a quantised one.
      cache: of any dtype, holding the prefix. Nothing is written, and whether the new tokens are in there already makes
        no difference: over a quantised cache they count as they would be read back. None for queries that attend to the
        cached prefix alone, all of it.
      w_uk, w_uv: up-projections of the latent to keys and values, per head.
      block_tables: page ids, of all cached tokens; entries past them may hold anything.
      cu_q_lens: prefix sums of the new tokens. One that falls, such as a 0 at the end, counts as the largest before it.
      kv_lens: tokens each sequence holds, cached and new; without `latent_new` those that are cached.
      sm_scale: multiplies the scores. Required: DeepSeek's depends on more than the width.
      window: the number of newest tokens that every head sees; None for all. Memory is that of S·window expanded
        tokens, or of as many as tables have entries for.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      absorbed: whether chunks attend to their prefix absorbed or expanded; None for what is expected to be faster,
        which is absorbed where Mosaic's `mla_decode` takes the call and sequences have up to n new tokens (300 with
        128 heads of DeepSeek-V3's widths, 512 with 16, see `AbsorptionConfig`). If T is at most n and a block of tokens
        (128 with 128 heads, 512 with 16), all is; else the device decides by the mean of the sequences' new tokens,
        each counting as much as it has cached. With a window only False.
      piece_tokens: prefix tokens expanded at a time, over all sequences, rounded up to whole pages; None for what was
        measured or is expected to be fastest, see `PieceConfig`. With a window there are no pieces.
      return_lse: also return the LSE.
      implementation: of `gather_latent`, `ragged_attention` and `mla_decode`.

    Returns:
      The output in q's dtype, exactly 0 for padding rows and queries that see no key; with `return_lse` also the
      float32 natural-log LSE of the scaled, capped, masked scores, -inf for those.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: a window without `latent_new`, where queries have no place among the keys, or with
        `absorbed`; or the implementation named does not support the call.

    Example:
      >>> spec = pallas_attn.latent_cache_spec(num_pages=8, page_size=4, latent_dim=6, rope_dim=2, dtype=jnp.float32)
      >>> cache = pallas_attn.PagedLatent.allocate(spec)
      >>> block_tables = jnp.array([[5, 0, 2], [3, -1, -1]], jnp.int32)
      >>> cu_q_lens, kv_lens = jnp.array([0, 2, 5], jnp.int32), jnp.array([9, 3], jnp.int32)  # 7 tokens are cached
      >>> q_nope, q_rope, latent_new = jnp.ones((5, 4, 3)), jnp.ones((5, 4, 2)), jnp.ones((5, 8))
      >>> w_uk, w_uv = jnp.ones((4, 3, 6)), jnp.ones((4, 5, 6))
      >>> pallas_attn.mla_prefill(
      ...     q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, sm_scale=0.1
      ... ).shape
      (5, 4, 5)
    """
    block_tables, cu_q_lens, kv_lens = checks.int32(block_tables=block_tables, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    sm_scale, soft_cap = checks.required_number("sm_scale", sm_scale), checks.number("soft_cap", soft_cap)
    window = checks.window(window)
    checks.check_int_window(window)
    if window is not None and latent_new is None:
        raise NotImplementedError("window: takes None without latent_new, where queries have no place among the keys")
    if absorbed is not None:
        absorbed = checks.flag("absorbed", absorbed)
    if window is not None and absorbed:
        raise NotImplementedError("absorbed: takes None or False with a window, whose tokens are expanded at once")
    _check(q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, piece_tokens)
    if not (q_nope.shape[0] and kv_lens.shape[0]):
        empty = jnp.zeros((*q_nope.shape[:2], w_uv.shape[1]), q_nope.dtype)
        return (empty, jnp.full(q_nope.shape[:2], -jnp.inf, jnp.float32)) if return_lse else empty
    q_nope, q_rope, latent_new, cache, w_uk, w_uv = refuse_gradients(
        "mla_prefill", (q_nope, q_rope, latent_new, cache, w_uk, w_uv)
    )
    cu_q_lens = checks.bound_sums(cu_q_lens, q_nope.shape[0])
    if piece_tokens is None:
        piece_tokens = _piece_config(q_nope.shape[1], w_uk.shape[1] + q_rope.shape[2] + w_uv.shape[1]).piece_tokens
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    dtype = (
        (jnp.dtype(q.dtype) if cache.is_quantised else cache.pages.dtype) if latent_new is None else latent_new.dtype
    )

    def attend(latent: Float[Array, "U LR"], cu_kv_lens: Int32[Array, "S_plus_1"], causal: bool) -> Any:
        k, v = _expand(latent.astype(q.dtype), w_uk, w_uv)
        return ragged_attention(
            q,
            k,
            v,
            cu_q_lens,
            cu_kv_lens,
            causal=causal,
            window=window if causal else None,
            soft_cap=soft_cap,
            sm_scale=sm_scale,
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=implementation,
        )

    with jax.named_scope("mla_prefill"):
        capacity = block_tables.shape[1] * cache.page_size
        if latent_new is None:
            state = jnp.zeros((*q.shape[:2], w_uv.shape[1]), jnp.float32), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
            num_cached = checks.bound_lens(kv_lens, capacity)
        else:
            num_cached = checks.bound_lens(jnp.maximum(kv_lens, 0) - jnp.diff(cu_q_lens), capacity)
            if window is None:
                state = attend(as_read_back(latent_new, cache), cu_q_lens, True)
            else:
                visible = _visible_latents(
                    cache, latent_new, block_tables, cu_q_lens, num_cached, window, implementation
                )
                state = attend(*visible, True)
        if window is not None:
            out = state[0].astype(q.dtype)
            return (out, state[1]) if return_lse else out
        state = varying_like(state, (state, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens))
        pieces = _PrefixPieces(cache, dtype, block_tables, num_cached, piece_tokens)

        def with_pieces(state: PrefillState, is_wanted: Bool[Array, ""] | bool = True) -> PrefillState:
            count = jnp.where(is_wanted, pieces.count, 0)

            def absorb(carry):
                i, state = carry
                latent, cu_kv_lens = pieces.load(i, implementation)
                return i + 1, _merge(state, attend(latent, cu_kv_lens, False))

            start = jnp.zeros((), jnp.int32), state
            return lax.while_loop(lambda carry: carry[0] < count, absorb, start)[1]

        options = {"sm_scale": sm_scale, "soft_cap": soft_cap, "implementation": implementation}

        def prefix_of(own_cu_q_lens: Int32[Array, "S_plus_1"], num_tokens: int) -> _AbsorbedPrefix:
            rows = QueryRows(own_cu_q_lens, num_tokens, min(num_tokens, max(1, FILLED_ROWS // q.shape[1])))
            return _AbsorbedPrefix(cache, block_tables, rows, num_cached, **options)

        def with_latents(state: PrefillState) -> PrefillState:
            return _merge(state, prefix_of(cu_q_lens, q.shape[0]).attend(q, w_uk, w_uv))

        def with_latents_in_blocks(state: PrefillState, is_wanted: Bool[Array, ""] | bool = True) -> PrefillState:
            has_prefix = is_wanted & (num_cached > 0) & (jnp.diff(cu_q_lens) > 0)
            size, end = _block_tokens(*q.shape[:2]), jnp.max(jnp.where(has_prefix, cu_q_lens[1:], 0))

            def absorb(carry):
                first, state = carry
                block = _TokenBlock(cu_q_lens, first, size, q.shape[0])
                found = prefix_of(block.cu_q_lens, size).attend(block.take(q), w_uk, w_uv)
                return first + size, block.put(state, _merge(block.take(state), found))

            start = jnp.min(jnp.where(has_prefix, cu_q_lens[:-1], q.shape[0])), state
            return lax.while_loop(lambda carry: carry[0] < end, absorb, start)[1]

        if absorbed is None:
            most = _most_absorbed(q_nope, q_rope, cache, w_uk, w_uv, block_tables, soft_cap, implementation)
            if q.shape[0] <= min(most, _block_tokens(*q.shape[:2])):
                state = with_latents(state)
            elif most:
                # Two loops, of which one ends at once. A condition would copy the state.
                is_short = _is_short(most, cu_q_lens, num_cached)
                state = with_pieces(with_latents_in_blocks(state, is_short), ~is_short)
            else:
                state = with_pieces(state)
        else:
            state = with_latents_in_blocks(state) if absorbed else with_pieces(state)
    out = state[0].astype(q.dtype)
    return (out, state[1]) if return_lse else out


@dataclasses.dataclass(frozen=True)
class PieceConfig:
    """Length of the pieces in which the prefix is expanded.

    A piece costs memory for its keys and values, and a pass over the outputs of all queries that merges its result:
    16 bytes an element, which on an H200 take as long as attending 500 tokens does. Expanding a piece costs the same
    however few tokens it holds.

    Attributes:
      piece_tokens: tokens of a piece, over all sequences.
    """

    piece_tokens: int

    def __post_init__(self) -> None:
        if self.piece_tokens < 1:
            raise ValueError(f"{self.piece_tokens=} must be at least 1")


def _piece_config(heads: int, width: int) -> PieceConfig:
    """Piece size for `heads` query heads whose queries, keys and values have `width` columns together."""
    on_gpu = device.current().platform == "gpu"
    key = {"heads": heads, "width": width}
    return tuning.lookup("mla_prefill", key, PieceConfig, lambda: PieceConfig(4096 if on_gpu else 1024))


@dataclasses.dataclass(frozen=True)
class AbsorptionConfig:
    """Chunks that attend to their prefix absorbed.

    Expanding a token of a prefix costs the same however many queries attend to it, so short chunks are better off
    absorbed: by operations alone, up to L·(nope + v) / (2·L - nope - v) new tokens of a sequence, 170 at DeepSeek-V3's
    widths. What is expanded is also written and read again, which takes as long, and longer where heads are few: by
    measuring, about 320 tokens with 128 heads and 512 with 16
    (benchmarks/log/080-short-chunks-absorbed.md).

    Attributes:
      max_new_tokens: new tokens of a sequence up to which that is faster; 0 for never.
    """

    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"{self.max_new_tokens=} must be at least 0")


def _most_absorbed(
    q_nope: Float[Array, "T Hq nope"],
    q_rope: Float[Array, "T Hq R"],
    cache: PagedLatent,
    w_uk: Float[Array, "Hq nope L"],
    w_uv: Float[Array, "Hq v L"],
    block_tables: Int32[Array, "S P"],
    soft_cap: float | None,
    implementation: Implementation,
) -> int:
    """New tokens of a sequence up to which a call is better off absorbed; 0 where Mosaic's `mla_decode` does not run
    it: that of others was not measured.
    """
    heads, latent_dim, expanded = *w_uk.shape[::2], w_uk.shape[1] + w_uv.shape[1]
    takes: list[bool] = []

    def look(
        q_latent: Array, q_rope: Array, cache: PagedLatent, block_tables: Array, kv_lens: Int32[Array, "_"]
    ) -> None:
        call = MlaDecodeCall(
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
            soft_cap=soft_cap,
        )

        def is_kernel(name: str, found: Any) -> bool:
            return name == "mosaic" and found.load().num_programs(call) > 0

        takes.append(dispatch.choose("mla_decode", implementation, is_kernel))

    rows, heads_of_row = block_tables.shape[0], heads * max(1, FILLED_ROWS // heads)
    dtype, lens = q_nope.dtype, jax.ShapeDtypeStruct((rows,), jnp.int32)
    queries = [jax.ShapeDtypeStruct((rows, 1, heads_of_row, width), dtype) for width in (latent_dim, q_rope.shape[2])]
    with contextlib.suppress(NotImplementedError, ExceptionGroup):
        jax.eval_shape(look, *queries, cache, block_tables, lens)
    if not any(takes):
        return 0
    key = {"heads": heads, "latent_dim": latent_dim, "expanded": expanded, "quantised": cache.is_quantised}
    times = 7 / 4 if heads > 32 else 3
    counted = int(times * latent_dim * expanded / max(1, 2 * latent_dim - expanded))
    heuristic = AbsorptionConfig(counted)
    return tuning.lookup("mla_prefill/absorbed", key, AbsorptionConfig, lambda: heuristic).max_new_tokens


def _is_short(most: int, cu_q_lens: Int32[Array, "S_plus_1"], num_cached: Int32[Array, "S"]) -> Bool[Array, ""]:
    """Whether sequences have at most so many new tokens in the mean, each counted as often as it has cached tokens."""
    cached, new = num_cached.astype(jnp.float32), jnp.diff(cu_q_lens).astype(jnp.float32)
    return jnp.sum(cached * new) <= most * jnp.sum(cached)


ABSORBED_TOKENS = 128
"""Packed tokens of a block that attends absorbed, at least. What is no more than a block attends without asking whether
anything is cached: a loop around it would wait for the chunk's own attention, and takes 17 us itself, and one that ends
at once 16 (H200; benchmarks/log/114).
"""

FILLED_ROWS = 128
"""Query rows (heads of each query) that share what kernels read of a prefix."""

BLOCK_ROWS = 8192
"""Query rows that attend absorbed at a time, in blocks of at least 128 tokens."""


def _block_tokens(tokens: int, heads: int) -> int:
    """Packed tokens that attend absorbed at a time.

    They take memory for queries and outputs in latent space, and time whether they have a prefix or not: where prompts
    are cut into chunks, one of a step's is the rest of a prompt, and all others are whole.
    """
    return min(tokens, max(ABSORBED_TOKENS, BLOCK_ROWS // heads))


class _TokenBlock:
    """Packed tokens that follow each other.

    Attributes:
      cu_q_lens: int32 [S+1], prefix sums of the sequences' tokens in it.
    """

    def __init__(self, cu_q_lens: Int32[Array, "S_plus_1"], first: Int32[Array, ""], size: int, num_tokens: int):
        """Take `size` of `num_tokens` tokens from `first` on; if there are fewer, tokens before it, of no sequence."""
        self._start, self._size = jnp.minimum(first, num_tokens - size), size
        self.cu_q_lens = jnp.clip(cu_q_lens - self._start, first - self._start, size)

    def take(self, x: Any) -> Any:
        """Its tokens of arrays [T, ...]."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, self._start, self._size), x)

    def put(self, x: Any, own: Any) -> Any:
        """Arrays with its tokens replaced."""
        return jax.tree.map(lambda x, own: lax.dynamic_update_slice_in_dim(x, own, self._start, 0), x, own)


class _AbsorbedPrefix:
    """The cached tokens of all sequences, as latents that queries attend to without expanding them.

    Every query sees all of them. So the heads of a row's queries are heads of one query to `mla_decode`.
    """

    def __init__(
        self,
        cache: PagedLatent,
        block_tables: Int32[Array, "S P"],
        rows: QueryRows,
        num_cached: Int32[Array, "S"],
        **options: Any,
    ):
        """Find tables and lengths of the rows. `options` are those of `mla_decode`."""
        self._rows, self._cache, self._options = rows, cache, options
        self._tables = block_tables[rows.sequence]
        self._lens = jnp.where(rows.count > 0, num_cached[rows.sequence], 0)

    def attend(
        self,
        q: Float[Array, "T Hq nope_plus_R"],
        w_uk: Float[Array, "Hq nope L"],
        w_uv: Float[Array, "Hq v L"],
    ) -> PrefillState:
        """Attention of all queries over them."""
        nope, rows = w_uk.shape[1], self._rows
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def pack(x: Float[Array, "T Hq D"]) -> Float[Array, "rows_times_Q Hq D"]:
            return rows.pack(x).reshape(-1, *x.shape[1:])

        def as_one_query(x: Float[Array, "rows_times_Q Hq D"]) -> Float[Array, "rows 1 Q_times_Hq D"]:
            return x.reshape(-1, 1, rows.queries * x.shape[1], x.shape[2])

        # Rows are packed before they become as wide as latents, and unpacked after W_UV.
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


type PrefillState = tuple[Float32[Array, "T Hq v"], Float32[Array, "T Hq"]]
"""Attention over some of the keys, and its LSE."""


def _merge(one: PrefillState, other: PrefillState) -> PrefillState:
    """`merge_states` of two, element by element, so that the state of a loop is updated in place."""
    highest = finite_or_zero(jnp.maximum(one[1], other[1]))
    weights = [jnp.exp(lse - highest) for _, lse in (one, other)]
    total = weights[0] + weights[1]
    seen = total != 0
    divisor = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, highest + jnp.log(divisor), -jnp.inf)
    scaled = [out * (weight / divisor)[..., None] for (out, _), weight in zip((one, other), weights, strict=True)]
    return scaled[0] + scaled[1], lse


def _check(q_nope, q_rope, latent_new, cache, w_uk, w_uv, block_tables, cu_q_lens, kv_lens, piece_tokens) -> None:
    dims = checks.Dims()
    dims.check("q_nope", q_nope, "T Hq nope", checks.PLAIN)
    dims.check("q_rope", q_rope, "T Hq R", (q_nope.dtype,))
    dims.check("w_uk", w_uk, "Hq nope L", (q_nope.dtype,))
    dims.check("w_uv", w_uv, "Hq v L", (q_nope.dtype,))
    checks.check_latent(cache, dims)
    if latent_new is not None:
        checks.check_new_latents("latent_new", latent_new, cache, dims)
    dims.check("block_tables", block_tables, "S P", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    if piece_tokens is not None:
        checks.size("piece_tokens", piece_tokens)


def _expand(
    latent: Float[Array, "U LR"], w_uk: Float[Array, "Hq nope L"], w_uv: Float[Array, "Hq v L"]
) -> tuple[Float[Array, "U Hq nope_plus_R"], Float[Array, "U Hq v"]]:
    """Per-head keys and values; all heads share the rotated key."""
    latent_dim = w_uk.shape[-1]
    normed, rotated = latent[:, :latent_dim], latent[:, latent_dim:]
    precision = lax.Precision.HIGHEST if latent.dtype == jnp.float32 else None
    k_nope = jnp.einsum("ul,hnl->uhn", normed, w_uk, precision=precision)
    v = jnp.einsum("ul,hvl->uhv", normed, w_uv, precision=precision)
    k_rope = jnp.broadcast_to(rotated[:, None, :], (*k_nope.shape[:2], rotated.shape[-1]))
    return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _visible_latents(
    cache: PagedLatent,
    latent_new: Float[Array, "T LR"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    num_cached: Int32[Array, "S"],
    window: int,
    implementation: Implementation,
) -> tuple[Float[Array, "U LR"], Int32[Array, "S_plus_1"]]:
    """Gather what the windows of a chunk's queries show: of each sequence the cached pages with its last window - 1
    tokens, and the new ones; with the prefix sums of their numbers.
    """
    page_size = cache.page_size
    skipped = jnp.maximum(num_cached - (window - 1), 0) // page_size
    width = min(-(-(window - 1) // page_size) + 1, block_tables.shape[1])
    lens = num_cached - skipped * page_size + jnp.diff(cu_q_lens)
    latent = gather_latent(
        cache,
        latent_new,
        _tables_from(block_tables, skipped, width),
        cu_q_lens,
        lens,
        length=block_tables.shape[0] * width * page_size + latent_new.shape[0],
        implementation=implementation,
    )
    return latent, jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])


def _tables_from(block_tables: Int32[Array, "S P"], first: Int32[Array, "S"], width: int) -> Int32[Array, "S width"]:
    """Take `width` entries of each table from one on; the last one where there are no more."""
    entry = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return jnp.take_along_axis(block_tables, jnp.minimum(entry, block_tables.shape[1] - 1), axis=1)


class _PrefixPieces:
    """The cached tokens of all sequences, packed and cut into pieces of at most `tokens` of them.

    Sequences are laid out in whole pages, so that a piece starts and ends on page boundaries of each and its part of a
    sequence is a shifted block table.
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
        self._pages = -(-piece_tokens // self._page_size)
        num_pages = -(-num_cached // self._page_size)
        self._end_page = jnp.cumsum(num_pages, dtype=jnp.int32)
        self._first_page = self._end_page - num_pages
        self.count = -(-self._end_page[-1] // self._pages)

    def load(
        self, i: Int32[Array, ""], implementation: Implementation
    ) -> tuple[Float[Array, "U LR"], Int32[Array, "S_plus_1"]]:
        """Latents of piece i in `dtype`, packed without gaps, and the prefix sums of its tokens per sequence."""
        start = i * self._pages
        skipped = jnp.maximum(start - self._first_page, 0)  # pages of each sequence in earlier pieces
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
