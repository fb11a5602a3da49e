"""Models with random weights, which are drawn on the device.

One parameter is drawn at a time, because the device memory has no room for a second copy of a large model.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_attn.models.checkpoints import weight_axes
from pallas_attn.models.config import DeepseekV4Config, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.decoder.mesh import num_devices, over_mesh

UNITS = ("norm.weight", "norm_1.weight", "norm_2.weight", "compressor.norm", "layer_scalar", "router.scale")
UNITS += ("per_expert_scale",)
"""Suffixes of the names of factors, whose mean is 1."""


def random_model(
    config: ModelConfig, dtype: DTypeLike, settings: AttentionSettings, seed: int = 0, mesh: Mesh | None = None
) -> Decoder:
    """Return a model with random weights whose scale keeps activations near 1.

    Nothing then overflows, and the router selects experts evenly. On a mesh, each device draws its own slices of the
    weights, so the values differ from the values of a model on one device.
    """
    model = nnx.eval_shape(lambda: Decoder(config, settings, dtype, mesh))
    graph, state = nnx.split(model)
    axes = {} if model.mesh is None else weight_axes(config, model.mesh)
    whole = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Decoder(config, settings, dtype))))
    shapes = {".".join(map(str, path)): weight.shape for path, weight in whole}

    def make(path: tuple[Any, ...], parameter: nnx.Variable) -> nnx.Variable:
        name, split, shape = ".".join(map(str, path)), None, parameter.shape
        if model.mesh is not None:
            split = model.mesh, axes[name]
            shape = (shape[0] * num_devices(model.mesh, axes[name]), *shape[1:])
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(name.encode()))
        if isinstance(config, DeepseekV4Config) and name.endswith("experts_of_tokens"):
            return parameter.replace(_random_choices(key, shape, config.n_routed_experts))
        return parameter.replace(_random(key, shape, parameter.dtype, *_centre_and_spread(name, shapes[name]), split))

    return nnx.merge(graph, nnx.map_state(make, state))


def _centre_and_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a parameter's values."""
    if name.endswith(UNITS):
        return 1.0, 0.1
    if len(shape) == 1 or name == "embed_tokens":
        return 0.0, 1.0 if name == "embed_tokens" else 0.1
    columns_in = shape[-1] if name.endswith(("w_uk", "w_uv")) else shape[-2]
    return 0.0, columns_in**-0.5


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_choices(key: Array, shape: tuple[int, int], experts: int) -> Array:
    """Return a table of different experts for each token, int32 [tokens, experts per token]: evenly spaced experts,
    starting from a random one."""
    first = jax.random.randint(key, (shape[0], 1), 0, experts)
    return (first + jnp.arange(shape[1], dtype=jnp.int32)[None] * (experts // shape[1])) % experts


type Split = tuple[Mesh, tuple[str, ...]]
"""Mesh whose devices draw a weight, and the mesh axes that split the first dimension of the weight."""


def _random(
    key: Array, shape: tuple[int, ...], dtype: DTypeLike, centre: float, spread: float, split: Split | None
) -> Array:
    return _maker(shape, dtype, split)(key, jnp.float32(centre), jnp.float32(spread))


@functools.cache
def _maker(shape: tuple[int, ...], dtype: DTypeLike, split: Split | None) -> Any:
    """Return a compiled function that draws the values of a parameter. Each slice of a split parameter has other
    values.

    A parameter with three or more dimensions, such as the matrices of all experts, is drawn one matrix at a time,
    because the 32-bit random bits take twice the memory of 16-bit weights.
    """
    mesh, axes = split or (None, ())
    own = shape if mesh is None else (shape[0] // num_devices(mesh, axes), *shape[1:])

    def matrix(key: Array, shape: tuple[int, ...], centre: Array, spread: Array) -> Array:
        return (centre + spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def values(key: Array, centre: Array, spread: Array) -> Array:
        if axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        if len(own) < 3:
            return matrix(key, own, centre, spread)
        keys = jax.random.split(key, own[0])
        return jax.lax.map(lambda key: matrix(key, own[1:], centre, spread), keys)

    if mesh is None:
        return jax.jit(values)
    return jax.jit(over_mesh(values, mesh, (PartitionSpec(),) * 3, PartitionSpec(axes or None)))
