"""Calibration: computes static scales of a quantised KV cache from the keys and values of sample prompts.

An int8 or fp8 cache stores x / scale, clipped to [-qmax, qmax], with qmax = 127 for int8 and 448 for float8_e4m3fn. A
scale is chosen so that the largest magnitude in the sample prompts, or a percentile of the magnitudes, is stored as
qmax. Keys are measured as they are cached, after norm and rotation.
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

from pallas_attn import PagedKV
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, ModelConfig
from pallas_attn.models.decoder import Caches, Decoder, KVScales, Step, pad_tokens, run_sequence, split_model
from pallas_attn.models.decoder.caches import QUANTISED

type Layout = Literal["head", "channel"]
"""One scale per KV head, or one scale per channel of a KV head."""


def calibrate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    dtype: DTypeLike,
    layout: Layout = "channel",
    percentile: float = 100.0,
) -> KVScales:
    """Compute static scales for a quantised cache.

    Each prompt runs in one forward pass with a cache in the model's dtype, in which keys and values are measured.

    Args:
      model: model with grouped-query attention.
      prompts: token ids, at least one prompt of at least one token.
      dtype: int8 or float8_e4m3fn, the dtype of the quantised cache.
      layout: "head" for one scale per KV head, "channel" for one scale per channel of a KV head.
      percentile: number p in (0, 100]. The p-th percentile of the magnitudes is computed for each prompt, and the
        largest of these values is stored as qmax. If p is below 100, larger magnitudes are clipped, and all others are
        quantised more finely.

    Returns:
      Scales of each layer with a cache, [Hkv] or [Hkv, D]: largest percentile value / qmax, or 1 if all magnitudes are
      zero.

    Raises:
      ValueError: an argument is invalid (see `check_inputs`), or keys or values are not finite.
    """
    check_inputs(model.config, prompts, dtype, layout, percentile)
    step, weights = split_model(model)
    reduced = (1,) if layout == "channel" else (1, 2)
    largest = jax.jit(functools.partial(_magnitudes, step, model.allocate_caches, reduced, percentile))
    of_prompts = [jax.device_get(largest(weights, pad_tokens(p), np.int32(len(p)))) for p in prompts]
    k, v = (
        tuple(_scales(np.max(of_layer, axis=0), dtype) for of_layer in zip(*of_kind, strict=True))
        for of_kind in zip(*of_prompts, strict=True)
    )
    return KVScales(k, v)


def check_inputs(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    dtype: DTypeLike,
    layout: Layout = "channel",
    percentile: float = 100.0,
) -> None:
    """Validate the arguments of `calibrate`. It needs only the model's configuration, so it can run before loading.

    Raises:
      ValueError: the model caches latents; a prompt is empty, too long for the model or has ids outside the
        vocabulary; or another argument is invalid.
    """
    if isinstance(config, DeepSeekConfig):
        raise ValueError(f"model: a {config.model_type} caches latents, which have no static scales")
    if isinstance(config, DeepseekV4Config):
        raise NotImplementedError(f"model: the caches of a {config.model_type} have no static scales")
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
) -> tuple[list[Float32[Array, "..."]], list[Float32[Array, "..."]]]:
    """Run a prompt. Return the percentile of the magnitudes of keys, and of values, for each layer with a cache: [Hkv]
    or [Hkv, D]. `reduced` are the axes of [Hkv, T, D] over which the percentile is computed."""
    _, caches = run_sequence(step, weights, allocate, tokens, num_tokens, jnp.zeros(1, jnp.int32))
    largest = functools.partial(_percentile, num_tokens=num_tokens, percentile=percentile, reduced=reduced)
    stored = [cache for cache in caches if isinstance(cache, PagedKV)]
    return [largest(cache.k) for cache in stored], [largest(cache.v) for cache in stored]


def _percentile(
    pages: Float[Array, "N Hkv ps D"], *, num_tokens: Int32[Array, ""], percentile: float, reduced: tuple[int, ...]
) -> Float32[Array, "..."]:
    """Return the percentile of the magnitudes of the first `num_tokens` tokens of a cache whose pages are in order of
    the tokens; NaN if a value of these tokens is not finite."""
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
    """Return magnitudes / qmax. A scale below the smallest normal float32 is replaced by 1, because some devices would
    treat it as 0."""
    qmax = jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max
    scales = magnitudes / np.float32(qmax)
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales)
