"""Compile-gate cases of the two-warpgroup kernels of `mla_decode` on Hopper.

In these kernels, each of two warpgroups computes half of the output columns, and they exchange tiles of probabilities.
Names of cases contain "seesaw", FlashMLA's name for this scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_attn
from pallas_attn import PagedLatent
from pallas_attn.mosaic.primitives import shared_memory
from pallas_attn.ops.mla_decode.config import two_warpgroup_config
from pallas_attn.ops.mla_decode.mosaic_two_warpgroup_bf16 import DecodeBf16Static
from pallas_attn.ops.mla_decode.mosaic_two_warpgroup_fp8 import DecodeFp8Scratch, DecodeFp8Static
from pallas_attn.runtime import tuning
from tests.aot import mla_swap_ab
from tests.aot.case import Case, DeferredCase, Tile, deferred, shape
from tests.aot.mla_swap_ab import BATCH, TOKENS, WIDTHS
from tests.aot.plans import fitted

ROWS = 64
"""Number of query rows of a CTA."""

mla_decode = functools.partial(pallas_attn.mla_decode, sm_scale=0.1, return_lse=True, implementation="mosaic")


@dataclass(frozen=True)
class Configuration:
    """Parameters that the kernel is compiled for.

    Attributes:
      latent_dim, rope_dim: width L of the latents and width R of the rotated keys.
      heads: number of query heads. A CTA computes a block of up to 64 of them. With an even number of blocks, pairs of
      CTAs form clusters and share loaded tiles.
      page_size: tokens per page.
      dtype: dtype of queries and of 16-bit latents.
      out: dtype of the output; None for the dtype of the queries.
      quantised: whether latents are fp8.
    """

    latent_dim: int = 512
    rope_dim: int = 64
    heads: int = 128
    page_size: int = 64
    dtype: Any = jnp.bfloat16
    out: Any = None
    quantised: bool = False

    def __str__(self) -> str:
        named = {"-fp8": self.quantised, "-f16": self.dtype == jnp.float16, "-f32-out": self.out == jnp.float32}
        pages = "" if self.page_size == 64 else f"-p{self.page_size}"
        name = f"mla-seesaw-{self.latent_dim}-{self.rope_dim}-h{self.heads}{pages}"
        return name + "".join(suffix for suffix, is_so in named.items() if is_so)

    @property
    def shapes(self) -> mla_swap_ab.Configuration:
        """Configuration of `mla_swap_ab`, whose methods make the shapes of the arguments, which are the same."""
        sizes = {"page_size": self.page_size, "dtype": self.dtype, "quantised": self.quantised}
        return mla_swap_ab.Configuration(self.latent_dim, self.rope_dim, **sizes)

    def arguments(
        self, queries: int = 1, mode: Literal["balanced", "fixed"] = "balanced", batch: int = BATCH
    ) -> dict[str, Any]:
        """Return the shapes of the arguments of a call, with a plan for the number of CTAs that an H200 runs at the
        same time.
        """
        blocks = -(-self.heads * queries // ROWS)
        plan = self.shapes.plan(mode, max(1, 132 // blocks), batch)
        return self.shapes.arguments(queries, self.heads, batch) | {"plan": plan}

    @property
    def tile(self) -> Tile:
        """Work of a CTA with `ROWS` query rows on one tile of `TOKENS` tokens. In a cluster, a CTA copies half of a
        16-bit tile.
        """
        keys, values = TOKENS * (self.latent_dim + self.rope_dim), TOKENS * self.latent_dim
        sharers = 2 if -(-self.heads // ROWS) % 2 == 0 and not self.quantised else 1
        num_bytes = self.shapes.tile.num_bytes if self.quantised else keys * jnp.dtype(self.dtype).itemsize
        return Tile(num_bytes // sharers, (keys + values) * ROWS)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of shared memory of the kernel for `arguments` with heuristic sizes."""
        if self.quantised:
            facts = {"latent_dim": self.latent_dim, "rope_dim": self.rope_dim, "queries": 1, "heads": self.heads}
            fp8 = DecodeFp8Static(**facts, page_size=self.page_size, causal=True, sm_scale=0.1)
            return shared_memory.block_bytes(DecodeFp8Scratch.types(fp8, self.dtype))
        sizes = two_warpgroup_config(self.latent_dim, self.rope_dim, self.page_size)
        static = DecodeBf16Static(
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            queries=1,
            heads=self.heads,
            page_size=self.page_size,
            pairs=sizes.pairs,
            cluster=sizes.cluster if -(-self.heads // ROWS) % sizes.cluster == 0 else 1,
            causal=True,
            sm_scale=0.1,
        )
        reductions = plgpu.CompilerParams().reduction_scratch_bytes
        return shared_memory.block_bytes(static.scratch_types(self.dtype), reduction_bytes=reductions)

    @deferred
    def case(self, arguments: dict[str, Any] | None = None) -> Case:
        """Return the case of a call with heuristic sizes.

        The temporary memory is mostly partial states: 128 KB for each KV split and 64 query rows.
        """

        def call(**arguments: Any) -> Any:
            with mock.patch.object(tuning, "device_name", return_value="untuned"):  # has no packaged tunings
                return mla_decode(**arguments, out_dtype=self.out)

        return Case(
            call,
            fitted(arguments or self.arguments()),
            cache="cache",
            temporaries=160 * 2**20,
            scratch_bytes=0 if arguments else self.scratch_bytes,
            tile=self.tile,
        )


# --- configurations


def configurations() -> Iterator[Configuration]:
    """Yield all widths with all page sizes, with and without clusters, then other dtypes and fp8 latents."""
    for latent_dim, rope_dim in WIDTHS:
        for page_size in (16, 32, 64, 128):
            shared = Configuration(latent_dim, rope_dim, page_size=page_size)
            yield from (shared, replace(shared, heads=64), replace(shared, dtype=jnp.float16))
        for heads in (64, 128):
            yield Configuration(latent_dim, rope_dim, heads, page_size=16, out=jnp.float32)
    for heads in (64, 128):
        for latent_dim in (128, 256, 384, 512):
            yield Configuration(latent_dim, heads=heads, quantised=True)
        yield Configuration(heads=heads, page_size=16, quantised=True)
        yield Configuration(heads=heads, out=jnp.float32, quantised=True)
    for heads in (40, 96):  # blocks of 40 and 48 query rows
        yield Configuration(heads=heads)
        yield Configuration(heads=heads, out=jnp.float32)
    yield Configuration(256, 32, heads=40, page_size=16)
    for heads in (32, 40, 48, 56):
        yield Configuration(heads=heads, quantised=True)


CONFIGURATIONS = list(configurations())


# --- other calls


@deferred
def drafts(heads: int, queries: int, page_size: int = 64, *, quantised: bool = False) -> DeferredCase:
    """Return a case with `queries` queries per sequence that form a draft tree (argument `draft_mask`)."""
    configuration = Configuration(heads=heads, page_size=page_size, quantised=quantised)
    mask = {"draft_mask": shape(BATCH, queries, queries, dtype=jnp.bool_)}
    return configuration.case(configuration.arguments(queries) | mask).replace(tile=None)


@deferred
def without(configuration: Configuration, *names: str) -> DeferredCase:
    """Return a case without the optional arguments `names`."""
    return configuration.case({k: v for k, v in configuration.arguments().items() if k not in names})


@deferred
def two_kernels(heads: int, queries: int = 1, *, quantised: bool = False) -> DeferredCase:
    """Return a call with a plan and without LSE. It must launch the attention kernel, the merge kernel and XLA's kernel
    that clips `kv_lens`, which calls with the same lengths share.
    """
    configuration = Configuration(heads=heads, quantised=quantised)
    given = {k: v for k, v in configuration.arguments(queries).items() if k not in ("q_lens", "draft_mask")}
    decode = functools.partial(pallas_attn.mla_decode, sm_scale=0.1, implementation="mosaic")
    return configuration.case(given).replace(function=decode, launches=3, tile=None)


LAYERS = 4


def layers(q_latent: Any, q_rope: Any, cache: PagedLatent, block_tables: Any, kv_lens: Any, plan: Any) -> Any:
    """Compute a decode step of `LAYERS` layers in a scan. All layers share one pool and have separate pages in it."""
    pages, page_size, _ = cache.pages.shape
    offsets = jnp.arange(BATCH + 1, dtype=jnp.int32)
    slots = pallas_attn.slot_mapping(block_tables, offsets, kv_lens, page_size=page_size, length=BATCH)

    def layer(carried: tuple[Any, PagedLatent], i: Any) -> tuple[tuple[Any, PagedLatent], None]:
        q_latent, cache = carried
        first = i * (pages // LAYERS)
        latent = jnp.concatenate([q_latent[:, 0, 0], q_rope[:, 0, 0]], axis=-1)
        cache = pallas_attn.write_latent(cache, latent, slots + first * page_size, implementation="mosaic")
        q_latent, _ = mla_decode(q_latent, q_rope, cache, block_tables + first, kv_lens, plan=plan)
        return (q_latent, cache), None

    return lax.scan(layer, (q_latent, cache), jnp.arange(LAYERS, dtype=jnp.int32))[0]


@deferred
def in_layers() -> DeferredCase:
    arguments = DEEPSEEK.arguments()
    named = {name: arguments[name] for name in ("q_latent", "q_rope", "cache", "block_tables", "kv_lens", "plan")}
    return DEEPSEEK.case(named).replace(function=layers, donated=True)


DEEPSEEK = Configuration()
LARGE = PagedLatent(shape(2**17, 64, 576))  # pyrefly: ignore[bad-argument-type]
"""Pool with more than 2**32 elements."""

UNLIKE: dict[str, DeferredCase] = {
    "fp8-drafts": drafts(64, 4, quantised=True),
    "20-heads": Configuration(heads=20).case(Configuration(heads=20).arguments()),  # dispatched to the swap-AB kernel
    "20-heads-8-queries": drafts(20, 8),
    "9-heads-8-queries": drafts(9, 8, page_size=16),
    "128-heads-2-queries": DEEPSEEK.case(DEEPSEEK.arguments(queries=2)),
    "128-heads-8-queries": drafts(128, 8),
    "fixed-plan": DEEPSEEK.case(DEEPSEEK.arguments(mode="fixed")),
    "no-plan": without(DEEPSEEK, "plan", "q_lens"),
    "layers": in_layers(),
    "one-sequence": DEEPSEEK.case(DEEPSEEK.arguments(batch=1)),
    "large-pool": DEEPSEEK.case(DEEPSEEK.arguments() | {"cache": LARGE}),
}

TWO_KERNELS: dict[str, DeferredCase] = {
    **{f"mla-decode-two-kernels-h{heads}": two_kernels(heads) for heads in (24, 40, 48, 56, 80, 96, 128)},
    "mla-decode-two-kernels-h48-q2": two_kernels(48, 2),
    **{f"mla-decode-two-kernels-h{heads}-fp8": two_kernels(heads, quantised=True) for heads in (40, 48, 56, 80, 96)},
    "mla-decode-two-kernels-h48-q2-fp8": two_kernels(48, 2, quantised=True),
}

MLA_TWO_WARPGROUP: dict[str, DeferredCase] = {
    str(DEEPSEEK): DEEPSEEK.case(),
    "mla-decode-layers": UNLIKE["layers"],
    "mla-decode-one-sequence": UNLIKE["one-sequence"],
}
"""Cases with a typical configuration, and two calls of `UNLIKE`."""

MLA_TWO_WARPGROUP_MORE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in CONFIGURATIONS},
    **{f"mla-decode-{name}": case for name, case in UNLIKE.items()},
    **TWO_KERNELS,
}
"""Cases with all configurations, all calls of `UNLIKE`, and `TWO_KERNELS`."""
