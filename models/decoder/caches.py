"""KV caches of a model: shapes and allocation of each layer's pages, and static scales of quantised keys and values.

A cache slot is the index of a token's place in the cache: page · page size + offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32

from pallas_attn import (
    CacheSpec,
    PagedIndexKeys,
    PagedKV,
    PagedLatent,
    index_cache_spec,
    kv_cache_spec,
    latent_cache_spec,
)
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedLatent:
    """Paged cache of an MLA layer with an indexer (sparse attention): latents, and index keys in the same slots."""

    latent: PagedLatent
    index: PagedIndexKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """Paged caches of a DeepSeek-V4 layer. Pages of all of them cover the same number of tokens. A layer without a
    compressor has only `window`, and only layers with an indexer have the last two.

    Attributes:
      window: keys, which are also the values, of the tokens in the window [N, ps, D].
      entries: entries [N, ps / rate, D].
      state: compressor rows of the newest tokens of each page, float32 [N, rows, columns].
      index: index keys of the entries [N, ps / rate, Di].
      index_state: rows of the indexer's compressor, float32 [N, rows, columns].
    """

    window: PagedLatent
    entries: PagedLatent | None = None
    state: PagedLatent | None = None
    index: PagedIndexKeys | None = None
    index_state: PagedLatent | None = None


type LatentCache = PagedLatent | IndexedLatent
"""Paged cache of one MLA layer."""

type LayerCache = LatentCache | CompressedCache | PagedKV | None
"""Paged cache of one layer: latents of MLA, caches of DeepSeek-V4, or keys and values of GQA. None if the layer uses
the cache of another layer."""

type PageCount = int | tuple[int, ...]
"""Number of pages of a layer's cache. For DeepSeek-V4, a tuple has the numbers for each of its cache groups."""

type Caches = tuple[LayerCache, ...]
"""Caches of all layers."""

INDEX = "index_"
"""Prefix of the names of an indexer's arrays in the `CacheSpec` of a layer: index_keys, index_scale."""

QUANTISED = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
"""Dtypes in which keys and values are stored as (stored value) · (scale)."""


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """Static scales of a quantised KV cache, from calibration. A key or value equals its stored number times the scale.

    Attributes:
      k, v: float32 scales of keys and values of each layer that has a cache: per KV head [Hkv], or also per channel
        [Hkv, D]. Layers without a cache, which are the last layers, have no scales.

    Raises:
      ValueError: k and v have different shapes, or the scales of a layer not one or two axes, or a scale is not
        positive and finite.
    """

    k: tuple[Float32[np.ndarray, "..."], ...]
    v: tuple[Float32[np.ndarray, "..."], ...]

    def __post_init__(self) -> None:
        if shape_of(self.k) != shape_of(self.v) or {len(scale.shape) for scale in self.k} not in ({1}, {2}):
            raise ValueError(
                "kv_scales: expected k and v of one shape, [layers, Hkv] or [layers, Hkv, D],"
                f" got {shape_of(self.k)} and {shape_of(self.v)}"
            )
        for name, scales in (("k", self.k), ("v", self.v)):
            if not all(np.all(np.isfinite(scale) & (scale > 0)) for scale in scales):
                raise ValueError(f"kv_scales: expected positive finite numbers, {name} has others")

    def of_part(self, config: ModelConfig) -> KVScales:
        """Return scales with the shape of the scales on one device, to compute the `CacheSpec` of the device.

        The values are the scales of the first KV heads on every device. `mesh.own_kv_heads` selects the scales of the
        KV heads that the device has.

        Args:
          config: configuration of one device's part of the model.
        """
        if isinstance(config, DeepSeekConfig | DeepseekV4Config):  # `cache_spec` raises
            return self
        heads = [config.kv_heads(layer).num_heads for layer in range(len(self.k))]
        k, v = (tuple(scale[:n] for scale, n in zip(scales, heads, strict=True)) for scales in (self.k, self.v))
        return KVScales(k, v)


def shape_of(scales: Sequence[np.ndarray]) -> list[int] | list[list[int]]:
    """Return [layers, ...] if the arrays of all layers have equal shapes, else the shape of each layer's array."""
    shapes = [[*scale.shape] for scale in scales]
    return [len(shapes), *shapes[0]] if all(shape == shapes[0] for shape in shapes) else shapes


def cache_spec(
    config: ModelConfig,
    num_pages: PageCount,
    page_size: int,
    dtype: DTypeLike,
    scales: KVScales | None = None,
    *,
    layer: int = 0,
) -> CacheSpec:
    """Return the names, shapes and dtypes of the arrays of one layer's cache.

    If the layer has an indexer (sparse attention), they include its arrays index_keys and index_scale. If the layer
    uses the cache of another layer, there are no arrays.

    Args:
      config: configuration of the model.
      num_pages: number of pages.
      page_size: tokens per page.
      dtype: bfloat16, float16, float32 or float8_e4m3fn; keys and values may also be int8. The rotated keys of
        float8_e4m3fn latents are stored in bfloat16.
      scales: static scales of int8 or float8_e4m3fn keys and values. None for one scale per token and head, which is
        computed when the token is written.
      layer: index of the layer. Indices from the number of layers on are multi-token prediction modules.

    Raises:
      ValueError: a size below 1, an unsupported dtype, latents too narrow for scales, or scales of the wrong shape.
      NotImplementedError: static scales or int8 for DeepSeek-V4.
    """
    if isinstance(config, DeepseekV4Config):
        return _compressed_spec(config, num_pages, page_size, dtype, scales, layer)
    if isinstance(num_pages, tuple):
        raise ValueError(f"num_pages: expected one number for the cache of a layer, got {num_pages}")
    if isinstance(config, DeepSeekConfig):
        if scales is not None:
            raise ValueError("kv_scales: expected None, scales of quantised latents are computed when they are written")
        pool = {"num_pages": num_pages, "page_size": page_size}
        spec = latent_cache_spec(**pool, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, dtype=dtype)
        if not config.has_indexer(layer):
            return spec
        index = index_cache_spec(**pool, index_dim=config.index_head_dim, dtype=dtype)
        return CacheSpec(
            num_pages, page_size, spec.arrays | {f"{INDEX}{n}": array for n, array in index.arrays.items()}
        )
    if layer not in config.cached_layers:
        return CacheSpec(num_pages, page_size, {})
    heads = config.kv_heads(layer)
    if scales is not None:
        axes = len(scales.k[0].shape)
        wanted = shape_of([np.empty(config.kv_heads(i)[:axes]) for i in config.cached_layers])
        if shape_of(scales.k) != wanted:
            raise ValueError(f"kv_scales: expected shape {wanted} of this model, got {shape_of(scales.k)}")
        layout = "head" if axes == 1 else "channel"
    else:
        layout = page_size if jnp.dtype(dtype) in QUANTISED else None
    return kv_cache_spec(
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=heads.num_heads,
        head_dim=heads.width,
        dtype=dtype,
        scales=layout,
    )


def _compressed_spec(
    config: DeepseekV4Config,
    num_pages: PageCount,
    page_size: int,
    dtype: DTypeLike,
    scales: KVScales | None,
    layer: int,
) -> CacheSpec:
    """Return the result of `cache_spec` for a DeepSeek-V4 layer: arrays named "cache.array".

    In float8_e4m3fn, rows and entries have the published format: the columns that are not rotated in float8_e4m3fn with
    a power-of-two scale for 64 columns, the rotated columns in bfloat16. Index keys have one scale each.
    """
    if scales is not None or jnp.dtype(dtype) == jnp.int8:
        raise NotImplementedError(
            f"cache_dtype: expected bfloat16, float16, float32 or float8_e4m3fn for a {config.model_type},"
            f" its caches have no other format; got {'kv_scales' if scales is not None else jnp.dtype(dtype).name}"
        )
    rate, columns = config.rate(layer), config.state_columns(layer)
    counts = num_pages if isinstance(num_pages, tuple) else (num_pages,) * len(config.groups_of(layer))

    def rows(count: int, page_size: int, width: int, dtype: DTypeLike) -> CacheSpec:
        return latent_cache_spec(num_pages=count, page_size=page_size, latent_dim=width, rope_dim=0, dtype=dtype)

    def keys(count: int, page_size: int) -> CacheSpec:
        if jnp.dtype(dtype) not in QUANTISED:
            return rows(count, page_size, config.head_dim, dtype)
        rotated = config.qk_rope_head_dim
        return latent_cache_spec(
            num_pages=count,
            page_size=page_size,
            latent_dim=config.head_dim - rotated,
            rope_dim=rotated,
            dtype=dtype,
            scale_dtype=jnp.float8_e8m0fnu,
        )

    specs = {"window": keys(counts[0], page_size)}
    if rate:
        if page_size % rate:
            raise ValueError(
                f"page_size: expected a multiple of {config.page_unit} tokens, so that a page has whole entries of a"
                f" {config.model_type}, got {page_size}"
            )
        specs["entries"] = keys(counts[1], page_size // rate)
        specs["state"] = rows(counts[2], config.state_rows(layer, page_size), columns, jnp.float32)
    if config.has_indexer(layer):
        index_columns = columns // config.head_dim * config.index_head_dim
        specs["index"] = index_cache_spec(
            num_pages=counts[1], page_size=page_size // rate, index_dim=config.index_head_dim, dtype=dtype
        )
        specs["index_state"] = rows(counts[2], config.state_rows(layer, page_size), index_columns, jnp.float32)
    arrays = {f"{name}.{field}": array for name, spec in specs.items() for field, array in spec.arrays.items()}
    return CacheSpec(counts[0], page_size, arrays)


_COMPRESSED = dict.fromkeys(("window", "entries", "state", "index_state"), PagedLatent) | {"index": PagedIndexKeys}
"""Class of each cache of a `CompressedCache`."""


def compressed_cache(arrays: Mapping[str, Any]) -> CompressedCache:
    """Return the caches of a DeepSeek-V4 layer, given their arrays by the names of `cache_spec`."""
    parts: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        cache, field = name.split(".")
        parts.setdefault(cache, {})[field] = array
    caches: dict[str, Any] = {cache: _COMPRESSED[cache](**fields) for cache, fields in parts.items()}
    return CompressedCache(**caches)


def allocate_compressed(spec: CacheSpec) -> CompressedCache:
    """Allocate empty caches of one DeepSeek-V4 layer."""
    arrays = spec.arrays.items()
    return compressed_cache(
        {
            n: jnp.full(a.shape, 1 if n.endswith(".scale") else 0, a.dtype) for n, a in arrays
        }  # as `PagedLatent.allocate`
    )


def latent_cache(spec: CacheSpec, make: Callable[[CacheSpec, type], Any]) -> LatentCache:
    """Return the cache of one MLA layer, made by `make(spec, class)`: once for its latents (class PagedLatent), and, if
    the spec has arrays of an indexer, once for its index keys (class PagedIndexKeys)."""

    def part(arrays: dict[str, Any], kind: type) -> Any:
        return make(dataclasses.replace(spec, arrays=arrays), kind)

    index = {n.removeprefix(INDEX): array for n, array in spec.arrays.items() if n.startswith(INDEX)}
    latent = part({n: array for n, array in spec.arrays.items() if not n.startswith(INDEX)}, PagedLatent)
    return IndexedLatent(latent, part(index, PagedIndexKeys)) if index else latent


def cache_arrays(cache: LayerCache) -> dict[str, jax.Array]:
    """Return the arrays of a layer's cache by their names in its `CacheSpec`."""
    if isinstance(cache, IndexedLatent):
        index = {f"{INDEX}{name}": array for name, array in _fields(cache.index).items()}
        return _fields(cache.latent) | index
    if isinstance(cache, CompressedCache):
        parts = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
        given = {name: _fields(part) for name, part in parts.items() if part is not None}
        return {f"{name}.{field}": array for name, fields in given.items() for field, array in fields.items()}
    return {} if cache is None else _fields(cache)


def _fields(cache: PagedLatent | PagedIndexKeys | PagedKV) -> dict[str, jax.Array]:
    arrays = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    return {name: array for name, array in arrays.items() if array is not None}


def with_arrays(cache: LayerCache, arrays: Mapping[str, jax.Array]) -> LayerCache:
    """Return a layer's cache with other arrays, named as in `cache_arrays`."""
    if cache is None:
        return None
    if isinstance(cache, CompressedCache):
        return compressed_cache(cache_arrays(cache) | dict(arrays))
    if not isinstance(cache, IndexedLatent):
        return dataclasses.replace(cache, **arrays)
    index = {name.removeprefix(INDEX): array for name, array in arrays.items() if name.startswith(INDEX)}
    latent = {name: array for name, array in arrays.items() if not name.startswith(INDEX)}
    return IndexedLatent(dataclasses.replace(cache.latent, **latent), dataclasses.replace(cache.index, **index))


def move_tokens(cache: LayerCache, sources: Int32[Array, "n"], targets: Int32[Array, "n"]) -> LayerCache:
    """Copy the entries of tokens in a layer's cache from source slots to target slots, in place. Pairs with a target of
    -1 are skipped.

    Static scales do not change, because they apply to all tokens.

    Raises:
      NotImplementedError: a page of the cache has fewer scales than tokens, or the cache is of DeepSeek-V4.
    """
    if cache is None:
        return None
    if isinstance(cache, CompressedCache):
        raise NotImplementedError("move_tokens: compressed entries pool the rows of consecutive tokens")
    page_size = (cache.latent if isinstance(cache, IndexedLatent) else cache).page_size
    of_heads = isinstance(cache, PagedKV)  # [N, Hkv, ps, ...], else [N, ps, ...]
    (source, at), (target, to) = (jnp.divmod(jnp.maximum(slots, 0), page_size) for slots in (sources, targets))

    def moved(name: str, array: jax.Array) -> jax.Array:
        if array.ndim < 3:  # static scales
            return array
        if array.shape[1 + of_heads] != page_size:
            raise NotImplementedError(
                f"{name}: expected a scale per token, to move single tokens; got {list(array.shape)}"
            )
        where = (jnp.where(targets < 0, array.shape[0], target), *[slice(None)] * of_heads, to)
        # Without the barrier, XLA fuses reads and update into one operation, for which it copies the whole cache.
        taken = jax.lax.optimization_barrier(array[(source, *[slice(None)] * of_heads, at)])
        return array.at[where].set(taken, mode="drop")

    return with_arrays(cache, {name: moved(name, array) for name, array in cache_arrays(cache).items()})


def allocate_heads(spec: CacheSpec) -> PagedKV | None:
    """Allocate an empty cache of one GQA layer; None if the layer uses the cache of another layer."""
    return PagedKV.allocate(spec) if spec.arrays else None


def allocate_latents(spec: CacheSpec) -> LatentCache:
    """Allocate an empty cache of one MLA layer."""
    return latent_cache(spec, lambda spec, kind: kind.allocate(spec))


def allocate_caches(
    config: ModelConfig,
    specs: Sequence[CacheSpec],
    scales: KVScales | None = None,
    own_heads: Callable[[int, Array], Array] = lambda layer, scale: scale,
) -> Caches:
    """Allocate empty caches of all layers.

    Args:
      config: configuration of the model, or of one device's part of it.
      specs: result of `cache_spec` for each layer.
      scales: static scales of all KV heads of the model; None for MLA, unquantised caches, or scales per token.
      own_heads: function (layer, scales) that selects, from the scales [Hkv, ...] of a layer, the scales of the KV
        heads in these caches. The default selects all.
    """
    if isinstance(config, DeepSeekConfig):
        return tuple(map(allocate_latents, specs))
    if isinstance(config, DeepseekV4Config):
        return tuple(map(allocate_compressed, specs))
    if scales is None:
        return tuple(map(allocate_heads, specs))
    cached = len(scales.k)
    of_layers = enumerate(zip(specs[:cached], scales.k, scales.v, strict=True))
    allocated = tuple(
        dataclasses.replace(
            PagedKV.allocate(spec),
            k_scale=own_heads(layer, jnp.asarray(k)),
            v_scale=own_heads(layer, jnp.asarray(v)),
        )
        for layer, (spec, k, v) in of_layers
    )
    return (*allocated, *[None] * (len(specs) - cached))
