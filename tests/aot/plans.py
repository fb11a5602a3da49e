"""Compile-gate cases of `plan_decode`, and shapes of plans for the cases of decode kernels.

A plan assigns the pages of all sequences to the CTAs of a decode kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

import pallas_attn
from pallas_attn import DecodePlan, HeadWindow, PagedKV, PlanKey
from pallas_attn.ops.plan_decode import sharing_of
from tests.aot.case import Case, DeferredCase, deferred, shape

KV_HEADS, PAGE_SIZE, PAGES, PROGRAMS = 8, 64, 256, 396
type Mode = Literal["balanced", "fixed"]


def step(batch: int, page_size: int = PAGE_SIZE, kv_heads: int = KV_HEADS) -> dict[str, Any]:
    """Return the arguments of `plan_decode`: the shapes of a decode call with `batch` sequences."""
    pages = shape(1, kv_heads, page_size, 64)
    return {
        "q": shape(batch, 1, kv_heads, 64),
        "cache": PagedKV(pages, pages),  # pyrefly: ignore[bad-argument-type]
        "block_tables": shape(batch, PAGES, dtype=jnp.int32),
        "kv_lens": shape(batch, dtype=jnp.int32),
    }


def plan_shapes(
    page_size: int, kv_heads: int, num_programs: int, mode: Mode, batch: int, implementation: str = "mosaic_sm90"
) -> DecodePlan:
    """Return the shapes of a plan for a Mosaic kernel, without tracing `plan_decode`, which would take half a second.

    The field `made_for` is a placeholder; `fitted` sets it for a call.
    """
    rows, rows_plus_1, programs_plus_1 = (
        shape(n, dtype=jnp.int32) for n in (batch * kv_heads, batch * kv_heads + 1, num_programs + 1)
    )
    fields = {
        **dict.fromkeys(("row_order", "sink_pages", "first_page", "num_pages", "next_row"), rows),
        **dict.fromkeys(("merged_rows", "split_indptr"), rows_plus_1),
        **dict.fromkeys(("cta_row", "cta_page", "cta_split"), programs_plus_1),
    }
    made_for = PlanKey("paged_decode", batch, 1, kv_heads, kv_heads, page_size, PAGES, window=None, q_lens=False)
    split_pages = sharing_of(mode, page_size).split_pages
    return DecodePlan(**fields, made_for=made_for, implementation=implementation, split_pages=split_pages)  # pyrefly: ignore[bad-argument-type]


def fitted(arguments: Mapping[str, Any], window: int | None = None) -> dict[str, Any]:
    """Return the arguments of a decode call in which `plan.made_for` describes this call."""
    plan = arguments.get("plan")
    if not isinstance(plan, DecodePlan):
        return dict(arguments)
    latent = "q_latent" in arguments
    cache = arguments["cache" if latent else "kv"]
    batch, num_queries, num_q_heads, _ = arguments["q_latent" if latent else "q"].shape
    made_for = PlanKey(
        op="mla_decode" if latent else "paged_decode",
        batch=batch,
        num_queries=num_queries,
        num_q_heads=num_q_heads,
        num_kv_heads=1 if latent else cache.k.shape[1],
        page_size=cache.page_size if latent else cache.plan_page_size,
        table_pages=arguments["block_tables"].shape[-1] // (1 if latent else cache.plan_page_size // cache.page_size),
        window="per head" if arguments.get("window") is not None else window,
        q_lens=arguments.get("q_lens") is not None,
    )
    return {**arguments, "plan": dataclasses.replace(plan, made_for=made_for)}


@deferred
def plan(batch: int, mode: Mode = "balanced", *, windows: bool = False, drafts: bool = False) -> Case:
    arguments = step(batch)
    if drafts:
        arguments["q_lens"] = shape(batch, dtype=jnp.int32)
    if windows:
        per_head = shape(KV_HEADS, dtype=jnp.int32)
        arguments["window"] = HeadWindow(per_head, per_head)  # pyrefly: ignore[bad-argument-type]
    call = functools.partial(pallas_attn.plan_decode, num_programs=PROGRAMS, mode=mode, implementation="mosaic")
    lengths = 4 * (batch + drafts * batch)  # bytes of the lengths, clipped to the size of the tables
    return Case(call, arguments, tensor_cores=False, temporaries=1024 + lengths)


PLANS: dict[str, DeferredCase] = {
    "plan-decode-1": plan(1),
    "plan-decode-64-windows": plan(64, windows=True, drafts=True),
    "plan-decode-1024": plan(1024, windows=True),
    "plan-decode-fixed-1024": plan(1024, "fixed", drafts=True),
}
