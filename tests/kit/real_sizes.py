"""Random arguments of operations with the shapes of real models (`scripts.bench.shapes`).

This module does not import pytest, because the compile gate (tests/aot) uses it in a process without pytest.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedKV, PagedLatent, kv_cache_spec
from scripts.bench.shapes import Decode, MlaDecode, MlaPrefill, Prefill

LATENT_SIZE = 0.25
"""Standard deviation of latents. The tolerances of the tests are FlashMLA's and assume values of about this size.
Queries have the reciprocal standard deviation, so that scores do not become small.
"""

MLA_SM_SCALE = 192**-0.5


def normal(key: jax.Array, shape: tuple[int, ...], size: float = 1.0) -> jax.Array:
    return size * jax.random.normal(key, shape, jnp.bfloat16)


def static(case: Decode | Prefill) -> dict[str, Any]:
    """Return the static arguments `window` and `soft_cap` of the call, without the ones that are None."""
    options = {"window": case.window, "soft_cap": case.soft_cap}
    return {name: value for name, value in options.items() if value is not None}


def decode_arrays(case: Decode, key: jax.Array) -> dict[str, Any]:
    """Return arguments of `paged_decode`, with random sequence lengths up to the context."""
    q, lens, pool, table = jax.random.split(key, 4)
    return {
        "q": normal(q, (case.batch, case.queries, case.q_heads, case.head_dim)),
        "kv_lens": jax.random.randint(lens, (case.batch,), case.queries, case.context + 1, jnp.int32),
        **_paged_kv(case, case.batch, case.context, pool, table),
    }


def prefill_arrays(case: Prefill, key: jax.Array) -> dict[str, Any]:
    """Return arguments of `paged_prefill`."""
    q, pool, table = jax.random.split(key, 3)
    length = case.cached_tokens + case.new_tokens
    return {
        "q": normal(q, (case.sequences * case.new_tokens, case.q_heads, case.head_dim)),
        **_lengths(case),
        **_paged_kv(case, case.sequences, length, pool, table),
    }


def mla_decode_arrays(case: MlaDecode, key: jax.Array) -> dict[str, Any]:
    """Return arguments of `mla_decode`, with random sequence lengths up to the context."""
    q, rope, lens, pool = jax.random.split(key, 4)
    return {
        "q_latent": normal(q, (case.batch, case.queries, case.heads, case.latent_dim), 1 / LATENT_SIZE),
        "q_rope": normal(rope, (case.batch, case.queries, case.heads, case.rope_dim), 1 / LATENT_SIZE),
        "kv_lens": jax.random.randint(lens, (case.batch,), case.queries, case.context + 1, jnp.int32),
        **_paged_latent(case, case.batch, case.context, pool),
    }


def mla_prefill_arrays(case: MlaPrefill, key: jax.Array) -> dict[str, Any]:
    """Return arguments of `mla_prefill`."""
    q, rope, new, w_uk, w_uv, pool = jax.random.split(key, 6)
    tokens, length = case.sequences * case.new_tokens, case.cached_tokens + case.new_tokens
    return {
        "q_nope": normal(q, (tokens, case.heads, case.nope_dim), 1 / LATENT_SIZE),
        "q_rope": normal(rope, (tokens, case.heads, case.rope_dim), 1 / LATENT_SIZE),
        "latent_new": normal(new, (tokens, case.latent_dim + case.rope_dim), LATENT_SIZE),
        "w_uk": normal(w_uk, (case.heads, case.nope_dim, case.latent_dim), case.latent_dim**-0.5),
        "w_uv": normal(w_uv, (case.heads, case.value_dim, case.latent_dim), case.latent_dim**-0.5),
        **_lengths(case),
        **_paged_latent(case, case.sequences, length, pool),
    }


def _lengths(case: Prefill | MlaPrefill) -> dict[str, Any]:
    return {
        "cu_q_lens": jnp.arange(case.sequences + 1, dtype=jnp.int32) * case.new_tokens,
        "kv_lens": jnp.full((case.sequences,), case.cached_tokens + case.new_tokens, jnp.int32),
    }


def _paged_kv(case: Decode | Prefill, sequences: int, longest: int, key: jax.Array, table: jax.Array) -> dict[str, Any]:
    """Return a cache, block tables with randomly placed pages, and sinks if the model has learned sinks."""
    pages_per_row = math.ceil(longest / case.page_size)
    spec = kv_cache_spec(
        num_pages=1 + sequences * pages_per_row,
        page_size=case.page_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=jnp.bfloat16,
    )
    shape = spec.arrays["k"].shape
    k, v, sinks = jax.random.split(key, 3)
    # The tolerances of the tests are FlashMLA's and assume values V with a standard deviation of about 0.1.
    kv = PagedKV(normal(k, shape), normal(v, shape, 0.1))
    ids = 1 + jax.random.permutation(table, sequences * pages_per_row).astype(jnp.int32)
    arrays = {"kv": kv, "block_tables": ids.reshape(sequences, pages_per_row)}
    return arrays | ({"sinks": jax.random.normal(sinks, (case.q_heads,))} if case.learned_sinks else {})


def _paged_latent(case: MlaDecode | MlaPrefill, sequences: int, longest: int, key: jax.Array) -> dict[str, Any]:
    """Return a cache, and block tables with randomly placed pages."""
    pages, ids = jax.random.split(key)
    pages_per_row = math.ceil(longest / case.page_size)
    num_pages = 1 + sequences * pages_per_row
    ids = 1 + jax.random.permutation(ids, num_pages - 1).astype(jnp.int32)
    shape = (num_pages, case.page_size, case.latent_dim + case.rope_dim)
    pool = PagedLatent(normal(pages, shape, LATENT_SIZE))
    return {"cache": pool, "block_tables": ids.reshape(sequences, pages_per_row)}
