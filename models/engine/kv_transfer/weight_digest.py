"""Digest of all bits of a model's weights. It is the same on any mesh.

Each element contributes a hash of its bits and of its position in the whole weight. The contributions are added modulo
2**32, so each device can add up its own slices in any order. Two sums with different hashes give 64 bits per weight.
The hash is a bijection of the bits, so a change of one element always changes both sums. Any other difference, such as
two exchanged rows, leaves both sums equal with a probability of about 2**-64. The digest does not protect against
weights that were constructed to have the same digest.

On a mesh, a split weight is the concatenation of the devices' slices along its first axis (`models.decoder.mesh`).
Several slices may contain the same KV heads, and slices may be padded with experts of zeros. Each element of the whole
weight contributes once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, UInt32

from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, Gemma4Config, ModelConfig
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.decoder.mesh import DATA, EXPERT_COLUMNS, EXPERTS, num_devices, number_along
from pallas_attn.models.engine.kv_transfer.cached_pages import digest_of

_NUM_SUMS = 2

_ELSEWHERE = -1
"""Start of a block whose elements contribute as part of another slice."""


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Positions of the elements of all slices along one axis of a weight.

    Attributes:
      size: size of the whole weight along this axis. Elements at positions from `size` on are padding.
      blocks: consecutive blocks of a slice, each with its width and its first position in the whole weight for each
        slice (or `_ELSEWHERE`).
    """

    size: int
    blocks: tuple[tuple[int, tuple[int, ...]], ...]


def weight_digest(model: Decoder) -> str:
    """Return a SHA-256 digest of the names, dtypes and shapes of all weights and of sums over their elements' hashes.

    The sums are computed on the devices. Weights of equal shape, dtype and layout share one compiled program.
    """
    weights = _weights_of(model)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if model.mesh is not None:
        dtype = model.embed_tokens.dtype
        whole = nnx.eval_shape(lambda: Decoder(model.config, model.settings, dtype))
        shapes = {name: weight.shape for name, weight in _weights_of(whole).items()}
    sums = [_sums(weight, _axes_of(name, weight, shapes[name], model)) for name, weight in weights.items()]
    about = "\n".join(f"{name} {weight.dtype} {shapes[name]}" for name, weight in weights.items())
    return digest_of([np.frombuffer(about.encode(), np.uint8), *jax.device_get(sums)])


def _weights_of(model: Decoder) -> dict[str, Array]:
    """Return the weights by dotted path."""
    return {".".join(map(str, path)): weight.get_value() for path, weight in nnx.to_flat_state(nnx.state(model))}


def _axes_of(name: str, weight: Array, whole: Sequence[int], model: Decoder) -> tuple[_Axis, ...]:
    """Return the positions of a weight's slices in the whole weight of shape `whole`."""
    mesh, over = model.mesh, _split_over(weight)
    if mesh is None or not over:
        return tuple(_Axis(size, ((size, (0,)),)) for size in whole)
    places = [dict(zip(over, at, strict=True)) for at in np.ndindex(*(mesh.shape[axis] for axis in over))]
    of_slice = (weight.shape[0] // len(places), *weight.shape[1:])
    of_experts = DATA in over  # only whole experts are split over `data`
    columns = EXPERT_COLUMNS if of_experts else over
    devices, count = [number_along(columns, mesh, at) for at in places], num_devices(mesh, columns)

    def starts(size: int, own: int) -> tuple[int, ...]:
        """Return where the slice of each device starts. `size` elements form size / own different slices, each on one
        or more neighbouring devices. All devices but the first with a slice get `_ELSEWHERE`, so it counts once."""
        index = [device * (size // own) // count for device in range(count)]
        return tuple(
            index[device] * own if device == 0 or index[device] != index[device - 1] else _ELSEWHERE
            for device in devices
        )

    axes = [_Axis(size, ((size, (0,) * len(places)),)) for size in whole]
    if of_experts:
        axes[0] = _Axis(
            whole[0], ((of_slice[0], tuple(number_along(EXPERTS, mesh, at) * of_slice[0] for at in places)),)
        )
    split = [axis for axis in range(1 if of_experts else 0, len(whole)) if whole[axis] != of_slice[axis]]
    for axis in split or [len(whole) - 1]:  # unsplit: a bias, which only the first device has
        blocks, first = [], 0
        widths = [
            _joined_widths(name, sizes[axis], config)
            for sizes, config in ((whole, model.config), (of_slice, model.part))
        ]
        for size, own in zip(*widths, strict=True):
            blocks.append((own, tuple(start if start == _ELSEWHERE else first + start for start in starts(size, own))))
            first += size
        axes[axis] = _Axis(whole[axis], tuple(blocks))
    return tuple(axes)


def _split_over(weight: Array) -> tuple[str, ...]:
    """Return the mesh axes over which the first axis of a weight is split; empty if it is not split."""
    spec = getattr(weight.sharding, "spec", ())
    first = spec[0] if spec else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def _joined_widths(name: str, size: int, config: ModelConfig) -> tuple[int, ...]:
    """Return the widths of projections that are joined in one weight, such as queries, keys and values."""
    if "qkv_proj" in name and not isinstance(config, DeepSeekConfig | DeepseekV4Config):
        layer = int(name.split(".")[1])  # "layers.<layer>.self_attn.qkv_proj.weight"
        kv_heads, width = config.kv_heads(layer)
        queries, keys = config.num_attention_heads * width, kv_heads * width
        # A layer of Gemma 4 may have queries only, or queries and keys.
        num_joined = (size - queries) // keys if isinstance(config, Gemma4Config) else 2
        return (queries, *[keys] * num_joined)
    return (size // 2, size // 2) if "gate_up_proj" in name else (size,)


@functools.partial(jax.jit, static_argnames="axes")
def _sums(weight: Array, axes: tuple[_Axis, ...]) -> UInt32[Array, "sums"]:
    """Return the sums over the hashes of a weight's elements. Each element counts once."""
    num_slices = len(axes[0].blocks[0][1])
    bits = _bits(weight).reshape(num_slices, weight.shape[0] // num_slices, *weight.shape[1:])
    positions = [_positions(axis, number, bits.ndim) for number, axis in enumerate(axes, 1)]
    is_counted = functools.reduce(
        jnp.logical_and, [(at >= 0) & (at < axis.size) for at, axis in zip(positions, axes, strict=True)]
    )

    def total(number: int) -> Array:
        seeds = [jnp.uint32((number * len(axes) + axis + 1) * 0x9E3779B9 % 2**32) for axis in range(len(axes))]
        keys = [_mixed(at.astype(jnp.uint32) ^ seed) for at, seed in zip(positions, seeds, strict=True)]
        mixed = _mixed(bits ^ functools.reduce(jnp.add, keys))
        return jnp.sum(jnp.where(is_counted, mixed, jnp.uint32(0)), dtype=jnp.uint32)

    return jnp.stack([total(number) for number in range(_NUM_SUMS)])


def _bits(weight: Array) -> UInt32[Array, "..."]:
    """Return the bit patterns of the elements."""
    width = weight.dtype.itemsize
    if width > 4:
        raise NotImplementedError(f"weights: a digest of {weight.dtype} is not supported, only of at most 4 bytes")
    return jax.lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


def _positions(axis: _Axis, number: int, ndim: int) -> Array:
    """Return positions along an axis, shape [slices, 1, ..., size, 1, ...]; negative if another slice contributes."""
    of_blocks = []
    for width, starts in axis.blocks:
        first = jnp.asarray(starts, jnp.int32)[:, None]
        of_blocks.append(jnp.where(first < 0, _ELSEWHERE, first + jnp.arange(width, dtype=jnp.int32)[None, :]))
    positions = jnp.concatenate(of_blocks, axis=1)
    return jnp.expand_dims(positions, [i for i in range(1, ndim) if i != number])


def _mixed(x: Array) -> Array:
    """Return MurmurHash3's finalizer, a bijection of 32-bit integers that depends on all bits of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
