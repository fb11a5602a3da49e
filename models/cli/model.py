"""Loads the model that the options --model, --random, --head-windows and --dtype describe."""

from __future__ import annotations

import argparse

import jax
from jax.sharding import Mesh

from pallas_attn.models.checkpoints import load_config, load_model, random_model
from pallas_attn.models.cli.command_line import as_usage_error
from pallas_attn.models.config import (
    GEMMA_PRESETS,
    GQA_PRESETS,
    PRESETS,
    V4_PRESETS,
    ModelConfig,
    load_windows,
    with_windows,
)
from pallas_attn.models.decoder import AttentionSettings, Decoder, StepSizes, explain_attention, page_size_of

DEFAULT_PAGE_SIZE = 16
"""Tokens per page without --page-size, if the model supports it."""


def read_config(options: argparse.Namespace) -> ModelConfig:
    """Read the configuration of the model, with the windows of --head-windows if given.

    Raises:
      ValueError, NotImplementedError, OSError: as `load_config` and `load_windows`.
      UsageError: the model does not support windows, or has another number of layers or KV heads.
    """
    presets = PRESETS | V4_PRESETS | GQA_PRESETS | GEMMA_PRESETS
    config = presets[options.random] if options.model is None else load_config(options.model)
    if options.head_windows is None:
        return config
    windows = load_windows(options.head_windows)
    with as_usage_error(ValueError, NotImplementedError, prefix="--head-windows: "):
        return with_windows(config, windows)


def choose_page_size(options: argparse.Namespace, config: ModelConfig) -> None:
    """Set `options.page_size` to its default, if --page-size is not given."""
    if options.page_size is None:
        options.page_size = page_size_of(config, DEFAULT_PAGE_SIZE)


def dtype_of(options: argparse.Namespace, config: ModelConfig) -> str:
    """Return the dtype of weights and activations: the value of --dtype. The default is float32 if the configuration
    says float32, otherwise bfloat16."""
    return options.dtype or ("float32" if config.dtype == "float32" else "bfloat16")


def load(
    options: argparse.Namespace, config: ModelConfig, settings: AttentionSettings, mesh: Mesh | None = None
) -> Decoder:
    """Load the model of --model, or make the model of --random, on one device or a mesh.

    Raises:
      ValueError, NotImplementedError, OSError: as `load_model`.
      UsageError: the weights do not fit into the memory of the device or the host.
    """
    flag = "--random" if options.model is None else "--model"
    with as_usage_error(MemoryError, jax.errors.JaxRuntimeError, prefix=f"{flag}: loading the weights: "):
        if options.model is None:
            return random_model(config, dtype=dtype_of(options, config), settings=settings, mesh=mesh)
        return load_model(options.model, dtype_of(options, config), settings, config.windows, mesh)


def implementations(config: ModelConfig, settings: AttentionSettings, sizes: StepSizes, dtype: str) -> dict[str, str]:
    """Return the name of the attention implementation that each operation of the model will use, by name of the
    operation.

    Args:
      config: configuration of the model; on a mesh, of one device's part.
      settings: attention settings, with the implementations that may be used.
      sizes: sizes of the cache and of the largest step.
      dtype: dtype of the weights.

    Raises:
      NotImplementedError: no implementation supports an operation.
      ValueError: `settings` has an unknown implementation.
    """
    explained = explain_attention(config, settings, sizes, dtype)
    for op, explanation in explained.items():
        if explanation.chosen is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in explanation.refused.items())
            raise NotImplementedError(f"--implementation: {op} cannot run here: {reasons}")
    return {op: explanation.chosen for op, explanation in explained.items() if explanation.chosen is not None}


def name_of(options: argparse.Namespace) -> str:
    """Return the name of the model for display: the name of the folder or of the random model."""
    return options.random if options.model is None else options.model.resolve().name
