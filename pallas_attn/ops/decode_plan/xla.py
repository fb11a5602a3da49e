"""`plan_decode` in plain JAX: some ten kernels of XLA's."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_attn.ops.common.sharing import Sharing
from pallas_attn.ops.common.stretches import stretch_of
from pallas_attn.ops.common.visibility import head_windows, page_walk
from pallas_attn.types import DecodePlan, HeadWindow


def plan_decode(
    kv_lens: Int32[Array, "B"],
    q_lens: Int32[Array, "B"] | None,
    window: int | HeadWindow | None,
    sharing: Sharing,
    *,
    num_kv_heads: int,
    page_size: int,
    num_programs: int,
) -> DecodePlan:
    q_lens = jnp.ones_like(kv_lens) if q_lens is None else q_lens
    windows = head_windows(window, num_kv_heads)
    first_query = jnp.maximum(kv_lens - q_lens, 0)[:, None]
    end = jnp.where(q_lens > 0, kv_lens, 0)[:, None]
    walk = page_walk(first_query, end, windows.window[None], windows.sink_tokens[None], page_size=page_size)
    sink_pages, first_page, num_pages = (x.reshape(-1) for x in walk)
    offsets = _prefix_sums(sharing.cost(num_pages))
    total = offsets[-1]
    share = sharing.share(total, num_programs)
    program = jnp.arange(num_programs + 1, dtype=jnp.int32)
    rows = num_pages.shape[0]
    whole = offsets[sharing.first_row(program, sharing.rows_each(offsets[1], share, rows), num_programs, rows)]
    are_cut = sharing.is_uneven(jnp.diff(whole), share).any() | bool(sharing.piece_pages)
    start = jnp.where(are_cut, sharing.start(program, share, total), whole)
    piece_offsets = _prefix_sums(sharing.pieces(offsets[:-1], offsets[1:], share, are_cut))
    row = stretch_of(offsets[1:], start)
    begin = offsets[row]
    into = jnp.maximum(jnp.minimum(start, total) - begin, 0)
    return DecodePlan(
        sink_pages=sink_pages,
        first_page=first_page,
        num_pages=num_pages,
        next_row=_next_busy(num_pages),
        piece_offsets=piece_offsets,
        program_row=row,
        program_page=sharing.page(into),
        program_piece=sharing.piece(program, begin, into, piece_offsets[row], share),
        page_size=page_size,
        piece_pages=sharing.piece_pages,
    )


def _next_busy(num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """After each row, the next that has pages; the number of rows where there is none."""
    rows = num_pages.shape[0]
    busy = jnp.where(num_pages > 0, jnp.arange(rows, dtype=jnp.int32), rows)
    return jnp.append(lax.cummin(busy, reverse=True)[1:], jnp.int32(rows))


def _prefix_sums(x: Int32[Array, "rows"]) -> Int32[Array, "rows_plus_1"]:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
