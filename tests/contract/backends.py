"""The one table of the contract suites: every implementation, how it runs there, and which cases it refuses.

A backend is added by an entry in `BACKENDS`; the suites find the operations that it has, hold it to all of their cases,
and expect NotImplementedError, for the reason given here, where the table says that it refuses one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_attn import DecodePlan
from pallas_attn.mosaic import decode_config
from pallas_attn.mosaic.prefill import config as flash_config
from pallas_attn.ops import plan_decode as plan_module
from pallas_attn.ops.mla_decode import config as mla_config
from pallas_attn.ops.plan_decode.config import PlanConfig
from pallas_attn.ops.write_kv import config as write_config
from pallas_attn.portable.online_softmax import XlaConfig
from pallas_attn.runtime import device, dispatch
from pallas_attn.runtime.device import Architecture
from pallas_attn.triton.tiles import FlashTile
from tests.kit import harness
from tests.kit.harness import Jitted, Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """An implementation as the contract suites run it.

    Attributes:
      name: of the implementation.
      architecture: that its kernels are for, where the implementation has others for other cards.
      configs: taken in place of tuned or heuristic configurations, whichever of their types an operation looks up.
      dtype: of queries, in cases that name none.
      dense: memory grows with queries times keys, so that no large case is run.
      kernels: it runs kernels of its own: on a GPU compiled, elsewhere in an interpreter, with races looked for. There
        inputs are poisoned only, but for one case an operation, calls are repeated less often, and nothing is said of
        what XLA compiles; the compile gate says that of kernels.
      interpreter: what the calls of kernels run within where there is no GPU.
      plans: in `fixed` mode a row of a decode has the same bits in any batch and order.
      tree_tiles: latents take tiles of their own where drafts have a mask, so that a mask changes bits.
      refuses: the tests whose calls are refused, as patterns of "file::test[parameters]", and why, as patterns of the
        error's message.
      slow: the tests, as patterns, that are left to the slow run; on a GPU, kernels run them all.
    """

    name: str
    architecture: Architecture | None = None
    configs: tuple[Any, ...] = ()
    dtype: str = "float32"
    dense: bool = False
    kernels: bool = False
    interpreter: Callable[[pytest.CaptureFixture[str]], contextlib.AbstractContextManager[None]] | None = None
    plans: bool = False
    tree_tiles: bool = False
    refuses: Mapping[str, str] = MappingProxyType({})
    slow: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name in the ids of tests."""
        return f"{self.name}_sm100" if self.architecture == (10, 0) else self.name

    @functools.cached_property
    def variant(self) -> Variant:
        """With the configurations of the suites, under which small inputs make many tiles."""
        return Variant(self.name, self.configs, self.architecture, honours_plans=self.plans)

    def implements(self, op: str) -> bool:
        """Whether the operation has it, for cards that are here or interpreted."""
        if self.architecture is None:
            return self.name in dispatch.implementations(op)
        runs_here = self.interpreted or device.current().capability == self.architecture
        return runs_here and (self.name, self.architecture) in dispatch.MODULES[op]

    @property
    def interpreted(self) -> bool:
        """Whether its calls run in an interpreter here."""
        return self.kernels and jax.default_backend() != "gpu"

    @property
    def repeats(self) -> int:
        """Times that a call is repeated to see whether its bits stay."""
        return 3 if self.interpreted else 100

    def alone(self, batch: int) -> range:
        """Rows of a batch, of which the first is idle, that are tried without the others: one where that takes long."""
        return range(1, 2 if self.interpreted else batch)

    def refusal(self, test: str) -> str | None:
        """Why a test's call is refused, as a pattern of the message; None if it has to run."""
        reasons = [why for pattern, why in self.refuses.items() if re.search(pattern, test)]
        return reasons[0] if reasons else None

    def is_slow(self, test: str) -> bool:
        return self.kernels == self.interpreted and any(re.search(pattern, test) for pattern in self.slow)

    @contextlib.contextmanager
    def running(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        """Within it the backend's calls run as they do here."""
        with contextlib.ExitStack() as stack:
            if self.interpreter and self.interpreted:
                if self.architecture:
                    named = ".".join(map(str, self.architecture))
                    stack.enter_context(mock.patch.dict(os.environ, {device.INTERPRET_VARIABLE: named}))
                stack.enter_context(self.interpreter(capsys))
            yield


CUT_SHORT_ROWS = PlanConfig(row_overhead_pages=1, cut_pages=0)

E5M2_REFUSAL = "takes caches of 8 bits in int8 and float8_e4m3fn, got float8_e5m2"

MOSAIC_REFUSALS = {
    r"test_mla_sparse.py::test_values\[mosaic-float32": "takes bfloat16 and float16 queries, got float32",
    r"test_mla_sparse.py::test_values\[mosaic-float16 over 8 bits": "one dtype|takes bfloat16 queries over quantised",
    r"test_mla_sparse.py::test_values\[mosaic-float16, latents of 96": "takes latents of 128 to 512 columns",
    r"test_mla_sparse.py::test_values\[mosaic-rotated columns of 32": "and 64 rotated ones, got 128 and 32",
    r"mosaic-(gather|write of latents), 8 bits\]|test_one_scale_for_8_bits\[mosaic": "takes no quantised latents",
    r"latents_in_8_bits\[mosaic-absent pages, many heads": (
        "takes (no quantised latents|bfloat16 queries and 64 rotated columns over quantised latents)"
    ),
    r"test_(decode|prefill|dtypes|latents_in_8_bits)\[mosaic-float32( over .*)?\]": (
        "takes bfloat16 and float16 queries, got float32"
    ),
    r"mosaic-bfloat16 over (?!8 bits)": "takes queries and an unquantised cache of one dtype",
    r"page of 1 token|test_tokens_before_heads\[mosaic": "takes pages of 16, 32, 64 or 128 tokens, got 1",
    r"(page of 8 tokens|pages of 8)\]": "takes pages of 16, 32, 64 or 128 tokens, got 8",
    r"test_paged_attention.*heads of 16\]": "takes heads of width 64, 128 or 256, got 16",
    r"large soft cap\]": "takes a soft cap of up to 4096, got 5000",
    r"test_values_of_another_width": "takes pages of keys and values of one width",
    r"test_(decode|prefill)\[.*-fused|test_fused_caches": "takes keys and values in arrays of their own, got them",
    r"test_(decode|prefill)\[.*-(keys of 48|values narrower)": "takes pages of keys and values of one width",
    r"test_prefill\[.*chunks, a tree": "takes no draft mask",
    r"test_windows_and_soft_caps": "takes no (window|soft cap) over latents",
    r"test_decode\[.*G 67\]": "67 have no such divisor",
    r"test_(decode|prefill)\[.*e5m2": E5M2_REFUSAL,
    r"latents of 96\]": "takes latents of a multiple of 64 columns up to 512, got 96",
    r"rotated columns of 16\]": "takes 32 or 64 rotated columns, got 16",
    r"test_widths_and_heads.*(GQA of 16|narrow keys)": "takes keys and values of width",
    r"test_write_turns.*1-before_rope-neox-mosaic": "two pairs of columns or more that are rotated in neox style",
}

PORTABLE_SLOW = (
    # Decode and prefill are one engine: each runs the options, shapes and dtypes that the other leaves out.
    r"test_decode\[\w+-(head-wise drafts|large soft cap|G (2|4|7|14),? |page of 8|heads of 16|float16, windows)",
    r"test_decode\[\w+-(bfloat16|bfloat16 over float16|int8 per head, odd.*|int8 in 4.*|fp8 (per channel|in 4).*)\]",
    r"test_prefill\[\w+-(int window (ps|longer)|head-wise windows|soft cap|scores to|small scale|page of 1 )",
    r"test_prefill\[\w+-(G (1|3|5|8|12|16|67)\b|float32|bfloat16 over float32|fp8 (per [ht]|in 1))",
    r"test_prefill\[\w+-(int8 per head, head-wise|int8 per channel|a single sequence|no padding|chunks, scores)",
    r"test_decode\[\w+-(tree of (2|3, full|8, windowed))",
    # Heads are a dimension like any other to XLA, and how many they are matters only to kernels.
    r"test_mla_decode.py::test_[^\[]*\[\w+-many heads",
    # XLA has no grid whose axes could be too short; what is lowered for decode is lowered alike.
    r"test_more_query_tokens_than_a_grid_axis|test_seventy_thousand_tokens|test_no_host_callbacks_and_a_named_scope\[paged_prefill",
    # Other dtypes of one layout.
    r"test_options\[\w+-(a soft cap, Deep|large soft|a window longer|scores of either)",
    r"test_no_copy_of_the_cache\[(bfloat16|float8)|test_memory_does_not_grow_with_the_table\[\w+-bfloat16",
    r"test_ragged_attention.py::test_widths_and_heads\[\w+-(MHA of odd|GQA of [34])",
    # What is made of garbage in 8 bits, or in tables of heads, differs in kernels; here all read pages alike.
    r"test_garbage.*\[\w+-(decode, int8|prefill, int8|latents, many heads|prefill of heads|choice of keys, 8 bits)",
    # Decode runs the same for the reference, of which both are one function; what others vary, numpy checks there.
    r"test_prefill\[reference-(head-wise|large|G |heads of|page of|float|bfloat|int8|fp8|small|full|chunks, [ip])",
    r"test_(heads_and_widths|pages|dtypes|widths_and_heads|options)\[reference-(?!DeepSeek|float32\]|a window of s)",
    # Transformations of jax and what surrounds a call do with the reference what they do with xla; it is held to numpy.
    r"^(?!test_bad)[^\[]*::test_(?!decode|prefill|lengths|long_len|values|scores|a_choice|queries|large|several|gather"
    r"|plain|static|dynamic)"
    r"[^\[]*\[([^\]]*-)?reference",
    r"test_memory_grows_with_the_queries.*-full|test_keys_before_every_window",
    # Pages of two widths, and fused ones, are read alike for decode and prefill.
    r"test_prefill\[\w+-(values narrower|fused)|test_prefill\[reference-(keys of|chunks, a tree, )",
    r"test_windows_and_soft_caps\[(reference-(?!a window, 4)|xla-(a window (past|that)|a soft cap))",
    r"test_index_keys.py::test_memory_does_not_grow.*-chunk|test_a_choice_is_exact\[\w+-decode, absent",
)

MOSAIC_SLOW = (
    # Combinations whose parts all meet in faster cases, and values near those of others.
    r"test_(decode|prefill)\[mosaic-(no option|fp8 per token, windows|G 3,)",
    r"test_decode\[mosaic-(head-wise windows|tree of 8|int window ps \+ 1|fp8 in 4 groups|G 7,)",
    r"test_prefill\[mosaic-(soft cap, sinks|int window ps \+ 1|head-wise windows|chunks, int8)",
    r"test_prefill\[mosaic-(int8 per channel|fp8 in 4|chunks, parts of pages)",
    r"test_several_queries\[mosaic-many heads",
    r"test_ragged_attention.py::test_(widths_and_heads\[mosaic-GQA of 14|dtypes\[mosaic-float16)",  # paged prefill's
    r"test_options\[mosaic-a window, more queries",
    r"test_gradients_are_refused_by_name\[mosaic-(?!decode\])",
    r"test_paged_attention.py::test_vmap\[paged_prefill",
    r"test_heads_and_widths\[mosaic-(9-|20-)|test_pages\[mosaic-pages of 64",
    r"test_a_plan_changes_no_meaning\[mosaic-many heads-balanced",
    r"test_mla_decode.py::test_dtypes\[mosaic-float16",  # trees of test_mla_decode_two_warpgroup.py are float16
    r"test_(decode|prefill)\[mosaic-(tokens cached|all of |a window longer|a page of sink)",
    r"test_(decode|prefill)\[mosaic-(drafts, ragged|tiles that end)",
    r"test_(decode|prefill)\[mosaic-(no keys but|int window (ps - 1|longer)|head-wise drafts)",
    r"test_(decode|prefill)\[mosaic-(small scale|float16, windows)",
    r"test_(decode|prefill)\[mosaic-G (1,|2,|4,|5|8,|12,|14,|67)",
    r"test_decode\[mosaic-fp8 queries of (heads|tokens, head-wise)",
    r"test_paged_attention.py::test_output_dtype",
    r"test_(decode|prefill)\[mosaic-(int8 per head, head-wise|int8 in 4)",
    r"test_(decode|prefill)\[mosaic-fp8 (per channel|in 1 group|per head)",
    r"test_decode\[mosaic-(tree of [23]|tree of 8, full|8 queries each)",
    r"test_prefill\[mosaic-(a single|no padding|more seq|a page at|one seq|chunks, windows about|chunks, scores)",
    r"test_prefill\[mosaic-full, absent pages",
    r"test_paged_attention.py::test_(values_do_not|scan_with|chunks_give|agrees_with).*mosaic",
    r"test_paged_attention.py::test_an_absent_page_between.*paged_prefill-mosaic",
    r"test_values_of_one_shape\[mosaic-few heads-(one of maximum|large scores of)",
    r"test_values_of_one_shape\[mosaic-many heads-(all|one of maximum|large scores of)",
    r"test_several_queries\[mosaic-.*-(2, tree|8, tree|4 each.*)\]",
    r"test_several_queries\[mosaic-many heads-(4, tree over|4, causal)",
    r"test_heads_and_widths\[mosaic-(1-512|3-256|64-512|126|128)",
    r"test_mla_decode.py::test_(without_a_plan|under_vmap|output_dtype|a_triangular_mask)",
    r"test_mla_decode.py::test_dtypes\[mosaic-bfloat16, large",
    r"test_mla_decode.py::test_(an_absent_page|a_query_of_nan).*many heads",
    r"test_mla_decode.py::test_a_plan_changes_no_meaning\[mosaic-many heads-fixed",
    r"test_ragged_attention.py::test_widths_and_heads\[mosaic-(MHA|GQA of [234])",
    r"test_options\[mosaic-(a window (of (1|as)|longer)|the longest|a soft cap|scores of either)",
    r"test_ragged_attention.py::test_(any_lengths|scale_output|under_vmap|inside_a_scan)",
    r"test_bad_metadata.py::test_sums_of_.*\[mosaic-(padded with its|begins past 0\]|falls|past|below)",
    r"test_bad_metadata.py::test_garbage.*\[mosaic-(decode|decode, int8|latents, few.*|prefill|prefill of.*|write)\]",
    r"test_(ragged_paged_attention|mla_ragged_paged_attention|cascade_decode).py",  # made of operations with contracts
    # Writes whose layouts and dtypes meet in other pairs.
    r"test_plain_caches.*\[(float32-.|bfloat16-2|float16-1)-mosaic",
    r"test_static_scales.*(channel-float8_e4m3fn|channel-int8-2|head-int8|head-float8_e4m3fn-1)-?.*mosaic",
    r"test_dynamic_scales.*(1-int8|4-int8|2-float8|8-float8).*mosaic",
    r"test_tokens_without_a_slot_(count.*float8|leave.*(bfloat16|float8)).*mosaic",
    r"test_(vmap_writes|a_scan_writes_what).*(bfloat16|float8).*mosaic",
    r"TestGroups.*float8_e4m3fn",
    r"test_write_turns.*(4-before_rope-interleaved|8-None-interleaved|4-after_rope-neox)-mosaic",
    r"test_gather_(of_any_lengths|lays.*float16|of_a_single.*-1\]).*mosaic|test_gather_lays.*mosaic-float16",
)

TRITON_REFUSALS = {
    r"test_(decode|prefill|dtypes|latents_in_8_bits)\[triton-float32( over .*)?\]": (
        "takes bfloat16 and float16 queries, got float32"
    ),
    r"test_(decode|prefill|dtypes)\[triton-bfloat16 over ": "takes queries and an unquantised cache of one dtype",
    r"test_(decode|prefill)\[.*e5m2": E5M2_REFUSAL,
    r"test_one_scale_for_8_bits\[triton-float8_e5m2": "takes latents of 8 bits in float8_e4m3fn, got float8_e5m2",
    r"test_index_keys.py::test_scores\[triton-float32": "takes bfloat16 and float16 queries, got float32",
    r"test_mla_sparse.py::test_values\[triton-float32": "takes bfloat16 and float16 queries, got float32",
    r"test_mla_sparse.py::test_values\[triton-float16 over 8 bits": "takes queries and rotated keys of one dtype",
}

TRITON_SAMPLE = "|".join(
    (
        "head-wise windows and sink tokens, absent pages",
        "tree of 3, windowed",
        "soft cap, sinks, scale",
        "int8 per channel, windows, float16",
        "int8 per head, odd group",
        "fp8 per token, windows",
        "fp8 queries of tokens, tree",
        "page of 1 token",
        "fused in lanes, fp8 per token",
        "float32",
    )
)
"""Cases of attention over pages that the ordinary run interprets; between them, most options meet."""

TRITON_MLA_SAMPLE = "|".join(
    (
        r"test_several_queries\[triton-many heads-4, tree\]",
        r"test_several_queries\[triton-few heads-4 each, of rows",
        r"test_latents_in_8_bits\[triton-(4, tree|float32)\]",
        r"test_windows_and_soft_caps\[triton-a window, 4 causal",
        r"test_dtypes\[triton-(float32|bfloat16 over|bfloat16, large|latents of 96)",
        r"test_a_row_does_not_depend_on_the_batch\[triton-few",
    )
)
"""Tests of attention over latents that the ordinary run interprets."""

TRITON_SLOW = (
    rf"test_paged_attention.py::test_decode\[triton-(?!{TRITON_SAMPLE})",
    r"test_paged_attention.py::test_(?!decode|prefill|a_row_does_not_depend).*paged_decode-triton",
    r"test_paged_attention.py::test_(a_plan|without_a_plan|a_query_of_nan).*triton",
    r"test_bad_metadata.py.*triton-decode",
    r"test_write_places.*triton-float16|test_write_(fills|casts).*triton",
    r"test_latent_8bit.*triton-(bfloat16|float16)",
    # The sample meets most options once: windows and sink tokens, head-wise tables, absent pages, 8 bits, full.
    r"test_prefill\[triton-"
    r"(?!float32|bfloat16 over|first chunks|chunks, (absent|int8|a tree, int8)|full, absent|keys of)",
    r"paged_prefill-triton\]",
    r"test_(chunks_give|agrees_with|a_sequence_does).*triton",
    r"test_(more_)?garbage.*\[triton-prefill",
    r"test_sums_of_a_chunk\[triton-(?!falls)",
    r"test_write_kv.py::.*(Groups|moved|leave|count_in).*triton",
    r"test_plain_caches.*(float32-1|float16-.|bfloat16-2)-triton",
    r"test_static_scales.*(head-int8-1|channel-int8-.|float8_e4m3fn-.)-triton",
    r"test_dynamic_scales.*(1|4|8)-(int8|float8).*triton|test_dynamic_scales.*2-int8.*triton",
    r"test_write_kv_call.py::.*triton|test_write_(rounds|quantises).*triton",
    r"test_write_turns.*\[(?!4-before_rope-neox|4-after_rope-interleaved).*triton",
    r"test_gather_(of_any_lengths|lays.*|of_a_single.*)\[triton(-float16|-float32|-1)?\]",
    rf"test_mla_decode.py::(?!{TRITON_MLA_SAMPLE}).*triton",
    # The kernel is that of prefill: here are two widths of heads, keys in order, padding, and options at once.
    r"test_ragged_attention.py::test_(?!widths_and_heads|options|lengths|empty)[^\[]*\[triton",
    r"test_ragged_attention.py::test_lengths\[triton-(?!new tokens|more queries than keys-causal|no padding-full)",
    r"test_ragged_attention.py::test_(widths_and_heads|options)\[triton-(?!DeepSeek|the same window|full, soft)",
    r"test_bad_metadata.py.*triton-(latents|index scores|choice|chosen)",
    # Of sparse attention: latents in 8 bits, none among slots, and one choice; tests/triton has the others' programs.
    r"test_mla_sparse.py::test_values\[triton-(?!float|garbage|8 bits|one slot)",
    r"test_mla_sparse.py::test_(?!values)[^\[]*\[triton",
    # Made of operations with contracts: one mix of each is in every run.
    r"ragged_paged_attention.py::test_(?!tokens_before)[^\[]*\[triton(?!-a decode between|-float8_e4m3fn-rows of 3)",
    r"test_cascade_decode.py.*\[triton(?!-two pages)",
    r"test_index_keys.py::test_scores\[triton-(?!float32|bfloat16 over)",
    r"test_index_keys.py::test_a_choice_is_exact\[triton-(?!decode)",
    r"test_index_keys.py::test_(?!scores|a_choice_is_exact|written)[^\[]*\[triton",
)

SM100_SAMPLE = (
    # Kernels without a product are those of Hopper, which runs more of their cases.
    r"test_plain_caches.*bfloat16-1-mosaic_sm100",
    r"test_dynamic_scales.*4-float8_e4m3fn-2-mosaic_sm100",
    r"test_write_turns.*\[4-before_rope-neox-mosaic_sm100",
    r"test_write_places.*mosaic_sm100-bfloat16",
    r"test_gather_lays.*mosaic_sm100-bfloat16",
    # More of prefill, with two consumers, is in tests/ops/test_flash_sm100.py.
    r"test_widths_and_heads\[mosaic_sm100-DeepSeek",
    r"test_prefill\[mosaic_sm100-chunks, int8 per token",
    # Query rows of latents are columns of the output in the one, rows in the other; tests/ops has splits and widths.
    r"test_poison_changes_no_bit\[mosaic_sm100-few heads",
    r"test_several_queries\[mosaic_sm100-many heads-4, tree\]",
    # Decode is Hopper's kernel but for its products; tests/ops/test_paged_decode_sm100.py has rows of many tiles.
    r"test_decode\[mosaic_sm100-(head-wise windows and sink tokens|tree of 3, windowed|fp8 queries of tokens, tree)",
)
"""Tests of Blackwell's kernels that the ordinary run interprets; all others are slow."""

BACKENDS = (
    Backend("reference", dense=True, slow=PORTABLE_SLOW),
    # Tiles so small that small inputs make many of them, groups that do not divide the rows.
    Backend("xla", configs=(XlaConfig(tile_tokens=16, group_rows=3, tile_queries=4),), slow=PORTABLE_SLOW),
    Backend(
        "mosaic",
        (9, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=64, stages=2, programs_per_multiprocessor=1),
            mla_config.TwoWarpgroupConfig(pairs=1, cluster=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            # So few entries a program that the inputs make many, and groups that several of them touch.
            write_config.WriteKVConfig(row_threads=32, scan_tokens=2),
            CUT_SHORT_ROWS,
        ),
        dtype="bfloat16",
        kernels=True,
        interpreter=harness.interpreting,
        plans=True,
        refuses=MOSAIC_REFUSALS,
        slow=MOSAIC_SLOW,
    ),
    Backend(
        "mosaic",
        (10, 0),
        configs=(
            decode_config.DecodeConfig(tile_tokens=128, stages=2, programs_per_multiprocessor=1),
            flash_config.FlashConfig(tile_keys=64, stages=2, consumers=1),
            write_config.WriteKVConfig(row_threads=32, scan_tokens=2),
            CUT_SHORT_ROWS,
        ),
        dtype="bfloat16",
        kernels=True,
        interpreter=harness.interpreting,
        plans=True,
        refuses={r"latents_in_8_bits\[mosaic_sm100|mosaic_sm100-.*, 8 bits\]": "takes no quantised latents"}
        | {pattern.replace("mosaic", "mosaic_sm100"): why for pattern, why in MOSAIC_REFUSALS.items()},
        slow=(rf"^(?!{'|'.join(f'.*({test})' for test in SM100_SAMPLE)})",),
    ),
    # Interpreted wherever there is no GPU (tests/conftest.py).
    Backend(
        "triton",
        configs=(CUT_SHORT_ROWS, FlashTile(rows=16, tokens=32, warps=4, stages=2, bare_steps=True)),
        dtype="bfloat16",
        kernels=True,
        plans=True,
        tree_tiles=True,
        refuses=TRITON_REFUSALS,
        slow=TRITON_SLOW,
    ),
)


MOSAIC = next(backend for backend in BACKENDS if backend.name == "mosaic")


# --- what suites are parametrised by


def backends_of(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> list[Backend]:
    """Backends of an operation, of the wanted kind."""
    return [backend for backend in BACKENDS if backend.implements(op) and wanted(backend)]


def every_backend(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend`, with each backend of an operation, of the wanted kind."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("backend", params, indirect=True)


def every_case(op: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs a test, which takes `backend` and a case's `name`, with each case and backend of an operation."""
    params = [pytest.param(backend, name, id=f"{backend.id}-{name}") for backend in backends_of(op) for name in cases]
    return pytest.mark.parametrize(("backend", "name"), params, indirect=["backend"])


def every_variant(op: str, wanted: Callable[[Backend], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Do as `every_backend`, for a test that takes no more of a backend than its `variant`."""
    params = [pytest.param(backend, id=backend.id) for backend in backends_of(op, wanted)]
    return pytest.mark.parametrize("variant", params, indirect=True)


def is_lean(backend: Backend) -> bool:
    return not backend.dense


def is_compiled(backend: Backend) -> bool:
    """Whether what XLA compiles for it says something."""
    return not backend.kernels


def is_compiled_and_lean(backend: Backend) -> bool:
    return is_compiled(backend) and is_lean(backend)


# --- calls


def call(op: Callable[..., Any], backend: Backend, arrays: Mapping[str, Any], **static: Any) -> Any:
    """An operation's result, compiled once for each backend and set of static arguments."""
    return compiled(op, backend, **static)(**arrays)


def compiled(op: Callable[..., Any], backend: Backend, **static: Any) -> Jitted:
    return harness.compiled(op, backend.variant, **static)


def as_users_get(backend: Backend) -> Backend:
    """With the configurations that users get."""
    return dataclasses.replace(backend, configs=())


def plan_of(
    backend: Backend, arrays: Mapping[str, Any], *, window: int | None = None, num_programs: int, mode: str
) -> DecodePlan:
    """A plan for a decode call of these arguments, `window` if it is no array.

    XLA makes it: the kernel that plans has tests of its own, and is slow to interpret. Rows of few pages are cut, which
    would pay only if they were long.
    """
    return _planner(backend, window, num_programs, mode)(dict(arrays))


@functools.cache
def _planner(backend: Backend, window: int | None, num_programs: int, mode: str) -> Jitted:
    @jax.jit
    def plan(arrays: dict[str, Any]) -> DecodePlan:
        by_xla = {"plan_decode": {("xla", None): "xla"}}
        shown = arrays if window is None else arrays | {"window": window}
        with (
            Variant("xla", CUT_SHORT_ROWS).settings(),
            mock.patch.object(plan_module, "FIXED_PIECE_TOKENS", 32),
            mock.patch.dict(dispatch.MODULES, by_xla),
        ):
            return harness.plan_for(shown, num_programs=num_programs, mode=mode, implementation=backend.name)

    return plan
