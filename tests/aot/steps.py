"""Compile-gate cases of operations that launch several kernels: `ragged_paged_attention`, `mla_ragged_paged_attention`
and `cascade_decode`; and of a scan over layers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn
from pallas_attn import PagedKV, PagedLatent, kv_cache_spec, latent_cache_spec
from tests.aot.case import Case, allocated, deferred, shape

MIB = 2**20
SEQUENCES, TOKENS, PAGES, PAGE_SIZE, NUM_PAGES = 64, 1024, 64, 64, 8192
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LATENT, ROPE = 512, 64


def ints(*dims: int) -> Any:
    return shape(*dims, dtype=jnp.int32)


LENGTHS = {
    "kv_lens": ints(SEQUENCES),
    "page_indices": ints(SEQUENCES * PAGES),
    "cu_q_lens": ints(SEQUENCES + 1),
    "distribution": ints(3),
}


def paged_kv(dtype: Any, scales: Any = None) -> PagedKV:
    sizes: dict[str, Any] = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "num_kv_heads": KV_HEADS}
    return allocated(PagedKV, kv_cache_spec(**sizes, head_dim=HEAD_DIM, dtype=dtype, scales=scales))


@deferred
def ragged(kv: Any, dtype: Any = jnp.bfloat16, **static: Any) -> Case:
    new = shape(TOKENS, KV_HEADS, HEAD_DIM, dtype=dtype)
    arguments = {"q": shape(TOKENS, HEADS, HEAD_DIM), "k": new, "v": new, "kv": kv, **LENGTHS}
    call = functools.partial(pallas_attn.ragged_paged_attention, **static, implementation="mosaic")
    return Case(call, arguments, cache="kv", donated=True, temporaries=128 * MIB)


@deferred
def latents(heads: int) -> Case:
    sizes: dict[str, Any] = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "dtype": jnp.bfloat16}
    arguments = {
        "q_latent": shape(TOKENS, heads, LATENT),
        "q_rope": shape(TOKENS, heads, ROPE),
        "new_latent": shape(TOKENS, LATENT),
        "new_rope": shape(TOKENS, ROPE),
        "cache": allocated(PagedLatent, latent_cache_spec(**sizes, latent_dim=LATENT, rope_dim=ROPE)),
        **LENGTHS,
    }
    call = functools.partial(pallas_attn.mla_ragged_paged_attention, sm_scale=0.1, implementation="mosaic")
    return Case(call, arguments, cache="cache", donated=True, temporaries=512 * MIB)


@deferred
def cascade() -> Case:
    arguments = {
        "q": shape(SEQUENCES, 1, HEADS, HEAD_DIM),
        "kv": paged_kv(jnp.bfloat16),
        "block_tables": ints(SEQUENCES, PAGES),
        "kv_lens": ints(SEQUENCES),
    }
    call = functools.partial(pallas_attn.cascade_decode, implementation="mosaic")
    return Case(call, arguments, cache="kv", temporaries=128 * MIB)


@deferred
def layers_of_a_pool() -> Case:
    """Return the case of a scan over four layers that carries one pool: each layer writes and attends in its pages."""
    layers = 4
    spec = kv_cache_spec(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.bfloat16
    )
    mosaic: Any = {"implementation": "mosaic"}

    def steps(q: Any, k: Any, v: Any, kv: PagedKV, block_tables: Any, kv_lens: Any, slots: Any) -> Any:
        plan = pallas_attn.plan_decode(q[0], kv, block_tables, kv_lens, **mosaic)

        def layer(kv: PagedKV, inputs: Any) -> Any:
            i, q, k, v = inputs
            at = pallas_attn.layer_slots(slots, i, num_slots=NUM_PAGES * PAGE_SIZE)
            kv = pallas_attn.write_kv(kv, k, v, at, **mosaic)
            tables = pallas_attn.layer_tables(block_tables, i, num_pages=NUM_PAGES)
            return kv, pallas_attn.paged_decode(q, kv, tables, kv_lens, plan=plan, **mosaic)

        return jax.lax.scan(layer, kv, (jnp.arange(layers, dtype=jnp.int32), q, k, v))

    new = shape(layers, SEQUENCES, KV_HEADS, HEAD_DIM)
    arguments = {
        "q": shape(layers, SEQUENCES, 1, HEADS, HEAD_DIM),
        "k": new,
        "v": new,
        "kv": jax.eval_shape(lambda: PagedKV.allocate(spec, layers=layers)),
        "block_tables": ints(SEQUENCES, PAGES),
        "kv_lens": ints(SEQUENCES),
        "slots": ints(SEQUENCES),
    }
    return Case(steps, arguments, cache="kv", donated=True, temporaries=64 * MIB)


@deferred
def unplanned_decode(implementation: str = "mosaic") -> Case:
    """Return the case of a decode call without a plan. It has three kernels: plan, decode and merge. The kernel of the
    plan also clips the lengths.
    """
    queries = 2
    arguments = {
        "q": shape(SEQUENCES, queries, HEADS, HEAD_DIM),
        "kv": paged_kv(jnp.bfloat16),
        "block_tables": ints(SEQUENCES, PAGES),
        "kv_lens": ints(SEQUENCES),
        "q_lens": ints(SEQUENCES),
    }
    call = functools.partial(pallas_attn.paged_decode, implementation=implementation)
    mosaic = implementation == "mosaic"
    return Case(call, arguments, cache="kv", temporaries=64 * MIB, launches=3, kernels=mosaic, tensor_cores=mosaic)


STEPS = {
    "ragged-step-bf16": ragged(paged_kv(jnp.bfloat16), sliding_window=1024, soft_cap=30.0),
    "ragged-step-fp8-quantised": ragged(
        paged_kv(jnp.float8_e4m3fn, "head"), jnp.float8_e4m3fn, k_scale=0.5, v_scale=0.5
    ),
    "latent-step-16-heads": latents(16),
    "latent-step-128-heads": latents(128),
    "cascade-bf16": cascade(),
    "layers-of-a-pool-bf16": layers_of_a_pool(),
    "unplanned-decode": unplanned_decode(),
}

ARRAY = NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM
STEPS_OF_ARRAYS = {
    "ragged-step-bf16-array": ragged(shape(*ARRAY)),
    "ragged-step-fp8-array": ragged(shape(*ARRAY, dtype=jnp.float8_e4m3fn), k_scale=0.5, v_scale=0.5),
}
"""Cases with keys and values alternating in one array, which the attention kernels for Blackwell do not support."""
