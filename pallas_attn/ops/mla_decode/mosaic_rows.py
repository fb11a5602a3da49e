"""Latent attention of many query rows on Hopper: rows are wgmma's M, and two warpgroups share each block of them.

A program holds 64 query rows of a sequence (heads of each query, query by query) and works off its share of the plan.
Their output, [64, L] in float32, does not fit the registers of one warpgroup: warpgroup 0 keeps the left half of the
latent's columns, warpgroup 1 the right one. They score tiles of 64 latents in turn, and each needs the other's
probabilities too (after the "seesaw" of FlashMLA's deep dive of April 2025, but tile by tile: there, warpgroup 1 sees
the probabilities of the first tile of a pair only once the maxima of the second are known). What stands side by side
goes on at the same time; products are started, and waited for no sooner than something needs them:

    warpgroup 0, even                            warpgroup 1, odd
    P0 = exp(S0 - m0), leaves P0 and m0          starts S1 = Q C1^T, as C1 lands
    O = O exp(m - m0) + P0 left(C0)         ->   O = O exp(m - m0) + P0 right(C0)
    frees left(C0)                               P1 = exp(S1 - m1), meanwhile; leaves P1; frees right(C0); leaves m1
    O = O exp(m0 - m1) + P1 left(C1)        <-   O = O exp(m0 - m1) + P1 right(C1)
    frees left(C1)                               frees right(C1)
    the next S0 = Q C0^T, as C0 lands

The own product takes probabilities from registers, the other one from shared memory; they lie where the tile's rotated
keys were, which are as large and no longer needed (if R is not 64, in memory of their own: there is enough then).
Sums shrink only where a row's scores have outgrown what they are relative to by far, so mostly not at all.
Warpgroup 2 starts all copies: of the halves of a pair's tiles, in the order in which they fall free. Shared memory
holds one pair where latents are wide, so everything hangs on how soon probabilities are left and halves fall free.

Programs of neighbouring blocks of a sequence are a cluster of two: each copies one half of what both read, to both.

Masking and clearing are for the tiles that need them, by notes that the copying warpgroup leaves: a tile that all rows
see all of is not masked. Latents that no row sees, past a sequence's end for one, become 0 before they are values,
since 0 · NaN is NaN.

No wait can last. Below, "waits for x" means that x was asked for, and is not itself waiting for the waiter.

- landed: copies, started after free. A page that does not exist arrives without a copy. Only the warpgroup that scores
  a tile waits for it, and for all of it; the other one reads values after ready, which comes after that.
- free: has a phase more than there are copies: consumers arrive once at the start, and after each use of a half. The
  warpgroup that copies waits for one phase before each copy, and for the last one before it ends, so that no program
  of a cluster ends while another still arrives there. Both programs of a cluster have the same plan, pages and order.
  It waits for left(C0), right(C0), right(C1), left(C1) of a pair in turn, which are freed before anything of the next
  pair is waited for.
- ready[0]: warpgroup 0 arrives after its scores, for which it waits for copies only. ready[1]: warpgroup 1 arrives
  after its scores and its product with P0, for which it waits for copies and for ready[0] of the same pair.
- both[SUMS]: both warpgroups, after the same number of pairs. both[Q_FREE]: like free. The first piece's query is
  copied at once, another after the first pair of its piece, for which halves are free once the pairs before are done,
  whatever becomes of their results.
- What a warpgroup leaves is overwritten after it waited for something that the other one does after reading it: m0
  after m1 of the same pair, and so is P0, as ready[1] comes after the product that reads it; m1 and P1 after ready[0]
  of the next pair, before which warpgroup 0 sees the ends of all its products. Notes have room for twice the pairs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic import basics
from pallas_attn.mosaic.basics import LOG2E, Ref
from pallas_attn.mosaic.sm90.split_states import PartialStates, num_fragments, store_fragments
from pallas_attn.mosaic.sm90.tiles import over_tokens
from pallas_attn.mosaic.tile_scheduler import num_partial_states
from pallas_attn.ops.mla_decode.mosaic_rows_consumer import Consumer, State
from pallas_attn.ops.mla_decode.mosaic_rows_memory import PER_ROW, ROWS, SUMS, Inputs, Memory, Piece, Static
from pallas_attn.ops.mla_decode.mosaic_rows_merge import log_sum, normalised
from pallas_attn.ops.mla_decode.mosaic_rows_producer import Producer

# --- results


class Results(NamedTuple):
    """In global memory: out [B, blocks·ROWS, L], lse [blocks, B, ROWS] of rows in one piece; states of the others."""

    out: Any
    lse: Any
    partials: PartialStates


def finish(results: Results, consumer: Consumer, piece: Piece, state: State) -> None:
    """Writes what a piece comes to."""
    mem, static, half, block = consumer.mem, consumer.static, consumer.half, consumer.block
    own = state.l.sum(axis=1)
    mem.stats[2 + half] = own
    plgpu.barrier_arrive(mem.both.at[SUMS])
    plgpu.barrier_wait(mem.both.at[SUMS])
    real = consumer.seen(piece) < 0
    m = jnp.where(real, state.m, -jnp.inf)
    l = jnp.where(real, own + basics.load(mem.stats.at[2 + 1 - half], PER_ROW), 0.0)  # noqa: E741
    columns = pl.ds(half * static.widths[0], static.widths[half])

    @pl.when(piece.is_all)
    def _write() -> None:
        done = normalised(state.acc, l).astype(results.out.dtype)
        place = results.out.at[piece.row, pl.ds(block * ROWS, ROWS), columns]
        if done.dtype == mem.q.left.dtype:
            mem.q[half][0] = done
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mem.q[half].at[0], place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            consumer.release_query()
        else:
            consumer.release_query()
            place[...] = done
        if half == 0:
            results.lse[block, piece.row] = log_sum(m, l)

    @pl.when(~piece.is_all)
    def _keep() -> None:
        consumer.release_query()  # so that the next one comes while this is written
        partials = results.partials
        number = partials.state_index(block, results.lse.shape[0], piece.number)
        blocks = pl.ds(num_fragments(ROWS * half * static.widths[0]), num_fragments(ROWS * static.widths[half]))
        acc = jnp.where(over_tokens(real, state.acc.shape), state.acc, 0.0)
        store_fragments(acc, partials.acc.at[number, blocks])
        if half == 0:
            partials.stats[number, 0] = m * (1 / LOG2E)
            partials.stats[number, 1] = l


def kernel(static: Static, x: Inputs, out: Ref, lse: Ref, partials: PartialStates, *memory: Ref) -> None:
    """The roles of the three warpgroups."""
    results = Results(out, lse, partials)
    warpgroup = lax.axis_index("warpgroup")
    mem = Memory(*memory)

    def block() -> Any:  # of each role its own: else it is kept in local memory while barriers are made
        return lax.axis_index("blocks") * static.cluster + lax.axis_index("cluster")

    def compute(half: int) -> None:
        plgpu.set_max_registers(static.registers[0], action="increase")
        Consumer(static, x, mem, block(), half).run(functools.partial(finish, results))
        plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        plgpu.set_max_registers(static.registers[1], action="decrease")
        Producer(static, x, mem, block()).run()

    lax.switch(warpgroup, [functools.partial(compute, 0), functools.partial(compute, 1), copy])


def decode(x: Inputs, static: Static, out_dtype: jax.typing.DTypeLike) -> tuple[Any, Any, PartialStates]:
    """Runs the kernel: output and LSE of rows in one piece, and partial states of the others."""
    batch, rows, latent_dim = x.q_latent.shape
    blocks, num_programs = rows // ROWS, x.plan.program_place.shape[0] - 1
    states = blocks * num_partial_states(x.plan, batch, x.block_tables.shape[1])
    return plgpu.kernel(
        functools.partial(kernel, static),
        out_type=Results(
            jax.ShapeDtypeStruct((batch, rows, latent_dim), out_dtype),
            jax.ShapeDtypeStruct((blocks, batch, ROWS), jnp.float32),
            PartialStates.types(states, ROWS, latent_dim),
        ),
        grid=(num_programs, blocks // static.cluster),
        grid_names=("program", "blocks"),
        cluster=(static.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=Memory.types(x, static),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_decode_rows",
    )(basics.materialize(x))
