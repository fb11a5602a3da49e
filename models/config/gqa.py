"""Configurations of decoders with grouped-query attention (Qwen3, Llama and gpt-oss), from and to config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pallas_attn.models.config.entries import (
    Json,
    at_least,
    check_chosen_experts,
    check_kv_heads,
    check_scalars,
    dtype_of,
    fp8_block,
    is_integer,
    json_object,
    quantization_entry,
    read_fields,
    refuse_unsupported,
    token_ids,
    with_names,
)
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.rope import RopeScaling, read_rope, rope_entry
from pallas_attn.models.config.windows import (
    GLOBAL_KIND,
    LOCAL_KIND,
    HeadShape,
    Windows,
    check_windows,
    layer_kinds,
    read_head_windows,
    read_layer_types,
    window_entries,
)

MXFP4_GROUP = 32
"""Number of weights per scale in MXFP4."""

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "gpt_oss": "GptOssForCausalLM"}
"""Class name in Hugging Face transformers by model_type."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Required entries of gpt-oss, whose defaults differ from the defaults of the other families.
_EXPLICIT = (
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "attention_bias",
    "rms_norm_eps",
)

# Other names of entries of gpt-oss.
_ALIASES = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}

_OF_EXPERTS = ("num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit")


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """A model of the Qwen3, Llama or gpt-oss family. Fields have the names and meanings of Hugging Face's config.json.

    Qwen3 has norms of queries and keys. gpt-oss (arXiv:2508.10925) has learned sinks, mixtures of experts in all
    layers, and a window in every second layer.

    Attributes:
      num_key_value_heads: Hkv. Each KV head is shared by num_attention_heads / Hkv query heads.
      head_dim: D, width of queries, keys and values. It may differ from hidden_size / num_attention_heads.
      attention_bias: whether the four projections of attention have biases.
      num_local_experts, num_experts_per_tok: number of experts of a layer, and of experts that a token selects; 0 for
        dense layers.
      swiglu_alpha, swiglu_limit: parameters of the activation of experts (`models.moe.experts.ClampedSwiglu`).
      rope_scaling: scaling of the rotary embedding, or None.
      windows: visible keys of the KV heads of each layer (`config.windows`); None if all heads see all keys.
      eos_token_ids: ids that end a sequence.
      dtype: dtype of the checkpoint.
      fp8_block: rows and columns per scale of a block-quantised checkpoint; None for an unquantised checkpoint.
      mxfp4_experts: whether the experts in the checkpoint are packed as MXFP4 (`checkpoints.mxfp4`).
    """

    model_type: Literal["qwen3", "llama", "gpt_oss"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
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
    mxfp4_experts: bool = False

    def __post_init__(self) -> None:
        sizes = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
        at_least(1, {name: getattr(self, name) for name in sizes})
        check_kv_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        check_scalars(self.rope_theta, self.rms_norm_eps)
        if self.windows is not None:
            check_windows(self.windows, self.num_hidden_layers, self.num_key_value_heads)
        self._check_experts()

    def _check_experts(self) -> None:
        if self.model_type != "gpt_oss":
            if self.num_local_experts or self.mxfp4_experts:
                raise ValueError(
                    f"num_local_experts: expected none in a {self.model_type}, got {self.num_local_experts}"
                )
            return
        check_chosen_experts(
            self.num_hidden_layers,
            ("num_local_experts", self.num_local_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
        )
        if self.swiglu_limit <= 0:
            raise ValueError(f"swiglu_limit: expected a positive number, got {self.swiglu_limit}")
        if self.mxfp4_experts and (self.hidden_size % MXFP4_GROUP or self.intermediate_size % MXFP4_GROUP):
            sizes = f"{self.hidden_size} and {self.intermediate_size}"
            raise ValueError(
                f"hidden_size, intermediate_size: expected multiples of {MXFP4_GROUP} for MXFP4, got {sizes}"
            )

    @property
    def qk_norm(self) -> bool:
        """Whether each head of queries and keys is normed before it is rotated."""
        return self.model_type == "qwen3"

    @property
    def learned_sinks(self) -> bool:
        """Whether each query head has a learned logit in its softmax denominator."""
        return self.model_type == "gpt_oss"

    @property
    def is_sparse(self) -> bool:
        """False: tokens attend to all keys within their windows."""
        return False

    @property
    def rotary_dim(self) -> int:
        """Number of rotated columns of a query or key: D."""
        return self.head_dim

    @property
    def sm_scale(self) -> float:
        """Factor of query-key products."""
        return self.head_dim**-0.5

    @property
    def cached_layers(self) -> range:
        """Layers that have a cache: all."""
        return range(self.num_hidden_layers)

    @property
    def mtp_layers(self) -> range:
        """Layer indices of multi-token prediction modules: empty."""
        return range(self.num_hidden_layers, self.num_hidden_layers)

    def kv_heads(self, layer: int) -> HeadShape:
        """Return the shape of keys and values of a layer. It is the same for all layers."""
        return HeadShape(self.num_key_value_heads, self.head_dim)

    def is_dense(self, layer: int) -> bool:
        """Return whether the feed-forward part of a layer is dense. It is the same for all layers."""
        return not self.num_local_experts

    @classmethod
    def from_hf(cls, config: Json) -> GQAConfig:
        """Read the contents of a config.json, with old or new names of its rope and dtype entries.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another entry.
          NotImplementedError: the model has an unsupported feature, which the message names.
        """
        model_type = config.get("model_type")
        if str(model_type) not in FAMILIES:
            raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {', '.join(FAMILIES)}")
        is_gpt_oss = model_type == "gpt_oss"
        config = with_names(config, _ALIASES if is_gpt_oss else {})
        _require(config)
        limits = {} if is_gpt_oss else {"swiglu_limit": None}
        refuse_unsupported(config, rope_interleave=False, use_qk_norm=model_type == "qwen3", **limits)
        theta, scaling = read_rope(config, ("default", "yarn", "llama3"))
        fields, packed = read_fields(cls, config), _has_packed_experts(config)
        entries: dict[str, Any] = {
            **_head_sizes(config),
            **fields,
            "windows": _read_windows(config, fields["num_hidden_layers"]),
            "model_type": model_type,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "dtype": dtype_of(config, default="bfloat16" if packed else "float32"),
            "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
            "fp8_block": None if packed else fp8_block(config),
            "mxfp4_experts": packed,
        }
        return cls(**entries)

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json, from which `from_hf` makes an equal configuration."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        block, eos, packed = (entries.pop(name) for name in ("fp8_block", "eos_token_ids", "mxfp4_experts"))
        entries |= window_entries(entries.pop("windows"), by_layer=self.model_type != "llama")
        entries["architectures"] = [FAMILIES[self.model_type]]
        entries["hidden_act"] = "silu"
        entries["torch_dtype"] = entries.pop("dtype")
        entries["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        entries["rope_scaling"] = rope_entry(self.rope_scaling)
        if self.model_type == "gpt_oss":  # without these entries, transformers uses windows and YaRN
            if self.windows is None:
                entries["layer_types"] = [GLOBAL_KIND] * self.num_hidden_layers
            entries["rope_scaling"] = entries["rope_scaling"] or {"rope_type": "default"}
        else:
            entries = {name: entry for name, entry in entries.items() if name not in _OF_EXPERTS}
            entries["use_sliding_window"] = "sliding_window" in entries
        if block is not None:
            entries["quantization_config"] = quantization_entry(block)
        if packed:
            entries["quantization_config"] = {"quant_method": "mxfp4"}
        return entries


def _require(config: Json) -> None:
    names = [*_REQUIRED, "max_position_embeddings"]
    if config["model_type"] == "qwen3":
        names += ["num_key_value_heads", "head_dim"]
    if config["model_type"] == "gpt_oss":
        names += _EXPLICIT
    missing = [name for name in names if config.get(name) is None]
    if config["model_type"] == "gpt_oss":
        ropes = [json_object(config, name) for name in ("rope_scaling", "rope_parameters")]
        if not any(ropes):
            missing.append("rope_parameters")
        if all(entries.get("rope_theta") is None for entries in (config, *ropes)):
            missing.append("rope_theta")
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")


def _has_packed_experts(config: Json) -> bool:
    method = json_object(config, "quantization_config").get("quant_method")
    return config["model_type"] == "gpt_oss" and method == "mxfp4"


def _head_sizes(config: Json) -> dict[str, int]:
    """Return the defaults of older Llama models: one KV head per query head, and head_dim = hidden_size / heads."""
    read = read_fields(GQAConfig, config)
    heads, width = read["num_attention_heads"], read["hidden_size"]
    at_least(1, {"num_attention_heads": heads})
    if config.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size: expected a multiple of num_attention_heads={heads}, got {width}")
    return {"num_key_value_heads": heads, "head_dim": width // heads}


def _read_windows(config: Json, num_layers: int) -> Windows | None:
    """Read windows from `head_windows` if present, else from the kinds of the layers."""
    if config.get("head_windows") is not None:
        return read_head_windows(config["head_windows"])
    kinds = layer_kinds(config, num_layers)
    slides = config.get("use_sliding_window", False)
    if not isinstance(slides, bool):
        raise ValueError(f"use_sliding_window: expected true or false, got {shown(slides)}")
    if config["model_type"] == "llama":
        if slides or LOCAL_KIND in (kinds or []):
            raise NotImplementedError("use_sliding_window, layer_types: a llama has full_attention throughout")
        if config.get("sliding_window") is not None and "use_sliding_window" not in config:
            wanted = "null or use_sliding_window false, because a llama has full_attention throughout"
            raise NotImplementedError(f"sliding_window {shown(config['sliding_window'])}: expected {wanted}")
    if config["model_type"] == "gpt_oss":
        alternating = [GLOBAL_KIND if layer % 2 else LOCAL_KIND for layer in range(num_layers)]
        return read_layer_types(config, kinds or alternating)
    if kinds is None:
        first = num_layers if not slides else _first_sliding_layer(config)
        kinds = [LOCAL_KIND if layer >= first else GLOBAL_KIND for layer in range(num_layers)]
    elif not slides and LOCAL_KIND in kinds:
        raise ValueError("layer_types and use_sliding_window contradict each other: there are sliding_attention layers")
    return read_layer_types(config, kinds)


def _first_sliding_layer(config: Json) -> int:
    first = config.get("max_window_layers")
    if not is_integer(first) or first < 0:
        raise ValueError(f"max_window_layers: expected the first layer with a sliding window, got {shown(first)}")
    return first
