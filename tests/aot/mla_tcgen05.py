"""Compile-gate cases of the Blackwell kernel of `mla_decode`, which uses tcgen05 instructions and tensor memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import pallas_attn
from pallas_attn import PagedLatent
from pallas_attn.mosaic.blackwell.mla_decode import REDUCTION_BYTES, TcgenScratch, TcgenStatic, choose_static
from pallas_attn.mosaic.primitives import shared_memory
from tests.aot import mla_swap_ab
from tests.aot.case import Case, DeferredCase, deferred, shape
from tests.aot.mla_swap_ab import BATCH, WIDTHS
from tests.aot.plans import Mode, fitted, plan_shapes

MULTIPROCESSORS = 148

mla_decode = functools.partial(pallas_attn.mla_decode, sm_scale=0.1, return_lse=True, implementation="mosaic")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Parameters that the kernel is compiled for.

    Attributes:
      latent_dim, rope_dim: width of the latents and of the rotated keys.
      heads: number of query heads. If heads * queries is at most 64, the kernel computes the output transposed, with
      query rows as columns.
      queries: queries per sequence.
      page_size: tokens per page.
      dtype: dtype of queries and latents.
      out: dtype of the output; None for the dtype of the queries.
      tree: whether the queries form a draft tree (argument `draft_mask`).
    """

    latent_dim: int = 512
    rope_dim: int = 64
    heads: int = 128
    queries: int = 1
    page_size: int = 64
    dtype: Any = jnp.bfloat16
    out: Any = None
    tree: bool = False

    def __str__(self) -> str:
        named = {"-tree": self.tree, "-f16": self.dtype == jnp.float16, "-f32-out": self.out == jnp.float32}
        queries = "" if self.queries == 1 else f"-q{self.queries}"
        pages = "" if self.page_size == 64 else f"-p{self.page_size}"
        name = f"sm100-mla-decode-{self.latent_dim}-{self.rope_dim}-h{self.heads}{queries}{pages}"
        return name + "".join(suffix for suffix, is_so in named.items() if is_so)

    @property
    def static(self) -> TcgenStatic:
        return choose_static(
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            queries=self.queries,
            heads=self.heads,
            page_size=self.page_size,
            causal=not self.tree,
            sm_scale=0.1,
            dtype=self.dtype,
        )

    def arguments(self, mode: Mode = "balanced", batch: int = BATCH) -> dict[str, Any]:
        """Return the shapes of the arguments of a call, with a plan for the number of CTAs that a B200 runs at the same
        time.
        """
        shapes = mla_swap_ab.Configuration(
            self.latent_dim, self.rope_dim, page_size=self.page_size, dtype=self.dtype
        ).arguments(self.queries, self.heads, batch)
        programs = max(1, MULTIPROCESSORS // self.static.ctas(self.queries * self.heads))
        plan = plan_shapes(self.page_size, 1, programs, mode, batch, "mosaic_sm100")
        mask = shape(batch, self.queries, self.queries, dtype=jnp.bool_) if self.tree else None
        return shapes | {"draft_mask": mask, "plan": plan}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of shared memory of the kernel."""
        types = TcgenScratch.types(self.static, self.dtype)
        return shared_memory.block_bytes(types, reduction_bytes=REDUCTION_BYTES)

    @deferred
    def case(self, arguments: dict[str, Any] | None = None) -> Case:
        """Return the case. Its temporary memory is mostly partial states: up to 256 KB for each KV split and 128 query
        rows.
        """

        def call(**arguments: Any) -> Any:
            return mla_decode(**arguments, out_dtype=self.out)

        return Case(
            call,
            fitted(arguments or self.arguments()),
            cache="cache",
            temporaries=256 * 2**20,
            scratch_bytes=self.scratch_bytes,
            card="B200",
        )


# --- configurations

ALL_WIDTHS = [(latent_dim, rope_dim) for latent_dim in range(64, 513, 64) for rope_dim in (32, 64)]


def configurations() -> Iterator[Configuration]:
    """Yield every latent width with each kind of tile, then other page sizes, dtypes and draft trees."""
    for latent_dim, rope_dim in ALL_WIDTHS:
        for heads in (16, 32, 48, 64, 128):
            yield Configuration(latent_dim, rope_dim, heads, page_size=16)
    for latent_dim, rope_dim in WIDTHS:
        for heads in (16, 64, 128):
            yield from (Configuration(latent_dim, rope_dim, heads, page_size=page_size) for page_size in (32, 64, 128))
            tree = Configuration(latent_dim, rope_dim, heads // 4, queries=4, page_size=16, tree=True)
            yield from (tree, dataclasses.replace(tree, dtype=jnp.float16, out=jnp.float32))


@deferred
def without(configuration: Configuration, *names: str) -> DeferredCase:
    """Return a case without the optional arguments `names`."""
    return configuration.case({k: v for k, v in configuration.arguments().items() if k not in names})


DEEPSEEK, FEW = Configuration(), Configuration(heads=16)
LARGE = PagedLatent(shape(2**17, 64, 576))  # pyrefly: ignore[bad-argument-type]
"""Pool with more than 2**32 elements."""

UNLIKE: dict[str, DeferredCase] = {
    "20-heads-8-queries": Configuration(heads=20, queries=8, tree=True).case(),
    "128-heads-2-queries": Configuration(queries=2).case(),
    "9-heads-4-queries": Configuration(heads=9, queries=4).case(),
    "fixed-plan": DEEPSEEK.case(DEEPSEEK.arguments("fixed")),
    "no-plan": without(DEEPSEEK, "plan", "q_lens"),
    "no-plan-16-heads": without(FEW, "plan", "q_lens"),
    "one-sequence": DEEPSEEK.case(DEEPSEEK.arguments(batch=1)),
    "large-pool": DEEPSEEK.case(DEEPSEEK.arguments() | {"cache": LARGE}),
}

MLA_TCGEN05: dict[str, DeferredCase] = {str(c): c.case() for c in (DEEPSEEK, dataclasses.replace(FEW, heads=64))}
"""Typical configurations."""

MLA_TCGEN05_MORE: dict[str, DeferredCase] = {
    **{str(c): c.case() for c in configurations()},
    **{f"sm100-mla-decode-{name}": case for name, case in UNLIKE.items()},
}
"""Cases with all configurations, and all calls of `UNLIKE`."""
