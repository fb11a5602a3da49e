"""Compile-gate cases of the Hopper kernels of `mla_sparse`, for numbers of heads and tokens, latent widths and
dtypes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn
from pallas_attn import PagedLatent, latent_cache_spec
from pallas_attn.mosaic.primitives import shared_memory
from pallas_attn.ops.mla_sparse import mosaic_bf16
from pallas_attn.ops.mla_sparse.mosaic_fp8 import SparseFp8Scratch
from pallas_attn.ops.mla_sparse.mosaic_items import SparseStatic
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP, POWER_OF_TWO, SMALL_LATENT_GROUP
from tests.aot.case import Case, DeferredCase, Tile, allocated, deferred, shape, slots_of_tokens

ROWS, TOKENS, TOP_K, WINDOW = 64, 64, 2048, 128

mla_sparse = functools.partial(pallas_attn.mla_sparse, sm_scale=0.1, return_lse=True, implementation="mosaic")


@dataclass(frozen=True)
class Configuration:
    """Parameters that the kernel is compiled for.

    Attributes:
      latent_dim: width L of the latents.
      heads: number of query heads. A CTA computes up to 64 of them, the rows of its tile.
      tokens: number of query tokens. With few tokens, several CTAs share the selected latents of a token.
      quantised: whether latents are fp8.
      dtype: dtype of queries and of 16-bit latents.
      out: dtype of the output; None for the dtype of the queries.
      pages: number of pages of the pool.
      extra: whether the call has a second cache, sinks and no rotated columns, as in DeepSeek-V4. The first cache then
        has a window of 128 tokens. With `quantised`, the caches have records of 584 bytes.
      ranges: whether tokens attend to ranges of keys, with `extra` to the entries of HCA layers in pages of 2 entries;
        else only to a window.
    """

    latent_dim: int = 512
    heads: int = 128
    tokens: int = 128
    quantised: bool = False
    dtype: Any = jnp.bfloat16
    out: Any = None
    pages: int = 65536
    extra: bool = False
    ranges: bool = False

    def __str__(self) -> str:
        named = {
            "-fp8": self.quantised,
            "-f16": self.dtype == jnp.float16,
            "-f32-out": self.out == jnp.float32,
            "-v4": self.extra,
            "-ranges": self.ranges,
        }
        tokens = "" if self.tokens == 128 else f"-t{self.tokens}"
        name = f"mla-sparse-{self.latent_dim}-h{self.heads}{tokens}"
        return name + "".join(suffix for suffix, is_so in named.items() if is_so)

    @property
    def arguments(self) -> dict[str, Any]:
        """Shapes of the arguments of a call."""
        kind: dict[str, Any] = {"dtype": self.dtype}
        if self.quantised:
            kind = {"dtype": LATENT_8BIT, "rope_dtype": self.dtype}
        if self.records:
            kind["scale_dtype"] = POWER_OF_TWO
        spec_of = functools.partial(
            latent_cache_spec,
            latent_dim=self.latent_dim - (64 if self.records else 0),
            rope_dim=64 if self.records else self.rope_dim,
            **kind,
        )
        arguments = {
            "q_latent": shape(self.tokens, self.heads, self.latent_dim, dtype=self.dtype),
            "q_rope": None if self.extra else shape(self.tokens, self.heads, 64, dtype=self.dtype),
            "cache": allocated(PagedLatent, spec_of(num_pages=self.pages, page_size=64)),
            "slots": slots_of_tokens(self.tokens, WINDOW if self.extra else TOP_K, 64 if self.ranges else None),
        }
        if self.extra:
            page_size = 2 if self.ranges else 64
            extra = spec_of(num_pages=self.pages * 64 // page_size, page_size=page_size)
            arguments["extra_cache"] = allocated(PagedLatent, extra)
            arguments["extra_slots"] = slots_of_tokens(self.tokens, TOP_K - WINDOW, page_size if self.ranges else None)
            arguments["sinks"] = shape(self.heads, dtype=jnp.float32)
        return arguments

    @property
    def records(self) -> bool:
        """Whether latents have scales that are powers of two."""
        return self.extra and self.quantised

    @property
    def rope_dim(self) -> int:
        return 0 if self.extra else 64

    @property
    def tile(self) -> Tile:
        """Work of a CTA with `ROWS` heads on one tile of `TOKENS` latents."""
        numbers = self.latent_dim + 2 * 64 + self.latent_dim // LATENT_GROUP * 4
        if self.records:
            numbers = self.latent_dim - 64 + 2 * 64 + (self.latent_dim - 64) // SMALL_LATENT_GROUP
        num_bytes = TOKENS * (numbers if self.quantised else 2 * (self.latent_dim + self.rope_dim))
        return Tile(num_bytes, TOKENS * (2 * self.latent_dim + self.rope_dim) * ROWS)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of shared memory of the kernel."""
        facts = {
            "latent_dim": self.latent_dim,
            "rope_dim": self.rope_dim,
            "top_k": TOP_K,
            "first_extra": WINDOW if self.extra else TOP_K,
            "heads": -(-self.heads // 8) * 8,  # for fp8 latents; the kernel for 16-bit latents always has 64 rows
            "splits": 1,
            "sm_scale": 0.1,
            "small_groups": self.records,
            "page_sizes": (64, 2)[: 2 if self.extra else 1] if self.ranges else (),
        }
        if self.quantised:
            return shared_memory.block_bytes(SparseFp8Scratch.types(SparseStatic(**facts), self.dtype))
        reductions = plgpu.CompilerParams().reduction_scratch_bytes
        types = mosaic_bf16.scratch_types(SparseStatic(**facts), self.dtype)
        return shared_memory.block_bytes(types, reduction_bytes=reductions)

    @deferred
    def case(self) -> Case:
        """Return the case. Its temporary memory is mostly partial states: 128 KB for each KV split and 64 query
        rows.
        """
        return Case(
            functools.partial(mla_sparse, out_dtype=self.out),
            self.arguments,
            cache="cache",
            temporaries=64 * 2**20,
            scratch_bytes=self.scratch_bytes,
            tile=self.tile,
        )


def configurations() -> Iterator[Configuration]:
    """Yield configurations with all numbers of heads and kinds of cache for 8, 128 and 2,048 tokens, then with other
    widths and dtypes.
    """
    for quantised in (False, True):
        for heads in (16, 64, 128):
            for tokens in (8, 128, 2048):
                yield Configuration(heads=heads, tokens=tokens, quantised=quantised)
        yield Configuration(256, 64, quantised=quantised)
        yield Configuration(128, 64, quantised=quantised)
        yield Configuration(heads=20, out=jnp.float32, quantised=quantised)
        yield Configuration(heads=96, quantised=quantised)
    for quantised, heads, tokens in itertools.product((False, True), (16, 64, 128), (8, 128, 2048)):
        yield Configuration(heads=heads, tokens=tokens, quantised=quantised, extra=True)
    for quantised, (heads, tokens), extra in itertools.product((False, True), ((64, 8), (128, 2048)), (False, True)):
        yield Configuration(heads=heads, tokens=tokens, quantised=quantised, extra=extra, ranges=True)
    yield Configuration(320, 20, out=jnp.float32, quantised=True, extra=True)
    yield Configuration(448)
    yield Configuration(dtype=jnp.float16)


MLA_SPARSE: dict[str, DeferredCase] = {
    str(c): c.case() for c in (Configuration(), Configuration(quantised=True), Configuration(tokens=8, quantised=True))
}
"""Typical configurations."""

MLA_SPARSE_MORE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in configurations()},
    "mla-sparse-large-pool": Configuration(pages=2**18).case(),
}
"""All configurations, and a pool with more than 2**32 elements."""
