"""`plan_decode` in plain JAX: some ten kernels of XLA's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

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
    share = sharing.share(offsets[-1], num_programs)
    program = jnp.arange(num_programs + 1, dtype=jnp.int32)
    cuts = _at_equal_distances(sharing, offsets, share, program)
    if not sharing.piece_pages:
        alone = num_pages.shape[0] <= num_programs
        others, are_worse = (_for_each_row if alone else _whole_rows)(sharing, num_pages, offsets, share, program)
        cuts = jax.tree.map(functools.partial(jnp.where, are_worse), cuts, others)
    return DecodePlan(
        sink_pages=sink_pages,
        first_page=first_page,
        num_pages=num_pages,
        next_row=_next_busy(num_pages),
        **cuts._asdict(),
        page_size=page_size,
        piece_pages=sharing.piece_pages,
    )


class Cuts(NamedTuple):
    """Of a `DecodePlan`: pieces before each row, and where each program starts."""

    piece_offsets: Int32[Array, "rows_plus_1"]
    program_row: Int32[Array, "programs_plus_1"]
    program_page: Int32[Array, "programs_plus_1"]
    program_piece: Int32[Array, "programs_plus_1"]


def _at_equal_distances(sharing: Sharing, offsets: Array, share: Array, program: Array) -> Cuts:
    """Of rows laid end to end."""
    start = sharing.start(program, share, offsets[-1])
    piece_offsets = _prefix_sums(sharing.pieces(offsets[:-1], offsets[1:], share))
    row = stretch_of(offsets[1:], start)
    begin = offsets[row]
    into = jnp.maximum(jnp.minimum(start, offsets[-1]) - begin, 0)
    return Cuts(piece_offsets, row, sharing.page(into), sharing.piece(program, begin, into, piece_offsets[row], share))


def _whole_rows(
    sharing: Sharing, num_pages: Array, offsets: Array, share: Array, program: Array
) -> tuple[Cuts, Bool[Array, ""]]:
    """As many for each program; and whether that is too uneven."""
    rows, num_programs = num_pages.shape[0], program.shape[0] - 1
    first = sharing.first_row(program, sharing.rows_each(offsets[1], share, rows), num_programs, rows)
    row = stretch_of(offsets[1:], offsets[first])
    piece_offsets = _prefix_sums((num_pages > 0).astype(jnp.int32))
    are_worse = jnp.any(sharing.is_uneven(jnp.diff(offsets[first]), share))
    return Cuts(piece_offsets, row, jnp.zeros_like(row), piece_offsets[row]), are_worse


def _for_each_row(
    sharing: Sharing, num_pages: Array, offsets: Array, share: Array, program: Array
) -> tuple[Cuts, Bool[Array, ""]]:
    """Programs of its own, with equal parts of it; and whether that is too uneven, or takes more than there are."""
    parts = sharing.parts(num_pages, share)
    piece_offsets = _prefix_sums(parts)
    row = stretch_of(piece_offsets[1:], program)
    part = sharing.part(num_pages, jnp.maximum(parts, 1))
    page = (program - piece_offsets[row]) * jnp.append(part, jnp.int32(0))[row]
    are_worse = jnp.any(sharing.is_uneven(part, share)) | (piece_offsets[-1] >= program.shape[0])
    return Cuts(piece_offsets, row, page, jnp.minimum(program, piece_offsets[-1])), are_worse


def _next_busy(num_pages: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """After each row, the next that has pages; the number of rows where there is none."""
    rows = num_pages.shape[0]
    busy = jnp.where(num_pages > 0, jnp.arange(rows, dtype=jnp.int32), rows)
    return jnp.append(lax.cummin(busy, reverse=True)[1:], jnp.int32(rows))


def _prefix_sums(x: Int32[Array, "rows"]) -> Int32[Array, "rows_plus_1"]:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
