"""Configuration of DeepSeek-V2, V3 and V3.2 models and GLM-5, from and to config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from models.config.entries import (
    Json,
    at_least,
    check_experts_of_all_layers,
    check_scalars,
    dtype_of,
    fp8_block,
    integer,
    quantization_entry,
    read_fields,
    refuse_unsupported,
    token_ids,
)
from models.config.json_files import shown
from models.config.rope import YarnConfig, read_rope, rope_entry


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """A model of the DeepSeek-V2, V3 or V3.2 family. Fields have the names and meanings of Hugging Face's config.json.

    V2 and V3 differ in how experts are chosen, and here only in the fields for it. V3.2 and GLM-5 are V3 with an
    indexer in every layer, or in some that others share it with (arXiv:2603.12201). Layers before
    `first_k_dense_replace` are dense, the others mixtures of experts.

    Attributes:
      q_lora_rank: rank of the query projection, None where it is full.
      topk_method: "greedy" takes the best experts; "group_limited_greedy" (V2) those of the groups with the best single
        expert; "noaux_tc" (V3) those of the groups with the best two by score plus a learned bias, which chooses but
        does not weigh.
      scoring_func: how router logits become scores.
      norm_topk_prob: whether the chosen weights are made to sum to 1 before they are scaled.
      index_topk: keys that each token attends to; 0 for all, without an indexer.
      index_n_heads, index_head_dim: heads of the indexer, and width of its queries and keys.
      indexer_types: "full" for a layer with an indexer, "shared" for one that attends to the keys that the last full
        layer before it chose; None where all are full.
      rope_interleave: whether the checkpoint's rotary columns are interleaved pairs (else two halves).
      yarn: None for plain rotary embedding.
      eos_token_ids: ids that end a sequence.
      dtype: dtype of the stored checkpoint.
      fp8_block: rows and columns per scale of a block-quantised checkpoint, None for an unquantised one.
      num_nextn_predict_layers: multi-token prediction modules that a checkpoint may hold past the last layer.
    """

    model_type: Literal["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
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
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    indexer_types: tuple[Literal["full", "shared"], ...] | None = None
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
        at_least(1, {name: getattr(self, name) for name in sizes.split()})
        counts = "first_k_dense_replace n_shared_experts num_nextn_predict_layers"
        at_least(0, {name: getattr(self, name) for name in counts.split()})
        if self.q_lora_rank is not None:
            at_least(1, {"q_lora_rank": self.q_lora_rank})
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}")
        check_scalars(self.rope_theta, self.rms_norm_eps)
        if self.is_sparse:
            self._check_indexer()
        if self.indexer_types is not None:
            _check_indexer_types("indexer_types", self.indexer_types, self.num_hidden_layers, self.model_type)
        if self.num_moe_layers:
            self._check_experts()

    def _check_indexer(self) -> None:
        at_least(1, {name: getattr(self, name) for name in INDEXER})
        if self.q_lora_rank is None:
            raise ValueError(f"q_lora_rank: a {self.model_type} needs one, index queries are made of what it leaves")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim: expected at least qk_rope_head_dim={self.qk_rope_head_dim}, got {self.index_head_dim}"
            )

    def _check_experts(self) -> None:
        names = "moe_intermediate_size n_routed_experts num_experts_per_tok"
        at_least(1, {name: getattr(self, name) for name in names.split()})
        check_experts_of_all_layers(self.num_moe_layers, "n_routed_experts", self.n_routed_experts)
        if self.routed_scaling_factor <= 0:
            raise ValueError(f"routed_scaling_factor: expected more than 0, got {self.routed_scaling_factor:g}")
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
        """L + R, the columns that the cache holds per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_sparse(self) -> bool:
        """Whether tokens choose which keys they attend to."""
        return self.model_type in INDEX_ROPE_INTERLEAVE

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer chooses keys by itself, as multi-token prediction modules past the last layer do."""
        return self.is_sparse and not self.shares_choice(layer)

    def shares_choice(self, layer: int) -> bool:
        """Whether a layer attends to the keys that an earlier one chose."""
        return self.indexer_types is not None and self.indexer_types[layer : layer + 1] == ("shared",)

    @property
    def rotary_dim(self) -> int:
        """R: columns of a query or key that are rotated."""
        return self.qk_rope_head_dim

    @property
    def rope_scaling(self) -> YarnConfig | None:
        """Stretching of the rotary embedding, None for plain."""
        return self.yarn

    @property
    def windows(self) -> None:
        """None: all heads share one latent and see everything."""
        return None

    @property
    def mtp_layers(self) -> range:
        """Indices under which a checkpoint may hold multi-token prediction modules."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is dense; the others are mixtures of experts."""
        return layer < self.first_k_dense_replace

    @property
    def sm_scale(self) -> float:
        """Factor of query-key products, YaRN's temperature included."""
        return self.qk_head_dim**-0.5 * (self.yarn.score_scale if self.yarn else 1.0)

    @classmethod
    def from_hf(cls, config: Json) -> DeepSeekConfig:
        """Reads the contents of a config.json, with old or new names of its rope and dtype entries.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another.
          NotImplementedError: the model has a feature, named, that this one lacks.
        """
        return _from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """Contents of a config.json that describes this model; `from_hf` reads it back to an equal configuration."""
        left_out = () if self.is_sparse else (*INDEXER, "indexer_types")
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        yarn, fp8_block, eos = entries.pop("yarn"), entries.pop("fp8_block"), entries.pop("eos_token_ids")
        entries["architectures"] = [_ARCHITECTURES[self.model_type]]
        entries["hidden_act"] = "silu"
        entries["num_key_value_heads"] = self.num_attention_heads
        entries["torch_dtype"] = entries.pop("dtype")
        entries["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        entries["rope_scaling"] = rope_entry(yarn)
        if self.indexer_types is not None:
            entries["indexer_types"] = list(self.indexer_types)
        if fp8_block is not None:
            entries["quantization_config"] = quantization_entry(fp8_block)
        return entries


_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}

# How each family may choose experts; the first value is the default of config.json.
ROUTING = {
    "deepseek_v2": {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)},
    "deepseek_v3": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    "deepseek_v32": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    "glm_moe_dsa": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}

INDEX_ROPE_INTERLEAVE = {"deepseek_v32": False, "glm_moe_dsa": True}
"""Families with an indexer, and whether a checkpoint's rotary columns of index queries are interleaved pairs."""

INDEXER = ("index_topk", "index_n_heads", "index_head_dim")
"""Entries of an indexer."""

SHARING = ("glm_moe_dsa",)
"""Families whose layers may share the choice of an earlier one."""

INDEXER_LETTERS = {"F": "full", "S": "shared"}
"""Letters of `index_topk_pattern`, and the entries of `indexer_types` that they stand for."""

# Entries without which two readers of one config.json could build two models. The nullable ones may be null, but must
# be present.
_EXPLICIT = ("first_k_dense_replace", "max_position_embeddings", "routed_scaling_factor")
_NULLABLE = ("q_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_GROUPS = ("n_group", "topk_group")

ONE_LATENT = "heads of latent attention share one latent, and none has a window of its own"


def _from_hf(config: Json) -> DeepSeekConfig:
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("model_type is missing")
    if str(model_type) not in ROUTING:
        raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {', '.join(ROUTING)}")
    routing: dict[str, Any] = {name: _routing(config, name) for name in ("topk_method", "scoring_func")}
    _require(config, routing["topk_method"])
    _refuse_unsupported(config)
    entries = read_fields(DeepSeekConfig, config)
    if model_type == "deepseek_v2":
        # Older checkpoints of this family have these entries, but its models apply neither.
        entries |= {"norm_topk_prob": False, "rope_interleave": True}
    else:
        entries.setdefault("num_nextn_predict_layers", 1)
    if model_type in INDEX_ROPE_INTERLEAVE:
        entries["rope_interleave"] = True  # its models have no other, whatever this entry says
    else:
        entries |= dict.fromkeys(INDEXER, 0)
    theta, yarn = read_rope(config, ("default", "yarn"))
    special: dict[str, Any] = {
        "model_type": model_type,
        "rope_theta": theta,
        "yarn": yarn,
        "dtype": dtype_of(config),
        "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
        "fp8_block": fp8_block(config),
    }
    if model_type in INDEX_ROPE_INTERLEAVE:
        special["indexer_types"] = _indexer_types(config, entries["num_hidden_layers"])
    model = DeepSeekConfig(**{**entries, **routing, **special})
    if model.is_sparse:
        _check_layers(config, model)
    return model


def _routing(config: Json, name: str) -> str:
    supported = ROUTING[config["model_type"]][name]
    value = str(config.get(name) or supported[0])
    if value not in supported:
        raise NotImplementedError(
            f"{name} {shown(value)} of a {config['model_type']}: expected {' or '.join(supported)}"
        )
    return value


def _require(config: Json, topk_method: str) -> None:
    names = [f.name for f in dataclasses.fields(DeepSeekConfig) if f.type == "int" and f.default is dataclasses.MISSING]
    names += [*_EXPLICIT, *(_GROUPS if topk_method != "greedy" else ())]
    if config["model_type"] != "deepseek_v2":
        names.append("norm_topk_prob")
    if config["model_type"] in INDEX_ROPE_INTERLEAVE:
        names += INDEXER
    missing = [n for n in names if config.get(n) is None] + [n for n in _NULLABLE if n not in config]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")


def _refuse_unsupported(config: Json) -> None:
    """Raises NotImplementedError for features that would change the model's results and are not implemented."""
    refuse_unsupported(config)
    if config.get("head_windows") is not None:
        raise NotImplementedError(f"head_windows: {ONE_LATENT}")
    if config.get("moe_layer_freq", 1) != 1:
        raise NotImplementedError(f"moe_layer_freq {shown(config['moe_layer_freq'])}: expected 1")
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise NotImplementedError(
            f"num_key_value_heads {shown(config['num_key_value_heads'])}: latent attention expands to as many as"
            f" num_attention_heads={heads}"
        )


def _check_layers(config: Json, model: DeepSeekConfig) -> None:
    """Raises NotImplementedError or ValueError where the lists of layers that transformers 5 writes say anything else
    than the rest of the configuration.
    """
    dense = min(model.first_k_dense_replace, model.num_hidden_layers)
    kinds = {
        "layer_types": [("indexed_attention", "deepseek_sparse_attention")] * model.num_hidden_layers,
        "mlp_layer_types": [("dense",)] * dense + [("sparse",)] * model.num_moe_layers,
    }
    for name, wanted in kinds.items():
        given = config.get(name)
        if given is None:
            continue
        if not isinstance(given, list) or len(given) != len(wanted):
            raise ValueError(f"{name}: expected one for each of {len(wanted)} layers, got {shown(given)}")
        for i, (kind, known) in enumerate(zip(given, wanted, strict=True)):
            if kind not in known:
                raise NotImplementedError(f"{name} {shown(kind)} of layer {i}: expected {known[0]}")


def _indexer_types(config: Json, num_layers: int) -> tuple[str, ...] | None:
    """Reads which layers share a choice of keys, from a list or from the schedule of older files, which has to say the
    same where both are given. None where all layers choose.

    Raises:
      ValueError: malformed entries, or such as contradict each other.
    """
    given = {name: _types_of(config, name) for name in ("indexer_types", "index_topk_pattern")}
    if given["index_topk_pattern"] is None:  # which the schedule has no say in
        given["index_topk_freq"] = _scheduled_types(config, num_layers)
    known = {name: types for name, types in given.items() if types is not None}
    for name, types in known.items():
        _check_indexer_types(name, types, num_layers, config["model_type"])
    if len({*known.values()}) > 1:
        raise ValueError(f"{' and '.join(known)} contradict each other")
    types = next(iter(known.values()), ())
    return types if "shared" in types else None


def _check_indexer_types(name: str, types: tuple[str, ...], num_layers: int, model_type: str) -> None:
    """Raises ValueError unless there is full or shared for each layer, full for the first; NotImplementedError for
    layers that share in a family whose layers do not.
    """
    if len(types) != num_layers:
        raise ValueError(f"{name}: expected one for each of {num_layers} layers, got {len(types)}")
    for layer, kind in enumerate(types):
        if kind not in INDEXER_LETTERS.values():
            raise ValueError(f"{name} of layer {layer}: expected full or shared, got {shown(kind)}")
    if "shared" in types[:1]:
        raise ValueError(
            f"{name}: expected full for layer 0, which has none before it to share a choice of, got shared"
        )
    if "shared" in types and model_type not in SHARING:
        raise NotImplementedError(
            f"{name}: layer {types.index('shared')} of a {model_type} shares a choice, as only those of"
            f" {' and '.join(SHARING)} do"
        )


def _types_of(config: Json, name: str) -> tuple[str, ...] | None:
    """Reads full or shared for each layer, of a list of them or a string of F and S; None if absent."""
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, str) and name == "index_topk_pattern" and set(value) <= INDEXER_LETTERS.keys():
        return tuple(INDEXER_LETTERS[letter] for letter in value)
    if isinstance(value, list) and all(kind in ("full", "shared") for kind in value):
        return tuple(value)
    letters = " or a string of F and S" if name == "index_topk_pattern" else ""
    raise ValueError(f"{name}: expected a list of full and shared{letters}, got {shown(value)}")


def _scheduled_types(config: Json, num_layers: int) -> tuple[str, ...] | None:
    """Types of layers of which every `index_topk_freq`-th chooses, from layer `index_skip_topk_offset` - 1 on, and all
    before it; None without a schedule. Defaults are those of transformers."""
    schedule = {"index_topk_freq": 1, "index_skip_topk_offset": 2}
    period, offset = (integer(n, default if config.get(n) is None else config[n]) for n, default in schedule.items())
    at_least(0, {"index_topk_freq": period, "index_skip_topk_offset": offset})
    if config.get("index_topk_freq") is None:
        return None
    return tuple("shared" if max(i - offset + 1, 0) % max(period, 1) else "full" for i in range(num_layers))
