"""`paged_decode` on Hopper (H100, H200).

A program is one warpgroup. Several run side by side on a multiprocessor, so that some compute while others wait, and
each works off its share of the plan: pieces, which are consecutive pages of one row (a KV head of a sequence). All
query rows of that head are taken together, as columns of tiles, and a tile of 64 or 128 tokens as its rows:

    S [tokens, columns] = K qᵀ      O [D, columns] += Vᵀ P      m, l [columns]

so tokens fill wgmma's M of 64, whatever the group, and N is as narrow as the group allows. K and V are read from
where they landed, those of 8-bit caches by way of registers, where they become 16 bits (`mosaic_quantised`); only P
goes back to shared memory. Scales that are the same for all tokens go into the scores or the finished sums, those of
tokens multiply a row of S, and go into P by way of the exponent.

A piece of five tiles in two stages, from the top down:

    queries, tile 0 -> slot 0, tile 1 -> slot 1          (copies start; the program does not wait)
    wait q_landed
    wait landed[0]   S, softmax, P, O of tile 0          tile 1 arrives meanwhile
                     tile 2 -> slot 0
    wait landed[1]   S, softmax, P, O of tile 1          tile 2 arrives meanwhile
                     tile 3 -> slot 1
    wait landed[0]   ... tile 2, then tile 4 -> slot 0; tile 3; tile 4
    output, or a partial state

No wait can last: a program waits only for copies it started itself, earlier.

- landed[s] has a phase for every tile that goes to slot s, and 2 arrivals a page (4 with scales of tokens): `fetch`
  makes all of them, with a copy where there is a page and without where there is none. Every tile fetched is waited
  for once, in the order of fetching, and none is fetched past the last.
- q_landed has a phase for every piece, and an arrival for every term of the queries (for every query, if they are not
  in columns yet).
- A slot is fetched into again once its tile is done with: every warp has waited for the wgmma that read it, and
  `first_warp` for every warp. What threads themselves read or wrote there was committed before P was multiplied.
- The tile of the output is written again once the copy from it has been read, which its own program waits for.

A row that was not cut is normalised and written. The states of others go to global memory, and a second kernel merges
them (`mosaic_merge`), which also writes the rows that see nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from pallas_attn.ops.common import mosaic, mosaic_quantised
from pallas_attn.ops.common.mosaic import Ref
from pallas_attn.ops.common.mosaic_merge import Columns, Output, Partials, merge_pieces
from pallas_attn.ops.common.mosaic_pages import SCALES_AT_ONCE, Inputs, Memory, Piece, Static
from pallas_attn.ops.common.plan import plan_decode
from pallas_attn.ops.paged_decode import config
from pallas_attn.types import DecodePlan, HeadWindow, PagedKV


def paged_decode(
    q: Float[Array, "B Q Hq D"],
    kv: PagedKV,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    q_lens: Int32[Array, "B"],
    sm_scale: float,
    window: int | HeadWindow | None,
    sinks: Float[Array, "Hq"] | None,
    soft_cap: float | None,
    draft_mask: Bool[Array, "B Q Q"] | None,
    plan: DecodePlan | None,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[Float[Array, "B Q Hq D"], Float[Array, "B Q Hq"]]:
    limit = config.max_columns(kv.k.shape[-1], kv.k.dtype.itemsize, capped=soft_cap is not None)
    _refuse(q, kv, draft_mask, limit)
    (num_kv_heads, page_size), (num_heads, head_dim) = kv.k.shape[1:3], q.shape[2:]
    columns, settings = _sizes(q, kv, out_dtype, limit)
    scales = mosaic_quantised.scale_layout(kv)
    terms, query_scale = mosaic_quantised.query_terms(q, kv)
    if plan is None:
        plan = plan_decode(
            kv_lens,
            q_lens=q_lens,
            window=window,
            page_size=page_size,
            num_q_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_programs=settings.programs_per_multiprocessor * mosaic.multiprocessors(),
        )
    beside = mosaic_quantised.tokens_in_row(kv)
    rows = -1, page_size // beside, head_dim * beside
    raw_queries = config.takes_raw_queries(kv.k.dtype.itemsize, columns.width) and not columns.packs_freely
    packed = None if raw_queries else [columns.pack(term).reshape(-1, columns.width, head_dim) for term in terms]
    inputs = Inputs(
        q=q if packed is None else jnp.stack(packed),
        k=kv.k.reshape(rows),
        v=kv.v.reshape(rows),
        k_scale=None if scales == "channel" else _one_axis(kv.k_scale),
        v_scale=_one_axis(kv.v_scale),
        block_tables=block_tables,
        kv_lens=kv_lens,
        q_lens=q_lens,
        plan=plan,
        window=window if isinstance(window, HeadWindow) else None,
        drafts=None if draft_mask is None else columns.per_query(_as_bits(draft_mask)),
        sinks=None if sinks is None else columns.per_head(sinks),
    )
    static = Static(
        columns=columns,
        raw_queries=raw_queries,
        tokens=settings.tile_tokens,
        stages=settings.stages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        score_scale=sm_scale / query_scale,
        soft_cap=soft_cap,
        window=window if isinstance(window, int) else None,
        scales=scales,
    )
    out, lse, partials = _launch(inputs, static, q.shape, out_dtype)
    out, lse = merge_pieces(out, lse, partials, plan.piece_offsets, inputs.sinks, columns)
    return out, columns.unpack(lse, num_kv_heads)


def decode_programs(q: Array | jax.ShapeDtypeStruct, kv: PagedKV, *, out_dtype: jax.typing.DTypeLike) -> int:
    limit = config.max_columns(kv.k.shape[-1], kv.k.dtype.itemsize)
    _refuse(q, kv, None, limit)
    _, settings = _sizes(q, kv, out_dtype, limit)
    return settings.programs_per_multiprocessor * mosaic.multiprocessors()


def _sizes(
    q: Array | jax.ShapeDtypeStruct, kv: PagedKV, out_dtype: jax.typing.DTypeLike, limit: int
) -> tuple[Columns, config.MosaicConfig]:
    num_kv_heads, page_size, head_dim = kv.k.shape[1:]
    cache_bytes, scales = kv.k.dtype.itemsize, mosaic_quantised.scale_layout(kv)
    columns = Columns(q.shape[2] // num_kv_heads, q.shape[1], limit)
    key = config.MosaicKey(
        head_dim=head_dim,
        cache_bytes=cache_bytes,
        token_scales=isinstance(scales, int),
        columns=columns.width,
        terms=2 if scales == "channel" else 1,
        out_bytes=jnp.dtype(out_dtype).itemsize,
        page_size=page_size,
    )
    return columns, config.mosaic_config(key)


def _refuse(q: Array | jax.ShapeDtypeStruct, kv: PagedKV, draft_mask: Array | None, limit: int) -> None:
    """Raises NotImplementedError for what the kernel does not take."""
    mosaic.require_hopper()
    num_queries, num_heads, head_dim = q.shape[1:]
    num_kv_heads, page_size = kv.k.shape[1:3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 and float16 queries, got {q.dtype.name}")
    if kv.k_scale is None and kv.k.dtype != q.dtype:
        raise NotImplementedError(
            f"takes queries and an unquantised cache of one dtype, got {q.dtype.name} over {kv.k.dtype.name}"
        )
    if head_dim not in (64, 128, 256):
        raise NotImplementedError(f"takes heads of width 64, 128 or 256, got {head_dim}")
    if page_size not in (16, 32, 64, 128):
        raise NotImplementedError(f"takes pages of 16, 32, 64 or 128 tokens, got {page_size}")
    group = num_heads // num_kv_heads
    if group > limit and Columns(group, 1, limit).block_heads < limit // 2:
        raise NotImplementedError(f"takes {limit} query heads at once, or about as many; {group} have no such divisor")
    if draft_mask is not None and num_queries > 31:
        raise NotImplementedError(f"takes draft masks of at most 31 queries, got {num_queries}")


def _as_bits(draft_mask: Bool[Array, "B Q Q"]) -> Int32[Array, "B Q"]:
    """Bit j of query i: whether it sees draft key j."""
    bit = jnp.left_shift(1, jnp.arange(draft_mask.shape[-1], dtype=jnp.int32))
    return jnp.sum(jnp.where(draft_mask, bit[None, None], 0), axis=-1, dtype=jnp.int32)


def _one_axis(scale: Float[Array, "..."] | None) -> Float[Array, "..."] | None:
    """Scales that come with the tokens, as the kernel copies them: some of one array, never past its end."""
    if scale is None or scale.ndim != 3:
        return scale
    scale = scale.reshape(-1)
    return jnp.pad(scale, (0, -scale.size % SCALES_AT_ONCE)) if scale.size % SCALES_AT_ONCE else scale


def _launch(
    x: Inputs, static: Static, shape: tuple[int, ...], out_dtype: jax.typing.DTypeLike
) -> tuple[Array, Array, Partials]:
    """Runs the kernel: output and LSE of rows in one piece, and partial states of the others."""
    columns, plan = static.columns, x.plan
    rows, num_programs = plan.num_pages.shape[0], plan.program_row.shape[0] - 1
    cuts = rows * pl.cdiv(x.block_tables.shape[-1], plan.piece_pages) if plan.piece_pages else num_programs
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(
            jax.ShapeDtypeStruct(shape, out_dtype),
            jax.ShapeDtypeStruct((columns.blocks, rows, columns.width), jnp.float32),
            Partials.types(columns, rows + cuts, shape[-1]),
        ),
        grid=(num_programs, columns.blocks),
        grid_names=("program", "block"),
        scratch_types=Memory.types(x, static, out_dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=config.reduction_bytes(columns.width),
        ),
        kernel_name="paged_decode",
    )(x)


def _kernel(static: Static, x: Inputs, out: Ref, lse: Ref, partials: Partials, *memory: Ref) -> None:
    """Works off the pieces of one program."""
    program, block = lax.axis_index("program"), lax.axis_index("block")
    mem, plan, columns = Memory(*memory), x.plan, static.columns
    end_row, end_page = plan.program_row[program + 1], plan.program_page[program + 1]

    def work(at: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """One piece, from row and page `at` on; returns where the next begins."""
        row, page, number = at
        num_pages = plan.num_pages[row]
        stop = jnp.where(row == end_row, end_page, num_pages)
        if plan.piece_pages:
            stop = jnp.minimum(stop, (lax.div(page, plan.piece_pages) + 1) * plan.piece_pages)
        piece = Piece.of(static, x, mem, block, row, page, stop)
        state = piece.attend()
        alone = (page == 0) & (stop == num_pages)

        @pl.when(alone)
        def _finish() -> None:
            sink = columns.sink(x.sinks, block, piece.head)
            Output(out, lse, mem.out).write(columns, block, row, state, sink)

        @pl.when(~alone)
        def _keep() -> None:
            partials.write(columns, block, number, state)

        done = stop == num_pages
        return jnp.where(done, plan.next_row[row], row), jnp.where(done, 0, stop), number + 1

    def is_ours(at: tuple[Any, Any, Any]) -> Any:
        row, page, _ = at
        return (row < end_row) | ((row == end_row) & (page < end_page))

    lax.while_loop(is_ours, work, (plan.program_row[program], plan.program_page[program], plan.program_piece[program]))
    plgpu.wait_smem_to_gmem(0)
