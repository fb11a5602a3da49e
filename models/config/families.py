"""Functions for configurations of any model family. Only this module selects the family from the contents of
config.json."""

from __future__ import annotations

import dataclasses

from pallas_attn.models.config.deepseek import ONE_LATENT, ROUTING, DeepSeekConfig
from pallas_attn.models.config.entries import Json
from pallas_attn.models.config.gemma import NESTED, TEXT, Gemma4Config
from pallas_attn.models.config.gqa import FAMILIES, GQAConfig
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.windows import Windows

type HeadsConfig = GQAConfig | Gemma4Config
"""Configuration of a model that caches keys and values of heads, not latents."""

type ModelConfig = DeepSeekConfig | HeadsConfig


def with_windows(config: ModelConfig, windows: Windows) -> HeadsConfig:
    """Return the configuration with these attention windows instead of its own.

    Raises:
      NotImplementedError: the model has latent attention (MLA), or is a Gemma 4 model, and the windows differ from its
        own.
      ValueError: `windows` has another number of layers or KV heads than the model.
    """
    if isinstance(config, DeepSeekConfig):
        raise NotImplementedError(f"head_windows: {ONE_LATENT}")
    if isinstance(config, Gemma4Config):
        if windows != config.windows:
            raise NotImplementedError(
                "head_windows: expected the windows of layer_types, which also determine the heads of a"
                f" {config.model_type}; got others"
            )
        return config
    return dataclasses.replace(config, windows=windows)


def require_mtp(config: ModelConfig) -> DeepSeekConfig:
    """Return `config` unchanged if the model has multi-token prediction modules.

    Raises:
      NotImplementedError: no model of the family has these modules.
      ValueError: the model has no modules, or `config` is invalid for the layers of the modules.
    """
    if not isinstance(config, DeepSeekConfig):
        raise NotImplementedError(f"multi-token prediction: a {config.model_type} has no modules for it")
    if not config.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers: expected at least 1 for multi-token prediction, got 0")
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
    known = ", ".join([*ROUTING, *FAMILIES, NESTED, TEXT])
    raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {known}")
