"""What a DeepSeek model is: its configuration, from and to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

type Json = Mapping[str, Any]


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Context extension by YaRN (Peng et al., arXiv:2309.00071), with DeepSeek's two temperatures.

    Attributes:
      factor: how many times the original context is stretched.
      original_max_position_embeddings: tokens the model was pretrained on.
      beta_fast, beta_slow: turns within the original context above which a frequency is kept and below which it is
        interpolated; between them the two are blended.
      mscale, mscale_all_dim: strengths of the temperatures of the rotary part and of all scores.
      attention_factor: what cos and sin are multiplied by, in place of what the mscales say.
      truncate: whether the blend begins and ends at whole frequencies.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"yarn factor: expected at least 1, got {self.factor}")
        if self.original_max_position_embeddings < 1:
            got = self.original_max_position_embeddings
            raise ValueError(f"original_max_position_embeddings: expected at least 1, got {got}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"expected beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}")

    @property
    def rotary_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """What all attention scores are multiplied by: the temperature of both sides of the dot product."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model of the DeepSeek-V2 or V3 family. Fields have the names and meanings of Hugging Face's config.json.

    The two families differ in how experts are chosen, and here only in the fields that say so. Layers before
    `first_k_dense_replace` are dense, the others mixtures of experts.

    Attributes:
      q_lora_rank: rank of the query projection, None where it is full.
      topk_method: "greedy" takes the best experts; "group_limited_greedy" (V2) those of the groups with the best single
        expert; "noaux_tc" (V3) those of the groups with the best two by score plus a learned bias, which chooses but
        does not weigh.
      scoring_func: how router logits become scores.
      norm_topk_prob: whether the chosen weights are made to sum to 1 before they are scaled.
      rope_interleave: whether the checkpoint's rotary columns are interleaved pairs (else two halves).
      yarn: None for plain rotary embedding.
      eos_token_ids: ids that end a sequence.
      dtype: what the checkpoint is stored in.
      fp8_block: rows and columns per scale of a block-quantised checkpoint, None for an unquantised one.
      num_nextn_predict_layers: multi-token prediction layers a checkpoint may hold past the last layer; not used.
    """

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    yarn: YarnConfig | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    fp8_block: tuple[int, int] | None = None
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads kv_lora_rank"
            " qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings n_group topk_group"
        )
        _at_least(1, {name: getattr(self, name) for name in sizes.split()})
        counts = "first_k_dense_replace n_shared_experts num_nextn_predict_layers"
        _at_least(0, {name: getattr(self, name) for name in counts.split()})
        if self.q_lora_rank is not None:
            _at_least(1, {"q_lora_rank": self.q_lora_rank})
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}")
        if self.num_moe_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        names = "moe_intermediate_size n_routed_experts num_experts_per_tok"
        _at_least(1, {name: getattr(self, name) for name in names.split()})
        selectable = self.n_routed_experts
        if self.topk_method != "greedy":
            if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
                raise ValueError(
                    f"n_group: expected a divisor of n_routed_experts={self.n_routed_experts} that is at least"
                    f" topk_group={self.topk_group}, got {self.n_group}"
                )
            per_group = self.n_routed_experts // self.n_group
            if self.topk_method == "noaux_tc" and per_group < 2:
                raise ValueError(f"n_group: noaux_tc ranks groups by two experts each, n_group={self.n_group} leaves 1")
            selectable = self.topk_group * per_group
        if self.num_experts_per_tok > selectable:
            raise ValueError(
                f"num_experts_per_tok: expected at most the {selectable} experts to choose from,"
                f" got {self.num_experts_per_tok}"
            )

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    @property
    def qk_head_dim(self) -> int:
        """Width of an expanded query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """L + R: what the cache holds per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        """What query-key products are multiplied by, YaRN's temperature included."""
        return self.qk_head_dim**-0.5 * (self.yarn.score_scale if self.yarn else 1.0)

    @classmethod
    def from_hf(cls, config: Json) -> ModelConfig:
        """Reads the contents of a config.json, with old or new names of its rope and dtype entries.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another.
          NotImplementedError: the model has a feature, named, that this one lacks.
        """
        return _from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """Contents of a config.json that describes this model; `from_hf` reads it back to an equal configuration."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        yarn, fp8_block, eos = entries.pop("yarn"), entries.pop("fp8_block"), entries.pop("eos_token_ids")
        entries["architectures"] = [_ARCHITECTURES[self.model_type]]
        entries["hidden_act"] = "silu"
        entries["num_key_value_heads"] = self.num_attention_heads
        entries["torch_dtype"] = entries.pop("dtype")
        entries["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        entries["rope_scaling"] = None
        if yarn is not None:
            given = {name: value for name, value in dataclasses.asdict(yarn).items() if value is not None}
            entries["rope_scaling"] = {"type": "yarn", **given}
        if fp8_block is not None:
            entries["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(fp8_block),
            }
        return entries


def _at_least(least: int, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


_ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}

# How each family may choose experts; the first value is meant where config.json leaves it unsaid.
_ROUTING = {
    "deepseek_v2": {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)},
    "deepseek_v3": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}

# Entries without which two readers of one config.json could build two models. The nullable ones may say that there is
# none of something, but they must say it.
_EXPLICIT = ("first_k_dense_replace", "max_position_embeddings", "routed_scaling_factor")
_NULLABLE = ("q_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_GROUPS = ("n_group", "topk_group")


def _from_hf(config: Json) -> ModelConfig:
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("config.json: model_type is missing")
    if str(model_type) not in _ROUTING:
        raise NotImplementedError(f"model_type {model_type!r}: expected one of {', '.join(_ROUTING)}")
    routing: dict[str, Any] = {name: _routing(config, name) for name in ("topk_method", "scoring_func")}
    _require(config, routing["topk_method"])
    _refuse_unsupported(config)
    entries = _read_fields(ModelConfig, config)
    if model_type == "deepseek_v2":
        # Older checkpoints of this family carry them, and its models apply neither.
        entries |= {"norm_topk_prob": False, "rope_interleave": True}
    else:
        entries.setdefault("num_nextn_predict_layers", 1)
    theta, yarn = _rope(config)
    special: dict[str, Any] = {
        "model_type": model_type,
        "rope_theta": theta,
        "yarn": yarn,
        "dtype": _dtype(config),
        "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
        "fp8_block": _fp8_block(_object(config, "quantization_config")),
    }
    return ModelConfig(**{**entries, **routing, **special})


def _read_fields(cls: type, entries: Json) -> dict[str, Any]:
    """The dataclass's fields of plain types that the entries give, each held to its annotation."""
    read: dict[Any, Any] = {
        "int": _integer,
        "int | None": _integer,
        "float": _number,
        "float | None": _number,
        "bool": _flag,
    }
    given = [f for f in dataclasses.fields(cls) if f.type in read and f.name in entries]
    fields = {f.name: read[f.type](f.name, entries[f.name]) for f in given if entries[f.name] is not None}
    return fields | {f.name: None for f in given if entries[f.name] is None and f.type == "int | None"}


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def _routing(config: Json, name: str) -> str:
    supported = _ROUTING[config["model_type"]][name]
    value = str(config.get(name) or supported[0])
    if value not in supported:
        raise NotImplementedError(f"{name} {value!r} of a {config['model_type']}: expected {' or '.join(supported)}")
    return value


def _require(config: Json, topk_method: str) -> None:
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.type == "int" and f.default is dataclasses.MISSING]
    names += [*_EXPLICIT, *(_GROUPS if topk_method != "greedy" else ())]
    if config["model_type"] == "deepseek_v3":
        names.append("norm_topk_prob")
    missing = [n for n in names if config.get(n) is None] + [n for n in _NULLABLE if n not in config]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing")


def _refuse_unsupported(config: Json) -> None:
    """Raises NotImplementedError for features that would change what the model computes and are not here."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act {config['hidden_act']!r}: expected 'silu'")
    if config.get("mlp_bias"):
        raise NotImplementedError("mlp_bias: biases in the feed-forward layers are not supported")
    if config.get("moe_layer_freq", 1) != 1:
        raise NotImplementedError(f"moe_layer_freq {config['moe_layer_freq']!r}: expected 1")
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise NotImplementedError(
            f"num_key_value_heads {config['num_key_value_heads']!r}: latent attention expands to as many as"
            f" num_attention_heads={heads}"
        )


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids as config.json and generation_config.json give them: absent, one, or a list.

    Raises:
      ValueError: anything else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{name}: expected an id or a list of ids, got {value!r}")
    return tuple(ids)


def _dtype(config: Json) -> str:
    names = {str(config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if config.get(key)}
    if len(names) > 1:
        raise ValueError(f"dtype and torch_dtype contradict each other: {', '.join(sorted(names))}")
    name = names.pop() if names else "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {name!r}")
    return name


def _object(config: Json, name: str) -> Json:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected an object, got {value!r}")
    return value


def _fp8_block(quantization: Json) -> tuple[int, int] | None:
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block is None or quantization.get("fmt", "e4m3") != "e4m3":
        raise NotImplementedError(
            f"quantization_config: expected quant_method fp8 in e4m3 with a weight_block_size, got {dict(quantization)}"
        )
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"weight_block_size: expected rows and columns, got {block!r}")
    return (block[0], block[1])


def _rope(config: Json) -> tuple[float, YarnConfig | None]:
    """Base and YaRN parameters, from `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
    old, new = _object(config, "rope_scaling"), _object(config, "rope_parameters")
    if clashes := [k for k in old.keys() & new.keys() if old[k] != new[k]]:
        raise ValueError(f"rope_scaling and rope_parameters contradict each other in {', '.join(sorted(clashes))}")
    rope = {**old, **new}
    thetas = {_number("rope_theta", r["rope_theta"]) for r in (config, rope) if r.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta: config.json gives {' and '.join(map(str, sorted(thetas)))}")
    kinds = {str(rope[key]) for key in ("type", "rope_type") if rope.get(key)} or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"rope type and rope_type contradict each other: {', '.join(sorted(kinds))}")
    kind = kinds.pop()
    if kind not in ("default", "yarn"):
        raise NotImplementedError(f"rope type {kind!r}: expected default or yarn")
    return thetas.pop() if thetas else 10000.0, _yarn(config, rope) if kind == "yarn" else None


def _yarn(config: Json, rope: Json) -> YarnConfig:
    if rope.get("factor") is None:
        raise ValueError("rope type yarn: factor is missing")
    length = "original_max_position_embeddings"
    original = config.get(length) or rope.get(length) or config["max_position_embeddings"]
    return YarnConfig(**_read_fields(YarnConfig, {**rope, length: original}))
