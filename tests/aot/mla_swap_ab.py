"""Compile-gate cases of the swap-AB kernel of `mla_decode` on Hopper.

Swap-AB means that scores are computed as K·qᵀ, with tokens as tile rows and query rows as tile columns, which is
efficient for few query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_attn import PagedLatent, latent_cache_spec
from pallas_attn.mosaic.decode import DecodeTile
from pallas_attn.mosaic.decode_config import DecodeConfig
from pallas_attn.mosaic.primitives.query_packing import QueryPacking
from pallas_attn.ops.mla_decode.call import MlaDecodeCall
from pallas_attn.ops.mla_decode.config import SwapAbKey, max_columns, swap_ab_config, swap_ab_tile
from pallas_attn.ops.mla_decode.mosaic_swap_ab import decode, num_programs
from pallas_attn.ops.plan_decode import planned
from pallas_attn.types import LATENT_8BIT, LATENT_GROUP
from tests.aot.case import Case, DeferredCase, Tile, allocated, deferred, shape
from tests.aot.decode import scratch_bytes
from tests.aot.plans import fitted, plan_shapes

BATCH, PAGES, TOKENS = 32, 256, 64
WIDTHS = ((512, 64), (448, 64), (256, 64), (256, 32), (128, 32))
"""Pairs of latent width L and width R of the rotated key."""


def ints(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


@dataclass(frozen=True)
class Configuration:
    """Parameters that the kernel is compiled for.

    Attributes:
      latent_dim, rope_dim: width L of the latents and width R of the rotated keys.
      columns: query rows (heads times queries of a sequence) per CTA, the columns of its tile.
      page_size: tokens per page.
      out: dtype of the output.
      dtype: dtype of queries and of 16-bit latents.
      quantised: whether latents are fp8.
    """

    latent_dim: int = 512
    rope_dim: int = 64
    columns: int = 16
    page_size: int = 64
    out: Any = jnp.bfloat16
    dtype: Any = jnp.bfloat16
    quantised: bool = False

    def __str__(self) -> str:
        named = {"-fp8": self.quantised, "-f16": self.dtype == jnp.float16, "-f32-out": self.out == jnp.float32}
        pages = "" if self.page_size == 64 else f"-p{self.page_size}"
        name = f"mla-swap-ab-{self.latent_dim}-{self.rope_dim}-n{self.columns}{pages}"
        return name + "".join(suffix for suffix, is_so in named.items() if is_so)

    @property
    def key(self) -> SwapAbKey:
        """Key by which config.py and the tunings choose the sizes of the kernel."""
        out_bytes = jnp.dtype(self.out).itemsize
        return SwapAbKey(self.latent_dim, self.rope_dim, self.columns, out_bytes, self.page_size, self.quantised)

    def plan(self, mode: Literal["balanced", "fixed"] = "balanced", num_programs: int = 132, batch: int = BATCH) -> Any:
        return plan_shapes(self.page_size, 1, num_programs, mode, batch)

    def arguments(self, queries: int = 1, heads: int | None = None, batch: int = BATCH) -> dict[str, Any]:
        """Return the shapes of the arguments of a call. By default, heads * queries is `columns`."""
        spec = latent_cache_spec(
            num_pages=BATCH * PAGES,
            page_size=self.page_size,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            **({"dtype": LATENT_8BIT, "rope_dtype": self.dtype} if self.quantised else {"dtype": self.dtype}),
        )
        rows = batch, queries, heads or self.columns // queries
        return {
            "q_latent": shape(*rows, self.latent_dim, dtype=self.dtype),
            "q_rope": shape(*rows, self.rope_dim, dtype=self.dtype),
            "cache": allocated(PagedLatent, spec),
            "block_tables": ints(batch, PAGES),
            "kv_lens": ints(batch),
            "q_lens": ints(batch),
            "draft_mask": None,
            "plan": self.plan(batch=batch),
        }

    @property
    def tile(self) -> Tile:
        """Work of a CTA on one tile of `TOKENS` tokens."""
        keys, values = TOKENS * (self.latent_dim + self.rope_dim), TOKENS * self.latent_dim
        num_bytes = keys * jnp.dtype(self.dtype).itemsize
        if self.quantised:
            num_bytes = TOKENS * (self.latent_dim + self.rope_dim * 2 + self.latent_dim // LATENT_GROUP * 4)
        return Tile(num_bytes, (keys + values) * self.columns)

    def kernel_tile(self, sizes: DecodeConfig) -> DecodeTile:
        """Return the tile parameters with which the kernel for `arguments` is traced."""
        packing = QueryPacking(group=self.columns, queries=1, limit=self.columns)
        dims, options = (self.latent_dim, self.rope_dim), {"out_dtype": self.out, "quantised": self.quantised}
        return swap_ab_tile(packing, sizes.tile_tokens, self.page_size, dims, dtype=self.dtype, **options)

    @deferred
    def case(self, arguments: dict[str, Any] | None = None) -> Case:
        def decode_swap_ab(**arguments: Any) -> Any:
            call = MlaDecodeCall(**arguments, sm_scale=0.1, out_dtype=self.out)
            return decode(*planned(call, "mosaic_sm90", num_programs(call)))

        sizes = swap_ab_config(self.key)
        return Case(
            decode_swap_ab,
            fitted(arguments or self.arguments()),
            cache="cache",
            temporaries=64 * 2**20,
            scratch_bytes=0 if arguments else scratch_bytes(self.kernel_tile(sizes), sizes.stages),
            tile=self.tile,
            blocks=sizes.programs_per_multiprocessor,
        )


def configurations() -> Iterator[Configuration]:
    """Yield all widths with all numbers of columns and page sizes, float16, widths so small that the kernel has a third
    pipeline stage, and fp8 latents.
    """
    for latent_dim, rope_dim in WIDTHS:
        for columns in range(8, max_columns(jnp.float32) + 1, 8):
            yield Configuration(latent_dim, rope_dim, columns, out=jnp.float32)
        for columns in range(8, max_columns(jnp.bfloat16) + 1, 8):
            yield from (Configuration(latent_dim, rope_dim, columns, page_size) for page_size in (16, 32, 64, 128))
        yield Configuration(latent_dim, rope_dim, dtype=jnp.float16, out=jnp.float16)
    for page_size in (16, 32, 64, 128):  # shared memory has room for a third pipeline stage
        yield Configuration(64, 32, 32, page_size)
        yield Configuration(384, 64, 24, page_size, out=jnp.float32)
    for latent_dim, rope_dim in ((512, 64), (384, 32), (256, 64), (128, 32)):
        for columns in range(8, max_columns(jnp.bfloat16, quantised=True) + 1, 8):
            yield Configuration(latent_dim, rope_dim, columns, out=jnp.float32, quantised=True)
            yield Configuration(latent_dim, rope_dim, columns, page_size=16, quantised=True)
    for page_size in (32, 128):
        yield Configuration(512, 64, 16, page_size, quantised=True)
    yield Configuration(512, 64, 16, dtype=jnp.float16, out=jnp.float16, quantised=True)


@deferred
def drafts(configuration: Configuration, queries: int) -> DeferredCase:
    """Return a case with `queries` queries per sequence that form a draft tree (argument `draft_mask`)."""
    mask = {"draft_mask": shape(BATCH, queries, queries, dtype=jnp.bool_)}
    return configuration.case(configuration.arguments(queries) | mask)


DEEPSEEK = Configuration()
UNLIKE: dict[str, DeferredCase] = {
    "drafts": replace(DEEPSEEK, columns=32).case(replace(DEEPSEEK, columns=32).arguments(queries=2)),
    "draft-tree": drafts(replace(DEEPSEEK, columns=32, page_size=16), 4),
    "draft-tree-f32-out": drafts(replace(DEEPSEEK, columns=24, page_size=16, out=jnp.float32), 4),
    "20-heads": replace(DEEPSEEK, columns=24).case(DEEPSEEK.arguments(heads=20)),
    "9-heads-8-queries": replace(DEEPSEEK, columns=32).case(DEEPSEEK.arguments(queries=8, heads=9)),
    "fixed-plan": DEEPSEEK.case(DEEPSEEK.arguments() | {"plan": DEEPSEEK.plan("fixed")}),
    "fp8-draft-tree": drafts(replace(DEEPSEEK, columns=16, page_size=16, quantised=True), 2),
    "fp8-16-heads-2-queries": replace(DEEPSEEK, quantised=True).case(
        replace(DEEPSEEK, quantised=True).arguments(queries=2, heads=16)
    ),
    "fp8-20-heads": replace(DEEPSEEK, columns=24, quantised=True).case(
        replace(DEEPSEEK, quantised=True).arguments(heads=20)
    ),
    "no-plan": DEEPSEEK.case(DEEPSEEK.arguments() | {"plan": None}),
    "one-sequence": DEEPSEEK.case(DEEPSEEK.arguments(batch=1)),
}

MLA_SWAP_AB: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in (DEEPSEEK, Configuration(256, 32), Configuration(quantised=True))},
    **{f"mla-swap-ab-{name}": UNLIKE[name] for name in ("draft-tree", "20-heads", "fp8-draft-tree")},
}
"""Cases with typical configurations, and three calls of `UNLIKE`."""

MLA_SWAP_AB_MORE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in configurations()},
    **{f"mla-swap-ab-{name}": case for name, case in UNLIKE.items()},
}
"""Cases with all configurations, and all calls of `UNLIKE`."""
