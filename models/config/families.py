"""Configurations of any family, and the only place that tells families apart by config.json."""

from __future__ import annotations

import dataclasses

from models.config.deepseek import ONE_LATENT, ROUTING, DeepSeekConfig
from models.config.entries import Json
from models.config.gqa import FAMILIES, GQAConfig
from models.config.json_files import shown
from models.config.windows import Windows

type ModelConfig = DeepSeekConfig | GQAConfig


def with_windows(config: ModelConfig, windows: Windows) -> GQAConfig:
    """Replaces the windows of a model's heads.

    Raises:
      NotImplementedError: a model with latent attention.
      ValueError: another number of layers or KV heads than the model has.
    """
    if isinstance(config, DeepSeekConfig):
        raise NotImplementedError(f"head_windows: {ONE_LATENT}")
    return dataclasses.replace(config, windows=windows)


def require_mtp(config: ModelConfig) -> DeepSeekConfig:
    """Returns the configuration of a model that has multi-token prediction modules.

    Raises:
      NotImplementedError: a model of another family.
      ValueError: it announces no modules, or such as no layer can be made of.
    """
    if isinstance(config, GQAConfig):
        raise NotImplementedError(f"multi-token prediction: a {config.model_type} has no modules for it")
    if not config.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers: expected at least 1 for multi-token prediction, got 0")
    # With the modules' layers for further ones, what is asked of a decoder's layers is asked of theirs.
    layers = {"num_hidden_layers": config.mtp_layers.stop, "indexer_types": None}
    dataclasses.replace(config, **layers, num_nextn_predict_layers=0)
    return config


def read_config(config: Json) -> ModelConfig:
    """Reads the contents of a config.json of any family.

    Raises:
      ValueError: an entry is missing, malformed or contradicts another.
      NotImplementedError: a family or a feature, named, that is not here.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("model_type is missing")
    if str(model_type) in FAMILIES:
        return GQAConfig.from_hf(config)
    if str(model_type) in ROUTING:
        return DeepSeekConfig.from_hf(config)
    raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {', '.join([*ROUTING, *FAMILIES])}")
