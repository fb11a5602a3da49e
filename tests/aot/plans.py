"""`plan_decode` on Hopper: one kernel, whatever the sizes."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_attn
from pallas_attn import HeadWindow
from tests.aot.case import Case, shape

KV_HEADS, PAGE_SIZE, PROGRAMS = 8, 64, 396
type Mode = Literal["balanced", "fixed"]


@functools.cache  # every case of decode has a plan, and importing them is part of every start
def plan_shapes(page_size: int, kv_heads: int, num_programs: int, mode: Mode, batch: int) -> Any:
    """Of a plan for so many sequences."""
    sizes = {"page_size": page_size, "num_q_heads": kv_heads, "num_kv_heads": kv_heads, "num_programs": num_programs}
    make = functools.partial(pallas_attn.plan_decode, **sizes, mode=mode)
    return jax.eval_shape(make, shape(batch, dtype=jnp.int32))


def plan(batch: int, mode: Any = "balanced", *, windows: bool = False, drafts: bool = False) -> Case:
    arguments: dict[str, Any] = {"kv_lens": shape(batch, dtype=jnp.int32)}
    if drafts:
        arguments["q_lens"] = shape(batch, dtype=jnp.int32)
    if windows:
        per_head = shape(KV_HEADS, dtype=jnp.int32)
        arguments["window"] = HeadWindow(per_head, per_head)  # pyrefly: ignore[bad-argument-type]
    call = functools.partial(
        pallas_attn.plan_decode,
        page_size=PAGE_SIZE,
        num_q_heads=4 * KV_HEADS,
        num_kv_heads=KV_HEADS,
        num_programs=PROGRAMS,
        mode=mode,
        implementation="mosaic",
    )
    return Case(call, arguments, tensor_cores=False, temporaries=1024)


PLANS: dict[str, Case] = {
    "plan-decode-1": plan(1),
    "plan-decode-64-windows": plan(64, windows=True, drafts=True),
    "plan-decode-1024": plan(1024, windows=True),
    "plan-decode-fixed-1024": plan(1024, "fixed", drafts=True),
}
