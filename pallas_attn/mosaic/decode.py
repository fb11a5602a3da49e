"""Decode attention over paged K and V, read downward: operands of the kernel, the kernel, one tile.

A program is one warpgroup. As many run side by side on a multiprocessor as fit, so that some compute while others
wait. Each takes its share of a decode plan: work tiles (`mosaic.primitives.tile_scheduler`), consecutive pages of one
row, which is a KV head of a sequence. Query rows of that head are the columns of the tiles (`query_packing`). Tiles
are multiplied as the architecture does it (`DecodeProducts`): in `mosaic.hopper.decode_products` and
`mosaic.blackwell.decode_products`.

What happens to one tile of K and V, by the functions of this file:

1. `_kernel` takes the work tile and makes it a `KvSplit`, a row's pages and what its queries see.
2. `KvSplit.look_up_pages` turns the tile into rows of the pool by way of the block table.
3. `KvSplit.start_copies` has the copy engine bring those pages to a slot of shared memory.
4. `KvSplit.step` waits for the slot, computes scores (`scores`), masks them if some query does not see the whole tile
   (`mask_tile`), updates maxima, exponentiates, and adds Vᵀ P to the accumulator in registers. It then starts the
   copies of the tile that comes to this slot next.
5. `_kernel` writes the row (`split_states.OutputWriter`); or, where several programs have splits of the row, the
   partial state (`split_states.PartialStates`), which a second kernel merges (`split_states.merge_splits`). That one
   also writes the rows that see nothing.

A split of five tiles in two stages, from the top down:

    queries, tile 0 -> slot 0, tile 1 -> slot 1          (copies start; the program does not wait)
    wait q_landed
    wait landed[0]   S, softmax, P, O of tile 0          tile 1 arrives meanwhile
                     tile 2 -> slot 0
    wait landed[1]   S, softmax, P, O of tile 1          tile 2 arrives meanwhile
                     tile 3 -> slot 1
    wait landed[0]   ... tile 2, then tile 4 -> slot 0; tile 3; tile 4
    output, or a partial state

No wait can last: a program waits only for copies that it started itself, earlier.

- landed[s] has a phase for every tile that goes to slot s, with `DecodeTile.page_copies` arrivals for each of its
  pages: `start_copies` makes all of them, by a copy where there is a page and directly where there is none. Every tile
  is waited for once, in the order of the copies, and no copy is started past the last tile.
- q_landed has a phase for every split, with an arrival for every term of every part of the queries (for every query if
  they are packed in the kernel).
- A slot is copied to again once its tile is done with: every warp has waited for the products that read it, and
  `first_warp` for every warp. What threads themselves read or wrote there was committed before P was multiplied.
- The output tile is written again once the copy from it has been read, for which its own program waits.
- What the products of an architecture wait for is said where they are.
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

from pallas_attn.mosaic.merge import (
    OUTPUT_BYTES,
    AttentionState,
    OutputWriter,
    PartialStates,
    merge_splits,
)
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
"""float32 scales in 16 bytes, at multiples of which copies begin and end."""

# --- compile-time facts, operands and scratch of a kernel


class DecodeProducts(Protocol):
    """Products of decode on the tensor cores of an architecture. An object has the compile-time facts of no tile.

    Attributes:
      most_ahead: pages times values of the accumulator, at most, with which pages are looked up ahead.
    """

    most_ahead: ClassVar[int]

    def scores_layout(self, tile: DecodeTile) -> RegisterLayout:
        """Registers in which `scores` leaves its result."""
        ...

    def values_layout(self, tile: DecodeTile) -> RegisterLayout:
        """Registers of the accumulator, whose rows are channels of the values."""
        ...

    def query_row_bytes(self, tile: DecodeTile, key_row_bytes: int) -> int:
        """Bytes of a swizzled row of the queries in shared memory, for keys with rows of so many."""
        ...

    def probs_type(self, tile: DecodeTile) -> Any:
        """Scratch type of the probabilities."""
        ...

    def probs(self, tile: DecodeTile, p: Ref) -> list[Ref]:
        """Views [tokens, width] of the probabilities' memory: one, or one for each group of channels of a latent."""
        ...

    def store_probs(self, tile: DecodeTile, ps: list[jax.Array], to: list[Ref]) -> None:
        """Write probabilities to their views and commit them."""
        ...

    def scratch_types(self, tile: DecodeTile) -> Any:
        """Memory and barriers of the products' own."""
        ...

    def scores(
        self, tile: DecodeTile, own: Any, keys: list[Ref], queries: list[list[Ref]], scales: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Compute K qᵀ [tokens, width] from the parts of a key, each with the terms of the queries for it, and from the
        scales of each group of channels of a latent.
        """
        ...

    def load_values(self, tile: DecodeTile, own: Any, v: Ref) -> Any:
        """Get values [tokens, D], as cached, ready to be multiplied; probabilities are committed after it."""
        ...

    def add_values(self, tile: DecodeTile, own: Any, acc: jax.Array, values: Any, ps: list[Ref]) -> jax.Array:
        """Compute acc + Vᵀ P from what `load_values` returned, and committed probabilities: one P, or one for each
        group of channels of a latent.
        """
        ...

    def in_channel_order(self, tile: DecodeTile, acc: jax.Array) -> jax.Array:
        """Bring the rows of a finished accumulator to the order of the channels."""
        ...

    def capped(self, s: jax.Array, soft_cap: float) -> jax.Array:
        """Compute soft_cap * tanh(s / soft_cap)."""
        ...


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """Shapes and dtypes of the tile that a program attends to at a time.

    Attributes:
      packing: query rows of a KV head as columns.
      tokens: keys of the tile.
      page_size: tokens of a page.
      key_dims: widths of the parts of a key, each an array of its own in shared memory: (D,), or (L, R) of latents.
      has_values: whether V is apart from K; else the first part of a key is the value, too.
      terms: 16-bit numbers whose sum is a query.
      packs_queries: queries come as [B, Q, Hq, D], and the kernel arranges them as columns.
      scales: of an 8-bit cache.
      q_dtype, cache_dtype, out_dtype: of queries and probabilities, of K and V, of the output.
      rope_dtype: of latents in 8 bits, which have a scale for each token and group of channels: of their rotated
        columns, an array of their own, and of the queries for those. None for other caches.
      products: of the architecture.
    """

    packing: QueryPacking
    tokens: int
    page_size: int
    key_dims: tuple[int, ...]
    has_values: bool
    terms: int
    packs_queries: bool
    scales: ScaleLayout
    q_dtype: Any
    cache_dtype: Any
    out_dtype: Any
    products: DecodeProducts
    rope_dtype: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the scores."""
        return self.tokens, self.packing.width

    @property
    def value_dim(self) -> int:
        return self.key_dims[0]

    @property
    def tokens_per_row(self) -> int:
        """Tokens that share a row of shared memory."""
        return dequantize.tokens_per_smem_row(self.cache_dtype, self.value_dim)

    @property
    def latent_groups(self) -> int:
        """Groups of channels of a latent in 8 bits; 0 for other caches."""
        return 0 if self.rope_dtype is None else self.value_dim // LATENT_GROUP

    @property
    def scales_per_page(self) -> int:
        """Scales of latents that a tile takes of a page."""
        return self.page_tokens * self.latent_groups

    @property
    def key_slices(self) -> list[tuple[int, int]]:
        """First column and number of columns of each part of a key, in a row of its pool."""
        widths = [dim * self.tokens_per_row for dim in self.key_dims]
        if self.latent_groups:
            return [(0, width) for width in widths]
        return list(zip(itertools.accumulate(widths, initial=0), widths, strict=False))

    @property
    def key_dtypes(self) -> list[Any]:
        """Dtype of each part of a key."""
        return [self.cache_dtype, self.rope_dtype] if self.latent_groups else [self.cache_dtype] * len(self.key_dims)

    @property
    def query_dtypes(self) -> list[Any]:
        """Dtype of the queries for each part of a key."""
        return [self.q_dtype, self.rope_dtype] if self.latent_groups else [self.q_dtype] * len(self.key_dims)

    @property
    def row_bytes(self) -> int:
        """Bytes of a swizzled row. A copy swizzles whole rows of the pool, so all parts of a key in a pool have the
        same.
        """
        if self.latent_groups:
            return 128
        pool_row = sum(width for _, width in self.key_slices) * jnp.dtype(self.cache_dtype).itemsize
        return 64 if pool_row % 128 else 128

    @property
    def key_row_bytes(self) -> list[int]:
        """`row_bytes` of each part of a key."""
        if not self.latent_groups:
            return [self.row_bytes] * len(self.key_dims)
        return [self.row_bytes, 64 if self.key_dims[1] * jnp.dtype(self.rope_dtype).itemsize % 128 else 128]

    @property
    def pages(self) -> int:
        """Pages of a tile; 1 if a page is several tiles."""
        return max(1, self.tokens // self.page_size)

    @property
    def page_tokens(self) -> int:
        """Tokens that a tile takes of a page."""
        return min(self.tokens, self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // self.tokens)

    def first_page(self, i: Any) -> tuple[Any, Any]:
        """First page of a split's i-th tile, counted from the split's first page, and which tile of that page it is."""
        if self.tiles_per_page == 1:
            return i * self.pages, 0
        return lax.div(i, self.tiles_per_page), lax.rem(i, self.tiles_per_page)

    def rows(self, tokens: int) -> int:
        """Rows of shared memory that hold so many tokens."""
        return tokens // self.tokens_per_row

    @property
    def page_groups(self) -> int:
        """Groups of tokens of a page that have a scale each; 0 if scales do not come with the tokens."""
        return self.scales if isinstance(self.scales, int) else 0

    @property
    def group_tokens(self) -> int:
        """Tokens that a tile takes of a group."""
        return min(self.page_tokens, self.page_size // self.page_groups)

    @property
    def groups(self) -> int:
        """Groups of tokens that a tile takes of a page."""
        return self.page_tokens // self.group_tokens

    @property
    def page_copies(self) -> int:
        """Copies that bring a page of a tile."""
        return len(self.key_dims) + self.has_values + (2 if self.page_groups else 1 if self.latent_groups else 0)

    @property
    def looks_ahead(self) -> bool:
        """Whether pages are looked up before their slot is free, and wait in registers. An accumulator of many columns
        leaves too few of those.
        """
        return self.pages * self.packing.width * max(self.value_dim, 256) <= self.products.most_ahead

    @property
    def reduction_bytes(self) -> int:
        """Shared memory for maxima and sums over the tokens; 128 bytes a column let one round do."""
        return 1024 if self.latent_groups else min(128 * self.packing.width, 4096)

    @property
    def output_bytes(self) -> int:
        """Shared memory for a row of the output. Beside latents in 8 bits it is as little as works, like that for
        maxima, so that two tiles fit for each of two programs with 16 query rows.
        """
        return 0 if self.latent_groups else OUTPUT_BYTES

    def most_stages(self, programs: int, limit: int) -> int:
        """Tiles, up to a limit, that each of so many programs on a multiprocessor has shared memory for."""

        def fits(stages: int) -> bool:
            types = DecodeScratch.types(self, stages)
            return shared_memory.fits(types, programs, reduction_bytes=self.reduction_bytes)

        return next((stages for stages in range(limit, 0, -1) if fits(stages)), 0)


@dataclasses.dataclass(frozen=True)
class DecodeStatic:
    """Compile-time facts of a kernel, beside shapes and dtypes of its arrays.

    Attributes:
      stages: tiles in shared memory.
      score_scale: multiplies K qᵀ.
      window: of all heads, or None.
    """

    tile: DecodeTile
    stages: int
    num_kv_heads: int
    score_scale: float
    soft_cap: float | None
    window: int | None


class DecodeInputs(NamedTuple):
    """Arrays, or in the kernel references to them; see `QueryPacking`.

    Attributes:
      q: for each part of a key [terms, blocks·rows, width, dim of the part], whose sum over terms are the queries; or
        one of [B, Q, Hq, D] (`DecodeTile.packs_queries`).
      k, v: [N·Hkv, ps, D], or with several tokens in a row. A v of None: the first part of a key is the value.
      rope: [N, ps, R], the second part of the keys of latents in 8 bits; else None.
      k_scale, v_scale: [Hkv], [Hkv, D] (k_scale is None then, being part of q), [N·Hkv·g] or None. Of latents in 8 bits
        k_scale is [N, ps · groups of channels], for keys and values alike.
      q_scale: float32 [blocks·rows, width], multiplies the scores of each column; or None.
      block_tables: int32 [B, P] or [B, Hkv, P].
      kv_lens: int32 [B].
      q_lens: int32 [B], or None where every sequence has all queries.
      window: a `HeadWindow` or None.
      drafts: int32 [query_blocks, B, width], the draft keys that a column's query sees as bits; None if causal.
      sinks: [head_blocks, Hkv, width] or None.
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
    """Shared memory and barriers of a program.

    Attributes:
      q: for each part of a key [terms, width, dim of the part].
      raw_q: [width, D], queries as copied if the kernel packs them; else None.
      k: for each part of a key [stages, tokens, dim of the part], as cached, with as many tokens in a row.
      v: like k; None if the first part of a key is the value.
      p: probabilities, as `DecodeProducts.probs_type`.
      out: as `OutputWriter.tile_type`.
      tile_meta: int32 [2 · stages + 2, at least pages and width]. A row for each stage: position of each page's first
        token, or ABSENT. Then for each column the newest position it sees, and the newest that its window hides. Then
        a row for each stage: where in `scales` those of each page begin, if that may be in the middle.
      scales: [stages, 2, pages, at least 32] of keys and values, or [stages, pages, at least 32] of latents, or None. A
        copy starts at a multiple of 128 bytes.
      landed: a barrier for each stage: its tile is there.
      q_landed: the queries are there.
      products: of the products' own, as `DecodeProducts.scratch_types`.
    """

    q: tuple[Any, ...]
    raw_q: Any
    k: tuple[Any, ...]
    v: Any
    p: Any
    out: Any
    tile_meta: Any
    scales: Any
    landed: Any
    q_landed: Any
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
                (tile.terms, width, dim), dtype, row_bytes=tile.products.query_row_bytes(tile, row_bytes)
            )
            for dim, dtype, row_bytes in zip(tile.key_dims, tile.query_dtypes, tile.key_row_bytes, strict=True)
        ]
        scales = (stages, 2, tile.pages, max(32, tile.page_groups))
        if tile.latent_groups:
            scales = (stages, tile.pages, -(-tile.scales_per_page // 32) * 32)
        return DecodeScratch(
            q=tuple(queries),
            raw_q=plgpu.SMEM((width, tile.value_dim), tile.q_dtype) if tile.packs_queries else None,
            k=tuple(keys),
            v=keys[0] if tile.has_values else None,
            p=tile.products.probs_type(tile),
            out=OutputWriter.tile_type(width, tile.value_dim, tile.out_dtype, tile.output_bytes),
            tile_meta=plgpu.SMEM((2 * stages + 2, max(tile.pages, width)), jnp.int32),
            scales=plgpu.SMEM(scales, jnp.float32) if tile.page_groups or tile.latent_groups else None,
            landed=plgpu.Barrier(num_barriers=stages, num_arrivals=tile.pages * tile.page_copies),
            q_landed=plgpu.Barrier(
                num_arrivals=packing.block_queries if tile.packs_queries else tile.terms * len(tile.key_dims)
            ),
            products=tile.products.scratch_types(tile),
        )

    def values(self, slot: Any) -> Ref:
        return (self.k[0] if self.v is None else self.v).at[slot]


# --- the kernel


def decode_attention(
    x: DecodeInputs,
    static: DecodeStatic,
    out_shape: tuple[int, ...],
    out: Float[Array, "T Hq V"] | None = None,
    *,
    name: str,
) -> tuple[Float[Array, "B Q Hq V"] | Float[Array, "T Hq V"], Float[Array, "B Q Hq"]]:
    """Compute output and LSE.

    Args:
      out_shape: [B, Q, Hq, V].
      out: whose first B·Q tokens become the output, in place; None for an array of the output alone.
      name: of the kernel, for profiles.
    """
    packing = static.tile.packing
    held = None if out is None else basics.alias_in_place(out)
    own, lse, partials = _attend(x, static, out_shape, held, name)
    result = basics.alias_in_place(own) if held is None else held
    layout = static.tile.products.values_layout(static.tile)
    lse = packing.unpack(merge_splits(result, lse, partials, x.plan, x.sinks, packing, layout), static.num_kv_heads)
    finished = basics.read_back(result)
    return (finished.reshape(out_shape) if out is None else finished), lse


def _attend(
    x: DecodeInputs, static: DecodeStatic, out_shape: tuple[int, ...], held: Ref | None, name: str
) -> tuple[Any, Array, PartialStates]:
    """Run the kernel: output and LSE of rows in one split, partial states of the others.

    Args:
      held: takes the output, which is not returned then.
    """
    tile, plan = static.tile, x.plan
    packing, rows, num_programs = tile.packing, plan.num_pages.shape[0], plan.cta_row.shape[0] - 1
    states = most_splits(plan, x.block_tables.shape[-1])
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(
            jax.ShapeDtypeStruct((math.prod(out_shape[:2]), *out_shape[2:]), tile.out_dtype) if held is None else None,
            jax.ShapeDtypeStruct((packing.blocks, rows, packing.width), jnp.float32),
            PartialStates.types(packing.blocks * states, packing.width, tile.value_dim),
        ),
        grid=(num_programs, packing.blocks),
        grid_names=("program", "block"),
        scratch_types=DecodeScratch.types(tile, static.stages),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=tile.reduction_bytes),
        kernel_name=name,
    )(basics.materialize(x), held)


def _kernel(
    static: DecodeStatic,
    x: DecodeInputs,
    held: Ref | None,
    own: Ref | None,
    lse: Ref,
    partials: PartialStates,
    *scratch: Ref,
) -> None:
    """Attend to the work tiles of one program."""
    out = own if held is None else held
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


# --- one split of a row


@dataclasses.dataclass(frozen=True)
class KvSplit:
    """Pages `start` to `stop` of a row, numbered as in the plan, as one program attends to them.

    Attributes:
      block: index of the block of query rows.
      row: KV head of a sequence, batch · Hkv + head.
      sink_pages, first_page: the row's visible pages are table entries 0 to sink_pages, then those from first_page on.
      first_query: position of the first query; negative if there are more queries than keys.
      window, sink_tokens: window of the head, None if it hides nothing, and sink tokens that it shows besides.
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
        """Registers of scores."""
        return self.products.scores_layout(self.tile)

    @property
    def block_row(self) -> Any:
        """Index of the row's queries among those of all blocks."""
        return self.block * self.x.plan.num_pages.shape[0] + self.row

    @property
    def num_tiles(self) -> Any:
        return pl.cdiv(self.stop - self.start, self.tile.pages) * self.tile.tiles_per_page

    def attend(self) -> AttentionState:
        """Attend to all tiles of the split."""
        mem, tile = self.mem, self.tile
        # No load can pass a copy: all pages are looked up before the first one's copy starts.
        first = [(jnp.int32(i), self.look_up_pages(jnp.int32(i))) for i in range(self.static.stages)]

        @basics.first_warp
        def _fill() -> None:
            self.start_query_copies()
            for i, pages in first:
                pl.when(i < self.num_tiles)(functools.partial(self.start_copies, i, pages))

        self.store_limits()
        plgpu.barrier_wait(mem.q_landed)
        if tile.packs_queries:
            mem.q[0].at[0].transpose((1, 0))[...] = basics.load(mem.raw_q.transpose((1, 0)), self.layout.tile)
            plgpu.commit_smem()
        state = AttentionState.empty(tile.value_dim, tile.packing.width, self.products.values_layout(tile))
        state = state._replace(
            l=register_tiles.filled(0.0, tile.shape, self.layout.tile)
        )  # summed over tokens at the end
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
        """Multiply sums of cached values with the scales that are the same for all tokens."""
        if self.tile.scales == "head":
            return acc * self.x.v_scale[self.head]
        if self.tile.scales == "channel":
            per_channel = self.products.values_layout(self.tile).per_row
            return acc * over_tokens(basics.load(self.x.v_scale.at[self.head], per_channel), acc.shape)
        return acc  # scales of tokens are in it already

    # Copies to shared memory

    def start_query_copies(self) -> None:
        """Start the copies of the queries, on one warp."""
        x, mem, packing = self.x, self.mem, self.tile.packing
        if not self.tile.packs_queries:
            for q, part in zip(x.q, mem.q, strict=True):
                for term in range(q.shape[0]):
                    plgpu.copy_gmem_to_smem(q.at[term, self.block_row], part.at[term], mem.q_landed)
            return
        heads = pl.ds(packing.first_head(self.block, self.head), packing.block_heads)
        for i in range(packing.block_queries):
            query = packing.query_block(self.block) * packing.block_queries + i
            rows = mem.raw_q.at[pl.ds(i * packing.block_heads, packing.block_heads)]

            @pl.when(query < packing.queries)
            def _copy(query: Any = query, rows: Ref = rows) -> None:
                plgpu.copy_gmem_to_smem(x.q[0].at[self.batch, query, heads], rows, mem.q_landed)

            pl.when(query >= packing.queries)(lambda: plgpu.barrier_arrive(mem.q_landed))

    def look_up_pages(self, i: Any) -> list[tuple[Any, Any]]:
        """Row of the pool and position of the first token, or ABSENT, of each page of the i-th tile; of a tile past
        the last one, any row in range.
        """
        tile, tables, pool_rows = self.tile, self.x.block_tables, self.x.k.shape[0]
        first, tile_of_page = tile.first_page(i)
        pages = []
        for j in range(tile.pages):
            number = self.start + first + j
            entry = jnp.minimum(self.table_entry(jnp.minimum(number, self.stop - 1)), tables.shape[-1] - 1)
            if len(tables.shape) == 3:
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
        """Entry of the block table that holds a visible page of the row."""
        return jnp.where(page < self.sink_pages, page, page - self.sink_pages + self.first_page)

    def start_copies(self, i: Any, pages: list[tuple[Any, Any]]) -> None:
        """Start the copies of the i-th tile on one warp, given `look_up_pages(i)`. Absent pages arrive at once."""
        mem = self.mem
        slot = lax.rem(i, self.static.stages)
        for j, (pool_row, position) in enumerate(pages):
            mem.tile_meta[slot, j] = position
            pl.when(position < ABSENT)(functools.partial(self.copy_page, i, j, pool_row))

            @pl.when(position >= ABSENT)
            def _arrive() -> None:
                for _ in range(self.tile.page_copies):
                    plgpu.barrier_arrive(mem.landed.at[slot])

    def copy_page(self, i: Any, j: int, pool_row: Any) -> None:
        """Start the copies of the j-th page of the i-th tile, or of as much of the page as the tile holds."""
        tile, x, mem = self.tile, self.x, self.mem
        slot = lax.rem(i, self.static.stages)
        landed = mem.landed.at[slot]
        _, tile_of_page = tile.first_page(i)
        rows = tile.rows(tile.page_tokens)
        source, target = pl.ds(tile_of_page * rows, rows), pl.ds(j * rows, rows)
        pools = [x.k] * len(mem.k) if x.rope is None else [x.k, x.rope]
        for pool, (first, columns), k in zip(pools, tile.key_slices, mem.k, strict=True):
            plgpu.copy_gmem_to_smem(pool.at[pool_row, source, pl.ds(first, columns)], k.at[slot, target], landed)
        if x.v is not None:
            plgpu.copy_gmem_to_smem(x.v.at[pool_row, source], mem.v.at[slot, target], landed)
        if tile.latent_groups:
            count = tile.scales_per_page
            to = mem.scales.at[slot, j, pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(x.k_scale.at[pool_row, pl.ds(tile_of_page * count, count)], to, landed)
        if tile.page_groups:
            first = pool_row * tile.page_groups
            if tile.tiles_per_page > 1:
                first += lax.div(tile_of_page * (tile.tokens * tile.page_groups), tile.page_size)
            width = tile.groups
            if width < SCALES_PER_COPY:
                offset = lax.rem(first, SCALES_PER_COPY)
                mem.tile_meta[self.static.stages + 2 + slot, j] = offset
                first, width = first - offset, SCALES_PER_COPY
            for of_values, scale in enumerate((x.k_scale, x.v_scale)):
                to = mem.scales.at[slot, of_values, j, pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(scale.at[pl.ds(first, width)], to, landed)

    # One tile

    def step(self, i: Any, state: AttentionState) -> AttentionState:
        """Attend to the i-th tile, and start the copies of the one that takes its slot."""
        static, x, mem, shape = self.static, self.x, self.mem, self.tile.shape
        m, l, acc = state  # noqa: E741
        slot, following = lax.rem(i, static.stages), i + static.stages
        pages = self.look_up_pages(following) if self.tile.looks_ahead else None
        plgpu.barrier_wait(mem.landed.at[slot])
        base = [mem.tile_meta[slot, j] for j in range(self.tile.pages)]
        # The compiler would compute addresses before the loop and keep them: two registers for every 32 bytes of a row,
        # too many for the long rows of latents. There they depend on a zero that it does not know to be one, since it
        # cannot tell that positions are not negative.
        zero = jnp.minimum(base[0], 0) if x.v is None else 0
        slot += zero
        v = mem.values(slot)
        k_scales, v_scales = self.token_scales(slot)
        s = self.scores(slot, zero, k_scales)
        mask = functools.partial(self.mask_tile, base, v)
        s, v_scales = lax.cond(self.all_visible(base), lambda *x: x, mask, s, v_scales)
        v_scale = None
        if v_scales:
            # The scale is multiplied into the probability through the exponent: their product, which is rounded to 16
            # bits, is then at most 1. Of several groups of channels it is the largest one's.
            v_scale = jnp.maximum(functools.reduce(jnp.maximum, v_scales), dequantize.SMALLEST_SCALE)
            s += over_tokens(jnp.log2(v_scale) * (1 / LOG2E), shape)
        m_new = jnp.maximum(m, s.max(axis=0))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        p = jnp.exp2((s - over_columns(shift, shape)) * LOG2E)
        rescale = jnp.exp2((m - shift) * LOG2E)
        values = self.products.load_values(self.tile, mem.products, v)
        probs = self.products.probs(self.tile, mem.p)
        weights = [p]
        if self.tile.latent_groups > 1:
            weights = [p * over_tokens(scale / v_scale, shape) for scale in v_scales]
        self.products.store_probs(self.tile, [weight.astype(mem.p.dtype) for weight in weights], probs)
        acc = acc * over_columns(rescale, acc.shape)
        acc = self.products.add_values(self.tile, mem.products, acc, values, probs)
        if v_scale is not None:
            p *= over_tokens(1 / v_scale, shape)
        l = l * over_columns(rescale, shape) + p  # noqa: E741

        @pl.when(following < self.num_tiles)
        def _refill() -> None:
            found = self.look_up_pages(following) if pages is None else pages
            basics.first_warp(functools.partial(self.start_copies, following, found))

        return AttentionState(m_new, l, acc)

    def token_scales(self, slot: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Scales of the keys and of the values of a tile, a value for each token: of all channels, or of each group of
        channels of a latent. None if they do not come with the tokens.
        """
        tile, mem = self.tile, self.mem
        if tile.latent_groups:
            scales = dequantize.load_group_scales(
                mem.scales.at[slot], tile.page_tokens, tile.latent_groups, tile.tokens, self.layout
            )
            return scales, scales
        if not tile.page_groups:
            return (), ()
        begin = None
        if tile.groups < SCALES_PER_COPY:
            begin = mem.tile_meta.at[self.static.stages + 2 + slot, pl.ds(0, tile.pages)]
        k_scale, v_scale = (
            dequantize.load_per_token(mem.scales.at[slot, i], begin, tile.groups, tile.group_tokens, self.layout)
            for i in range(2)
        )
        return (k_scale,), (v_scale,)

    def scores(self, slot: Any, first_term: Any, k_scales: tuple[Any, ...]) -> Any:
        """Compute K qᵀ of a tile, scaled and capped."""
        static, tile, mem = self.static, self.tile, self.mem
        queries = [[q.at[first_term + i] for i in range(q.shape[0])] for q in mem.q]
        groups = k_scales if tile.latent_groups else ()
        s = self.products.scores(tile, mem.products, [k.at[slot] for k in mem.k], queries, groups)
        s *= static.score_scale * self.x.k_scale[self.head] if tile.scales == "head" else static.score_scale
        if k_scales and not groups:
            s *= over_tokens(k_scales[0], tile.shape)
        if self.x.q_scale is not None:
            s *= over_columns(basics.load(self.x.q_scale.at[self.block_row], PER_COLUMN), tile.shape)
        return s if static.soft_cap is None else self.products.capped(s, static.soft_cap)

    # Visibility

    def store_limits(self) -> None:
        """Write the range of positions that each column's query sees to shared memory. Few tiles need it, and in
        registers it would be in the way of the others.
        """
        query = self.tile.packing.query(self.block)
        newest = self.first_query + query if self.x.drafts is None else self.kv_len - 1
        self.limits(0)[...] = jnp.where(query < self.q_len, newest, -1)
        if self.window is not None:
            self.limits(1)[...] = jnp.maximum(self.first_query + query, 0) - self.window

    def limits(self, i: int) -> Ref:
        """Newest position that each column sees (0), or that its window hides (1)."""
        return self.mem.tile_meta.at[self.static.stages + i, pl.ds(0, self.tile.packing.width)]

    def all_visible(self, base: list[Any]) -> Any:
        """Whether every query sees every token of a tile."""
        last = functools.reduce(jnp.maximum, base) + (self.tile.page_tokens - 1)  # ABSENT with an absent page
        # The first query sees the fewest tokens; with masks, all may hide each other.
        newest = self.first_query if self.x.drafts is None else self.first_query - 1
        visible = (last - base[0] == self.tile.tokens - 1) & (last <= newest)
        if self.window is not None:
            visible &= (base[0] > self.kv_len - 1 - self.window) | (last < self.sink_tokens)
        return visible

    def mask_tile(self, base: list[Any], v: Ref, s: Any, v_scales: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Mask scores, and make values 0 and their scales 1 where no column sees the token, since 0 · NaN is NaN."""
        position = self.positions(base)
        s = self.mask_scores(position, s)
        live_mask = self.live_mask(position, s)
        if self.x.v is None:
            plgpu.commit_smem()  # every warp has its scores: the keys may change
        if self.tile.scales is None and not self.tile.latent_groups:
            clear_rows(v, live_mask, self.layout, self.tile.row_bytes)
        else:
            dequantize.clear_tokens(v, self.tile.value_dim, live_mask, self.layout)
            plgpu.commit_smem()
        return s, tuple(jnp.where(live_mask, scale, 1.0) for scale in v_scales)

    def positions(self, base: list[Any]) -> Any:
        """Position of each token of a tile."""
        token = register_tiles.row_iota(self.tile.tokens, self.layout)
        position = token + base[0]
        for j in range(1, self.tile.pages):
            first = j * self.tile.page_tokens
            position = jnp.where(token >= first, token + (base[j] - first), position)
        return position

    def mask_scores(self, position: Any, s: Any) -> Any:
        """Scores [tokens, width], -inf where a column's query does not see the token."""
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
            return jnp.where(s == -jnp.inf, 0.0, 1.0).max(axis=1) > 0  # a score of NaN is one, too
        live = position < self.kv_len
        if self.window is not None:
            # Of the new tokens each sees itself; the first query's window reaches back farthest.
            live &= (position < self.sink_tokens) | (position > jnp.maximum(self.first_query, 0) - self.window)
        return live
