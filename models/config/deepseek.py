"""Configuration of DeepSeek-V2, V3 and V3.2 models and GLM-5, from and to config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pallas_attn.models.config.entries import (
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
    with_names,
)
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.rope import YarnConfig, read_rope, rope_entry


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """A model of the DeepSeek-V2, V3 or V3.2 family. Fields have the names and meanings of Hugging Face's config.json.

    V2 and V3 differ only in the fields for the selection of experts. V3.2 and GLM-5 are V3 models with an indexer in
    every layer, or in some layers that share their selected keys with others (arXiv:2603.12201). Layers before
    `first_k_dense_replace` are dense. Later layers are mixtures of experts.

    Attributes:
      q_lora_rank: rank of the query projection; None for a full-rank projection.
      topk_method: "greedy" selects the experts with the best scores. "group_limited_greedy" (V2) selects from the
        groups with the best single expert. "noaux_tc" (V3) selects from the groups with the best two experts, by score
        plus a learned bias. The bias affects the selection, not the weights.
      scoring_func: function from router logits to scores.
      norm_topk_prob: whether the weights of the selected experts are normalised to sum 1 before they are scaled.
      index_topk: number of keys that each token attends to; 0 for all keys, without an indexer.
      index_n_heads, index_head_dim: number of heads of the indexer, and width of its queries and keys.
      indexer_types: "full" for a layer with an indexer, "shared" for a layer that attends to the keys that the last
        full layer before it selected; None if all layers are full.
      rope_interleave: whether rotary columns of the checkpoint are interleaved pairs; otherwise two halves.
      yarn: YaRN parameters; None for unscaled rotary embedding.
      eos_token_ids: ids that end a sequence.
      dtype: dtype of the checkpoint.
      fp8_block: rows and columns per scale of a block-quantised checkpoint; None for an unquantised checkpoint.
      num_nextn_predict_layers: number of multi-token prediction modules that a checkpoint may contain.
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
            raise ValueError(f"q_lora_rank: expected a rank, which the indexer of a {self.model_type} needs")
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
        """L + R: cached columns per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_sparse(self) -> bool:
        """Whether tokens attend to keys that an indexer selects."""
        return self.model_type in INDEX_ROPE_INTERLEAVE

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer has an indexer. Layers of multi-token prediction, after the last layer, have one."""
        return self.is_sparse and not self.shares_choice(layer)

    def shares_choice(self, layer: int) -> bool:
        """Return whether a layer attends to the keys that an earlier layer selected."""
        return self.indexer_types is not None and self.indexer_types[layer : layer + 1] == ("shared",)

    @property
    def rotary_dim(self) -> int:
        """R: number of rotated columns of a query or key."""
        return self.qk_rope_head_dim

    @property
    def rope_scaling(self) -> YarnConfig | None:
        """Scaling of the rotary embedding, or None."""
        return self.yarn

    @property
    def windows(self) -> None:
        """None: all heads share one latent and see all keys."""
        return None

    @property
    def cached_layers(self) -> range:
        """Layers that have a cache: all."""
        return range(self.num_hidden_layers)

    @property
    def mtp_layers(self) -> range:
        """Layer indices of multi-token prediction modules in a checkpoint."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    def is_dense(self, layer: int) -> bool:
        """Return whether the feed-forward part of a layer is dense, not a mixture of experts."""
        return layer < self.first_k_dense_replace

    @property
    def sm_scale(self) -> float:
        """Factor of query-key products, including YaRN's temperature."""
        return self.qk_head_dim**-0.5 * (self.yarn.score_scale if self.yarn else 1.0)

    @classmethod
    def from_hf(cls, config: Json) -> DeepSeekConfig:
        """Read the contents of a config.json, with old or new names of its rope and dtype entries.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another entry.
          NotImplementedError: the model has an unsupported feature, which the message names.
        """
        return _from_hf(config)

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json, from which `from_hf` makes an equal configuration."""
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

# Supported values of two entries of config.json, by model_type. If an entry is absent, the first value is used.
ROUTING = {
    "deepseek_v2": {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",)},
    "deepseek_v3": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    "deepseek_v32": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    "glm_moe_dsa": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}

INDEX_ROPE_INTERLEAVE = {"deepseek_v32": False, "glm_moe_dsa": True}
"""Families with an indexer, and whether rotary columns of index queries in a checkpoint are interleaved pairs."""

INDEXER = ("index_topk", "index_n_heads", "index_head_dim")
"""Entries of config.json for an indexer."""

SHARING = ("glm_moe_dsa",)
"""Families whose layers may share the selected keys of an earlier layer."""

INDEXER_LETTERS = {"F": "full", "S": "shared"}
"""Letters of `index_topk_pattern`, and the corresponding entries of `indexer_types`."""

# Entries without a default, because readers of config.json disagree about the defaults. Nullable entries must be
# present and may be null.
_EXPLICIT = ("first_k_dense_replace", "max_position_embeddings", "rms_norm_eps", "routed_scaling_factor")
_NULLABLE = ("q_lora_rank", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_GROUPS = ("n_group", "topk_group")

# Other names of entries in transformers 5.
_ALIASES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}

ONE_LATENT = "all heads of latent attention share one latent, so they cannot have different windows"


def _from_hf(config: Json) -> DeepSeekConfig:
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("model_type is missing")
    if str(model_type) not in ROUTING:
        raise NotImplementedError(f"model_type {shown(model_type)}: expected one of {', '.join(ROUTING)}")
    config = with_names(config, _ALIASES)
    routing: dict[str, Any] = {name: _routing(config, name) for name in ("topk_method", "scoring_func")}
    _require(config, routing["topk_method"])
    _refuse_unsupported(config)
    entries = read_fields(DeepSeekConfig, config)
    if model_type == "deepseek_v2":
        # Older config.json files have these entries. transformers ignores them in this family.
        entries |= {"norm_topk_prob": False, "rope_interleave": True}
    else:
        entries.setdefault("num_nextn_predict_layers", 1)
    if model_type in INDEX_ROPE_INTERLEAVE:
        entries["rope_interleave"] = True  # transformers ignores the entry in these families
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
    """Raise NotImplementedError for unsupported features that change the results of the model."""
    of_family = {"sliding_window": None, "swiglu_limit": None, "use_qk_norm": False, "use_sliding_window": False}
    if config["model_type"] in INDEX_ROPE_INTERLEAVE:
        of_family["indexer_rope_interleave"] = INDEX_ROPE_INTERLEAVE[config["model_type"]]
    refuse_unsupported(config, **of_family)
    if config.get("head_windows") is not None:
        raise NotImplementedError(f"head_windows: {ONE_LATENT}")
    if config.get("moe_layer_freq", 1) != 1:
        raise NotImplementedError(f"moe_layer_freq {shown(config['moe_layer_freq'])}: expected 1")
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise NotImplementedError(
            f"num_key_value_heads {shown(config['num_key_value_heads'])}: expected num_attention_heads={heads}, because"
            " latent attention has a key and a value for each query head"
        )


def _check_layers(config: Json, model: DeepSeekConfig) -> None:
    """Raise an error if the layer lists of transformers 5 contradict the rest of the configuration.

    Raises:
      ValueError: a list of another length.
      NotImplementedError: an unsupported kind of layer.
    """
    dense = min(model.first_k_dense_replace, model.num_hidden_layers)
    attention = ("indexed_attention", "deepseek_sparse_attention") if model.is_sparse else ("full_attention",)
    kinds = {
        "layer_types": [attention] * model.num_hidden_layers,
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
    """Return the type of each layer, from a list or from the schedule of older files; None if all layers are full.

    Raises:
      ValueError: malformed entries, or entries that contradict each other.
    """
    given = {name: _types_of(config, name) for name in ("indexer_types", "index_topk_pattern")}
    if given["index_topk_pattern"] is None:  # a pattern overrides the schedule
        given["index_topk_freq"] = _scheduled_types(config, num_layers)
    known = {name: types for name, types in given.items() if types is not None}
    for name, types in known.items():
        _check_indexer_types(name, types, num_layers, config["model_type"])
    if len({*known.values()}) > 1:
        raise ValueError(f"{' and '.join(known)} contradict each other")
    types = next(iter(known.values()), ())
    return types if "shared" in types else None


def _check_indexer_types(name: str, types: tuple[str, ...], num_layers: int, model_type: str) -> None:
    """Check the types of all layers.

    Raises:
      ValueError: a type other than full and shared, a wrong number of types, or a first layer that is not full.
      NotImplementedError: shared layers in a family without them.
    """
    if len(types) != num_layers:
        raise ValueError(f"{name}: expected one for each of {num_layers} layers, got {len(types)}")
    for layer, kind in enumerate(types):
        if kind not in INDEXER_LETTERS.values():
            raise ValueError(f"{name} of layer {layer}: expected full or shared, got {shown(kind)}")
    if "shared" in types[:1]:
        raise ValueError(f"{name}: expected full for layer 0, because no earlier layer selects keys for it, got shared")
    if "shared" in types and model_type not in SHARING:
        raise NotImplementedError(
            f"{name}: layer {types.index('shared')} of a {model_type} shares a choice of keys, which is"
            f" supported only in {' and '.join(SHARING)}"
        )


def _types_of(config: Json, name: str) -> tuple[str, ...] | None:
    """Read full or shared per layer from a list, or from a string of F and S; None if absent."""
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
    """Return the types of layers of a schedule; None without a schedule.

    Every `index_topk_freq`-th layer from `index_skip_topk_offset` - 1 on is full, and all layers before it. Defaults
    are the defaults of transformers.
    """
    schedule = {"index_topk_freq": 1, "index_skip_topk_offset": 2}
    period, offset = (integer(n, default if config.get(n) is None else config[n]) for n, default in schedule.items())
    at_least(0, {"index_topk_freq": period, "index_skip_topk_offset": offset})
    if config.get("index_topk_freq") is None:
        return None
    return tuple("shared" if max(i - offset + 1, 0) % max(period, 1) else "full" for i in range(num_layers))
