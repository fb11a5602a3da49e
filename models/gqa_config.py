"""What a dense decoder with grouped-query attention is: Qwen3's and Llama's configurations, from and to config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from models.config_entries import Json, at_least, dtype_of, fp8_block, quantization_entry, read_fields, token_ids
from models.rope_config import RopeScaling, read_rope, rope_entry
from models.windows import Windows, check_windows, layer_kinds, read_head_windows, read_layer_types, window_entries

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""model_type to the name of its class in Hugging Face transformers."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """A model of the Qwen3 or Llama family. Fields have the names and meanings of Hugging Face's config.json.

    The two differ in the norms of queries and keys, which Qwen3 has.

    Attributes:
      num_key_value_heads: Hkv, each of which num_attention_heads / Hkv query heads share.
      head_dim: D, of queries, keys and values; not always hidden_size / num_attention_heads.
      attention_bias: whether the four projections of attention have biases.
      rope_scaling: None for plain rotary embedding.
      windows: what each layer's KV heads see, as `models.windows` has it; None where all see everything.
      eos_token_ids: ids that end a sequence.
      dtype: what the checkpoint is stored in.
      fp8_block: rows and columns per scale of a block-quantised checkpoint, None for an unquantised one.
    """

    model_type: Literal["qwen3", "llama"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    windows: Windows | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    fp8_block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        sizes = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
        at_least(1, {name: getattr(self, name) for name in sizes})
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads={self.num_attention_heads},"
                f" got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.windows is not None:
            check_windows(self.windows, self.num_hidden_layers, self.num_key_value_heads)

    @property
    def qk_norm(self) -> bool:
        """Whether every head of queries and keys is normed before it is rotated."""
        return self.model_type == "qwen3"

    @property
    def rotary_dim(self) -> int:
        """Columns of a query or key that are rotated: all."""
        return self.head_dim

    @property
    def sm_scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.head_dim**-0.5

    @property
    def num_nextn_predict_layers(self) -> int:
        """Layers a checkpoint may hold past the last one, for predicting further tokens: these families have none."""
        return 0

    def is_dense(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is no mixture of experts: always."""
        return True

    @classmethod
    def from_hf(cls, config: Json) -> GQAConfig:
        """Reads the contents of a config.json, with old or new names of its rope and dtype entries.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another.
          NotImplementedError: the model has a feature, named, that this one lacks.
        """
        model_type = config.get("model_type")
        if str(model_type) not in FAMILIES:
            raise NotImplementedError(f"model_type {model_type!r}: expected one of {', '.join(FAMILIES)}")
        _require(config)
        _refuse_unsupported(config)
        theta, scaling = read_rope(config, ("default", "yarn", "llama3"))
        fields = read_fields(cls, config)
        entries: dict[str, Any] = {
            **_head_sizes(config),
            **fields,
            "windows": _read_windows(config, fields["num_hidden_layers"]),
            "model_type": model_type,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "dtype": dtype_of(config),
            "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
            "fp8_block": fp8_block(config),
        }
        return cls(**entries)

    def to_hf(self) -> dict[str, Any]:
        """Contents of a config.json that describes this model; `from_hf` reads it back to an equal configuration."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        block, eos = entries.pop("fp8_block"), entries.pop("eos_token_ids")
        entries |= window_entries(entries.pop("windows"))
        if "sliding_window" in entries:
            entries["use_sliding_window"] = True
        entries["architectures"] = [FAMILIES[self.model_type]]
        entries["hidden_act"] = "silu"
        entries["torch_dtype"] = entries.pop("dtype")
        entries["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        entries["rope_scaling"] = rope_entry(self.rope_scaling)
        if block is not None:
            entries["quantization_config"] = quantization_entry(block)
        return entries


def _require(config: Json) -> None:
    names = [*_REQUIRED, "max_position_embeddings"]
    if config["model_type"] == "qwen3":
        names += ["num_key_value_heads", "head_dim"]
    if missing := [name for name in names if config.get(name) is None]:
        raise ValueError(f"config.json: {', '.join(missing)} missing")


def _head_sizes(config: Json) -> dict[str, int]:
    """What older Llamas leave unsaid: a KV head for each query head, and heads that share the hidden size."""
    read = read_fields(GQAConfig, config)
    heads, width = read["num_attention_heads"], read["hidden_size"]
    at_least(1, {"num_attention_heads": heads})
    if config.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size: expected a multiple of num_attention_heads={heads}, got {width}")
    return {"num_key_value_heads": heads, "head_dim": width // heads}


def _refuse_unsupported(config: Json) -> None:
    """Raises NotImplementedError for features that would change what the model computes and are not here."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act {config['hidden_act']!r}: expected 'silu'")
    if config.get("mlp_bias"):
        raise NotImplementedError("mlp_bias: biases in the feed-forward layers are not supported")


def _read_windows(config: Json, num_layers: int) -> Windows | None:
    """From `head_windows`, which says all where it is there; else from the kinds of the layers."""
    if config.get("head_windows") is not None:
        return read_head_windows(config["head_windows"])
    kinds = layer_kinds(config, num_layers)
    slides = config.get("use_sliding_window", False)
    if not isinstance(slides, bool):
        raise ValueError(f"use_sliding_window: expected true or false, got {slides!r}")
    if config["model_type"] == "llama" and (slides or "sliding_attention" in (kinds or [])):
        raise NotImplementedError("use_sliding_window, layer_types: a llama has full_attention throughout")
    if kinds is None:
        first = num_layers if not slides else _first_sliding_layer(config)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    elif not slides and "sliding_attention" in kinds:
        raise ValueError("layer_types and use_sliding_window contradict each other: there are sliding_attention layers")
    return read_layer_types(config, kinds)


def _first_sliding_layer(config: Json) -> int:
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ValueError(f"max_window_layers: expected the first layer with a sliding window, got {first!r}")
    return first
