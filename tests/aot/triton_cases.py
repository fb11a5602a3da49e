"""Calls that the gate compiles in Triton, by name, and the cards that it compiles them for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

import pallas_attn
from pallas_attn import PagedLatent, device, latent_cache_spec
from tests.aot.case import allocated, shape


@dataclasses.dataclass(frozen=True)
class TritonCase:
    """Call that has to compile for every card.

    Attributes:
      function: takes `arguments` by name, and names "triton".
      arguments: pytrees of shapes.
      tensor_cores: whether one of its kernels has to use the tensor cores.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    tensor_cores: bool = True


def card(name: str, capability: device.Architecture, multiprocessors: int, shared_kib: int) -> device.Device:
    return device.Device("gpu", name, capability, multiprocessors, shared_kib * 1024, (shared_kib + 1) * 1024)


CARDS = {
    "sm80": card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163),
    "sm86": card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99),
    "sm89": card("NVIDIA L4", (8, 9), 58, 99),
    "sm90": card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227),
    "sm100": card("NVIDIA B200", (10, 0), 148, 227),
    "sm120": card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99),
}


def latents(name: str, latent_dim: int, rope_dim: int, page_size: int = 64) -> PagedLatent:
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16, "fp8": jnp.float8_e4m3fn}[name]
    sizes = {"num_pages": 1024, "page_size": page_size, "latent_dim": latent_dim, "rope_dim": rope_dim}
    return allocated(PagedLatent, latent_cache_spec(**sizes, dtype=dtype))


def write_latents(name: str, latent_dim: int, rope_dim: int) -> TritonCase:
    return TritonCase(
        functools.partial(pallas_attn.write_latent, implementation="triton"),
        {
            "cache": latents(name, latent_dim, rope_dim),
            "latent": shape(64, latent_dim + rope_dim, dtype=jnp.bfloat16),
            "slots": shape(64, dtype=jnp.int32),
        },
        tensor_cores=False,
    )


def gather_latents(name: str, latent_dim: int, rope_dim: int, num_new: int = 64) -> TritonCase:
    ints = functools.partial(shape, dtype=jnp.int32)
    return TritonCase(
        functools.partial(pallas_attn.gather_latent, length=4096, implementation="triton"),
        {
            "cache": latents(name, latent_dim, rope_dim),
            "latent_new": shape(num_new, latent_dim + rope_dim, dtype=jnp.bfloat16),
            "block_tables": ints(16, 64),
            "cu_q_lens": ints(17),
            "kv_lens": ints(16),
        },
        tensor_cores=False,
    )


LATENTS = {
    f"{op}-latent-{name}-{latent_dim}-{rope_dim}": case(name, latent_dim, rope_dim)
    for op, case in (("write", write_latents), ("gather", gather_latents))
    for name in ("bf16", "fp8")
    for latent_dim, rope_dim in ((512, 64), (128, 32))
} | {"gather-latent-bf16-old": gather_latents("bf16", 512, 64, num_new=0)}

TRITON_CASES: dict[str, TritonCase] = {**LATENTS}

ORDINARY = frozenset(
    {("write-latent-bf16-512-64", "sm86"), ("write-latent-fp8-512-64", "sm80"), ("gather-latent-fp8-512-64", "sm86")}
)
"""Cases and cards of the ordinary run; the slow run has all others."""
