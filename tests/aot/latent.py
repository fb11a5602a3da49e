"""Compile-gate cases of `write_latent`, `gather_latent` and `mla_prefill` on Hopper, at the latent widths of models."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_attn
from pallas_attn import PagedLatent, latent_cache_spec
from tests.aot.case import Case, allocated, deferred, shape

WIDTHS = ((512, 64), (256, 32), (128, 32), (256, 64), (448, 64))
"""Pairs of latent width L and width R of the rotated key."""
DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
PAGE_SIZE, SEQUENCES, TABLE_PAGES, TOKENS = 64, 8, 2048, 4096
BLOCKS = 5
"""Required number of CTAs per multiprocessor of the copy kernels. Each CTA has 18 KB in flight. Five CTAs have more
than twice the bytes in flight that a multiprocessor needs to use its share of the memory bandwidth.
"""

MOVES = functools.partial(Case, cache="cache", tensor_cores=False, temporaries=1024, blocks=BLOCKS)

write_latent = functools.partial(pallas_attn.write_latent, implementation="mosaic")
gather_latent = functools.partial(pallas_attn.gather_latent, implementation="mosaic")


def paged_latent(latent_dim: int, rope_dim: int, dtype: Any, num_pages: int = 8192) -> PagedLatent:
    spec = latent_cache_spec(
        num_pages=num_pages, page_size=PAGE_SIZE, latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype
    )
    return allocated(PagedLatent, spec)


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


@deferred
def write(cache: PagedLatent, num_tokens: int = TOKENS) -> Case:
    latent = shape(num_tokens, cache.pages.shape[-1], dtype=cache.pages.dtype)
    arguments = {"cache": cache, "latent": latent, "slots": ints(num_tokens)}
    return MOVES(write_latent, arguments, donated=True)


@deferred
def gather(cache: PagedLatent, num_new: int = TOKENS, sequences: int = SEQUENCES) -> Case:
    arguments = {
        "cache": cache,
        "latent_new": shape(num_new, cache.pages.shape[-1], dtype=cache.pages.dtype),
        "block_tables": ints(sequences, TABLE_PAGES),
        "cu_q_lens": ints(sequences + 1),
        "kv_lens": ints(sequences),
    }
    call = functools.partial(gather_latent, length=16 * TOKENS)
    return MOVES(call, arguments)


DEEPSEEK = paged_latent(512, 64, jnp.bfloat16)


@deferred
def layers_in_scan() -> Case:
    """Return the case of a scan that writes the latents of four layers. The cache is the carry of the scan."""

    def steps(cache: PagedLatent, latent: jax.Array, slots: jax.Array) -> PagedLatent:
        return lax.scan(lambda cache, step: (write_latent(cache, *step), None), cache, (latent, slots))[0]

    arguments = {"cache": DEEPSEEK, "latent": shape(4, 64, 576), "slots": ints(4, 64)}
    return MOVES(steps, arguments, donated=True, temporaries=2**20)


HEADS, NOPE, PIECE_TOKENS = 16, 128, 4096


def prefill_arguments(table_pages: int, tokens: int = TOKENS, sequences: int = SEQUENCES, heads: int = HEADS) -> Any:
    """Return the shapes of the arguments of `mla_prefill`, by default for DeepSeek-V2-Lite."""
    return {
        "cache": DEEPSEEK,
        "q_nope": shape(tokens, heads, NOPE),
        "q_rope": shape(tokens, heads, 64),
        "latent_new": shape(tokens, 576),
        "w_uk": shape(heads, NOPE, 512),
        "w_uv": shape(heads, NOPE, 512),
        "block_tables": ints(sequences, table_pages),
        "cu_q_lens": ints(sequences + 1),
        "kv_lens": ints(sequences),
    }


mla_prefill = functools.partial(pallas_attn.mla_prefill, sm_scale=0.1, implementation="mosaic")


@deferred
def prefill(table_pages: int) -> Case:
    """Return a case of a prompt chunk whose prefix is expanded: its latents become keys and values of each head,
    `PIECE_TOKENS` tokens at a time.

    Temporary memory holds the keys and values of `PIECE_TOKENS` prefix tokens and of the chunk, before and after
    concatenation, and the outputs and LSEs of the chunk: the merged ones, and the ones of the current prefix tokens.
    """
    call = functools.partial(mla_prefill, absorbed=False, piece_tokens=PIECE_TOKENS)
    expanded = (PIECE_TOKENS + TOKENS) * HEADS * 2 * (2 * NOPE + 64) * 2
    merged = 2 * TOKENS * HEADS * 4 * (NOPE + 1)
    arguments = prefill_arguments(table_pages)
    return MOVES(call, arguments, tensor_cores=True, temporaries=2 * (expanded + merged), blocks=1)


@deferred
def short_prefill(tokens: int, sequences: int, heads: int) -> Case:
    """Return a case of a short prompt chunk, for which the program chooses at run time between the absorbed form, which
    attends to the latents of the prefix, and the expanded form.

    Temporary memory holds queries and outputs in latent space, partial states (one per token and CTA), and keys and
    values of `PIECE_TOKENS` prefix tokens.
    """
    latent = 2 * tokens * heads * (576 + 512) * 2
    partial_states = (tokens + 132) * 128 * 512 * 4
    expanded = PIECE_TOKENS * heads * 2 * (2 * NOPE + 64) * 2
    return MOVES(
        functools.partial(mla_prefill, piece_tokens=PIECE_TOKENS),
        prefill_arguments(512, tokens, sequences, heads),
        tensor_cores=True,
        temporaries=2 * (latent + partial_states + expanded),
        blocks=1,
    )


LATENT = {
    "write-latent-bf16": write(DEEPSEEK),
    "write-latent-decode": write(DEEPSEEK, 64),
    "write-latent-scan": layers_in_scan(),
    "write-latent-large-pool": write(paged_latent(512, 64, jnp.bfloat16, num_pages=2**17)),
    "gather-latent-bf16": gather(DEEPSEEK),
    "gather-latent-cached-only": gather(DEEPSEEK, num_new=0),
    "gather-latent-large-pool": gather(paged_latent(512, 64, jnp.bfloat16, num_pages=2**17), sequences=64),
    "mla-prefill-narrow": prefill(128),
    "mla-prefill-wide": prefill(16384),
    "mla-prefill-short": short_prefill(128, 1, 16),
}

LATENT_MORE = {
    "mla-prefill-short-h128": short_prefill(96, 4, 128),
    "mla-prefill-decided": short_prefill(512, 8, 16),
} | {
    f"{name}-latent-{dtype}-{latent_dim}-{rope_dim}": make(paged_latent(latent_dim, rope_dim, DTYPES[dtype]))
    for (name, make), dtype, (latent_dim, rope_dim) in itertools.product(
        (("write", write), ("gather", gather)), DTYPES, WIDTHS
    )
    if (dtype, latent_dim) != ("bf16", 512)  # these cases are in `LATENT`
}
"""Writes and gathers with all widths and dtypes, and two more short chunks."""
