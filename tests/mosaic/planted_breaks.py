"""Mistakes that `test_planted_breaks.py` makes on purpose in the Blackwell kernels, in the decode kernel for wide
heads, and in kernels over views of other layouts and fused caches, each with the test that detects it.

To plant a mistake is to replace correct code by wrong code in a copy of the library. The mistakes are typical: missing
barriers, GEMMs that do not clear the accumulator, masks off by one, and errors in rescaling, scales, zeroing and
merges.
"""

from __future__ import annotations

import dataclasses

DECODE = "pallas_attn/mosaic/decode.py"
TMA = "pallas_attn/mosaic/primitives/tma.py"
PRODUCTS = "pallas_attn/mosaic/blackwell/decode_products.py"
LATENTS = "pallas_attn/mosaic/blackwell/mla_decode.py"
MERGE = "pallas_attn/mosaic/merge.py"
PREFILL = "pallas_attn/mosaic/blackwell/prefill.py"

STAGES = "tests/ops/test_paged_decode_sm100.py::test_more_tiles_than_stages"
ALL_OPTIONS = f"{STAGES}[float16, heads of 256, drafts, windows, soft cap, absent pages]"
LATENT_ROWS = "tests/ops/test_mla_decode_sm100.py::test_splits_are_merged[rows, halves that overlap, float16, drafts]"
LATENT_COLUMNS = "tests/ops/test_mla_decode_sm100.py::test_splits_are_merged[columns, two parts, tree]"
ROWS = "tests/ops/test_flash_sm100.py::test_two_consumers"
PAGES = "tests/ops/test_flash_sm100.py::test_pages_with_two_consumers"
WIDE = "tests/ops/test_paged_decode_mosaic.py::test_wide_heads_with_more_tiles_than_stages"
COLUMNS = "tests/contract/test_paged_attention.py::test_columns_of_wide_values_keep_their_place"

WRITE = "pallas_attn/ops/write_kv/mosaic.py"
FUSED_BYTES = "tests/ops/test_write_kv.py::test_fused_caches_equal_separate_caches"
FUSED_GROUPS = "tests/ops/test_write_kv_mosaic.py::test_chunk_in_random_order[fused-interpreter0]"

LAYOUTS = "tests/contract/test_paged_attention.py::test_decode"
LAYOUTS_OF_PREFILL = "tests/contract/test_paged_attention.py::test_prefill"


@dataclasses.dataclass(frozen=True)
class PlantedBreak:
    """A mistake, as a replacement of text in a file.

    Attributes:
      file: path of the file in the repository.
      right: correct text, which occurs exactly once in the file.
      wrong: text that replaces it.
      noticed_by: id of a test that fails or hangs with the mistake; empty if no test does.
      why_not: reason why no test fails; empty if a test fails.
    """

    file: str
    right: str
    wrong: str
    noticed_by: str = ""
    why_not: str = ""


BREAKS: dict[str, PlantedBreak] = {
    "decode: S is added to old TMEM values": PlantedBreak(
        PRODUCTS,
        "[(own.scores, k, q, i > 0) for",
        "[(own.scores, k, q, True) for",
        f"{STAGES}[bfloat16]",
    ),
    "decode: O is added to old TMEM values": PlantedBreak(
        PRODUCTS,
        "v.transpose((1, 0)), p, False) for",
        "v.transpose((1, 0)), p, True) for",
        f"{STAGES}[bfloat16]",
    ),
    "decode: a product is read before it has finished": PlantedBreak(
        PRODUCTS,
        "        plgpu.tcgen05_commit_arrive(own.done)\n\n    plgpu.barrier_wait(own.done)",
        "        plgpu.tcgen05_commit_arrive(own.done)\n",
        f"{STAGES}[bfloat16]",
    ),
    "decode: a product starts before all warps are ready": PlantedBreak(
        PRODUCTS,
        "        plgpu.barrier_wait(own.ready)\n",
        "",
        f"{STAGES}[bfloat16]",
    ),
    "decode: converted keys are not committed": PlantedBreak(
        PRODUCTS,
        "            dequantize.dequantize_tile(keys[0], own.staged)\n            plgpu.commit_smem()\n",
        "            dequantize.dequantize_tile(keys[0], own.staged)\n",
        f"{STAGES}[fp8 per token]",
    ),
    "decode: probabilities are not committed": PlantedBreak(
        PRODUCTS,
        "        to[0][...] = ps[0]\n        plgpu.commit_smem()\n",
        "        to[0][...] = ps[0]\n",
        f"{STAGES}[bfloat16]",
    ),
    "decode: the second half of the channels is the first half": PlantedBreak(
        PRODUCTS,
        "channels = [values.at[:, pl.ds(first, layout.rows)] for first, _ in slices]",
        "channels = [values.at[:, pl.ds(0, layout.rows)] for first, _ in slices]",
        ALL_OPTIONS,
    ),
    "decode: no wait for the load of S": PlantedBreak(
        PRODUCTS,
        "    result = plgpu.async_load_tmem(accumulator, layout=layout.tile)\n    plgpu.wait_load_tmem()\n",
        "    result = plgpu.async_load_tmem(accumulator, layout=layout.tile)\n",
        f"{STAGES}[bfloat16]",
    ),
    "decode: the cap is half as high": PlantedBreak(
        "pallas_attn/mosaic/primitives/soft_cap.py",
        "return soft_cap - 2 * soft_cap * reciprocal(1 +",
        "return soft_cap - soft_cap * reciprocal(1 +",
        ALL_OPTIONS,
    ),
    "wide decode: the second half of the output has the first columns": PlantedBreak(
        "pallas_attn/mosaic/decode_merge.py",
        "out[j * slice_values : (j + 1) * slice_values]",
        "out[:slice_values]",
        f"{COLUMNS}[512-paged_decode-mosaic]",
    ),
    "wide decode: the halves of the values are swapped": PlantedBreak(
        DECODE,
        "                plgpu.copy_gmem_to_smem(self.values_of_page(pool_row, tile_of_page), target, full)\n",
        "                half = tile.value_dim // 2\n"
        "                for i in range(2):\n"
        "                    swapped = target.at[:, pl.ds((1 - i) * half, half)]\n"
        "                    part = self.rows_of_page(self.x.v, pool_row, tile_of_page, i * half, half)\n"
        "                    plgpu.copy_gmem_to_smem(part, swapped, full)\n",
        f"{COLUMNS}[512-paged_decode-mosaic]",
    ),
    "views: a page starts at the table entry of another token": PlantedBreak(
        DECODE,
        "pool_row = tables[self.batch, entry * tile.page_size]",
        "pool_row = tables[self.batch, entry]",
        f"{LAYOUTS}[mosaic-tokens first, drafts, windows, absent pages]",
    ),
    "views: values start at the column of keys": PlantedBreak(
        DECODE,
        "tile_of_page, self.tile.first_value_column, columns)",
        "tile_of_page, 0, columns)",
        f"{LAYOUTS}[mosaic-fused in lanes, tokens first, pages of 64, float16]",
    ),
    "views: a copy has the rows of the first head": PlantedBreak(
        TMA,
        "self.pages.at[pl.ds(page + first, count), self.head, some]",
        "self.pages.at[pl.ds(page + first, count), 0, some]",
        f"{LAYOUTS_OF_PREFILL}[mosaic-tokens first, pages of 192, int window, soft cap]",
    ),
    "views: the rest of a table starts within a page of the plan": PlantedBreak(
        "pallas_attn/ops/cascade_decode/__init__.py",
        "shared = shared // entries * entries",
        "shared = shared // 1",
        "tests/contract/test_cascade_decode.py::test_view_of_pages_with_tokens_before_heads[mosaic]",
    ),
    "wide decode: no wait for the values": PlantedBreak(
        DECODE,
        "            plgpu.barrier_wait(mem.values_full.at[stage])\n",
        "",
        f"{WIDE}[interpreted-one stage, sinks, absent pages]",
    ),
    "wide decode: the next values are copied with the next keys": PlantedBreak(
        DECODE,
        "                basics.first_warp(functools.partial(self.start_copies, following, pages))\n",
        "                basics.first_warp(functools.partial(self.start_copies, following, pages))\n"
        "                basics.first_warp(functools.partial(self.start_value_copies, following, pages))\n",
        f"{WIDE}[interpreted-one stage, sinks, absent pages]",
    ),
    "wide decode: absent pages do not arrive at the barrier of the values": PlantedBreak(
        DECODE,
        "            pl.when(position >= ABSENT)(lambda: plgpu.barrier_arrive(full))\n",
        "",
        f"{WIDE}[interpreted-one stage, sinks, absent pages]",
    ),
    "decode: the accumulator is not rescaled": PlantedBreak(
        DECODE,
        "        acc = acc * over_columns(rescale, acc.shape)\n",
        "",
        f"{STAGES}[bfloat16]",
    ),
    "decode: masked values are not zeroed": PlantedBreak(
        DECODE,
        "            clear_rows(v, live_mask, self.layout, self.tile.row_bytes)\n        else:",
        "            pass\n        else:",
        f"{STAGES}[bfloat16]",
    ),
    "decode: masked 8-bit values are not zeroed": PlantedBreak(
        DECODE,
        "dequantize.clear_tokens(v, self.tile.value_dim, live_mask, self.layout)",
        "pass",
        f"{STAGES}[fp8 per token]",
    ),
    "decode: tiles with drafts count as visible": PlantedBreak(
        DECODE,
        "newest = self.first_query if self.x.drafts is None else self.first_query - 1",
        "newest = self.kv_len - 1",
        "tests/contract/test_paged_attention.py::test_decode[mosaic_sm100-drafts, ragged]",
    ),
    "decode: an absent page has one arrival too few": PlantedBreak(
        DECODE,
        "for _ in range(self.tile.page_copies):",
        "for _ in range(self.tile.page_copies - 1):",
        ALL_OPTIONS,
    ),
    "decode: a window is one token too wide": PlantedBreak(
        DECODE,
        "(each < self.sink_tokens) | (each > limit(1))",
        "(each < self.sink_tokens) | (each >= limit(1))",
        ALL_OPTIONS,
    ),
    "decode: sums are not divided by the value scales": PlantedBreak(
        DECODE,
        "            p *= over_tokens(1 / v_scale, shape)\n",
        "            pass\n",
        f"{STAGES}[fp8 per token]",
    ),
    "decode: a stage is refilled too early": PlantedBreak(
        DECODE,
        "stage, following = lax.rem(i, static.stages), i + static.stages\n",
        "stage, following = lax.rem(i, static.stages), i + static.stages - 1\n",
        f"{STAGES}[bfloat16]",
    ),
    "latents: both halves have the same other columns": PlantedBreak(
        LATENTS,
        'return (1 - lax.axis_index("half")) * self.static.own if',
        'return lax.axis_index("half") * self.static.own if',
        LATENT_ROWS,
    ),
    "latents: scores are added to the scores of the previous tile": PlantedBreak(
        LATENTS,
        "mem.k.rope.at[stage].transpose((1, 0)), accumulate=False)",
        "mem.k.rope.at[stage].transpose((1, 0)))",
        LATENT_ROWS,
    ),
    "latents: scores of own columns replace scores of other columns": PlantedBreak(
        LATENTS,
        "        plgpu.tcgen05_mma(mem.s, q, mem.k.own.at[stage].transpose((1, 0)))\n",
        "        plgpu.tcgen05_mma(mem.s, q, mem.k.own.at[stage].transpose((1, 0)), accumulate=False)\n",
        LATENT_ROWS,
    ),
    "latents: no wait for the load of S": PlantedBreak(
        LATENTS,
        "        s = plgpu.async_load_tmem(mem.s, layout=static.layout)  # [query_rows, tokens]\n"
        "        plgpu.wait_load_tmem()\n",
        "        s = plgpu.async_load_tmem(mem.s, layout=static.layout)  # [query_rows, tokens]\n",
        LATENT_ROWS,
    ),
    "latents: O is not rescaled": PlantedBreak(
        LATENTS,
        "pl.when((m_new - m).max() > 0)(",
        "pl.when((m_new - m).max() > 1e30)(",
        LATENT_ROWS,
    ),
    "latents: masked latents are not zeroed": PlantedBreak(
        LATENTS,
        "            self.clear_dead_rows(split, stage)\n",
        "",
        LATENT_ROWS,
    ),
    "latents: only own columns are zeroed": PlantedBreak(
        LATENTS,
        "self.mem.k[: 2 if self.static.columns and self.static.other else 1]",
        "self.mem.k[:1]",
        LATENT_COLUMNS,
    ),
    "latents: P is overwritten while the tensor core reads it": PlantedBreak(
        LATENTS,
        "            plgpu.barrier_wait(mem.o_done)  # the product with the last P has finished: P and O may change\n",
        "",
        LATENT_ROWS,
    ),
    "latents: a stage is refilled before it is empty": PlantedBreak(
        LATENTS,
        "pl.when(tile >= static.stages)(lambda: plgpu.barrier_wait(free.at[stage]))",
        "pl.when(tile > static.stages)(lambda: plgpu.barrier_wait(free.at[stage]))",
        LATENT_ROWS,
    ),
    "latents: a query sees the draft after it": PlantedBreak(
        LATENTS,
        "jnp.where(newer <= (1 if static.causal else 0), FULL, DEAD)",
        "jnp.where(newer <= (2 if static.causal else 0), FULL, DEAD)",
        LATENT_ROWS,
    ),
    "latents: a query row sees one draft too many": PlantedBreak(
        LATENTS,
        "newer = self.static.queries - 1 - lax.div(row, self.static.heads)",
        "newer = self.static.queries - 2 - lax.div(row, self.static.heads)",
        LATENT_ROWS,
    ),
    "latents: both halves write the overlapping columns": PlantedBreak(
        LATENTS,
        "is_written = (half == 0) | (place >= static.own - static.other) if static.halves == 2 else True",
        "is_written = True",
        LATENT_ROWS,
    ),
    "latents: a split reads past its end": PlantedBreak(
        LATENTS,
        "jnp.where((entry < split.stop) & basics.in_pool",
        "jnp.where(basics.in_pool",
        LATENT_ROWS,
    ),
    "latents: the query is empty before its last product": PlantedBreak(
        LATENTS,
        "                pl.when(i == last)(lambda: plgpu.tcgen05_commit_arrive(mem.q_empty))\n            score(",
        "                pl.when(i == 0)(lambda: plgpu.tcgen05_commit_arrive(mem.q_empty))\n            score(",
        LATENT_COLUMNS,
    ),
    "latents: a split that sees no key stores its maximum": PlantedBreak(
        LATENTS,
        "partials.stats[index, 0] = jnp.where(seen, m, -jnp.inf)",
        "partials.stats[index, 0] = m",
        why_not="its sum and its values are 0, so it does not change the merge",
    ),
    "latents: merged states are not weighted": PlantedBreak(
        MERGE,
        "state.acc * mine + other.acc * others",
        "state.acc + other.acc * others",
        LATENT_ROWS,
    ),
    "latents: the rotated query is overwritten by P": PlantedBreak(
        LATENTS,
        "            plgpu.tcgen05_commit_arrive(mem.q_moved)\n            plgpu.barrier_wait(mem.other_full)",
        "            plgpu.tcgen05_commit_arrive(mem.q_moved)",
        LATENT_ROWS,
    ),
    "prefill: S is added to old TMEM values": PlantedBreak(
        PREFILL,
        "rings.q.at[consumer * parts + part], k, accumulate=part > 0)",
        "rings.q.at[consumer * parts + part], k, accumulate=True)",
        ROWS,
    ),
    "prefill: O is added to O of the previous block": PlantedBreak(
        PREFILL,
        "plgpu.tcgen05_mma(scratch.outputs[consumer], p, v, accumulate=accumulate)",
        "plgpu.tcgen05_mma(scratch.outputs[consumer], p, v)",
        ROWS,
    ),
    "prefill: S overwrites P while the tensor core reads it": PlantedBreak(
        PREFILL,
        "                plgpu.barrier_wait(scratch.o_done.at[consumer])  # P was read; the next S overwrites it\n",
        "",
        ROWS,
    ),
    "prefill: S of a single consumer overwrites P": PlantedBreak(
        PREFILL,
        "            wait_if(i > 0, self.scratch.o_done.at[0])  # P of tile i - 1 was read: S of i + 1 overwrites it\n",
        "",
        "tests/ops/test_flash_sm100.py::test_each_width[256]",
    ),
    "prefill: no wait for the load of S": PlantedBreak(
        PREFILL,
        "for columns in self._chunks()]\n        plgpu.wait_load_tmem()\n",
        "for columns in self._chunks()]\n",
        ROWS,
    ),
    "prefill: O is not rescaled": PlantedBreak(
        PREFILL,
        "pl.when(any_of_warp(m != state.m))(",
        "pl.when(any_of_warp(m > 1e30))(",
        ROWS,
    ),
    "prefill: sums are not rescaled": PlantedBreak(
        PREFILL,
        "l = state.l * factor  # noqa: E741",
        "l = state.l  # noqa: E741",
        ROWS,
    ),
    "prefill: rows that see no key have an infinite shift": PlantedBreak(
        PREFILL,
        "shift = jnp.where(m == -jnp.inf, 0.0, m)\n        factor",
        "shift = m\n        factor",
        ROWS,
    ),
    "prefill: a window is one token too narrow": PlantedBreak(
        PREFILL,
        "seen = column >= over_rows(limits.low, part.shape)",
        "seen = column > over_rows(limits.low, part.shape)",
        ROWS,
    ),
    "prefill: a query sees the key after it": PlantedBreak(
        PREFILL,
        "seen &= column < over_rows(limits.high, part.shape)",
        "seen &= column <= over_rows(limits.high, part.shape)",
        ROWS,
    ),
    "prefill: absent pages are visible": PlantedBreak(
        PREFILL,
        "            seen &= (lax.shift_right_logical(over_rows(limits.pages, part.shape), page) & 1) == 1\n",
        "",
        f"{PAGES}[int8, absent pages]",
    ),
    "prefill: no wait for the load of O": PlantedBreak(
        PREFILL,
        "            plgpu.wait_load_tmem()  # before p_full of the next block, after which a product overwrites O\n",
        "",
        why_not="the wait after the next load, of scores or of the next chunk, precedes any write to O",
    ),
    "prefill: probabilities are not committed": PlantedBreak(
        PREFILL,
        "        plgpu.commit_tmem()\n        plgpu.barrier_arrive(scratch.p_full.at[buffer])",
        "        plgpu.barrier_arrive(scratch.p_full.at[buffer])",
        ROWS,
    ),
    "prefill: sums use the scales of keys": PlantedBreak(
        PREFILL,
        "transform.token_scales(i).at[2, columns], PER_COLUMN",
        "transform.token_scales(i).at[0, columns], PER_COLUMN",
        f"{PAGES}[int8, absent pages]",
    ),
    "prefill: meta of a tile are read before they are there": PlantedBreak(
        PREFILL,
        "        if transform.await_tile is not None:\n            transform.await_tile(i)\n",
        "",
        f"{PAGES}[int8, absent pages]",
    ),
    "prefill: queries are freed while the tensor core reads them": PlantedBreak(
        PREFILL,
        "@pl.when(is_last)\n        def _release_queries()",
        "@pl.when(is_last | ~is_last)\n        def _release_queries()",
        ROWS,
    ),
    "prefill: the second split-fp16 part of a query replaces the first": PlantedBreak(
        PREFILL,
        "rings.q.at[consumer * parts + part], k, accumulate=part > 0)",
        "rings.q.at[consumer * parts + part], k, accumulate=False)",
        f"{PAGES}[fp8 by channel]",
    ),
    "prefill: the queue has a stage too few": PlantedBreak(
        PREFILL,
        "static.consumers + 2, static.stages + 1, orders_tensor_core=True)",
        "static.consumers + 2, static.stages - 1, orders_tensor_core=True)",
        ROWS,
    ),
    "write: values of a fused cache are stored one column too early": PlantedBreak(
        WRITE,
        "(v, pool.values, static.value_column, x.v_scale",
        "(v, pool.values, static.value_column - 1, x.v_scale",
        f"{FUSED_BYTES}[16-bfloat16-None-2-mosaic]",
    ),
    "write: 8-bit values of a fused cache overwrite the keys": PlantedBreak(
        WRITE,
        "    tile.store(pages, row, quantised, column)\n",
        "    tile.store(pages, row, quantised)\n",
        f"{FUSED_BYTES}[21-int8-channel-1-mosaic]",
    ),
    "write: earlier values of a group are read from the keys": PlantedBreak(
        WRITE,
        "tile.load(pages, group.earlier, column)]",
        "tile.load(pages, group.earlier)]",
        FUSED_GROUPS,
    ),
    "write: requantised values of a group overwrite the keys": PlantedBreak(
        WRITE,
        "    _store_quantised(tile, pages, column, group.row,",
        "    _store_quantised(tile, pages, 0, group.row,",
        FUSED_GROUPS,
    ),
    "write: a vector of a fused cache is not aligned": PlantedBreak(
        WRITE,
        "vector = min(vector, value_column & -value_column)",
        "pass",
        "tests/ops/test_write_kv_mosaic.py::test_accesses_to_fused_caches_are_aligned[neox]",
    ),
}
