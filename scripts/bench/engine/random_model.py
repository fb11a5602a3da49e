"""Models with random weights, made on the device one parameter at a time, since a model of a real size fits there only
once."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from models.config import ModelConfig
from models.decoder import AttentionSettings, Decoder


def random_model(config: ModelConfig, dtype: DTypeLike, settings: AttentionSettings, seed: int = 0) -> Decoder:
    """Makes a model whose weights keep activations near 1, so that tokens go to experts evenly and nothing
    overflows."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, settings, dtype)))

    def make(path: tuple[Any, ...], parameter: nnx.Variable) -> nnx.Variable:
        name = ".".join(map(str, path))
        key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), zlib.crc32(name.encode()))
        return parameter.replace(
            _random(key, parameter.shape, parameter.dtype, *_centre_and_spread(name, parameter.shape))
        )

    return nnx.merge(graph, nnx.map_state(make, state))


def _centre_and_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's values."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if len(shape) == 1 or name == "embed_tokens":
        return 0.0, 1.0 if name == "embed_tokens" else 0.1
    columns_in = shape[-1] if name.endswith(("w_uk", "w_uv")) else shape[-2]
    return 0.0, columns_in**-0.5


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random(key: Array, shape: tuple[int, ...], dtype: DTypeLike, centre: float, spread: float) -> Array:
    return (centre + spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
