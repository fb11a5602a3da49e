"""Tests of `wgmma.hide`, which masks the scores of a tile by `Limits`, for any values of the limits.

The compiled code differs from the interpreted code: it computes the mask of a row as one bit per column.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.mosaic.hopper import wgmma
from pallas_attn.mosaic.hopper.prefill import QUERIES, ROWS
from pallas_attn.mosaic.hopper.tiles import PER_TOKEN, TILE
from pallas_attn.mosaic.primitives import basics
from pallas_attn.mosaic.primitives.masks import Limits
from tests.kit.harness import fresh_rng
from tests.kit.slow_cases import slow_cases
from tests.ops.test_flash_schedule import compiled, running


def hidden(page_tokens: int, names: tuple[str, ...], s: jax.Array, limits: list[jax.Array]) -> jax.Array:
    """Return scores s [64, N] masked by a kernel that calls `wgmma.hide`. `names` are the fields of `Limits`."""

    def kernel(s: Any, *refs: Any) -> None:
        *limits, out = refs
        given = {name: basics.load(limit, PER_TOKEN) for name, limit in zip(names, limits, strict=True)}
        tile = wgmma.hide(basics.load(s, TILE), Limits(**given, page_tokens=page_tokens))
        ROWS.store(out, ROWS.iota(QUERIES), 0, tile)

    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(s.shape, s.dtype))(s, *limits)


@slow_cases(
    "-64-16-interpreted", "-128-8-interpreted", "-128-128-interpreted", "-192-64-interpreted",
    "-256-32-interpreted", "sink-64-16-interpreted", "sink-128-8-interpreted",
    "sink-128-128-interpreted", "sink-192-64-interpreted", "sink-256-32-interpreted",
    "pages-64-16-interpreted", "pages-128-8-interpreted", "pages-128-128-interpreted",
    "pages-192-64-interpreted", "pages-256-32-interpreted", "sink-pages-64-16-interpreted",
    "sink-pages-128-8-interpreted", "sink-pages-128-128-interpreted", "sink-pages-192-64-interpreted",
    "sink-pages-256-32-interpreted",
)  # fmt: skip
@pytest.mark.parametrize("mode", ["interpreted", compiled])
@pytest.mark.parametrize(("columns", "page_tokens"), [(64, 16), (128, 8), (128, 128), (192, 64), (256, 32)])
@pytest.mark.parametrize("options", [(), ("sink",), ("pages",), ("sink", "pages")], ids="-".join)
def test_hide_matches_limits(
    columns: int, page_tokens: int, options: tuple[str, ...], mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, names = fresh_rng(), ("low", "high", *options)
    edge = rng.integers(-2 * columns, 3 * columns, (3, QUERIES))
    edge[:, :8] = rng.choice([-(2**30), -1, 0, 1, columns - 1, columns, columns + 1, 2**30], (3, 8))
    values = dict(zip(("low", "high", "sink"), edge, strict=True))
    values["pages"] = np.full(QUERIES, rng.integers(1 << columns // page_tokens))
    s = rng.normal(size=(QUERIES, columns)).astype(np.float32)
    given = [jnp.asarray(values[name], jnp.int32) for name in names]
    with running(mode, capsys):
        got = jax.jit(functools.partial(hidden, page_tokens, names))(jnp.asarray(s), given)
    seen = Limits(**dict(zip(names, given, strict=True)), page_tokens=page_tokens).sees(jnp.arange(columns)[None])
    np.testing.assert_array_equal(got, np.where(seen, s, -np.inf))
