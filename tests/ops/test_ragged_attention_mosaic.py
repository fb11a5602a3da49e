"""Tests of the Hopper kernel of `ragged_attention` in addition to the contract suite.

On a CPU, kernels are interpreted with race detection; on a GPU, they are compiled. A block has 128 query rows, a tile
has 64 keys, and TMA copies start at multiples of 8 rows. Cases that differ only in values of arrays share a
compilation.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import ragged_attention
from pallas_attn.mosaic.hopper.prefill import ROWS, FlashStatic
from pallas_attn.mosaic.prefill.config import FlashConfig
from pallas_attn.mosaic.prefill.schedule import FlashWorkTile, QueryBlock
from pallas_attn.mosaic.prefill.split import OutputRows, RowState, merge_splits
from pallas_attn.mosaic.primitives import basics
from pallas_attn.ops.ragged_attention.mosaic_sm90 import RaggedInputs, RaggedLoader
from tests.contract.test_ragged_attention import Inputs, RaggedCase
from tests.kit import harness
from tests.kit.harness import Variant
from tests.kit.slow_cases import slow_cases

# Keys that the mask hides are NaN, and the kernel multiplies them before it applies the mask.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

MOSAIC = Variant("mosaic", FlashConfig(tile_keys=64, stages=2, consumers=2))
SHARED_ROWS = Variant("mosaic", FlashConfig(tile_keys=64, stages=1, consumers=2, column_parts=2))
BASE = RaggedCase(
    (3, 0, 141, 20),
    (70, 9, 150, 5),
    tokens=173,
    keys=243,
    q_heads=1,
    kv_heads=1,
    key_dim=64,
    value_dim=64,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True, params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def mode(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Run kernels interpreted on the CPU or, on a GPU, compiled."""
    with contextlib.nullcontext() if request.param == "compiled" else harness.interpreting(capsys):
        yield


def call(variant: Variant, case: RaggedCase, arrays: dict[str, Any], **static: Any) -> Any:
    return harness.compiled(ragged_attention, variant, return_lse=True, **case.static, **static)(**arrays)


def check(case: RaggedCase, variant: Variant = MOSAIC) -> None:
    """Compare a call on poisoned inputs with numpy."""
    inputs = Inputs.draw(case, harness.fresh_rng())
    got = call(variant, case, inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(case.dtype))


@slow_cases("interpreted-sinks, splits")
@pytest.mark.parametrize("name", ["window, soft cap", "sinks, splits"])
def test_consumers_share_query_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers have the same query rows of 512 columns, and half of the columns of the output each."""
    wide = replace(BASE, key_dim=512, value_dim=512, q_heads=3, q_lens=(3, 0, 41, 20), tokens=66)
    cases = {
        "window, soft cap": replace(wide, window=70, soft_cap=5.0),
        "sinks, splits": replace(wide, sinks=True, causal=False),
    }
    monkeypatch.setattr(basics, "multiprocessors", lambda: 40 if "splits" in name else 2)
    check(cases[name], SHARED_ROWS)


@slow_cases("interpreted-7", "interpreted-10")
@pytest.mark.parametrize("group", [pytest.param(2, marks=pytest.mark.slow), 7, 10])
def test_heads_share_a_block(group: int) -> None:
    """A block has the query rows of 2, 7 or (for a group of 10) 5 heads of a KV head, 8 queries at a time. Some blocks
    end between the heads of 8 queries. The calls have sinks or a window, and queries of no sequence.
    """
    case = replace(BASE, q_heads=2 * group, kv_heads=2, q_lens=(3, 0, 30), kv_lens=(70, 9, 150), tokens=37)
    check(replace(case, sinks=True))
    check(replace(case, window=40))


@slow_cases("interpreted-full, one work tile per CTA", "interpreted-causal, queue")
@pytest.mark.parametrize(
    ("causal", "multiprocessors", "stages"),
    [
        pytest.param(True, 16, 2, id="causal, queue"),
        pytest.param(False, 512, 3, id="full, one work tile per CTA"),
        # The two cases above have both values of each parameter.
        pytest.param(True, 512, 3, id="causal, one work tile per CTA", marks=pytest.mark.slow),
        pytest.param(False, 16, 2, id="full, queue", marks=pytest.mark.slow),
    ],
)
def test_split_keys(causal: bool, multiprocessors: int, stages: int) -> None:
    """Some sequences have fewer key tiles than splits, so some splits are empty."""
    variant = Variant("mosaic", FlashConfig(tile_keys=64, stages=stages, consumers=1))
    case = replace(BASE, q_lens=(3, 0, 7, 50), kv_lens=(70, 9, 3, 230), tokens=64, keys=320, causal=causal)
    with harness.keys_cut(multiprocessors) as splits:
        check(case, variant)
    assert splits[0].most > 1


@slow_cases("interpreted")
def test_split_keys_with_window_cap_and_sinks() -> None:
    """Sinks are added when splits are merged. In some splits, the window hides all keys."""
    variant = Variant("mosaic", FlashConfig(tile_keys=64, stages=2, consumers=1))
    case = replace(BASE, q_lens=(5, 18), kv_lens=(3, 190), tokens=24, keys=200, window=100, soft_cap=5.0, sinks=True)
    with harness.keys_cut(2) as splits:
        check(case, variant)
    assert splits[0].most > 1


@slow_cases("interpreted-whole", "interpreted-split")
@pytest.mark.parametrize(("multiprocessors", "stages"), [(None, 4), (16, 5)], ids=["whole", "split"])
def test_output_does_not_depend_on_return_lse(multiprocessors: int | None, stages: int) -> None:
    """The numbers of stages differ from other tests. `harness.compiled` caches calls by their settings, and the patched
    number of multiprocessors is not one of them.
    """
    variant = Variant("mosaic", FlashConfig(tile_keys=64, stages=stages, consumers=1))
    case = replace(BASE, q_lens=(3, 0, 7, 50), kv_lens=(70, 9, 3, 230), tokens=64, keys=320)
    arrays = Inputs.draw(case, harness.fresh_rng()).arguments()
    with contextlib.nullcontext() if multiprocessors is None else harness.keys_cut(multiprocessors):
        out, _ = call(variant, case, arrays)
        harness.assert_same_bits(harness.compiled(ragged_attention, variant, **case.static)(**arrays), out)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_tiles_of_a_window(splits: int) -> None:
    """The sequence has 100 queries that begin at row 13 of q and 3,000 keys that begin at row 77 of k. For each block
    and window, the splits must have the tiles of all visible keys.
    """
    static = FlashStatic(
        64, 64, tile_keys=64, stages=2, consumers=1, copies=1, score_scale=1.0, tile_rows=64, rows=ROWS
    )
    for window, start in itertools.product((1, 64, 65, 500, 2900), (8, 72)):
        loader = RaggedLoader(static, 113, 1, causal=True, window=window)
        rows = np.arange(max(start, 13), min(start + 64, 113))
        newest = 77 + 3000 - 113 + rows
        end_tile = (newest[-1] - 72) // 64 + 1
        block = QueryBlock(*(jnp.int32(x) for x in (0, start, 0, 13, 113, 77, 3077, end_tile)))
        walked: list[int] = []
        for split in range(splits):
            work = (
                FlashWorkTile(block, 0) if splits == 1 else FlashWorkTile(block, 0, jnp.int32(split), jnp.int32(splits))
            )
            tile = loader.tile(RaggedInputs(*[None] * 6), None, work)
            assert tile.kv_tiles >= 1
            walked += range(int(tile.first_tile), int(tile.first_tile + tile.kv_tiles))
        oldest = max(77, newest[0] - window + 1)
        assert [tile for tile in walked if tile < end_tile] == list(range((oldest - 72) // 64, end_tile))


@pytest.mark.slow  # in `make test`, test_merge_of_large_maxima tests the merge
def test_split_keys_with_scores_near_5e5() -> None:
    """Values are 1 and -1 in alternate tiles. They cancel in the output, which then shows errors in the weights of
    splits, and no rounding error of float16 values.
    """
    variant = Variant("mosaic", FlashConfig(tile_keys=64, stages=2, consumers=1))
    case = replace(BASE, q_lens=(3, 0, 0, 50), kv_lens=(70, 0, 0, 230), tokens=64, keys=320, dtype="float16")
    case = replace(case, exact=True)
    inputs = Inputs.draw(case, harness.fresh_rng())
    inputs.q[...] *= case.key_dim**0.5
    inputs.v[...] = np.where(np.arange(case.keys) // 64 % 2, -1, 1)[:, None, None]
    with harness.keys_cut(16) as splits:
        got = call(variant, case, inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), variant.tolerance(case.dtype))
    assert splits[0].most > 1


@pytest.mark.parametrize("level", [0, 7e5])
def test_merge_of_large_maxima(level: float) -> None:
    """Merge the partial states of 3 splits for 5 query rows. The memory of a fourth split is NaN, because it is not
    written.

    One row sees no key and must be empty; one row sees NaN and must be NaN.
    """
    rng, nothing, seen_nan = harness.fresh_rng(), 1, 2
    o = rng.standard_normal((4, 5, 64), np.float32)
    m, l = (rng.uniform(low, low + 8, (4, 5)).astype(np.float32) for low in (level, 1))  # noqa: E741
    for split, row in ((0, 0), (0, nothing), (1, nothing), (2, nothing)):
        o[split, row], m[split, row], l[split, row] = np.nan, -np.inf, 0
    o[1, seen_nan] = l[1, seen_nan] = o[3] = m[3] = l[3] = np.nan
    sinks = jnp.asarray(rng.standard_normal(5), jnp.float32)
    partials = RowState(*(jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in (o, m, l)))
    finished = OutputRows(jnp.ones((5, 64)), jnp.ones(5))
    merge = jax.jit(merge_splits)
    whole = merge(partials, finished, jnp.asarray([1, 1, 1], jnp.int32), sinks)
    np.testing.assert_array_equal(whole.out, finished.out)
    np.testing.assert_array_equal(whole.lse, finished.lse)
    out, lse = map(np.asarray, merge(partials, finished, jnp.asarray([1, 1, 3], jnp.int32), sinks))

    weights = np.where(l[:3] == 0, 0, np.exp2(m[:3].astype(np.float64) - level))
    total = (weights * l[:3]).sum(axis=0)
    weighted = np.where(l[:3, :, None] == 0, 0, o[:3] * weights[..., None]).sum(axis=0)
    denominator = total + np.exp2(np.asarray(sinks, np.float64) / np.log(2) - level)
    rest = [0, 3, 4]
    harness.assert_close("output", out[rest], weighted[rest] / denominator[rest, None], harness.F32_OUT)
    harness.assert_close("LSE", lse[rest], (level + np.log2(total[rest])) * np.log(2), harness.F32_LSE)
    assert not np.any(out[nothing])
    assert np.isneginf(lse[nothing])
    assert np.isnan(out[seen_nan]).all()
    assert np.isnan(lse[seen_nan])


@slow_cases("interpreted-above it", "interpreted-below the rescaling threshold")
@pytest.mark.parametrize("growth", [3, 30], ids=["below the rescaling threshold", "above it"])
def test_rescaling_of_growing_scores(growth: int) -> None:
    """All rows of a tile are rescaled if the maximum of one row grows by more than the threshold. The factors are
    powers of 2, so this must not change the bits of the other rows.
    """
    case = replace(BASE, q_lens=(0, 0, 0, 173), kv_lens=(0, 0, 0, 243))
    inputs = Inputs.draw(case, harness.fresh_rng())
    grows = np.arange(case.tokens) % 2 == 1
    inputs.k[:, 0, 0] = growth * (np.arange(case.keys) // 64)
    inputs.q[:, 0, 0] = np.where(grows, case.key_dim**0.5 * np.log(2), 0)
    got = call(MOSAIC, case, inputs.arguments())
    harness.assert_attention_close(got, inputs.expected(), MOSAIC.tolerance(case.dtype))
    inputs.q[:, 0, 0] = 0
    none_grows = call(MOSAIC, case, inputs.arguments())
    harness.assert_same_bits(*([np.asarray(x)[~grows] for x in results] for results in (got, none_grows)))


FEW = replace(BASE, q_lens=(5, 0, 6), kv_lens=(9, 2, 7), tokens=12, keys=19, q_heads=2)
WIDTHS = {
    "DeepSeek's, three consumers": (
        FlashConfig(tile_keys=64, stages=2, consumers=3),
        replace(FEW, key_dim=192, value_dim=128, q_heads=2, kv_heads=2, dtype="float16"),
    ),
    "scores near 5e5 of either sign": (
        FlashConfig(tile_keys=128, stages=3, consumers=1),
        replace(FEW, key_dim=128, value_dim=128, q_heads=3, kv_heads=1, exact=True),
    ),
    "the widest": (
        FlashConfig(tile_keys=64, stages=2, consumers=2),
        replace(FEW, key_dim=256, value_dim=256, causal=False),
    ),
}


@slow_cases("interpreted-scores near 5e5 of either sign", "interpreted-DeepSeek's, three consumers")
@pytest.mark.parametrize(
    ("config", "case"),
    [
        pytest.param(*each, id=name, marks=pytest.mark.slow if name == "the widest" else [])
        for name, each in WIDTHS.items()
    ],
)
def test_widths_and_configurations(config: FlashConfig, case: RaggedCase) -> None:
    check(case, replace(MOSAIC, config=config))


def test_no_tokens_or_no_keys() -> None:
    inputs = Inputs.draw(replace(BASE, q_lens=(0,) * 4, kv_lens=(0,) * 4), harness.fresh_rng())
    arrays = inputs.arguments()
    out, lse = call(MOSAIC, BASE, arrays | {"q": arrays["q"][:0]})
    assert (out.shape, lse.shape) == ((0, 1, 64), (0, 1))
    out, lse = call(MOSAIC, BASE, arrays | {"k": arrays["k"][:0], "v": arrays["v"][:0]})
    assert not np.any(out)
    assert np.all(np.isneginf(lse))


def test_tiles_larger_than_shared_memory_are_unsupported() -> None:
    case = replace(BASE, key_dim=256, value_dim=256)
    variant = replace(MOSAIC, config=FlashConfig(tile_keys=192, stages=2, consumers=2))
    with pytest.raises(NotImplementedError, match=r"192 keys for 2 consumers take \d+ bytes .* at most 232448"):
        call(variant, case, Inputs.draw(case, harness.fresh_rng()).arguments())
