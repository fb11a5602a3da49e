"""Compressed entries of blocks of tokens (DeepSeek-V4's compressor), for `reference` and `xla`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_attn.portable.index_keys import stored_index_keys
from pallas_attn.portable.latents import stored_latents
from pallas_attn.portable.pool_access import page_or_none, put
from pallas_attn.portable.rope import rms_norm, rotate
from pallas_attn.types import PagedIndexKeys, PagedLatent


def split_rows(
    rows: Float32[Array, "E n columns"], ratio: int, width: int
) -> tuple[Float32[Array, "E n D"], Float32[Array, "E n D"]]:
    """Return the contents and gates of the n = c·ratio rows of each entry, of D = `width` columns.

    If entries overlap (c = 2), the first `ratio` rows contribute their columns [:D], and the others columns [D:].
    """

    def own_half(part: Float32[Array, "E n half_columns"]) -> Float32[Array, "E n D"]:
        if part.shape[-1] == width:
            return part
        return jnp.concatenate([part[:, :ratio, :width], part[:, ratio:, width:]], axis=1)

    contents, gates = jnp.split(rows, 2, axis=-1)
    return own_half(contents), own_half(gates)


def pooled_entries(
    contents: Float32[Array, "E n D"],
    gates: Float32[Array, "E n D"],
    exists: Bool[Array, "E n"],
    norm: Float[Array, "D"],
    norm_eps: float,
    cos: Float32[Array, "E half"],
    sin: Float32[Array, "E half"],
) -> Float32[Array, "E D"]:
    """Pool the existing rows of each entry, normalize the sum, and rotate its last columns."""
    shown = exists[..., None]
    weights = jax.nn.softmax(jnp.where(shown, gates, -jnp.inf), axis=1)
    pooled = jnp.sum(jnp.where(shown, contents * weights, 0.0), axis=1)  # a missing row may be NaN
    normed = rms_norm(pooled, norm, norm_eps)
    first = normed.shape[-1] - 2 * cos.shape[-1]
    rotated = rotate(normed[:, None, first:], cos, sin, "interleaved")[:, 0]
    return jnp.concatenate([normed[:, :first], rotated], axis=-1)


def write_at[Cache: PagedLatent | PagedIndexKeys](
    cache: Cache, values: Float32[Array, "n columns"], slots: Int32[Array, "n"]
) -> Cache:
    """Return a cache with values written to slots; -1 and slots outside the pool are not written."""
    stored = stored_index_keys(values, cache) if isinstance(cache, PagedIndexKeys) else stored_latents(values, cache)
    num_pages, page_size = jax.tree.leaves(cache)[0].shape[:2]
    page, offset = slots // page_size, slots % page_size
    page = page_or_none(page, (page >= 0) & (page < num_pages), num_pages)  # index -1 would wrap around
    return jax.tree.map(lambda pool, new: put(pool, (page, offset), new), cache, stored)
