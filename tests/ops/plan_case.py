"""Calls of `plan_decode` below its public function, which accept sizes that no decode kernel supports.

A program of a plan is a CTA of the decode kernel, or several CTAs that share pages.
"""

from __future__ import annotations

from typing import Any, Literal

import jax

from pallas_attn import DecodePlan, HeadWindow, PlanKey
from pallas_attn.checks import window_key
from pallas_attn.ops.plan_decode import sharing_of
from pallas_attn.ops.plan_decode.call import PlanDecodeCall
from pallas_attn.runtime import dispatch


def plan(
    kv_lens: jax.Array,
    *,
    q_lens: jax.Array | None = None,
    window: int | HeadWindow | None = None,
    page_size: int,
    num_kv_heads: int,
    num_programs: int,
    mode: Literal["balanced", "fixed"] | Any = "balanced",
    implementation: str = "xla",
) -> DecodePlan:
    """Return a plan for sequences with `kv_lens` tokens, computed by `implementation`."""
    made_for = PlanKey(
        op="paged_decode",
        batch=kv_lens.shape[0],
        num_queries=1,
        num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        table_pages=1,
        window=window_key(window),
        q_lens=False,
    )
    call = PlanDecodeCall(
        kv_lens,
        q_lens,
        window,
        sharing=sharing_of(mode, page_size),
        num_programs=num_programs,
        made_for=made_for,
        implementation="mosaic_sm90",
    )
    return dispatch.run(call, implementation)
