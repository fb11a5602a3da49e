"""Calibration: static scales of a quantised K/V cache, computed from the keys and values of sample prompts.

An int8 or fp8 cache stores x / scale, saturated at qmax (127 for int8, 448 for e4m3). The scale maps the largest value
to qmax. Keys are measured as they are cached, normed and rotated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import DeepSeekConfig, ModelConfig
from models.decoder import Caches, Decoder, KVScales, Step, pad_tokens, run_sequence, split_model
from models.decoder.caches import QUANTISED
from pallas_attn import PagedKV

type Layout = Literal["head", "channel"]
"""One scale per KV head, or one scale per channel of a KV head."""


def calibrate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    dtype: DTypeLike,
    layout: Layout = "channel",
    percentile: float = 100.0,
) -> KVScales:
    """Run each prompt in one forward pass over a cache in the model's dtype, and compute scales of the cached values.

    Args:
      model: model that caches keys and values.
      prompts: token ids, at least one prompt of at least one token.
      dtype: int8 or float8_e4m3fn, the dtype of the quantised cache.
      layout: one scale per head or per channel.
      percentile: percentile of a prompt's magnitudes that maps to qmax, in (0, 100]. The largest value of all prompts
        is used. Below 100, a few values saturate and all others are quantised in finer steps.

    Returns:
      Scales [layers, Hkv] or [layers, Hkv, D]: magnitude / qmax, and 1 if all values are zero.

    Raises:
      ValueError: as `check_inputs`, or keys or values are not finite.
    """
    check_inputs(model.config, prompts, dtype, layout, percentile)
    step, weights = split_model(model)
    reduced = (1,) if layout == "channel" else (1, 2)
    largest = jax.jit(functools.partial(_magnitudes, step, model.allocate_caches, reduced, percentile))
    of_prompts = [jax.device_get(largest(weights, pad_tokens(p), np.int32(len(p)))) for p in prompts]
    k, v = (np.max(magnitudes, axis=0) for magnitudes in zip(*of_prompts, strict=True))
    return KVScales(_scales(k, dtype), _scales(v, dtype))


def check_inputs(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    dtype: DTypeLike,
    layout: Layout = "channel",
    percentile: float = 100.0,
) -> None:
    """Validate the arguments of `calibrate`, given only the configuration of the model.

    Raises:
      ValueError: the model caches latents; a prompt is empty, too long for the model or has ids outside the
        vocabulary; or another argument is invalid.
    """
    if isinstance(config, DeepSeekConfig):
        raise ValueError(f"model: a {config.model_type} caches latents, which have no static scales")
    if jnp.dtype(dtype) not in QUANTISED:
        raise ValueError(f"dtype: expected int8 or float8_e4m3fn, got {jnp.dtype(dtype).name}")
    if layout not in ("head", "channel"):
        raise ValueError(f"layout: expected head or channel, got {layout!r}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile: expected more than 0 and at most 100, got {percentile}")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= config.max_position_embeddings:
            raise ValueError(f"prompt {i}: expected 1 to {config.max_position_embeddings} tokens, got {len(prompt)}")
        if outside := [token for token in prompt if not 0 <= token < config.vocab_size]:
            raise ValueError(f"prompt {i}: expected ids from 0 to {config.vocab_size - 1}, got {outside[0]}")


def _magnitudes(
    step: Step,
    allocate: Callable[[int, int], Caches],
    reduced: tuple[int, ...],
    percentile: float,
    weights: list[Array],
    tokens: Int32[Array, "T"],
    num_tokens: Int32[Array, ""],
) -> tuple[Float32[Array, "layers ..."], Float32[Array, "layers ..."]]:
    """Return magnitudes of keys and values per layer: the maximum or percentile over axes `reduced` of [Hkv, T, D]."""
    _, caches = run_sequence(step, weights, allocate, tokens, num_tokens, jnp.zeros(1, jnp.int32))
    largest = functools.partial(_percentile, num_tokens=num_tokens, percentile=percentile, reduced=reduced)
    stored = [cache for cache in caches if isinstance(cache, PagedKV)]
    return jnp.stack([largest(cache.k) for cache in stored]), jnp.stack([largest(cache.v) for cache in stored])


def _percentile(
    pages: Float[Array, "N Hkv ps D"], *, num_tokens: Int32[Array, ""], percentile: float, reduced: tuple[int, ...]
) -> Float32[Array, "..."]:
    """Return the percentile of the magnitudes of the first `num_tokens` tokens. The pages are in order."""
    heads, width = pages.shape[1], pages.shape[3]
    magnitudes = jnp.abs(pages.astype(jnp.float32)).swapaxes(0, 1).reshape(heads, -1, width)
    is_token = (jnp.arange(magnitudes.shape[1], dtype=jnp.int32) < num_tokens)[None, :, None]
    if percentile == 100:
        found = jnp.max(magnitudes, axis=reduced, where=is_token, initial=0.0)
    else:
        found = jnp.nanpercentile(jnp.where(is_token, magnitudes, jnp.nan), percentile, axis=reduced)
    finite = jnp.all(jnp.isfinite(magnitudes) | ~is_token, axis=reduced)
    return jnp.where(finite, found, jnp.nan)  # XLA's maximum may ignore NaN


def _scales(magnitudes: Float32[np.ndarray, "..."], dtype: DTypeLike) -> Float32[np.ndarray, "..."]:
    """Return magnitudes / qmax, or 1 below the smallest normal float32, because some devices flush subnormals to 0."""
    qmax = jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max
    scales = magnitudes / np.float32(qmax)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)
