"""Attention of decode steps over pages, on Hopper: programs that work off the pieces of a plan.

A program is one warpgroup. Several run side by side on a multiprocessor where they fit, so that some compute while
others wait, and each works off its share of the plan: pieces, which are consecutive pages of one row (a KV head of a
sequence). `Piece` attends over one.

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

- landed[s] has a phase for every tile that goes to slot s, and for each of its pages the arrivals of as many
  copies (`Inputs.copies`): `fetch` makes all of them, with a copy where there is a page and without where there is
  none. Every tile fetched is waited for once, in the order of fetching, and none is fetched past the last.
- q_landed has a phase for every piece, and an arrival for every term of every part of the queries (for every query, if
  they are not in columns yet).
- A slot is fetched into again once its tile is done with: every warp has waited for the wgmma that read it, and
  `first_warp` for every warp. What threads themselves read or wrote there was committed before P was multiplied.
- The tile of the output is written again once the copy from it has been read, which its own program waits for.

A row that was not cut is normalised and written. The states of others go to global memory, and a second kernel merges
them (`sm90.query_packing`), which also writes the rows that see nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import Ref
from pallas_attn.mosaic.sm90.decode_config import reduction_bytes
from pallas_attn.mosaic.sm90.decode_memory import Inputs, Memory, Static
from pallas_attn.mosaic.sm90.decode_pages import Piece
from pallas_attn.mosaic.sm90.query_packing import Output, merge_pieces
from pallas_attn.mosaic.sm90.split_states import Partials
from pallas_attn.mosaic.tile_scheduler import Span, for_each_span, num_states


def attend(
    x: Inputs, static: Static, out_type: jax.ShapeDtypeStruct, *, name: str
) -> tuple[Float[Array, "B Q Hq V"], Float[Array, "B Q Hq"]]:
    """Output, of `out_type`, and LSE.

    Args:
      name: of the kernel, for profiles.
    """
    out, lse, partials = _launch(x, static, out_type, name)
    out, lse = merge_pieces(out, lse, partials, x.plan, x.sinks, static.columns)
    return out, static.columns.unpack(lse, static.num_kv_heads)


def _launch(x: Inputs, static: Static, out_type: jax.ShapeDtypeStruct, name: str) -> tuple[Array, Array, Partials]:
    """Runs the kernel: output and LSE of rows in one piece, and partial states of the others."""
    columns, plan = static.columns, x.plan
    rows, num_programs = plan.num_pages.shape[0], plan.cta_row.shape[0] - 1
    states = num_states(plan, rows, x.block_tables.shape[-1])
    return plgpu.kernel(
        functools.partial(_kernel, static),
        out_type=(
            out_type,
            jax.ShapeDtypeStruct((columns.blocks, rows, columns.width), jnp.float32),
            Partials.types(columns.blocks * states, columns.width, x.value_dim),
        ),
        grid=(num_programs, columns.blocks),
        grid_names=("program", "block"),
        scratch_types=Memory.types(x, static, out_type.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=reduction_bytes(columns.width),
        ),
        kernel_name=name,
    )(basics.materialize(x))


def _kernel(static: Static, x: Inputs, out: Ref, lse: Ref, partials: Partials, *memory: Ref) -> None:
    """Works off the pieces of one program."""
    block, mem, columns = lax.axis_index("block"), Memory(*memory), static.columns

    def work(span: Span, carry: Any) -> Any:
        piece = Piece.of(static, x, mem, block, span)
        state = piece.attend()

        @pl.when(span.is_all)
        def _finish() -> None:
            sink = columns.sink(x.sinks, block, piece.head)
            Output(out, lse.at[block, span.row], mem.out).write(columns, block, span.row, state, sink)

        @pl.when(~span.is_all)
        def _keep() -> None:
            columns.keep(partials, block, span.number, state)

        return carry

    for_each_span(x.plan, work)
    plgpu.wait_smem_to_gmem(0)
