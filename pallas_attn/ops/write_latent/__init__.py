"""Writing new latents into their pages."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_attn import checks, dispatch
from pallas_attn.types import Implementation, PagedLatent


def _mosaic() -> Any:
    import pallas_attn.ops.write_latent.mosaic_sm90 as implementation

    return implementation.write_latent


def _xla() -> Any:
    import pallas_attn.ops.write_latent.xla as implementation

    return implementation.write_latent


def _reference() -> Any:
    import pallas_attn.ops.write_latent.reference as implementation

    return implementation.write_latent


IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla, "reference": _reference}


def write_latent(
    cache: PagedLatent,
    latent: Float[Array, "T LR"],
    slots: Int32[Array, "T"],
    *,
    implementation: Implementation = None,
) -> PagedLatent:
    """Writes one latent a slot; in place where the cache is donated.

    Args:
      cache: pages [N, ps, L + R].
      latent: normed latents and rotated keys, in the cache's dtype or cast to it.
      slots: page · ps + offset of each token; PAGE_NONE, or any slot outside the pool, writes nothing. No two alike.
      implementation: None, a name, or names to try in order.

    Returns:
      The cache with the tokens written and every other element untouched.

    Raises:
      ValueError: arguments that do not fit each other.
      NotImplementedError: the implementation named does not support the call.
    """
    dims = checks.Dims()
    dims.check("cache.pages", cache.pages, "N ps LR", checks.PLAIN)
    dims.check("latent", latent, "T LR", checks.PLAIN)
    dims.check("slots", slots, "T", checks.INT)
    latent = latent.astype(cache.pages.dtype)
    return dispatch.run("write_latent", IMPLEMENTATIONS, implementation, cache, latent, slots)
