"""Helpers for caches and calls that are split over several devices with `jax.shard_map`.

Inside `jax.shard_map`, an operation computes with the shards of one device. Three kinds of split are supported:

- *Heads*: the cache has the partition `kv_partition(kv, heads="tensor")`, and queries, outputs and sinks are split in
  the same way. `head_split` checks the numbers of heads. Devices exchange nothing. A latent cache has no head axis, so
  each device has the whole cache.
- *Sequences*: queries, block tables and lengths are split over a mesh axis. Page ids refer to the pages of the device
  that uses them.
- *Contexts*: the pages of every sequence are divided among n devices, `kv_partition(kv, pages="context")`. Each device
  computes attention to its own pages, and `decode_over_contexts` merges the results. All devices receive the same block
  tables, with ids of the whole cache of N pages. Device i has the pages i·N/n to (i + 1)·N/n - 1. Entry j of a row must
  be a page of device j % n. Consecutive pages of a sequence are then on different devices, so that the devices have
  about equal numbers of its tokens.

A `DecodePlan` is for one device: call `plan_decode` inside `jax.shard_map`, with the arguments of the decode call
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.portable.merge import merge_states
from pallas_attn.types import PAGE_NONE, DecodePlan, PagedKV, PagedLatent

type Axis = str | tuple[str, ...] | None
"""Names of the mesh axes that an array axis is split over; None if it is not split."""


@dataclasses.dataclass(frozen=True)
class HeadSplit:
    """Numbers of heads per device, if every device has the same number of query heads; see `head_split`.

    Attributes:
      devices: number of devices.
      q_heads, kv_heads: query heads and KV heads per device.
      copies: number of devices that have the same KV head. It is 1, unless the model has fewer KV heads than devices.

    Example:
      >>> pallas_attn.parallel.HeadSplit(devices=8, q_heads=4, kv_heads=1, copies=2).kv_heads_of(5)
      range(2, 3)
    """

    devices: int
    q_heads: int
    kv_heads: int
    copies: int

    def kv_heads_of(self, device: int) -> range:
        """Return the KV heads that the query heads of a device read."""
        first = device // self.copies * self.kv_heads
        return range(first, first + self.kv_heads)


def head_split(num_q_heads: int, num_kv_heads: int, devices: int) -> HeadSplit:
    """Split heads over devices so that the query heads of a device read only KV heads of the same device.

    Args:
      num_q_heads, num_kv_heads: numbers of query heads and KV heads of the model.
      devices: number of devices.

    Raises:
      ValueError: the number of devices does not divide the query heads, or it neither divides the KV heads nor is a
        multiple of them.

    Example:
      >>> pallas_attn.parallel.head_split(num_q_heads=32, num_kv_heads=8, devices=4)
      HeadSplit(devices=4, q_heads=8, kv_heads=2, copies=1)
    """
    checks.check_heads(num_q_heads, num_kv_heads)
    if devices < 1:
        raise ValueError(f"devices: expected at least 1, got {devices}")
    if num_q_heads % devices:
        raise ValueError(f"devices: expected a divisor of {num_q_heads} query heads, got {devices}")
    if num_kv_heads % devices and devices % num_kv_heads:
        raise ValueError(f"devices: expected a divisor or a multiple of {num_kv_heads} KV heads, got {devices}")
    kv_heads = max(1, num_kv_heads // devices)
    return HeadSplit(devices, num_q_heads // devices, kv_heads, devices * kv_heads // num_kv_heads)


def kv_partition(kv: PagedKV, *, pages: Axis = None, heads: Axis = None) -> PagedKV:
    """Return a `PagedKV` with the `PartitionSpec` of each array, for a cache that is split over mesh axes.

    Args:
      kv: the cache, or its shapes as `jax.ShapeDtypeStruct`s.
      pages: mesh axes that the pages are split over.
      heads: mesh axes that the KV heads are split over.

    Example:
      >>> spec = pallas_attn.kv_cache_spec(
      ...     num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.int8, scales="head"
      ... )
      >>> kv = jax.eval_shape(lambda: pallas_attn.PagedKV.allocate(spec))
      >>> specs = pallas_attn.parallel.kv_partition(kv, heads="tensor")
      >>> tuple(specs.k), tuple(specs.k_scale)
      ((None, 'tensor'), ('tensor',))
    """

    return jax.tree.map(lambda x: PartitionSpec(heads) if x.ndim < 3 else PartitionSpec(pages, heads), kv)


def latent_partition(cache: PagedLatent, *, pages: Axis = None) -> PagedLatent:
    """Return a `PagedLatent` with the `PartitionSpec` of each array, for a latent cache that is split over mesh axes.

    Args:
      cache: the cache, or its shapes as `jax.ShapeDtypeStruct`s.
      pages: mesh axes that the pages are split over.

    Example:
      >>> cache = pallas_attn.PagedLatent(jax.ShapeDtypeStruct((8, 16, 40), jnp.bfloat16))
      >>> tuple(pallas_attn.parallel.latent_partition(cache, pages="context").pages)
      ('context',)
    """
    return jax.tree.map(lambda _: PartitionSpec(pages), cache)


def plan_partition(plan: DecodePlan, axes: Axis) -> DecodePlan:
    """Return a `DecodePlan` with the `PartitionSpec` of each array, to pass plans out of one `jax.shard_map` and into
    another.

    Each device makes its own plan. Outside `jax.shard_map`, the arrays of all devices are concatenated.

    Args:
      plan: the plan of one device, or its shapes as `jax.ShapeDtypeStruct`s.
      axes: mesh axes along which the devices have different plans.

    Example:
      >>> q, table = jax.ShapeDtypeStruct((2, 1, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.int32)
      >>> pages = jax.ShapeDtypeStruct((6, 2, 16, 8), jnp.float32)
      >>> plan = pallas_attn.plan_decode(q, pallas_attn.PagedKV(pages, pages), table, jnp.array([40, 7], jnp.int32))
      >>> tuple(pallas_attn.parallel.plan_partition(plan, "tensor").row_order)
      ('tensor',)
    """
    return jax.tree.map(lambda _: PartitionSpec(axes), plan)


# --- contexts


@dataclasses.dataclass(frozen=True)
class ContextPart:
    """Block tables and lengths for the pages of one device, if contexts are split over n devices.

    Attributes:
      block_tables: int32 [B, P'] or [B, Hkv, P'] with P' = ceil(P / n), ids in the device's own part of the cache.
      kv_lens: int32 [B], tokens of each sequence in these pages.

    Example:
      >>> pallas_attn.parallel.ContextPart(jnp.array([[3, 1]], jnp.int32), jnp.array([20], jnp.int32)).kv_lens
      Array([20], dtype=int32)
    """

    block_tables: Int32[Array, "B *heads P"]
    kv_lens: Int32[Array, "B"]


def context_part(
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    cache: PagedKV | PagedLatent,
    *,
    axis: str,
) -> ContextPart:
    """Return block tables and lengths for the pages of this device. Call the function inside `jax.shard_map`.

    Args:
      block_tables: ids of the whole cache; entry j must be a page of device j % n. The tokens of other entries are
        invisible. For a view of pages of ps tokens, which has an entry per token, the ps entries of page j must be on
        device j % n.
      kv_lens: number of tokens of each sequence, on all devices together.
      cache: this device's part of the cache.
      axis: mesh axis that the pages are split over, n devices.

    Raises:
      ValueError: the cache is a view, and the tables do not have an entry for each token.

    Example:
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> cache = pallas_attn.PagedLatent(jnp.zeros((8, 16, 40)))
      >>> P = jax.sharding.PartitionSpec
      >>> def lens(table, lens, cache):
      ...     return pallas_attn.parallel.context_part(table, lens, cache, axis="context").kv_lens
      >>> specs = (P(), P(), pallas_attn.parallel.latent_partition(cache, pages="context"))
      >>> split = jax.shard_map(lens, mesh=mesh, in_specs=specs, out_specs=P("context"))
      >>> split(jnp.array([[3, 1], [2, 0]], jnp.int32), jnp.array([20, 7], jnp.int32), cache)
      Array([20,  7], dtype=int32)
    """
    block_tables, kv_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens)
    device, devices = lax.axis_index(axis), lax.axis_size(axis)
    num_pages = jax.tree.leaves(cache)[0].shape[0]
    if block_tables.ndim == 3:
        num_pages *= block_tables.shape[1]  # the tables contain row ids, page·Hkv + head
    entries = cache.view_page_size or 1 if isinstance(cache, PagedKV) else 1  # table entries of a page
    page_size = entries * cache.page_size
    *rows, columns = block_tables.shape
    if columns % entries:
        raise ValueError(
            f"block_tables: expected an entry for each token, a multiple of {entries} per row, because cache is a view"
            f" of pages of {entries} tokens; got {list(block_tables.shape)}. token_tables converts tables of pages"
        )
    padding = [(0, 0)] * len(rows) + [(0, -columns % (devices * entries))]
    dealt = jnp.pad(block_tables, padding, constant_values=PAGE_NONE).reshape(*rows, -1, devices, entries)
    own = lax.dynamic_index_in_dim(dealt, device, axis=-2, keepdims=False).reshape(*rows, -1)
    kv_lens = checks.bound_lens(kv_lens, columns * cache.page_size)
    full_pages, tokens = kv_lens // page_size, kv_lens % page_size
    own_lens = (full_pages + devices - 1 - device) // devices * page_size
    own_lens += jnp.where(full_pages % devices == device, tokens, 0)
    return ContextPart(_own_ids(own, num_pages, device), own_lens)


def local_slots(slots: Int32[Array, "T"], cache: PagedKV | PagedLatent, *, axis: str) -> Int32[Array, "T"]:
    """Convert slots of the whole cache into slots of this device's part, for `write_kv` and `write_latent`.

    Call the function inside `jax.shard_map`.

    Args:
      slots: page·ps + offset of each token, with page ids of the whole cache.
      cache: this device's part of the cache.
      axis: mesh axis that the pages are split over.

    Returns:
      Slots in this device's pages; -1, which is not written, for tokens whose page is on another device.

    Example:
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> cache = pallas_attn.PagedLatent(jnp.zeros((8, 16, 40)))
      >>> P = jax.sharding.PartitionSpec
      >>> def local(slots, cache):
      ...     return pallas_attn.parallel.local_slots(slots, cache, axis="context")
      >>> specs = (P(), pallas_attn.parallel.latent_partition(cache, pages="context"))
      >>> jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("context"))(jnp.array([5, 130, -1]), cache)
      Array([ 5, -1, -1], dtype=int32)
    """
    (slots,) = checks.int32(slots=slots)
    num_pages = jax.tree.leaves(cache)[0].shape[0]
    return _own_ids(slots, num_pages * cache.page_size, lax.axis_index(axis))


def _own_ids(ids: Array, count: int, device: Array) -> Array:
    """Convert ids of the whole cache into ids of this device's part, which has `count` ids. Ids of other devices become
    PAGE_NONE.
    """
    own = ids - device * count
    return jnp.where((ids >= 0) & (own >= 0) & (own < count), own, PAGE_NONE)


def decode_over_contexts(
    decode: Callable[..., Any],
    queries: Sequence[Float[Array, "B Q Hq D"]],
    cache: PagedKV | PagedLatent,
    block_tables: Int32[Array, "B P"] | Int32[Array, "B Hkv P"],
    kv_lens: Int32[Array, "B"],
    *,
    axis: str,
    q_lens: Int32[Array, "B"] | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "B Q Hq_n D"], Float[Array, "B Q Hq_n"]]:
    """Decode over a cache whose pages are split over n devices. Call the function inside `jax.shard_map`.

    Each device computes the attention of all heads to its own pages. One all-to-all then gives device i the results of
    all devices for Hq / n heads, heads i·Hq/n to (i + 1)·Hq/n - 1, and device i merges them by LSE.

    Q queries of a sequence become Q sequences with one query each, because the queries see different numbers of tokens
    in the pages of a device.

    Args:
      decode: `paged_decode` or `mla_decode`.
      queries: queries of the operation, [q] or [q_latent, q_rope], the same on all devices.
      cache: this device's part of the cache.
      block_tables, kv_lens: for the whole cache, the same on all devices; see `context_part`.
      axis: mesh axis that the pages are split over.
      q_lens: number of queries of each sequence; None if every sequence has Q queries.
      sinks: float32 sink logits of all heads. They are applied once, in the merge.
      options: other arguments of the operation. A `plan` must be made for B·Q sequences with one query each, with the
        tables and lengths of `context_part`. If `out_dtype` is float32, the outputs are exchanged in float32.

    Returns:
      Output [B, Q, Hq / n, D] and float32 LSE [B, Q, Hq / n] of this device's heads.

    Raises:
      ValueError: n does not divide the number of heads, or arguments of the operation do not fit each other.
      NotImplementedError: the call has a window or a draft mask: these hide different numbers of tokens on each device.

    Example:
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> kv = pallas_attn.PagedKV(jnp.ones((8, 2, 4, 8)), jnp.ones((8, 2, 4, 8)))
      >>> def decode(q, kv, block_tables, kv_lens):
      ...     split = pallas_attn.parallel.decode_over_contexts
      ...     return split(pallas_attn.paged_decode, [q], kv, block_tables, kv_lens, axis="context")
      >>> P = jax.sharding.PartitionSpec
      >>> specs = (P(), pallas_attn.parallel.kv_partition(kv, pages="context"), P(), P())
      >>> split = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=P(None, None, "context"))
      >>> table, kv_lens = jnp.array([[3, 1], [2, 0]], jnp.int32), jnp.array([7, 3], jnp.int32)
      >>> out, lse = split(jnp.ones((2, 1, 4, 8)), kv, table, kv_lens)
      >>> out.shape, lse.shape
      ((2, 1, 4, 8), (2, 1, 4))
    """
    for name in ("window", "draft_mask"):
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: hides different numbers of tokens on each device of {axis!r}")
    devices = lax.axis_size(axis)
    batch, num_queries, num_heads = queries[0].shape[:3]
    if num_heads % devices:
        raise ValueError(f"queries: expected heads that the {devices} devices of {axis!r} divide, got {num_heads}")
    block_tables, kv_lens, q_lens = checks.int32(block_tables=block_tables, kv_lens=kv_lens, q_lens=q_lens)
    kv_lens = checks.bound_lens(kv_lens, block_tables.shape[-1] * cache.page_size)
    if num_queries > 1:
        kv_lens = _lens_of_queries(kv_lens, q_lens, num_queries)
        block_tables = jnp.repeat(block_tables, num_queries, axis=0)
        queries, q_lens = [q.reshape(batch * num_queries, 1, *q.shape[2:]) for q in queries], None
    part = context_part(block_tables, kv_lens, cache, axis=axis)
    if q_lens is not None:
        options["q_lens"] = q_lens
    out, lse = decode(*queries, cache, part.block_tables, part.kv_lens, return_lse=True, **options)
    out, lse = merge_over_contexts(out, lse, axis=axis, sinks=sinks)
    return out.reshape(batch, num_queries, *out.shape[2:]), lse.reshape(batch, num_queries, -1)


def merge_over_contexts(
    out: Float[Array, "*rows Hq D"],
    lse: Float[Array, "*rows Hq"],
    *,
    axis: str,
    own: tuple[Float[Array, "*rows Hq_n D"], Float[Array, "*rows Hq_n"]] | None = None,
    sinks: Float[Array, "Hq"] | None = None,
) -> tuple[Float[Array, "*rows Hq_n D"], Float[Array, "*rows Hq_n"]]:
    """Merge the attention that n devices have computed over disjoint sets of keys. Call the function inside
    `jax.shard_map`.

    One all-to-all gives device i the results of all devices for heads i·Hq/n to (i + 1)·Hq/n - 1, which it merges.

    Args:
      out: this device's output for all heads, computed without sinks.
      lse: float32 LSE (natural logarithm) for all heads; -inf where the device saw no key.
      axis: mesh axis of the n devices.
      own: output and LSE of the attention to additional keys, which this device has computed for its Hq / n heads only.
      sinks: float32 sink logits of all heads. They are applied once.

    Returns:
      Output and LSE of this device's Hq / n heads.

    Raises:
      ValueError: n does not divide the number of heads, or shapes and dtypes do not fit each other.

    Example:
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def merge(out, lse):
      ...     return pallas_attn.parallel.merge_over_contexts(out, lse, axis="context")
      >>> P = jax.sharding.PartitionSpec
      >>> split = jax.shard_map(merge, mesh=mesh, in_specs=P(), out_specs=P(None, "context"))
      >>> out, lse = split(jnp.ones((3, 4, 8)), jnp.zeros((3, 4)))
      >>> out.shape, lse.shape
      ((3, 4, 8), (3, 4))
    """
    devices, (*rows, num_heads, width) = lax.axis_size(axis), out.shape
    if num_heads % devices:
        raise ValueError(f"out: expected heads that the {devices} devices of {axis!r} divide, got {num_heads}")
    outs, lses = _exchange_heads(out.reshape(-1, 1, num_heads, width), lse.reshape(-1, 1, num_heads), axis)
    outs, lses = outs.reshape(devices, *rows, -1, width), lses.reshape(devices, *rows, -1)
    if own is not None:
        outs, lses = jnp.concatenate([outs, own[0][None]]), jnp.concatenate([lses, own[1][None]])
    if sinks is not None:
        each = num_heads // devices
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * each, each)
    return merge_states(outs, lses, sinks)


def _lens_of_queries(
    kv_lens: Int32[Array, "B"], q_lens: Int32[Array, "B"] | None, num_queries: int
) -> Int32[Array, "BQ"]:
    """Return the number of tokens that each query sees, int32 [B·Q]; 0 for queries past q_len."""
    index = jnp.arange(num_queries, dtype=jnp.int32)[None]
    real = jnp.full_like(kv_lens, num_queries) if q_lens is None else checks.bound_lens(q_lens, num_queries)
    lens = kv_lens[:, None] - real[:, None] + index + 1
    return jnp.where((index < real[:, None]) & (kv_lens[:, None] > 0), jnp.maximum(lens, 0), 0).reshape(-1)


def _exchange_heads(
    out: Float[Array, "B Q Hq D"], lse: Float[Array, "B Q Hq"], axis: str
) -> tuple[Float[Array, "n B Q Hq_n D"], Float[Array, "n B Q Hq_n"]]:
    """Exchange results: return outputs and LSEs of all n devices for this device's heads.

    The bits of the LSE are appended to the output as additional columns, so that one all-to-all is enough. The exchange
    has an integer dtype: the bits of an LSE can be a NaN in the output's dtype, whose bits a float exchange may change.
    """
    devices, width = lax.axis_size(axis), out.shape[-1]
    bits = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    lse_bits = lax.bitcast_convert_type(lse, bits).reshape(*lse.shape, -1)
    packed = jnp.concatenate([lax.bitcast_convert_type(out, bits), lse_bits], axis=-1)
    packed = packed.reshape(*packed.shape[:2], devices, -1, packed.shape[-1])
    packed = lax.all_to_all(packed, axis, split_axis=2, concat_axis=0)
    lse_bits = packed[..., width:] if bits.itemsize < 4 else packed[..., width]
    return lax.bitcast_convert_type(packed[..., :width], out.dtype), lax.bitcast_convert_type(lse_bits, jnp.float32)
