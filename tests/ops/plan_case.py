"""Calls of `plan_decode` below its public function, which accept sizes that no decode kernel supports.

A program of a plan is a CTA of the decode kernel, or several CTAs that share pages.
"""

from __future__ import annotations

from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import FULL, DecodePlan, HeadWindow, PlanKey
from pallas_attn.checks import window_key
from pallas_attn.ops.plan_decode import sharing_of
from pallas_attn.ops.plan_decode.call import PlanDecodeCall, PlanResult
from pallas_attn.runtime import dispatch

PS = 16
"""Page size of `arguments`."""


def plan(kv_lens: jax.Array, **options: Any) -> DecodePlan:
    """Return the plan of `result`."""
    found, *_ = result(kv_lens, **options)
    return found


def result(
    kv_lens: jax.Array,
    *,
    q_lens: jax.Array | None = None,
    window: int | HeadWindow | None = None,
    page_size: int,
    num_kv_heads: int,
    num_programs: int,
    mode: Literal["balanced", "fixed"] | Any = "balanced",
    implementation: str = "xla",
    table_pages: int = 2**31 - 1,
    num_queries: int = 20,
) -> PlanResult:
    """Return a plan for sequences with `kv_lens` tokens, and the clipped lengths, computed by `implementation`.

    XLA's plan is jitted, because its operations take longer to compile one by one.

    Args:
      num_queries: maximum of `q_lens`; without `q_lens`, each sequence has 1 query.
    """
    static = {
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "num_programs": num_programs,
        "mode": mode,
        "table_pages": table_pages,
        "num_queries": 1 if q_lens is None else num_queries,
    }
    if implementation != "xla":
        return _plan(kv_lens, q_lens, window, None, implementation=implementation, **static)
    heads, width = (window, None) if isinstance(window, HeadWindow) else (None, window)
    return _jitted(kv_lens, q_lens, heads, width, implementation=implementation, **static)


def _plan(
    kv_lens: jax.Array,
    q_lens: jax.Array | None,
    heads: int | HeadWindow | None,
    width: int | None,
    *,
    page_size: int,
    num_kv_heads: int,
    num_programs: int,
    mode: Any,
    implementation: str,
    table_pages: int,
    num_queries: int,
) -> PlanResult:
    """Return a plan with the window `heads`, or `width` if `heads` is None."""
    window = width if heads is None else heads
    made_for = PlanKey(
        op="paged_decode",
        batch=kv_lens.shape[0],
        num_queries=num_queries,
        num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        table_pages=table_pages,
        window=window_key(window),
        q_lens=q_lens is not None,
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


_jitted = jax.jit(
    _plan,
    static_argnames=(
        *("width", "page_size", "num_kv_heads", "num_programs", "mode", "implementation", "table_pages", "num_queries"),
    ),
)


def arguments(
    rng: np.random.Generator, batch: int, kv_heads: int, longest: int, *, windows: bool = False, drafts: bool = False
) -> dict[str, Any]:
    """Draw arguments of `plan`. About one sequence in five has no tokens: its length is 0 or negative. With `windows`,
    some heads have windows; with `drafts`, sequences have -1 to 4 queries.
    """
    lens = rng.integers(0, longest + 1, batch)
    lens = np.where(rng.random(batch) < 0.8, lens, -lens)
    given: dict[str, Any] = {"kv_lens": jnp.asarray(lens, jnp.int32), "q_lens": None, "window": None}
    if drafts:
        given["q_lens"] = jnp.asarray(rng.integers(-1, 5, batch), jnp.int32)
    if windows:
        width = np.where(rng.random(kv_heads) < 0.5, FULL, rng.integers(1, longest, kv_heads))
        sinks = rng.integers(0, 100, kv_heads)
        given["window"] = HeadWindow(jnp.asarray(width, jnp.int32), jnp.asarray(sinks, jnp.int32))
    return given | {"page_size": PS, "num_kv_heads": kv_heads}


def check(implementation: str, mode: str, num_programs: int, **given: Any) -> PlanResult:
    """Compare a plan and clipped lengths of an implementation with those of XLA, and return them."""
    got, want = (
        result(**given, mode=mode, num_programs=num_programs, implementation=name) for name in (implementation, "xla")
    )
    chex.assert_trees_all_equal(got, want)
    return got
