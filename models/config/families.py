"""Functions for configurations of any model family. Only this module selects the family from the contents of
config.json."""

from __future__ import annotations

import dataclasses

from pallas_attn.models.config.deepseek import ONE_LATENT, ROUTING, DeepSeekConfig
from pallas_attn.models.config.deepseek_v4 import V4, DeepseekV4Config
from pallas_attn.models.config.entries import Json
from pallas_attn.models.config.gemma import NESTED, TEXT, Gemma4Config
from pallas_attn.models.config.gqa import FAMILIES, GQAConfig
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.windows import CacheGroup, Windows, window_groups

type HeadsConfig = GQAConfig | Gemma4Config
"""Configuration of a model that caches keys and values of heads, not latents."""

type ModelConfig = DeepSeekConfig | DeepseekV4Config | HeadsConfig


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a model. Layers without a cache are in no group. A layer of DeepSeek-V4 is in one
    group for each of its caches with different windows."""
    return config.cache_groups if isinstance(config, DeepseekV4Config) else window_groups(config)


def with_windows(config: ModelConfig, windows: Windows) -> HeadsConfig | DeepseekV4Config:
    """Return the configuration with these attention windows instead of its own.

    Raises:
      NotImplementedError: the model has latent attention (MLA), or is a Gemma 4 or DeepSeek-V4 model, and the windows
        differ from its own.
      ValueError: `windows` has another number of layers or KV heads than the model.
    """
    if isinstance(config, DeepSeekConfig):
        raise NotImplementedError(f"head_windows: {ONE_LATENT}")
    if isinstance(config, Gemma4Config | DeepseekV4Config):
        if windows != config.windows:
            others = "heads" if isinstance(config, Gemma4Config) else "other caches"
            raise NotImplementedError(
                f"head_windows: expected the windows of layer_types, which also determine the {others} of a"
                f" {config.model_type}; got others"
            )
        return config
    return dataclasses.replace(config, windows=windows)


def require_mtp(config: ModelConfig) -> DeepSeekConfig | DeepseekV4Config:
    """Return `config` unchanged if the model has multi-token prediction modules.

    Raises:
      NotImplementedError: no model of the family has these modules.
      ValueError: the model has no modules, or `config` is invalid for the layers of the modules.
    """
    if not isinstance(config, DeepSeekConfig | DeepseekV4Config):
        raise NotImplementedError(f"multi-token prediction: a {config.model_type} has no modules for it")
    if not config.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers: expected at least 1 for multi-token prediction, got 0")
    if isinstance(config, DeepseekV4Config):
        return config
    # Each module has a decoder layer. A configuration with these layers added raises if it is invalid for them.
    layers = {"num_hidden_layers": config.mtp_layers.stop, "indexer_types": None}
    dataclasses.replace(config, **layers, num_nextn_predict_layers=0)
    return config


def read_config(config: Json) -> ModelConfig:
    """Return the configuration, given the contents of a config.json of any family.

    Raises:
      ValueError: an entry is missing, malformed or contradicts another entry.
      NotImplementedError: an unsupported family or feature, which the message names.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("model_type is missing")
    if str(model_type) in FAMILIES:
        return GQAConfig.from_hf(config)
    if str(model_type) in ROUTING:
        return DeepSeekConfig.from_hf(config)
    if str(model_type) in (NESTED, TEXT):
        return Gemma4Config.from_hf(config)
    if str(model_type) == V4:
        return DeepseekV4Config.from_hf(config)
    known = ", ".join([*ROUTING, V4, *FAMILIES, NESTED, TEXT])
    raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {known}")
