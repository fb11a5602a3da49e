"""Kernels for Hopper over views of other layouts: which implementation runs, and the pages of plans."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import (
    explain,
    paged_decode,
    paged_prefill,
    plan_decode,
    ragged_paged_attention,
    token_tables,
    view_fused,
    view_nhd,
)
from pallas_attn.ops.paged_decode import mosaic_sm90 as decode_kernel
from pallas_attn.ops.paged_prefill import mosaic_sm90 as prefill_kernel
from pallas_attn.ops.write_kv import mosaic as write_kernel
from tests.contract.backends import MOSAIC
from tests.kit import harness

HKV, D, PAGES, PS = 2, 64, 6, 192


@pytest.fixture(autouse=True)
def on_hopper(capsys: pytest.CaptureFixture[str]) -> Any:
    with MOSAIC.running(capsys):
        yield


def arguments(kind: str) -> dict[str, Any]:
    """Return arguments of `paged_decode`."""
    pages = jnp.asarray(np.random.default_rng(0).standard_normal((PAGES, PS, HKV, 2 * D)), jnp.bfloat16)
    kv = view_fused(pages, HKV) if kind == "fused" else view_nhd(pages[..., :D], pages[..., D:])
    tables = token_tables(jnp.array([[3, 1], [0, 5]], jnp.int32), page_size=PS)
    lens = jnp.array([PS + 40, 9], jnp.int32)
    return {"q": jnp.ones((2, 1, 4, D), jnp.bfloat16), "kv": kv, "block_tables": tables, "kv_lens": lens}


@pytest.mark.parametrize("kind", [pytest.param("separate", marks=pytest.mark.slow), "fused"])
def test_kernels_are_chosen(kind: str) -> None:
    decode = arguments(kind)
    prefill = decode | {"q": decode["q"][:, 0], "cu_q_lens": jnp.arange(3, dtype=jnp.int32)}
    for op, call in (("paged_decode", decode), ("paged_prefill", prefill)):
        assert explain(op, **call).chosen == "mosaic"
    plan = jax.jit(plan_decode)(decode["q"], decode["kv"], decode["block_tables"], decode["kv_lens"])
    assert plan.implementation.startswith("mosaic")
    step = tuple(prefill[name] for name in ("kv", "kv_lens", "block_tables", "cu_q_lens"))
    new = jnp.ones((2, HKV, D), jnp.bfloat16)
    for tokens, update in ((None, False), (new, True)):
        new_tokens = prefill["q"], tokens, tokens
        assert explain("ragged_paged_attention", *new_tokens, *step, update_kv_cache=update).chosen == "mosaic"


@pytest.mark.slow  # interprets a kernel
@pytest.mark.parametrize("kind", ["separate", "fused"])
def test_calls_run_the_kernels(kind: str) -> None:
    decode = arguments(kind)
    prefill = decode | {"q": decode["q"][:, 0], "cu_q_lens": jnp.arange(3, dtype=jnp.int32)}
    plan = plan_decode(decode["q"], decode["kv"], decode["block_tables"], decode["kv_lens"])
    mixed = prefill["q"], None, None, *(prefill[name] for name in ("kv", "kv_lens", "block_tables", "cu_q_lens"))
    with (
        mock.patch.object(decode_kernel, "paged_decode", side_effect=decode_kernel.paged_decode) as decodes,
        mock.patch.object(prefill_kernel, "paged_prefill", side_effect=prefill_kernel.paged_prefill) as prefills,
    ):
        paged_decode(**decode, plan=plan)
        assert decodes.called
        paged_prefill(**prefill)
        ragged_paged_attention(*mixed, update_kv_cache=False)
        assert prefills.call_count == 2


@pytest.mark.parametrize(("page_size", "of_plan"), [(192, 64), (96, 32), (48, 16), (24, 1)])
def test_pages_of_plans(page_size: int, of_plan: int) -> None:
    pages = jnp.ones((4, page_size, HKV, D), jnp.bfloat16)
    kv, tables = view_nhd(pages, pages), token_tables(jnp.zeros((2, 3), jnp.int32), page_size=page_size)
    plan = plan_decode(jnp.ones((2, 1, 4, D), jnp.bfloat16), kv, tables, jnp.array([9, 70], jnp.int32))
    assert (plan.made_for.page_size, plan.made_for.table_pages) == (of_plan, 3 * page_size // of_plan)
    np.testing.assert_array_equal(
        np.sort(plan.num_pages), np.sort(np.repeat([-(-9 // of_plan), -(-70 // of_plan)], HKV))
    )


@pytest.mark.parametrize("kind", [pytest.param("separate", marks=pytest.mark.slow), "fused", "array"])
def test_ragged_paged_attention_writes_and_reads(kind: str) -> None:
    """An array has keys and values alternating, and tables of pages."""
    call = arguments("separate" if kind == "separate" else "fused")
    q, k, v = call["q"][:, 0], jnp.ones((2, HKV, D), jnp.bfloat16), jnp.full((2, HKV, D), 2, jnp.bfloat16)
    kv, tables = call["kv"], call["block_tables"]
    if kind == "array":
        kv, tables = kv.k.reshape(PAGES, PS, 2 * HKV, D), jnp.array([3, 1, 0, 5], jnp.int32)
    mixed = q, k, v, kv, call["kv_lens"], tables, jnp.arange(3, dtype=jnp.int32)
    with (
        mock.patch.object(prefill_kernel, "paged_prefill", side_effect=prefill_kernel.paged_prefill) as reads,
        mock.patch.object(write_kernel, "write_kv", side_effect=write_kernel.write_kv) as writes,
    ):
        out, after = jax.jit(ragged_paged_attention)(*mixed)
    assert reads.called
    assert writes.called
    want, expected = jax.jit(functools.partial(ragged_paged_attention, implementation="xla"))(*mixed)
    harness.assert_same_bits(after, expected)
    np.testing.assert_allclose(out.astype(np.float32), want.astype(np.float32), atol=2e-2)
