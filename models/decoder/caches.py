"""A model's caches: the shapes of its layers' pages, and the scales of quantised keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32

from models.config import DeepSeekConfig, GQAConfig, ModelConfig
from pallas_attn import (
    CacheSpec,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    index_cache_spec,
    kv_cache_spec,
    latent_cache_spec,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedLatent:
    """The paged cache of one layer of sparse attention: latents, and index keys in the same pages and slots."""

    latent: PagedLatent
    index: PagedIndexKeys


type LatentCache = PagedLatent | IndexedLatent
"""The paged cache of one layer of MLA."""

type LayerCache = LatentCache | PagedKV
"""The paged cache of one layer: latents of MLA, keys and values of GQA."""

type Caches = tuple[LayerCache, ...]
"""Caches of every layer."""

INDEX = "index_"
"""Beginning of the names of index keys' arrays in a `CacheSpec`."""

QUANTISED = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
"""Dtypes of keys and values that are stored with scales."""


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """Static scales of a quantised cache, found by calibration: a stored value times its scale is the value meant.

    Attributes:
      k, v: one scale a layer and KV head [layers, Hkv], or also a channel [layers, Hkv, D].

    Raises:
      ValueError: scales that are not positive and finite, or k and v of unlike shapes.
    """

    k: Float32[np.ndarray, "..."]
    v: Float32[np.ndarray, "..."]

    def __post_init__(self) -> None:
        if self.k.shape != self.v.shape or self.k.ndim not in (2, 3):
            raise ValueError(
                "kv_scales: expected k and v of one shape, [layers, Hkv] or [layers, Hkv, D],"
                f" got {list(self.k.shape)} and {list(self.v.shape)}"
            )
        for name, scales in (("k", self.k), ("v", self.v)):
            if not np.all(np.isfinite(scales) & (scales > 0)):
                raise ValueError(f"kv_scales: expected positive finite numbers, {name} has others")

    def of_part(self, config: ModelConfig) -> KVScales:
        """Scales of as many heads as a device of a mesh has: the first ones, which stand for any by their shape."""
        heads = slice(config.num_key_value_heads if isinstance(config, GQAConfig) else None)
        return KVScales(self.k[:, heads], self.v[:, heads])


def cache_spec(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    scales: KVScales | None = None,
    *,
    layer: int = 0,
) -> CacheSpec:
    """Shapes of one layer's cache.

    Arrays of index keys are named index_keys and index_scale. Layers without an indexer have none.

    Args:
      config: the model.
      num_pages, page_size: of the pool.
      dtype: bfloat16, float16, float32 or float8_e4m3fn; for keys and values also int8. Rotated keys beside
        float8_e4m3fn latents are bfloat16.
      scales: static scales of int8 or float8_e4m3fn keys and values; without, every token and head has one of its own.
      layer: which; past the last one, a multi-token prediction module's.

    Raises:
      ValueError: a size below 1, a dtype such a cache does not have, latents too narrow to have scales, or scales of
        other layers and heads.
    """
    if isinstance(config, DeepSeekConfig):
        if scales is not None:
            raise ValueError("kv_scales: expected none, quantised latents get a scale each as they are written")
        pool = {"num_pages": num_pages, "page_size": page_size}
        spec = latent_cache_spec(**pool, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, dtype=dtype)
        if not config.has_indexer(layer):
            return spec
        index = index_cache_spec(**pool, index_dim=config.index_head_dim, dtype=dtype)
        return CacheSpec(
            num_pages, page_size, spec.arrays | {f"{INDEX}{n}": array for n, array in index.arrays.items()}
        )
    if scales is not None:
        wanted = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)[: scales.k.ndim]
        if scales.k.shape != wanted:
            raise ValueError(f"kv_scales: expected shape {list(wanted)} of this model, got {list(scales.k.shape)}")
        layout = "head" if scales.k.ndim == 2 else "channel"
    else:
        layout = page_size if jnp.dtype(dtype) in QUANTISED else None
    return kv_cache_spec(
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        scales=layout,
    )


def latent_cache(spec: CacheSpec, make: Callable[[CacheSpec, type], Any]) -> LatentCache:
    """The cache of one layer of MLA whose parts `make` makes, of their specs and classes."""

    def part(arrays: dict[str, Any], kind: type) -> Any:
        return make(dataclasses.replace(spec, arrays=arrays), kind)

    index = {n.removeprefix(INDEX): array for n, array in spec.arrays.items() if n.startswith(INDEX)}
    latent = part({n: array for n, array in spec.arrays.items() if not n.startswith(INDEX)}, PagedLatent)
    return IndexedLatent(latent, part(index, PagedIndexKeys)) if index else latent


def cache_arrays(cache: LayerCache) -> dict[str, jax.Array]:
    """The arrays of a layer's cache, by their names in its `CacheSpec`."""
    if isinstance(cache, IndexedLatent):
        index = {f"{INDEX}{name}": array for name, array in _fields(cache.index).items()}
        return _fields(cache.latent) | index
    return _fields(cache)


def _fields(cache: PagedLatent | PagedIndexKeys | PagedKV) -> dict[str, jax.Array]:
    arrays = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    return {name: array for name, array in arrays.items() if array is not None}


def with_arrays(cache: LayerCache, arrays: Mapping[str, jax.Array]) -> LayerCache:
    """A layer's cache with other arrays, by names as `cache_arrays` gives them."""
    if not isinstance(cache, IndexedLatent):
        return dataclasses.replace(cache, **arrays)
    index = {name.removeprefix(INDEX): array for name, array in arrays.items() if name.startswith(INDEX)}
    latent = {name: array for name, array in arrays.items() if not name.startswith(INDEX)}
    return IndexedLatent(dataclasses.replace(cache.latent, **latent), dataclasses.replace(cache.index, **index))


def move_tokens(cache: LayerCache, sources: Int32[Array, "n"], targets: Int32[Array, "n"]) -> LayerCache:
    """Copies what a layer's cache holds in some slots to others, in place; nothing where the target is -1.

    Raises:
      NotImplementedError: tokens of a page share a scale.
    """
    page_size = (cache.latent if isinstance(cache, IndexedLatent) else cache).page_size
    of_heads = isinstance(cache, PagedKV)  # [N, Hkv, ps, ...], else [N, ps, ...]
    (source, at), (target, to) = (jnp.divmod(jnp.maximum(slots, 0), page_size) for slots in (sources, targets))

    def moved(name: str, array: jax.Array) -> jax.Array:
        if array.ndim < 3:  # static scales
            return array
        if array.shape[1 + of_heads] != page_size:
            raise NotImplementedError(f"{name}: tokens that share a scale are not moved, got {list(array.shape)}")
        where = (jnp.where(targets < 0, array.shape[0], target), *[slice(None)] * of_heads, to)
        # Fused with what overwrites them, XLA would copy the cache to read them.
        taken = jax.lax.optimization_barrier(array[(source, *[slice(None)] * of_heads, at)])
        return array.at[where].set(taken, mode="drop")

    return with_arrays(cache, {name: moved(name, array) for name, array in cache_arrays(cache).items()})


def allocate_latents(spec: CacheSpec) -> LatentCache:
    """Allocates an empty cache of one layer of MLA."""
    return latent_cache(spec, lambda spec, kind: kind.allocate(spec))


def allocate_caches(
    config: ModelConfig,
    specs: Sequence[CacheSpec],
    scales: KVScales | None = None,
    own_heads: Callable[[Array], Array] = lambda scale: scale,
) -> Caches:
    """Allocates empty caches of all layers, laid out as `cache_spec` does for these scales.

    Args:
      config: the model.
      specs: of each layer.
      scales: static scales of all KV heads.
      own_heads: takes a layer's scales to those of the heads in these caches.
    """
    if isinstance(config, DeepSeekConfig):
        return tuple(map(allocate_latents, specs))
    caches = [PagedKV.allocate(spec) for spec in specs]
    if scales is None:
        return tuple(caches)
    return tuple(
        dataclasses.replace(cache, k_scale=own_heads(jnp.asarray(k)), v_scale=own_heads(jnp.asarray(v)))
        for cache, k, v in zip(caches, scales.k, scales.v, strict=True)
    )
