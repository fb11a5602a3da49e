"""Compile-gate cases of the XLA implementations, and of the expert layer's kernels on Hopper.

The XLA implementations run on any device. Their cases have the sizes of a large server: pools of several gigabytes to
tens of gigabytes, and block tables for 128k tokens per sequence. A call must not copy the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn
from pallas_attn import PagedKV, PagedLatent, kv_cache_spec, latent_cache_spec
from pallas_attn.models.moe import dispatch, split_experts
from pallas_attn.models.moe.experts import ClampedSwiglu, Experts
from tests.aot.case import Case, DeferredCase, allocated, deferred, shape

MIB = 2**20
SEQUENCES, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
LATENT, ROPE, NOPE, LATENT_HEADS = 512, 64, 128, 16
PAGE_SIZE, PAGES_PER_SEQUENCE, NEW_TOKENS = 64, 2048, 2048
NUM_PAGES = SEQUENCES * PAGES_PER_SEQUENCE

XLA = functools.partial(Case, kernels=False, tensor_cores=False)


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


def xla(operation: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    return functools.partial(operation, **static, implementation="xla")


def paged_kv(dtype: Any, scales: Any = None) -> PagedKV:
    spec = kv_cache_spec(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        scales=scales,
    )
    return allocated(PagedKV, spec)


def paged_latent(dtype: Any) -> PagedLatent:
    spec = latent_cache_spec(num_pages=NUM_PAGES, page_size=PAGE_SIZE, latent_dim=LATENT, rope_dim=ROPE, dtype=dtype)
    return allocated(PagedLatent, spec)


TABLES = ints(SEQUENCES, PAGES_PER_SEQUENCE)
RAGGED = {"cu_q_lens": ints(SEQUENCES + 1), "kv_lens": ints(SEQUENCES)}
BF16 = paged_kv(jnp.bfloat16)
FP8 = paged_kv(jnp.float8_e4m3fn, PAGE_SIZE)
INT8 = paged_kv(jnp.int8, "head")
INT8_GROUPS = paged_kv(jnp.int8, 4)
FP8_GROUPS = paged_kv(jnp.float8_e4m3fn, 4)


def decode(kv: PagedKV) -> Case:
    q = shape(SEQUENCES, 1, HEADS, HEAD_DIM)
    arguments = {"q": q, "kv": kv, "block_tables": TABLES, "kv_lens": ints(SEQUENCES)}
    return XLA(xla(pallas_attn.paged_decode), arguments, cache="kv", temporaries=16 * MIB)


def prefill(kv: PagedKV) -> Case:
    arguments = {"q": shape(NEW_TOKENS, HEADS, HEAD_DIM), "kv": kv, "block_tables": TABLES, **RAGGED}
    return XLA(xla(pallas_attn.paged_prefill), arguments, cache="kv", temporaries=256 * MIB)


def write(kv: PagedKV, num_tokens: int = NEW_TOKENS) -> Case:
    new = shape(num_tokens, KV_HEADS, HEAD_DIM)
    arguments = {"kv": kv, "k": new, "v": new, "slots": ints(num_tokens)}
    return XLA(xla(pallas_attn.write_kv), arguments, cache="kv", donated=True, temporaries=16 * MIB)


def latent_cases(dtype: Any, suffix: str = "") -> dict[str, Case]:
    cache = {"cache": paged_latent(dtype)}
    new = shape(NEW_TOKENS, LATENT + ROPE)
    ragged = {"latent_new": new, "block_tables": TABLES, **RAGGED}
    decode = {
        "q_latent": shape(SEQUENCES, 1, LATENT_HEADS, LATENT),
        "q_rope": shape(SEQUENCES, 1, LATENT_HEADS, ROPE),
        "block_tables": TABLES,
        "kv_lens": ints(SEQUENCES),
    }
    prefill = {
        "q_nope": shape(NEW_TOKENS, LATENT_HEADS, NOPE),
        "q_rope": shape(NEW_TOKENS, LATENT_HEADS, ROPE),
        "w_uk": shape(LATENT_HEADS, NOPE, LATENT),
        "w_uv": shape(LATENT_HEADS, NOPE, LATENT),
    }
    scale = (NOPE + ROPE) ** -0.5
    case = functools.partial(XLA, cache="cache", temporaries=16 * MIB)
    return {
        f"xla-mla-decode{suffix}": case(xla(pallas_attn.mla_decode, sm_scale=scale), cache | decode),
        f"xla-mla-prefill{suffix}": case(
            xla(pallas_attn.mla_prefill, sm_scale=scale), cache | prefill | ragged, temporaries=256 * MIB
        ),
        f"xla-write-latent{suffix}": case(
            xla(pallas_attn.write_latent), cache | {"latent": new, "slots": ints(NEW_TOKENS)}, donated=True
        ),
        f"xla-gather-latent{suffix}": case(xla(pallas_attn.gather_latent, length=4 * NEW_TOKENS), cache | ragged),
    }


def ragged_attention() -> Case:
    arguments = {
        "q": shape(NEW_TOKENS, LATENT_HEADS, NOPE + ROPE),
        "k": shape(4 * NEW_TOKENS, LATENT_HEADS, NOPE + ROPE),
        "v": shape(4 * NEW_TOKENS, LATENT_HEADS, NOPE),
        "cu_q_lens": ints(SEQUENCES + 1),
        "cu_kv_lens": ints(SEQUENCES + 1),
    }
    return XLA(xla(pallas_attn.ragged_attention), arguments, temporaries=256 * MIB)


def routed_experts(tokens: int) -> DeferredCase:
    """Return a case of the routed experts of a layer of DeepSeek-V2-Lite: 64 experts, 6 per token."""
    count, width, hidden = 64, 2048, 1408
    return experts_case(tokens, 6, lambda: Experts(bf16(count, width, 2 * hidden), bf16(count, hidden, width)))


def biased_experts(tokens: int) -> DeferredCase:
    """Return a case of the experts of a layer of gpt-oss-20b: 32 experts with biases, 4 per token. Their width, 2,880,
    is not a multiple of 128.
    """
    count, width = 32, 2880

    def make() -> Experts:
        weights = bf16(count, width, 2 * width), bf16(count, width, width)
        return Experts(*weights, bf16(count, 2 * width), bf16(count, width), ClampedSwiglu(1.702, 7.0))

    return experts_case(tokens, 4, make)


def bf16(*dims: int) -> jax.Array:
    return jnp.zeros(dims, jnp.bfloat16)


@deferred
def experts_case(tokens: int, top_k: int, make: Callable[[], Experts]) -> Case:
    experts = jax.eval_shape(make)
    num_experts, hidden, width = experts.down.shape
    arguments = {
        "x": shape(tokens, width),
        "chosen": ints(tokens, top_k),
        "weights": shape(tokens, top_k, dtype=jnp.float32),
        "experts": experts,
    }
    # A pair is a token and one of its experts. The limit allows some arrays with a row per pair. It is far below the
    # experts * pairs rows that `jax.lax.ragged_dot` would allocate. For few tokens, it also allows the results of the
    # first GEMM for all tokens in every expert. For many tokens, it allows up to 8 rows of padding per expert, because
    # the kernel pads the pairs of each expert to a multiple of 8 rows.
    per_expert = num_experts * hidden * 2 * (-(-tokens // 8) * 8 if tokens <= dispatch.MAX_FEW_ROWS else 8)
    temporaries = MIB + tokens * top_k * 4 * (width + 2 * hidden) + per_expert
    return Case(split_experts.routed_experts, arguments, temporaries=temporaries)


PORTABLE = {
    "xla-paged-decode-bf16": decode(BF16),
    "xla-paged-decode-fp8": decode(FP8),
    "xla-paged-decode-int8": decode(INT8),
    "xla-paged-prefill": prefill(BF16),
    "xla-write-kv-bf16": write(BF16),
    "xla-write-kv-fp8": write(FP8),
    "xla-write-kv-int8": write(INT8),
    "xla-write-kv-int8-groups": write(INT8_GROUPS),
    "xla-write-kv-fp8-groups": write(FP8_GROUPS),
    "xla-write-kv-int8-groups-decode": write(INT8_GROUPS, SEQUENCES),
    "xla-write-kv-fp8-groups-decode": write(FP8_GROUPS, SEQUENCES),
    **latent_cases(jnp.bfloat16),
    **latent_cases(jnp.float8_e4m3fn, "-fp8"),
    "xla-ragged-attention": ragged_attention(),
    **{f"experts-{tokens}-tokens": routed_experts(tokens) for tokens in (1, 5, 21, 37, 64, 171, 576, 1024)},
    **{f"biased-experts-{tokens}-tokens": biased_experts(tokens) for tokens in (1, 4, 64, 1024)},
}
