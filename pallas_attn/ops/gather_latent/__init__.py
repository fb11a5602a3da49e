"""Cached and new latents of each sequence, back to back in one ragged array."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_attn import checks, dispatch
from pallas_attn.types import Implementation, PagedLatent


def _mosaic() -> Any:
    import pallas_attn.ops.gather_latent.mosaic_sm90 as implementation

    return implementation.gather_latent


def _xla() -> Any:
    import pallas_attn.ops.gather_latent.xla as implementation

    return implementation.gather_latent


def _reference() -> Any:
    import pallas_attn.ops.gather_latent.reference as implementation

    return implementation.gather_latent


IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla, "reference": _reference}


def gather_latent(
    cache: PagedLatent,
    latent_new: Float[Array, "T LR"],
    block_tables: Int32[Array, "S P"],
    cu_q_lens: Int32[Array, "S_plus_1"],
    kv_lens: Int32[Array, "S"],
    *,
    length: int,
    implementation: Implementation = None,
) -> Float[Array, "length LR"]:
    """Per sequence [cached..., new...], bit for bit, sequence after sequence.

    Sequence s has cu_q_lens[s + 1] - cu_q_lens[s] new tokens, read from `latent_new`; the kv_lens[s] minus that many
    before them are read from its pages. It starts at the sum of the kv_lens before it.

    Args:
      cache: pages [N, ps, L + R].
      latent_new: the packed new tokens, in the cache's dtype; T may be 0 where every length is.
      block_tables: page ids; entries past the cached tokens may hold anything. Tokens of pages that are absent are 0.
      cu_q_lens: prefix sums of the new tokens, from 0.
      kv_lens: tokens each sequence holds, cached and new.
      length: rows of the result; those past the sum of kv_lens are 0, tokens past `length` are left out.
      implementation: None, a name, or names to try in order.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    dims = checks.Dims()
    dims.check("cache.pages", cache.pages, "N ps LR", checks.PLAIN)
    dims.check("latent_new", latent_new, "T LR", (cache.pages.dtype,))
    dims.check("block_tables", block_tables, "S P", checks.INT)
    dims.check("cu_q_lens", cu_q_lens, "S+1", checks.INT)
    dims.check("kv_lens", kv_lens, "S", checks.INT)
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    return dispatch.run(
        "gather_latent", IMPLEMENTATIONS, implementation, cache, latent_new, block_tables, cu_q_lens, kv_lens, length
    )
