"""Decode attention over paged K and V: kernel operands, kernel body, and the computation of one tile.

Each CTA is one warpgroup. Several CTAs share a multiprocessor, so that some compute while others wait for memory. A CTA
processes its share of a decode plan as a sequence of splits (`mosaic.primitives.tile_scheduler`). `DecodeProducts` is
the interface to the tensor cores, with one implementation per architecture: `mosaic.hopper.decode_products` and
`mosaic.blackwell.decode_products`.

Terms (`pallas_attn.types` explains B, Q, Hq, Hkv, D, N, ps, P, L and R):

    plan row       one KV head of one sequence, numbered sequence · Hkv + head
    split          consecutive pages of one plan row, processed by one CTA; also called work tile
    query row      one query head of one query token; all query rows of a plan row attend to the same keys
    block          up to `width` query rows of a plan row, padded to `width` (`QueryPacking`). Each CTA has one block
    tile           keys and values of `tokens` tokens, from one or several pages
    stage          shared-memory buffer for one tile
    pool row       one page of one KV head in the pool: k[page · Hkv + head], shape [ps, D]
    key segment    columns of a key that have a separate array in shared memory: (D,), or (L, R) for latents
    query parts    16-bit arrays whose sum is the query; there are two if one would round too much, otherwise one
    token group    consecutive tokens of a page that share one scale of K and one of V
    channel group  128 consecutive channels of an 8-bit latent. Each token has one scale per channel group

Main loop (`_kernel`, `KvSplit.attend`, `KvSplit.step`):

    for each work tile of this CTA:                      # for_each_work_tile
        look up the pool rows of the first `stages` tiles in the block table
        first warp: start TMA of the queries and of these tiles
        wait q_full
        m, l, acc = -inf, 0, 0
        for i in range(num_tiles):                       # tile i is in stage i % stages
            wait full[stage]
            s = K qᵀ                                     # [tokens, query_rows]; scaled, capped
            if refills_keys_early:
                first warp: start TMA of the keys of tile i + stages into this stage
                wait values_full[stage]
            if some query row does not see the whole tile: mask s, zero values that no query row sees
            m, p = max(m, s), exp(s - m)                 # p [tokens, query_rows]
            acc = acc * rescale + Vᵀ p                   # [value_dim, query_rows]
            first warp: start TMA of tile i + stages (its values, if refills_keys_early) into this stage
        if the work tile has all pages of the plan row: write output and LSE  # OutputWriter
        else: store the partial state                    # PartialStates

A second kernel (`merge_splits`) merges the partial states of each plan row that has several splits. It also writes the
output of plan rows that see no key.

Timeline of a split of five tiles in two stages, top to bottom. S and O are the two products, P the probabilities:

    TMA of queries, tile 0 -> stage 0, tile 1 -> stage 1     (the CTA does not wait)
    wait q_full
    wait full[0]     S, softmax, P, O of tile 0              tile 1 arrives meanwhile
                     TMA of tile 2 -> stage 0
    wait full[1]     S, softmax, P, O of tile 1              tile 2 arrives meanwhile
                     TMA of tile 3 -> stage 1
    wait full[0]     ... tile 2, then TMA of tile 4 -> stage 0; tile 3; tile 4
    output, or a partial state

Two tiles of 16-bit keys and values of more than 384 columns do not fit shared memory. With `refills_keys_early`, a
stage has separate barriers for keys and values, so that a single stage keeps at least half of a tile in flight:

    TMA of queries, keys and values of tile 0
    wait full[0]         S of tile 0                         values of tile 0 arrive meanwhile
                         TMA of the keys of tile 1
    wait values_full[0]  softmax, P, O of tile 0             keys of tile 1 arrive meanwhile
                         TMA of the values of tile 1

Barriers (all warps of the CTA wait):

    barrier       one phase per   arrivals                                     arrivals per phase
    full[stage]   tile            TMA; the first warp for an absent page       pages * page_copies
    values_full   tile            TMA; the first warp for an absent page       pages
    q_full        split           TMA; the first warp for a padding query      query_parts * key segments, or
                                                                               block_queries if `packs_queries`

`values_full[stage]` exists with `refills_keys_early` only; `full[stage]` then is the barrier of the keys.

Stages have no "empty" barrier. The first warp refills a stage inside `basics.first_warp`, which first synchronizes all
warps. At this point every warp has waited for the products that read the stage. The warps' own accesses to the stage
are ordered before the copy by the `commit_smem` that follows the store of P. With `refills_keys_early`, the warps do
not access the keys themselves.

Deadlock freedom: a CTA waits only for copies that it started itself, before the wait.

- `start_copies` makes all arrivals of one phase of full[stage], `start_value_copies` of values_full[stage]. The CTA
  waits once per tile, in the order in which it started the copies. It starts no copy for tiles past the last one.
- q_full has one phase per split. All copies of the queries are started before the wait.
- Before the CTA overwrites the output tile in shared memory, it waits until the previous bulk copy has read the tile.
- Barriers of the products are described in `mosaic.hopper.decode_products` and `mosaic.blackwell.decode_products`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic.decode_merge import COLUMN_STATES, OUTPUT_BYTES, OutputWriter, merge_splits
from pallas_attn.mosaic.merge import AttentionState
from pallas_attn.mosaic.partial_states import PartialStates
from pallas_attn.mosaic.primitives import basics, dequantize, register_tiles, shared_memory
from pallas_attn.mosaic.primitives.basics import LOG2E, Ref
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.mosaic.primitives.register_tiles import (
    PER_COLUMN,
    RegisterLayout,
    clear_rows,
    over_columns,
    over_tokens,
)
from pallas_attn.mosaic.primitives.tile_scheduler import ABSENT, WorkTile, for_each_work_tile
from pallas_attn.portable.schedule import most_splits
from pallas_attn.types import LATENT_GROUP, DecodePlan, HeadWindow, ScaleLayout

SCALES_PER_COPY = 4
"""Number of float32 scales in 16 bytes. A bulk copy needs addresses and sizes that are multiples of 16 bytes."""

# --- compile-time parameters, operands and scratch of a kernel


class DecodeProducts(Protocol):
    """Tensor-core products of the decode kernel for one architecture. Implementations hold no state of a tile.

    `own` is the scratch of the products, from `scratch_types`. `width` is `tile.packing.width`, the number of columns.

    Attributes:
      max_lookahead: limit of `DecodeTile.looks_ahead`.
    """

    max_lookahead: ClassVar[int]

    def scores_layout(self, tile: DecodeTile) -> RegisterLayout:
        """Register layout of the result of `scores`."""
        ...

    def values_layout(self, tile: DecodeTile) -> RegisterLayout:
        """Register layout of the accumulator [value_dim, query_rows]."""
        ...

    def query_row_bytes(self, tile: DecodeTile, key_row_bytes: int) -> int:
        """Swizzle width [bytes] of the queries in shared memory, given the swizzle width of the keys."""
        ...

    def probs_type(self, tile: DecodeTile) -> Any:
        """Scratch type of the probabilities."""
        ...

    def probs(self, tile: DecodeTile, p: Ref) -> list[Ref]:
        """Views [tokens, width] of `p`, the scratch of `probs_type`: one view, or one per channel group of a latent."""
        ...

    def store_probs(self, tile: DecodeTile, ps: list[jax.Array], to: list[Ref]) -> None:
        """Write each array of `ps` to its view in `to`, and make the writes visible to the tensor cores."""
        ...

    def scratch_types(self, tile: DecodeTile) -> Any:
        """Scratch types of memory and barriers that only the products use."""
        ...

    def scores(
        self, tile: DecodeTile, own: Any, keys: list[Ref], queries: list[list[Ref]], scales: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Compute K qᵀ [tokens, width].

        Args:
          keys: [tokens, segment width] in shared memory, one reference per key segment.
          queries: for each key segment, the query parts [width, segment width] in shared memory.
          scales: for each channel group of a latent, the scale of each token, [tokens]; empty for other caches.
        """
        ...

    def load_values(self, tile: DecodeTile, own: Any, v: Ref) -> Any:
        """Prepare cached values [tokens, D] as an operand of `add_values`.

        The caller calls `store_probs` after this function, so shared-memory writes of this function are committed too.
        """
        ...

    def add_values(self, tile: DecodeTile, own: Any, acc: jax.Array, values: Any, ps: list[Ref]) -> jax.Array:
        """Compute acc + Vᵀ P.

        Args:
          values: result of `load_values`.
          ps: probabilities [tokens, width] after `store_probs`: one array, or one per channel group of a latent.
        """
        ...

    def in_channel_order(self, tile: DecodeTile, acc: jax.Array) -> jax.Array:
        """Permute the rows of a finished accumulator to channel order. `add_values` may use another order."""
        ...

    def capped(self, s: jax.Array, soft_cap: float) -> jax.Array:
        """Compute soft_cap * tanh(s / soft_cap)."""
        ...


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Shapes and dtypes of a KV tile, which one CTA processes per iteration.

    Attributes:
      packing: assignment of query rows to columns.
      tokens: tokens of the tile.
      page_size: tokens of a page.
      key_dims: widths of the key segments: (D,), or (L, R) for latents.
      has_values: whether V is a separate array; otherwise the first key segment is also the value.
      query_parts: number of 16-bit arrays whose sum is the query: 2 for caches with channel scales, otherwise 1.
      packs_queries: whether the kernel receives queries [B, Q, Hq, D] and arranges them as columns itself. Otherwise
        XLA arranges them before the kernel (`QueryPacking.pack`).
      scales: scale layout of an 8-bit cache: "head", "channel", or the number of token groups per page. None otherwise.
      q_dtype: dtype of the queries.
      cache_dtype: dtype of K and V.
      out_dtype: dtype of the output.
      rope_dtype: dtype of the rotated columns of 8-bit latents and of their queries; None for all other caches. In an
        8-bit latent cache, the rotated columns are a separate pool.
      products: tensor-core products of the architecture.
      tokens_first: whether the pools have tokens before heads, [tokens of the pool, Hkv, columns], and block tables
        have one entry per token. The entry of a page's first token is then the index of the page's first row in the
        pool.
      first_value_column: column of the pool of values where a value starts; above 0 if keys and values are one array.
    """

    packing: QueryPacking
    tokens: int
    page_size: int
    key_dims: tuple[int, ...]
    has_values: bool
    query_parts: int
    packs_queries: bool
    scales: ScaleLayout
    q_dtype: Any
    cache_dtype: Any
    out_dtype: Any
    products: DecodeProducts
    rope_dtype: Any = None
    tokens_first: bool = False
    first_value_column: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the scores, [tokens, width]."""
        return self.tokens, self.packing.width

    @property
    def value_dim(self) -> int:
        return self.key_dims[0]

    @property
    def tokens_per_row(self) -> int:
        """Number of tokens in one row of the tile in shared memory; above 1 only for narrow 8-bit heads."""
        return dequantize.tokens_per_smem_row(self.cache_dtype, self.value_dim)

    @property
    def latent_groups(self) -> int:
        """Number of channel groups of an 8-bit latent; 0 for other caches."""
        return 0 if self.rope_dtype is None else self.value_dim // LATENT_GROUP

    @property
    def scales_per_page(self) -> int:
        """Number of scales of an 8-bit latent tile that one page contributes."""
        return self.page_tokens * self.latent_groups

    @property
    def key_slices(self) -> list[tuple[int, int]]:
        """First column and width of each key segment in the last dimension of its pool, `DecodeInputs.k` or `rope`."""
        widths = [dim * self.tokens_per_row for dim in self.key_dims]
        if self.latent_groups:
            return [(0, width) for width in widths]
        return list(zip(itertools.accumulate(widths, initial=0), widths, strict=False))

    @property
    def key_dtypes(self) -> list[Any]:
        """Dtype of each key segment."""
        return [self.cache_dtype, self.rope_dtype] if self.latent_groups else [self.cache_dtype] * len(self.key_dims)

    @property
    def query_dtypes(self) -> list[Any]:
        """Dtype of the queries for each key segment."""
        return [self.q_dtype, self.rope_dtype] if self.latent_groups else [self.q_dtype] * len(self.key_dims)

    @property
    def row_bytes(self) -> int:
        """Swizzle width [bytes] of K and V in shared memory, 64 or 128.

        It must divide the last dimension of the pool [bytes], because Mosaic GPU tiles this whole dimension for the TMA
        copy. All key segments in one pool therefore have the same swizzle width.
        """
        if self.latent_groups:
            return 128
        pool_row = sum(width for _, width in self.key_slices) * jnp.dtype(self.cache_dtype).itemsize
        return 64 if pool_row % 128 else 128

    @property
    def key_row_bytes(self) -> list[int]:
        """Swizzle width [bytes] of each key segment."""
        if not self.latent_groups:
            return [self.row_bytes] * len(self.key_dims)
        return [self.row_bytes, 64 if self.key_dims[1] * jnp.dtype(self.rope_dtype).itemsize % 128 else 128]

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 if a page holds several tiles."""
        return max(1, self.tokens // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Number of tokens of one page that are in the same tile."""
        return min(self.tokens, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // self.tokens)

    def first_page(self, i: Any) -> tuple[Any, Any]:
        """Return where the i-th tile of a split starts: its first page, counted from the start of the split, and the
        index of the tile in this page (0 if a page is not larger than a tile).
        """
        if self.tiles_per_page == 1:
            return i * self.pages, 0
        return lax.div(i, self.tiles_per_page), lax.rem(i, self.tiles_per_page)

    def rows(self, tokens: int) -> int:
        """Number of shared-memory rows that hold `tokens` tokens."""
        return tokens // self.tokens_per_row

    @property
    def page_groups(self) -> int:
        """Number of token groups per page; 0 if the cache has no scale per token or token group."""
        return self.scales if isinstance(self.scales, int) else 0

    @property
    def group_tokens(self) -> int:
        """Number of tokens of one token group that are in the same tile."""
        return min(self.page_tokens, self.page_size // self.page_groups)

    @property
    def groups(self) -> int:
        """Number of token groups of one page that are in the same tile."""
        return self.page_tokens // self.group_tokens

    @property
    def refills_keys_early(self) -> bool:
        """Whether the copies of the next keys start before the values of a tile are multiplied. Keys and values then
        have separate barriers.

        Without it, two tiles of wide 16-bit heads would have to fit shared memory.
        """
        return self.has_values and self.value_dim > 256 and jnp.dtype(self.cache_dtype).itemsize == 2

    @property
    def page_copies(self) -> int:
        """Number of TMA copies for each page of a tile that arrive at `DecodeScratch.full`: key segments, values unless
        they have a separate barrier, and scales.
        """
        values = self.has_values and not self.refills_keys_early
        return len(self.key_dims) + values + (2 if self.page_groups else 1 if self.latent_groups else 0)

    @property
    def looks_ahead(self) -> bool:
        """Whether the kernel looks up the pages of tile i + stages at the start of iteration i instead of at its end.

        The lookup then overlaps the computation, but its results stay in registers. Large accumulators leave too few
        registers for several pages. With `refills_keys_early`, the copies of keys and of values share a lookup.
        """
        return (
            self.refills_keys_early
            or self.pages * self.packing.width * max(self.value_dim, 256) <= self.products.max_lookahead
        )

    @property
    def reduction_bytes(self) -> int:
        """Shared memory [bytes] for reductions over the tokens. 128 bytes per column let all columns be reduced in a
        single round.
        """
        return 1024 if self.latent_groups else min(128 * self.packing.width, 4096)

    @property
    def output_bytes(self) -> int:
        """Upper limit [bytes] of the output tile in shared memory.

        For 8-bit latents, 0 selects the smallest output tile. Two CTAs with 16 query rows then fit on a multiprocessor
        with two stages each.
        """
        return 0 if self.latent_groups else OUTPUT_BYTES

    def max_stages(self, ctas: int, limit: int) -> int:
        """Largest number of stages, up to `limit`, for which `ctas` CTAs fit the shared memory of a multiprocessor."""

        def fits(stages: int) -> bool:
            types = DecodeScratch.types(self, stages)
            return shared_memory.fits(types, ctas, reduction_bytes=self.reduction_bytes)

        return next((stages for stages in range(limit, 0, -1) if fits(stages)), 0)


@dataclasses.dataclass(frozen=True)
class DecodeStatic:
    """Compile-time parameters of a kernel, except shapes and dtypes of its arrays.

    Attributes:
      stages: number of stages.
      score_scale: factor of K qᵀ.
      window: window of all heads [tokens], or None. Windows per head are in `DecodeInputs.window`.
    """

    tile: DecodeTile
    stages: int
    num_kv_heads: int
    score_scale: float
    soft_cap: float | None
    window: int | None


class DecodeInputs(NamedTuple):
    """Kernel operands: arrays, or references in the kernel. `QueryPacking` defines blocks, query_blocks, head_blocks
    and width; rows is the number of plan rows, B·Hkv.

    Attributes:
      q: for each key segment [query_parts, blocks·rows, width, segment width]; the sum over query_parts is the query.
        Or one array [B, Q, Hq, D] if `DecodeTile.packs_queries`.
      k, v: [N·Hkv, ps, columns]; [N·Hkv, ps / t, t·D] with t = `DecodeTile.tokens_per_row` tokens per row; or
        [tokens of the pool, Hkv, columns] with `DecodeTile.tokens_first`. A key has D of the columns. For latents, k
        has all key segments of the pool, and v is None because the first key segment is also the value.
      rope: [N, ps, R], second key segment of 8-bit latents; otherwise None.
      k_scale, v_scale: scales in the layout `DecodeTile.scales`: [Hkv] per head; [Hkv, D] per channel, where k_scale is
        None because it was multiplied into q; [N·Hkv·g] for g token groups per page. For 8-bit latents, k_scale is
        [N, ps · channel groups] and is the scale of keys and values. None for 16-bit caches.
      q_scale: float32 [blocks·rows, width], factor of the scores of each column; or None.
      block_tables: int32 [B, P] page ids, or [B, Hkv, P] pool-row ids; [B, P·ps] token ids with
        `DecodeTile.tokens_first`.
      kv_lens: int32 [B], tokens of each sequence, including its queries.
      q_lens: int32 [B], queries of each sequence; None if every sequence has Q queries.
      window: windows and sink tokens per head, or None.
      drafts: int32 [query_blocks, B, width]; bit j is set if the query of this column sees draft key j, the j-th of the
        sequence's new tokens. None for causal visibility.
      sinks: [head_blocks, Hkv, width], sink logit of each column; or None.
    """

    q: tuple[Any, ...]
    k: Any
    v: Any
    rope: Any
    k_scale: Any
    v_scale: Any
    q_scale: Any
    block_tables: Any
    kv_lens: Any
    q_lens: Any
    plan: DecodePlan
    window: HeadWindow | None
    drafts: Any
    sinks: Any


class DecodeScratch(NamedTuple):
    """Shared memory and barriers of a CTA.

    Attributes:
      q: for each key segment [query_parts, width, segment width].
      unpacked_q: [width, D], queries as TMA copied them, if `DecodeTile.packs_queries`; otherwise None.
      k: for each key segment [stages, tokens, segment width] in the cache's dtype, or [stages, tokens / t, t · segment
        width] with t = `DecodeTile.tokens_per_row`.
      v: like k; None if the first key segment is also the value.
      p: probabilities; its type is `DecodeProducts.probs_type`.
      out: output tile; its type is `OutputWriter.tile_type`.
      tile_meta: int32 [2 · stages + 2, max(pages, width)].
        Rows 0 to stages - 1: position of the first token of each page in the stage, or ABSENT.
        Row `stages`: newest position that the query of each column sees, or -1 for a column without a query.
        Row `stages + 1`: newest position that the window of each column hides.
        Rows `stages + 2` on, one per stage: index of each page's first scale in `scales`. It is above 0 where the copy
        was rounded down to a multiple of 16 bytes.
      scales: float32 [stages, 2, pages, at least 32] for K and V with token groups, [stages, pages, at least 32] for
        8-bit latents, or None. The minimum of 32 aligns each copy to 128 bytes.
      full: one barrier per stage; a phase completes when the tile has arrived, or its keys if values have a separate
        barrier.
      values_full: one barrier per stage for the values, if `DecodeTile.refills_keys_early`; otherwise None.
      q_full: barrier; a phase completes when the queries have arrived.
      products: scratch of the products; its type is `DecodeProducts.scratch_types`.
    """

    q: tuple[Any, ...]
    unpacked_q: Any
    k: tuple[Any, ...]
    v: Any
    p: Any
    out: Any
    tile_meta: Any
    scales: Any
    full: Any
    values_full: Any
    q_full: Any
    products: Any

    @staticmethod
    def types(tile: DecodeTile, stages: int) -> DecodeScratch:
        """Scratch types of a kernel."""
        packing, (tokens, width) = tile.packing, tile.shape
        keys = [
            register_tiles.operand((stages, tile.rows(tokens), columns), dtype, row_bytes=row_bytes)
            for (_, columns), dtype, row_bytes in zip(tile.key_slices, tile.key_dtypes, tile.key_row_bytes, strict=True)
        ]
        queries = [
            register_tiles.operand(
                (tile.query_parts, width, dim), dtype, row_bytes=tile.products.query_row_bytes(tile, row_bytes)
            )
            for dim, dtype, row_bytes in zip(tile.key_dims, tile.query_dtypes, tile.key_row_bytes, strict=True)
        ]
        scales = (stages, 2, tile.pages, max(32, tile.page_groups))
        if tile.latent_groups:
            scales = (stages, tile.pages, -(-tile.scales_per_page // 32) * 32)
        return DecodeScratch(
            q=tuple(queries),
            unpacked_q=plgpu.SMEM((width, tile.value_dim), tile.q_dtype) if tile.packs_queries else None,
            k=tuple(keys),
            v=keys[0] if tile.has_values else None,
            p=tile.products.probs_type(tile),
            out=OutputWriter.tile_type(width, tile.value_dim, tile.out_dtype, tile.output_bytes),
            tile_meta=plgpu.SMEM((2 * stages + 2, max(tile.pages, width)), jnp.int32),
            scales=plgpu.SMEM(scales, jnp.float32) if tile.page_groups or tile.latent_groups else None,
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=tile.pages * tile.page_copies),
            values_full=plgpu.Barrier(num_barriers=stages, num_arrivals=tile.pages)
            if tile.refills_keys_early
            else None,
            q_full=plgpu.Barrier(
                num_arrivals=packing.block_queries if tile.packs_queries else tile.query_parts * len(tile.key_dims)
            ),
            products=tile.products.scratch_types(tile),
        )

    def values(self, stage: Any) -> Ref:
        return (self.k[0] if self.v is None else self.v).at[stage]


# --- the kernel


def decode_attention(
    x: DecodeInputs,
    static: DecodeStatic,
    out_shape: tuple[int, ...],
    out: Float[Array, "T Hq V"] | None = None,
    *,
    name: str,
) -> tuple[Float[Array, "B Q Hq V"] | Float[Array, "T Hq V"], Float[Array, "B Q Hq"]]:
    """Run the decode kernel and the merge kernel.

    Returns:
      Output, with shape `out_shape` or the updated `out`, and LSE [B, Q, Hq].

    Args:
      out_shape: [B, Q, Hq, V], where V is the width of a value.
      out: array whose first B·Q tokens are overwritten by the output, in place; None to allocate the output.
      name: name of the kernel in profiles.
    """
    tile, plan = static.tile, x.plan
    packing, rows, num_ctas = tile.packing, plan.num_pages.shape[0], plan.cta_row.shape[0] - 1
    states = most_splits(plan, plan.made_for.table_pages)
    out_ref = None if out is None else basics.alias_in_place(out)
    # The kernel writes output and LSE of plan rows with one split, and partial states of plan rows with several splits.
    own, lse, partials = plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(
            None
            if out_ref is not None
            else jax.ShapeDtypeStruct((math.prod(out_shape[:2]), *out_shape[2:]), tile.out_dtype),
            jax.ShapeDtypeStruct((packing.blocks, rows, packing.width), jnp.float32),
            PartialStates.types(packing.blocks * states, packing.width, tile.value_dim),
        ),
        grid=(num_ctas, packing.blocks),
        grid_names=("program", "block"),
        scratch_types=DecodeScratch.types(tile, static.stages),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=tile.reduction_bytes),
        kernel_name=name,
    )(basics.materialize(x), out_ref)
    result = basics.alias_in_place(own) if out_ref is None else out_ref
    layout = tile.products.values_layout(tile)
    lse = packing.unpack(merge_splits(result, lse, partials, plan, x.sinks, packing, layout), static.num_kv_heads)
    finished = basics.read_back(result)
    return (finished.reshape(out_shape) if out is None else finished), lse


def _kernel(
    static: DecodeStatic,
    x: DecodeInputs,
    out_ref: Ref | None,
    own: Ref | None,
    lse: Ref,
    partials: PartialStates,
    *scratch: Ref,
) -> None:
    """Process the work tiles of one CTA."""
    out = own if out_ref is None else out_ref
    block, mem, packing = lax.axis_index("block"), DecodeScratch(*scratch), static.tile.packing
    layout = static.tile.products.values_layout(static.tile)

    def attend(work: WorkTile, carry: Any) -> Any:
        split = KvSplit.of(static, x, mem, block, work)
        state = split.attend()

        @pl.when(work.is_whole_row)
        def _write() -> None:
            sink = packing.load_sinks(x.sinks, block, split.head)
            OutputWriter(out, lse.at[block, work.row], mem.out, layout).write(packing, block, work.row, state, sink)

        @pl.when(~work.is_whole_row)
        def _store_partial() -> None:
            partials.store(partials.state_index(block, packing.blocks, work.split), state, layout)

        return carry

    for_each_work_tile(x.plan, attend)
    plgpu.wait_smem_to_gmem(0)


# --- one split of a plan row


@dataclasses.dataclass(frozen=True)
class KvSplit:
    """One split of a plan row, for one block of query rows.

    The plan numbers only the visible pages of a plan row: first `sink_pages` pages with sink tokens, from block-table
    entry 0 on, then the pages of the window, from entry `first_page` on (`table_entry`).

    Attributes:
      block: index of the block.
      row: plan row, batch · Hkv + head.
      start, stop: number of the first page, and of the last page plus 1.
      batch, head: sequence and KV head of the plan row.
      kv_len, q_len: tokens of the sequence including its queries, and its queries.
      first_query: position of the first query, kv_len - q_len; negative if queries outnumber keys.
      window: window of the head [tokens], or None.
      sink_tokens: number of first tokens that are visible outside the window.
    """

    static: DecodeStatic
    x: DecodeInputs
    mem: DecodeScratch
    block: Any
    row: Any
    start: Any
    stop: Any
    sink_pages: Any
    first_page: Any
    batch: Any
    head: Any
    kv_len: Any
    q_len: Any
    first_query: Any
    window: Any
    sink_tokens: Any

    @staticmethod
    def of(static: DecodeStatic, x: DecodeInputs, mem: DecodeScratch, block: Any, work: WorkTile) -> KvSplit:
        batch, head = lax.div(work.row, static.num_kv_heads), lax.rem(work.row, static.num_kv_heads)
        sink_pages, first_page = x.plan.sink_pages[work.plan_index], x.plan.first_page[work.plan_index]
        kv_len = x.kv_lens[batch]
        q_len = jnp.int32(static.tile.packing.queries) if x.q_lens is None else x.q_lens[batch]
        if x.window is None:
            window, sink_tokens = static.window, 0
        else:
            window, sink_tokens = x.window.window[head], x.window.sink_tokens[head]
        pages = work.row, work.start, work.stop, sink_pages, first_page
        lens = kv_len, q_len, kv_len - q_len
        return KvSplit(static, x, mem, block, *pages, batch, head, *lens, window, sink_tokens)

    @property
    def tile(self) -> DecodeTile:
        return self.static.tile

    @property
    def products(self) -> DecodeProducts:
        return self.static.tile.products

    @property
    def layout(self) -> RegisterLayout:
        """Register layout of the scores."""
        return self.products.scores_layout(self.tile)

    @property
    def block_row(self) -> Any:
        """Index of this split's query rows in arrays [blocks·rows, ...]."""
        return self.block * self.x.plan.num_pages.shape[0] + self.row

    @property
    def num_tiles(self) -> Any:
        return pl.cdiv(self.stop - self.start, self.tile.pages) * self.tile.tiles_per_page

    def attend(self) -> AttentionState:
        """Attend to all tiles of the split. Return maximum, sum and unnormalised output of each query row."""
        mem, tile = self.mem, self.tile
        # Look up all pages before the first copy starts. The compiler moves no load across the start of a copy, so
        # lookups between copies would run one after the other.
        first = [(jnp.int32(i), self.look_up_pages(jnp.int32(i))) for i in range(self.static.stages)]

        @basics.first_warp
        def _fill() -> None:
            self.start_query_copies()
            for i, pages in first:
                pl.when(i < self.num_tiles)(functools.partial(self.start_copies, i, pages))
                if tile.refills_keys_early:
                    pl.when(i < self.num_tiles)(functools.partial(self.start_value_copies, i, pages))

        self.store_limits()
        plgpu.barrier_wait(mem.q_full)
        if tile.packs_queries:
            mem.q[0].at[0].transpose((1, 0))[...] = basics.load(mem.unpacked_q.transpose((1, 0)), self.layout.tile)
            plgpu.commit_smem()
        layout = self.products.values_layout(tile)
        state = COLUMN_STATES.empty((tile.value_dim, tile.packing.width), PER_COLUMN, layout.tile)
        state = state._replace(
            l=register_tiles.filled(0.0, tile.shape, self.layout.tile)  # [tokens, query_rows], summed after the loop
        )
        m, l, acc = lax.fori_loop(0, self.num_tiles, self.step, state)  # noqa: E741
        if tile.scales is not None or tile.latent_groups:
            acc = self.apply_value_scales(self.products.in_channel_order(tile, acc))
        is_query = basics.load(self.limits(0), PER_COLUMN) >= 0
        return AttentionState(
            jnp.where(is_query, m, -jnp.inf),
            jnp.where(is_query, l.sum(axis=0), 0.0),
            jnp.where(over_columns(is_query, acc.shape), acc, 0.0),
        )

    def apply_value_scales(self, acc: Any) -> Any:
        """Multiply the accumulator by value scales that all tokens share: one per head or one per channel."""
        if self.tile.scales == "head":
            return acc * self.x.v_scale[self.head]
        if self.tile.scales == "channel":
            per_channel = self.products.values_layout(self.tile).per_row
            return acc * over_tokens(basics.load(self.x.v_scale.at[self.head], per_channel), acc.shape)
        return acc  # `step` multiplied scales per token into P

    # Copies to shared memory

    def start_query_copies(self) -> None:
        """Start the copies of the queries, on one warp."""
        x, mem, packing = self.x, self.mem, self.tile.packing
        if not self.tile.packs_queries:
            for q, segment in zip(x.q, mem.q, strict=True):
                for i in range(q.shape[0]):
                    plgpu.copy_gmem_to_smem(q.at[i, self.block_row], segment.at[i], mem.q_full)
            return
        heads = pl.ds(packing.first_head(self.block, self.head), packing.block_heads)
        for i in range(packing.block_queries):
            query = packing.query_block(self.block) * packing.block_queries + i
            rows = mem.unpacked_q.at[pl.ds(i * packing.block_heads, packing.block_heads)]

            @pl.when(query < packing.queries)
            def _copy(query: Any = query, rows: Ref = rows) -> None:
                plgpu.copy_gmem_to_smem(x.q[0].at[self.batch, query, heads], rows, mem.q_full)

            pl.when(query >= packing.queries)(lambda: plgpu.barrier_arrive(mem.q_full))

    def look_up_pages(self, i: Any) -> list[tuple[Any, Any]]:
        """Look up the pages of the i-th tile in the block table.

        Returns:
          For each page, the pool row and the position of the tile's first token in the page. With
          `DecodeTile.tokens_first`, the pool row is that of the first token of the page. The position is ABSENT if the
          table entry names no page or the page is past the end of the split; the pool row is then arbitrary.
        """
        tile, tables, pool_rows = self.tile, self.x.block_tables, self.x.k.shape[0]
        last_entry = self.x.plan.made_for.table_pages - 1
        first, tile_of_page = tile.first_page(i)
        pages = []
        for j in range(tile.pages):
            number = self.start + first + j
            entry = jnp.minimum(self.table_entry(jnp.minimum(number, self.stop - 1)), last_entry)
            if tile.tokens_first:
                pool_row = tables[self.batch, entry * tile.page_size]
                exists = basics.in_pool(pool_row, pool_rows)
            elif len(tables.shape) == 3:
                pool_row = tables[self.batch, self.head, entry]
                exists = basics.in_pool(pool_row, pool_rows)
            else:
                page = tables[self.batch, entry]
                pool_row = page * self.static.num_kv_heads + self.head
                exists = basics.in_pool(page, pool_rows // self.static.num_kv_heads)
            position = entry * tile.page_size + tile_of_page * tile.tokens
            pages.append((pool_row, jnp.where((number < self.stop) & exists, position, ABSENT)))
        return pages

    def table_entry(self, page: Any) -> Any:
        """Block-table entry of a visible page, given its number in the plan."""
        return jnp.where(page < self.sink_pages, page, page - self.sink_pages + self.first_page)

    def start_copies(self, i: Any, pages: list[tuple[Any, Any]]) -> None:
        """Start the copies of the i-th tile, on one warp. For each absent page, arrive at the barrier instead. With
        `DecodeTile.refills_keys_early`, copy only the keys.

        Args:
          pages: result of `look_up_pages(i)`.
        """
        mem = self.mem
        stage = lax.rem(i, self.static.stages)
        for j, (pool_row, position) in enumerate(pages):
            mem.tile_meta[stage, j] = position
            pl.when(position < ABSENT)(functools.partial(self.copy_page, i, j, pool_row))

            @pl.when(position >= ABSENT)
            def _arrive() -> None:
                for _ in range(self.tile.page_copies):
                    plgpu.barrier_arrive(mem.full.at[stage])

    def start_value_copies(self, i: Any, pages: list[tuple[Any, Any]]) -> None:
        """Start the copies of the values of the i-th tile; see `start_copies`."""
        tile, mem = self.tile, self.mem
        stage = lax.rem(i, self.static.stages)
        full = mem.values_full.at[stage]
        _, tile_of_page = tile.first_page(i)
        for j, (pool_row, position) in enumerate(pages):
            target = mem.v.at[stage, pl.ds(j * tile.page_tokens, tile.page_tokens)]

            @pl.when(position < ABSENT)
            def _copy(pool_row: Any = pool_row, target: Ref = target) -> None:
                plgpu.copy_gmem_to_smem(self.values_of_page(pool_row, tile_of_page), target, full)

            pl.when(position >= ABSENT)(lambda: plgpu.barrier_arrive(full))

    def copy_page(self, i: Any, j: int, pool_row: Any) -> None:
        """Start the copies of the j-th page of the i-th tile. If a page holds several tiles, copy only this tile."""
        tile, x, mem = self.tile, self.x, self.mem
        stage = lax.rem(i, self.static.stages)
        full = mem.full.at[stage]
        _, tile_of_page = tile.first_page(i)
        rows = tile.rows(tile.page_tokens)
        target = pl.ds(j * rows, rows)
        pools = [x.k] * len(mem.k) if x.rope is None else [x.k, x.rope]
        for pool, (first, columns), k in zip(pools, tile.key_slices, mem.k, strict=True):
            source = self.rows_of_page(pool, pool_row, tile_of_page, first, columns)
            plgpu.copy_gmem_to_smem(source, k.at[stage, target], full)
        if x.v is not None and not tile.refills_keys_early:
            plgpu.copy_gmem_to_smem(self.values_of_page(pool_row, tile_of_page), mem.v.at[stage, target], full)
        if tile.latent_groups:
            count = tile.scales_per_page
            to = mem.scales.at[stage, j, pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(x.k_scale.at[pool_row, pl.ds(tile_of_page * count, count)], to, full)
        if tile.page_groups:
            first = pool_row * tile.page_groups
            if tile.tiles_per_page > 1:
                first += lax.div(tile_of_page * (tile.tokens * tile.page_groups), tile.page_size)
            width = tile.groups
            if width < SCALES_PER_COPY:
                offset = lax.rem(first, SCALES_PER_COPY)
                mem.tile_meta[self.static.stages + 2 + stage, j] = offset
                first, width = first - offset, SCALES_PER_COPY
            for of_values, scale in enumerate((x.k_scale, x.v_scale)):
                to = mem.scales.at[stage, of_values, j, pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(scale.at[pl.ds(first, width)], to, full)

    def rows_of_page(self, pool: Ref, pool_row: Any, tile_of_page: Any, first: int, columns: int) -> Ref:
        """Return the part of a pool that is in one tile: the rows of one page, from column `first` on.

        Args:
          pool_row: result of `look_up_pages`.
          tile_of_page: index of the tile in the page.
        """
        rows = self.tile.rows(self.tile.page_tokens)
        begin = tile_of_page * rows
        if self.tile.tokens_first:
            # `pool_row` is a multiple of the page size. The division tells Mosaic so.
            begin += lax.div(pool_row, jnp.int32(self.tile.page_size)) * self.tile.page_size
            return pool.at[pl.ds(begin, rows), self.head, pl.ds(first, columns)]
        return pool.at[pool_row, pl.ds(begin, rows), pl.ds(first, columns)]

    def values_of_page(self, pool_row: Any, tile_of_page: Any) -> Ref:
        """Return the values of a page that are in one tile; see `rows_of_page`."""
        columns = self.tile.value_dim * self.tile.tokens_per_row
        return self.rows_of_page(self.x.v, pool_row, tile_of_page, self.tile.first_value_column, columns)

    # One tile

    def step(self, i: Any, state: AttentionState) -> AttentionState:
        """Attend to the i-th tile, then start the copies of tile i + stages, which uses the same stage.

        During the loop, `state.l` is [tokens, query_rows]: one sum per token of the tile, added up after the loop.
        """
        static, x, mem, shape = self.static, self.x, self.mem, self.tile.shape
        m, l, acc = state  # noqa: E741  # [query_rows], [tokens, query_rows], [value_dim, query_rows]
        stage, following = lax.rem(i, static.stages), i + static.stages
        pages: Any = self.look_up_pages(following) if self.tile.looks_ahead else None
        plgpu.barrier_wait(mem.full.at[stage])
        base = [mem.tile_meta[stage, j] for j in range(self.tile.pages)]
        # The compiler would hoist address computations out of the loop and use two registers per 32 bytes of a key. The
        # long rows of latents and of wide heads would take too many registers. Their addresses therefore include this
        # zero, which changes per tile from the compiler's view: the compiler does not know that positions are never
        # negative.
        zero = jnp.minimum(base[0], 0) if x.v is None or self.tile.value_dim > 256 else 0
        stage += zero
        v = mem.values(stage)
        k_scales, v_scales = self.token_scales(stage)  # [tokens] each
        s = self.scores(stage, zero, k_scales)  # [tokens, query_rows]
        if self.tile.refills_keys_early:

            @pl.when(following < self.num_tiles)
            def _refill_keys() -> None:
                basics.first_warp(functools.partial(self.start_copies, following, pages))

            plgpu.barrier_wait(mem.values_full.at[stage])
        mask = functools.partial(self.mask_tile, base, v)
        s, v_scales = lax.cond(self.all_visible(base), lambda *x: x, mask, s, v_scales)
        v_scale = None
        if v_scales:
            # Values of token t have the scale v_scale[t], which is multiplied into P. Adding ln(v_scale) to the scores
            # before the maximum is taken gives P · v_scale directly, and it is at most 1 when it is rounded to 16 bits.
            # With several channel groups, v_scale is the largest scale of the token.
            v_scale = jnp.maximum(functools.reduce(jnp.maximum, v_scales), dequantize.SMALLEST_SCALE)
            s += over_tokens(jnp.log2(v_scale) * (1 / LOG2E), shape)
        m_new = jnp.maximum(m, s.max(axis=0))  # [query_rows]
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp2((s - over_columns(shift, shape)) * LOG2E)  # [tokens, query_rows]
        rescale = jnp.exp2((m - shift) * LOG2E)  # [query_rows]
        values = self.products.load_values(self.tile, mem.products, v)
        probs = self.products.probs(self.tile, mem.p)
        weights = [p]
        if self.tile.latent_groups > 1:
            weights = [p * over_tokens(scale / v_scale, shape) for scale in v_scales]
        self.products.store_probs(self.tile, [weight.astype(mem.p.dtype) for weight in weights], probs)
        acc = acc * over_columns(rescale, acc.shape)
        acc = self.products.add_values(self.tile, mem.products, acc, values, probs)  # [value_dim, query_rows]
        if v_scale is not None:
            p *= over_tokens(1 / v_scale, shape)
        l = l * over_columns(rescale, shape) + p  # noqa: E741

        @pl.when(following < self.num_tiles)
        def _refill() -> None:
            found = self.look_up_pages(following) if pages is None else pages
            refill = self.start_value_copies if self.tile.refills_keys_early else self.start_copies
            basics.first_warp(functools.partial(refill, following, found))

        return AttentionState(m_new, l, acc)

    def token_scales(self, stage: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Load the scales of a tile: a tuple for the keys and a tuple for the values.

        Each tuple has one array [tokens] per channel group for 8-bit latents, one array [tokens] for caches with token
        groups, and no array for other caches.
        """
        tile, mem = self.tile, self.mem
        if tile.latent_groups:
            scales = dequantize.load_group_scales(
                mem.scales.at[stage], tile.page_tokens, tile.latent_groups, tile.tokens, self.layout
            )
            return scales, scales
        if not tile.page_groups:
            return (), ()
        begin = None
        if tile.groups < SCALES_PER_COPY:
            begin = mem.tile_meta.at[self.static.stages + 2 + stage, pl.ds(0, tile.pages)]
        k_scale, v_scale = (
            dequantize.load_per_token(mem.scales.at[stage, i], begin, tile.groups, tile.group_tokens, self.layout)
            for i in range(2)
        )
        return (k_scale,), (v_scale,)

    def scores(self, stage: Any, first_part: Any, k_scales: tuple[Any, ...]) -> Any:
        """Compute K qᵀ of a tile, scaled and capped, [tokens, query_rows].

        Args:
          first_part: index of the first query part: 0, or a zero that the compiler cannot fold (see `step`).
          k_scales: key scales from `token_scales`.
        """
        static, tile, mem = self.static, self.tile, self.mem
        queries = [[q.at[first_part + i] for i in range(q.shape[0])] for q in mem.q]
        groups = k_scales if tile.latent_groups else ()
        s = self.products.scores(tile, mem.products, [k.at[stage] for k in mem.k], queries, groups)
        s *= static.score_scale * self.x.k_scale[self.head] if tile.scales == "head" else static.score_scale
        if k_scales and not groups:
            s *= over_tokens(k_scales[0], tile.shape)
        if self.x.q_scale is not None:
            s *= over_columns(basics.load(self.x.q_scale.at[self.block_row], PER_COLUMN), tile.shape)
        return s if static.soft_cap is None else self.products.capped(s, static.soft_cap)

    # Visibility

    def store_limits(self) -> None:
        """Store in shared memory the first and last position that the query of each column sees.

        The limits are not kept in registers, because registers are scarce and few tiles need a mask.
        """
        query = self.tile.packing.query(self.block)
        newest = self.first_query + query if self.x.drafts is None else self.kv_len - 1
        self.limits(0)[...] = jnp.where(query < self.q_len, newest, -1)
        if self.window is not None:
            self.limits(1)[...] = jnp.maximum(self.first_query + query, 0) - self.window

    def limits(self, i: int) -> Ref:
        """Return a reference to int32 [width] in shared memory.

        For i = 0, it has the newest position that the query of each column sees, or -1 for a column without a query.
        For i = 1, it has the newest position that the window of each column hides.
        """
        return self.mem.tile_meta.at[self.static.stages + i, pl.ds(0, self.tile.packing.width)]

    def all_visible(self, base: list[Any]) -> Any:
        """Whether every query row sees every token of a tile.

        Args:
          base: position of the first token of each page of the tile, or ABSENT.
        """
        last = functools.reduce(jnp.maximum, base) + (self.tile.page_tokens - 1)  # at least ABSENT if a page is absent
        # With causal visibility, the first query sees the fewest tokens. A draft mask may hide any draft token.
        newest = self.first_query if self.x.drafts is None else self.first_query - 1
        visible = (last - base[0] == self.tile.tokens - 1) & (last <= newest)
        if self.window is not None:
            visible &= (base[0] > self.kv_len - 1 - self.window) | (last < self.sink_tokens)
        return visible

    def mask_tile(self, base: list[Any], v: Ref, s: Any, v_scales: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Mask the scores of a tile, and zero the values of tokens that no query row sees.

        Such values may be NaN, and a probability of 0 times NaN is NaN. The value scales of these tokens become 1.

        Args:
          base: position of the first token of each page of the tile, or ABSENT.
          v: values of the tile in shared memory.
          s: scores [tokens, query_rows].
          v_scales: value scales from `token_scales`.
        """
        position = self.positions(base)
        s = self.mask_scores(position, s)
        live_mask = self.live_mask(position, s)
        if self.x.v is None:
            # Keys and values are the same array. Synchronize the warps, so that all have finished reading the keys.
            plgpu.commit_smem()
        if self.tile.scales is None and not self.tile.latent_groups:
            clear_rows(v, live_mask, self.layout, self.tile.row_bytes)
        else:
            dequantize.clear_tokens(v, self.tile.value_dim, live_mask, self.layout)
            plgpu.commit_smem()
        return s, tuple(jnp.where(live_mask, scale, 1.0) for scale in v_scales)

    def positions(self, base: list[Any]) -> Any:
        """Position of each token of a tile, [tokens]."""
        token = register_tiles.row_iota(self.tile.tokens, self.layout)
        position = token + base[0]
        for j in range(1, self.tile.pages):
            first = j * self.tile.page_tokens
            position = jnp.where(token >= first, token + (base[j] - first), position)
        return position

    def mask_scores(self, position: Any, s: Any) -> Any:
        """Set scores [tokens, query_rows] to -inf where the query of the column does not see the token."""
        packing, shape = self.tile.packing, self.tile.shape
        each = over_tokens(position, shape)

        def limit(i: int) -> Any:
            return over_columns(basics.load(self.limits(i), PER_COLUMN), shape)

        s = jnp.where(each <= limit(0), s, -jnp.inf)
        if self.x.drafts is not None:
            drafts = self.x.drafts.at[packing.query_block(self.block), self.batch]
            draft = over_tokens(position - self.first_query, shape)
            bits = over_columns(basics.load(drafts, PER_COLUMN), shape)
            seen = (lax.shift_right_logical(bits, jnp.clip(draft, 0, 31)) & 1) == 1
            s = jnp.where((draft < 0) | seen, s, -jnp.inf)
        if self.window is not None:
            s = jnp.where((each < self.sink_tokens) | (each > limit(1)), s, -jnp.inf)
        return s

    def live_mask(self, position: Any, s: Any) -> Any:
        """Whether some query sees each token, bool [tokens], from positions and masked scores."""
        if self.x.drafts is not None:
            # A token is live if some score is not -inf. NaN scores count as visible.
            return jnp.where(s == -jnp.inf, 0.0, 1.0).max(axis=1) > 0
        live = position < self.kv_len
        if self.window is not None:
            # A new token sees itself. An older token is live if the first query sees it: its window starts first.
            live &= (position < self.sink_tokens) | (position > jnp.maximum(self.first_query, 0) - self.window)
        return live
