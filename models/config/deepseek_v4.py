"""Configuration of DeepSeek-V4 models, from and to config.json.

Every layer has attention with a window. Layers with a compressor also attend to entries. An entry pools the keys of a
block of tokens. There are two kinds of these layers: compressed sparse attention (CSA) to the entries that an indexer
selects, heavily compressed attention (HCA) to all entries.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from pallas_attn import FULL
from pallas_attn.models.config.entries import (
    Json,
    at_least,
    check_experts_of_all_layers,
    check_scalars,
    dtype_of,
    fp8_block,
    integer,
    is_integer,
    json_object,
    number,
    quantization_entry,
    read_fields,
    refuse_unsupported,
    token_ids,
    with_names,
)
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.rope import YarnConfig, read_rope, rope_entry
from pallas_attn.models.config.windows import LOCAL_KIND, CacheGroup, Windows, layer_kinds

V4 = "deepseek_v4"
"""Value of model_type."""

CSA_KIND, HCA_KIND = "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of layers with a compressor. Layers of the kind "sliding_attention" have only a window."""

HASH_MOE, SCORED_MOE = "hash_moe", "moe"
"""Kinds of experts in `mlp_layer_types`: selected by the token id, or by the scores of a router."""

SCORING = ("sqrtsoftplus", "sigmoid", "softmax")

PUBLISHED_RATES = {CSA_KIND: 4, HCA_KIND: 128}
"""Tokens per entry in published models."""

_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "intermediate_size": "moe_intermediate_size",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Other names of entries in transformers."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "max_position_embeddings",
    "routed_scaling_factor",
    "rope_theta",
    "compress_rope_theta",
    "hc_mult",
    "swiglu_limit",
)


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """A DeepSeek-V4 model. Fields have the names and meanings of Hugging Face's config.json, except `csa_rate`,
    `hca_rate`, `yarn` and `fp8_block`.

    Attributes:
      head_dim: D, width of the only KV head, which is key and value.
      qk_rope_head_dim: R, number of last columns of queries and keys that are rotated.
      layer_types: kind of each layer: "sliding_attention", "compressed_sparse_attention" (CSA) or
        "heavily_compressed_attention" (HCA).
      mlp_layer_types: kind of the experts of each layer: "hash_moe" or "moe".
      csa_rate, hca_rate: tokens per entry in CSA and in HCA layers.
      sliding_window: W, number of keys in the window, including the token's own key.
      o_groups, o_lora_rank: groups of heads of the output projection, and columns that it computes for each group.
      hc_mult: N, number of residual streams.
      hc_sinkhorn_iters: iterations that normalise the matrix that mixes the residual streams.
      hc_eps: epsilon of these iterations.
      swiglu_limit: maximum of gate projections, and maximum magnitude of up projections.
      index_topk: number of entries that a token attends to in CSA layers.
      index_n_heads, index_head_dim: number of heads of the indexer, and width of its queries and keys.
      rope_theta: base of the rotary embedding of layers without a compressor.
      compress_rope_theta, yarn: base and YaRN parameters of the rotary embedding of layers with a compressor. yarn is
        None for no scaling.
      eos_token_ids: ids that end a sequence.
      dtype: dtype of the checkpoint.
      fp8_block: rows and columns per scale of a block-quantised checkpoint; None for an unquantised checkpoint.
      num_nextn_predict_layers: number of multi-token prediction modules that a checkpoint may contain.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    sliding_window: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    csa_rate: int = 4
    hca_rate: int = 128
    scoring_func: Literal["sqrtsoftplus", "sigmoid", "softmax"] = "sqrtsoftplus"
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnConfig | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    fp8_block: tuple[int, int] | None = None
    num_nextn_predict_layers: int = 0

    def __post_init__(self) -> None:
        sizes = (*(name for name in _REQUIRED if name not in _NUMBERS), "csa_rate", "hca_rate", "hc_sinkhorn_iters")
        at_least(1, {name: getattr(self, name) for name in sizes})
        at_least(2, {"qk_rope_head_dim": self.qk_rope_head_dim})
        at_least(0, {"num_nextn_predict_layers": self.num_nextn_predict_layers})
        for theta in (self.rope_theta, self.compress_rope_theta):
            check_scalars(theta, self.rms_norm_eps)
        for name in ("routed_scaling_factor", "swiglu_limit"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name):g}")
        if self.hc_eps < 0:
            raise ValueError(f"hc_eps: expected at least 0, got {self.hc_eps:g}")
        if self.scoring_func not in SCORING:
            raise NotImplementedError(f"scoring_func {shown(self.scoring_func)}: expected {' or '.join(SCORING)}")
        self._check_layers()
        self._check_widths()
        check_experts_of_all_layers(self.num_hidden_layers, "n_routed_experts", self.n_routed_experts)
        if self.num_experts_per_tok > self.n_routed_experts:
            wanted = f"at most n_routed_experts={self.n_routed_experts}"
            raise ValueError(f"num_experts_per_tok: expected {wanted}, got {self.num_experts_per_tok}")

    def _check_widths(self) -> None:
        rotated = self.qk_rope_head_dim
        if rotated % 2:
            raise ValueError(f"qk_rope_head_dim: expected an even number, got {rotated}")
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) < rotated:
                wanted = f"at least qk_rope_head_dim={rotated}"
                raise ValueError(f"{name}: expected {wanted}, got {getattr(self, name)}")
        if self.num_attention_heads % self.o_groups:
            wanted = f"a divisor of num_attention_heads={self.num_attention_heads}"
            raise ValueError(f"o_groups: expected {wanted}, got {self.o_groups}")
        if not 1 <= self.sliding_window <= FULL:
            raise ValueError(f"sliding_window: expected 1 to {FULL}, got {shown(self.sliding_window)}")
        if self.page_unit > MOST_TOKENS_PER_UNIT:
            raise ValueError(
                f"compress_rates: expected a least common multiple of at most {MOST_TOKENS_PER_UNIT},"
                f" got {self.csa_rate} and {self.hca_rate}"
            )

    def _check_layers(self) -> None:
        known = {"layer_types": (LOCAL_KIND, CSA_KIND, HCA_KIND), "mlp_layer_types": (HASH_MOE, SCORED_MOE)}
        for name, kinds in known.items():
            given = getattr(self, name)
            if len(given) != self.num_hidden_layers:
                raise ValueError(f"{name}: expected one for each of {self.num_hidden_layers} layers, got {len(given)}")
            if unknown := [kind for kind in given if kind not in kinds]:
                raise NotImplementedError(f"{name} {shown(unknown[0])}: expected {' or '.join(kinds)}")

    @property
    def model_type(self) -> str:
        """The model_type of a config.json."""
        return V4

    @property
    def tie_word_embeddings(self) -> bool:
        """False: the head is not the embedding."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether tokens attend to entries that an indexer selects."""
        return CSA_KIND in self.layer_types

    @property
    def rotary_dim(self) -> int:
        """R: number of rotated columns of a query or key."""
        return self.qk_rope_head_dim

    @property
    def rope_scaling(self) -> None:
        """None: the rotary embedding of layers without a compressor is not scaled."""
        return None

    @property
    def sm_scale(self) -> float:
        """Factor of query-key products."""
        return self.head_dim**-0.5

    @property
    def page_unit(self) -> int:
        """Number of tokens that the page size must be a multiple of, so that a page has whole entries of all rates."""
        return math.lcm(*(self.rate(layer) or 1 for layer in range(self.num_hidden_layers)))

    @property
    def windows(self) -> Windows:
        """Window of each layer."""
        return (self.sliding_window,) * self.num_hidden_layers

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups: the windows of all layers, the entries of layers with a compressor, the compressor rows of CSA
        layers, and the compressor rows of HCA layers. Groups without layers are left out. Pages of all groups have the
        same number of tokens. The names of caches are the fields of `CompressedCache`.

        An unfinished block is in the page of the next token, because a page has whole blocks. The window of compressor
        rows in HCA layers is therefore 1 token, which keeps this page. CSA layers also need the block before.
        """
        layers = range(self.num_hidden_layers)
        compressed = tuple(layer for layer in layers if self.rate(layer))
        groups = [
            CacheGroup(self.sliding_window, tuple(layers), ("window",)),
            CacheGroup(None, compressed, ("entries", "index")),
        ]
        for kind in (CSA_KIND, HCA_KIND):
            members = tuple(layer for layer in compressed if self.layer_types[layer] == kind)
            window = 1 + self.state_window(members[0]) - self.rate(members[0]) if members else 0
            groups.append(CacheGroup(window, members, ("state", "index_state")))
        return tuple(group for group in groups if group.layers)

    def page_bytes(self, number: int, page_size: int) -> int:
        """Return the memory of one page of `page_size` tokens in all layers of the cache group with this index, with
        16-bit caches."""
        group = self.cache_groups[number]

        def of_layer(layer: int) -> int:
            if number == 0:
                return 2 * page_size * self.head_dim
            columns = self.head_dim + (self.index_head_dim if self.has_indexer(layer) else 0)
            if group.window is None:
                return 2 * page_size // self.rate(layer) * columns
            rows = self.state_rows(layer, page_size)
            return 4 * rows * self.state_columns(layer) // self.head_dim * columns  # float32

        return sum(map(of_layer, group.layers))

    def groups_of(self, layer: int) -> tuple[int, ...]:
        """Return the indices of the cache groups of a layer: of its window, and, with a compressor, of its entries and
        of its compressor rows."""
        return tuple(number for number, group in enumerate(self.cache_groups) if layer in group.layers)

    @property
    def of_module(self) -> DeepseekV4Config:
        """Configuration of the layer of a multi-token prediction module, as a model with one layer."""
        layer = {"layer_types": (LOCAL_KIND,), "mlp_layer_types": (SCORED_MOE,)}
        return dataclasses.replace(self, num_hidden_layers=1, num_nextn_predict_layers=0, **layer)

    @property
    def cached_layers(self) -> range:
        """Layers that have a cache: all."""
        return range(self.num_hidden_layers)

    @property
    def mtp_layers(self) -> range:
        """Layer indices of multi-token prediction modules: empty, because checkpoints name them differently."""
        return range(self.num_hidden_layers, self.num_hidden_layers)

    def is_dense(self, layer: int) -> bool:
        """Return False: all layers have experts."""
        return False

    def is_hashed(self, layer: int) -> bool:
        """Return whether a layer selects experts by the token id."""
        return self.mlp_layer_types[layer] == HASH_MOE

    def rate(self, layer: int) -> int:
        """Return the number of tokens per entry of a layer; 0 for a layer without a compressor."""
        return {LOCAL_KIND: 0, CSA_KIND: self.csa_rate, HCA_KIND: self.hca_rate}[self.layer_types[layer]]

    @property
    def has_hca(self) -> bool:
        """Whether a layer attends to all entries."""
        return HCA_KIND in self.layer_types

    def has_indexer(self, layer: int) -> bool:
        """Return whether a layer selects entries."""
        return self.layer_types[layer] == CSA_KIND

    def state_window(self, layer: int) -> int:
        """Return the number of newest tokens whose compressor rows an entry pools; 0 without a compressor. Entries of
        CSA layers also pool the block before their own."""
        return self.rate(layer) * (2 if self.has_indexer(layer) else 1)

    def state_rows(self, layer: int, page_size: int) -> int:
        """Return the number of compressor rows in a page of `page_size` tokens of a layer with a compressor.

        A page has the rows of its newest tokens: position p has row p % (number of rows) of its page. The number is
        twice the window. A step with at most `most_queries` tokens of a sequence then overwrites no row that the step
        reads, or that is needed if its drafts are rejected. If the number does not divide `page_size`, a page has one
        row per token.
        """
        rows = 2 * self.state_window(layer)
        return page_size if page_size % rows else rows

    def most_queries(self, page_size: int) -> int | None:
        """Return the maximum number of tokens per decode row, with drafts; None for no limit."""
        compressed = [layer for layer in range(self.num_hidden_layers) if self.rate(layer)]
        shorter = [layer for layer in compressed if self.state_rows(layer, page_size) < page_size]
        return min((self.state_window(layer) + 1 for layer in shorter), default=None)

    def state_columns(self, layer: int) -> int:
        """Return the width of a compressor row of a layer: contents and gates of one or, in CSA layers, two halves."""
        return (4 if self.has_indexer(layer) else 2) * self.head_dim

    @classmethod
    def from_hf(cls, config: Json) -> DeepseekV4Config:
        """Read the contents of a config.json, with the published entries or the entries that transformers writes.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another entry.
          NotImplementedError: the model has an unsupported feature, which the message names.
        """
        config = with_names(config, _ALIASES)
        if missing := [name for name in _REQUIRED if config.get(name) is None and not _nested(config, name)]:
            raise ValueError(f"{', '.join(missing)} missing")
        _refuse(config)
        layers = integer("num_hidden_layers", config["num_hidden_layers"])
        at_least(1, {"num_hidden_layers": layers})
        rates = _rates(config)
        fields = read_fields(cls, config)
        entries: dict[str, Any] = {
            "num_nextn_predict_layers": 1,
            **fields,
            **_read_rope(config),
            "qk_rope_head_dim": _rotary_width(config),
            "layer_types": _layer_types(config, layers, rates),
            "mlp_layer_types": _mlp_layer_types(config, layers),
            "csa_rate": rates[CSA_KIND],
            "hca_rate": rates[HCA_KIND],
            "scoring_func": str(config.get("scoring_func") or SCORING[0]),
            "dtype": dtype_of(config, "bfloat16"),
            "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
            "fp8_block": fp8_block(config),
        }
        return cls(**entries)

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json, from which `from_hf` makes an equal configuration."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        yarn, block, eos = (entries.pop(name) for name in ("yarn", "fp8_block", "eos_token_ids"))
        rates = {CSA_KIND: entries.pop("csa_rate"), HCA_KIND: entries.pop("hca_rate")}
        return {
            **entries,
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": V4,
            "compress_rates": rates,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": "silu",
            "layer_types": list(self.layer_types),
            "mlp_layer_types": list(self.mlp_layer_types),
            "n_shared_experts": 1,
            "num_key_value_heads": 1,
            "rope_scaling": rope_entry(yarn),
            "tie_word_embeddings": False,
            **({} if block is None else {"quantization_config": quantization_entry(block)}),
        }


MOST_TOKENS_PER_UNIT = 65536
"""Maximum of `DeepseekV4Config.page_unit`."""

_NUMBERS = ("routed_scaling_factor", "rope_theta", "compress_rope_theta", "swiglu_limit")
"""Entries of `_REQUIRED` that are not sizes."""

_ROPES = {"main": "rope_theta", "compress": "compress_rope_theta"}
"""Objects in `rope_parameters`, and the field with the base of each."""


def _nested(config: Json, name: str) -> bool:
    """Return whether `rope_parameters` has the base of a rotary embedding."""
    ropes = config.get("rope_parameters")
    if not isinstance(ropes, dict):
        return False
    labels = [label for label, field in _ROPES.items() if field == name]
    return any(isinstance(ropes.get(label), dict) and ropes[label].get("rope_theta") is not None for label in labels)


def _refuse(config: Json) -> None:
    """Raise NotImplementedError for unsupported features that change the results of the model."""
    refuse_unsupported(
        config,
        attention_bias=False,
        head_windows=None,
        n_shared_experts=1,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        topk_method="noaux_tc",
    )
    # The weights of the selected experts are always normalised, whatever norm_topk_prob says.
    dtypes = (config.get("expert_dtype"), json_object(config, "quantization_config").get("expert_dtype"))
    if unknown := [value for value in dtypes if value not in (None, "fp4", "fp8")]:
        raise NotImplementedError(f"expert_dtype {shown(unknown[0])}: expected fp4 or fp8")


def _rates(config: Json) -> dict[str, int]:
    """Read the number of tokens per entry of each kind of layer with a compressor."""
    given = json_object(config, "compress_rates")
    if unknown := sorted({str(kind) for kind in given} - PUBLISHED_RATES.keys()):
        raise ValueError(f"compress_rates: expected {' and '.join(PUBLISHED_RATES)}, got {shown(unknown[0])}")
    rates = PUBLISHED_RATES | {kind: integer(f"compress_rates of {kind}", rate) for kind, rate in given.items()}
    for kind, name in ((CSA_KIND, "compress_rate_csa"), (HCA_KIND, "compress_rate_hca")):
        if config.get(name) is not None:
            rates[kind] = integer(name, config[name])
    at_least(1, {f"compress_rates of {kind}": rate for kind, rate in rates.items()})
    return rates


def _layer_types(config: Json, layers: int, rates: dict[str, int]) -> tuple[str, ...]:
    """Read the kind of each layer from `layer_types` or `compress_ratios`. Without both, layers follow DeepSeek-V4-Pro:
    two HCA layers, then alternating HCA and CSA layers."""
    kinds, ratios = layer_kinds(config, layers), config.get("compress_ratios")
    from_ratios = None if ratios is None else _of_ratios(ratios, layers, rates)
    if kinds is None and from_ratios is None:
        return tuple(CSA_KIND if layer >= 2 and layer % 2 else HCA_KIND for layer in range(layers))
    if kinds is None or from_ratios is None:
        return tuple(kinds or from_ratios or ())
    if tuple(kinds) != from_ratios:
        raise ValueError("layer_types and compress_ratios contradict each other")
    return from_ratios


def _of_ratios(ratios: Any, layers: int, rates: dict[str, int]) -> tuple[str, ...]:
    """Return the kind of each layer, given one ratio for each layer and one for each prediction module."""
    if not isinstance(ratios, list) or len(ratios) < layers or not all(map(is_integer, ratios)):
        raise ValueError(f"compress_ratios: expected one for each of {layers} layers, got {shown(ratios)}")
    kinds = {0: LOCAL_KIND, **{rate: kind for kind, rate in rates.items()}}
    if unknown := [ratio for ratio in ratios[:layers] if ratio not in kinds]:
        wanted = ", ".join(map(str, kinds))
        raise NotImplementedError(f"compress_ratios {shown(unknown[0])}: expected one of {wanted}")
    return tuple(kinds[ratio] for ratio in ratios[:layers])


def _mlp_layer_types(config: Json, layers: int) -> tuple[str, ...]:
    """Read the kind of the experts of each layer from `mlp_layer_types` or `num_hash_layers`."""
    kinds, count = config.get("mlp_layer_types"), config.get("num_hash_layers")
    if count is not None:
        at_least(0, {"num_hash_layers": integer("num_hash_layers", count)})
    if kinds is None:
        hashed = min(3 if count is None else count, layers)
        return (HASH_MOE,) * hashed + (SCORED_MOE,) * (layers - hashed)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"mlp_layer_types: expected a name for each layer, got {shown(kinds)}")
    if count is not None and kinds != [HASH_MOE] * min(count, layers) + [SCORED_MOE] * max(layers - count, 0):
        raise ValueError("mlp_layer_types and num_hash_layers contradict each other")
    return tuple(kinds)


def _rotary_width(config: Json) -> int:
    """Read R from `qk_rope_head_dim`, or from `partial_rotary_factor`: R = int(D · factor)."""
    width, given = config.get("qk_rope_head_dim"), config.get("partial_rotary_factor")
    if given is None:
        return 64 if width is None else integer("qk_rope_head_dim", width)
    share = number("partial_rotary_factor", given)
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor: expected more than 0 and at most 1, got {shown(given)}")
    rotated = int(integer("head_dim", config["head_dim"]) * share)
    if width is not None and width != rotated:
        raise ValueError(f"qk_rope_head_dim: expected {rotated} by partial_rotary_factor, got {shown(width)}")
    return rotated


def _read_rope(config: Json) -> dict[str, Any]:
    """Read both rotary embeddings from `rope_parameters` of transformers, {main: {...}, compress: {...}}, or from
    `rope_theta`, `compress_rope_theta` and `rope_scaling`. Cosines and sines are not scaled."""
    ropes = json_object(config, "rope_parameters")
    length = {"max_position_embeddings": config["max_position_embeddings"]}
    if not {"main", "compress"} <= ropes.keys():
        thetas = {name: number(name, config[name]) for name in _ROPES.values()}
        _, yarn = read_rope({**length, **_scaling(config)}, ("default", "yarn"))
        return thetas | {"yarn": _unscaled(yarn)}
    if config.get("rope_scaling") is not None:
        raise ValueError("rope_parameters and rope_scaling: expected one of them, got both")
    if unknown := sorted(ropes.keys() - _ROPES.keys()):
        raise ValueError(f"rope_parameters: expected main and compress, got {shown(unknown[0])}")
    found: dict[str, Any] = {}
    for label, name in _ROPES.items():
        entries = {key: value for key, value in json_object(ropes, label).items() if key != "partial_rotary_factor"}
        kinds = ("default",) if label == "main" else ("default", "yarn")
        theta, scaling = read_rope({**length, "rope_parameters": entries}, kinds)
        if config.get(name) is not None and entries.get("rope_theta") not in (None, config[name]):
            raise ValueError(f"rope_parameters of {label}: expected {name}={shown(config[name])}, got {theta}")
        found[name] = theta if entries.get("rope_theta") is not None else number(name, config[name])
        if label == "compress":
            found["yarn"] = _unscaled(scaling)
    return found


def _scaling(config: Json) -> dict[str, Any]:
    return {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}


def _unscaled(scaling: Any) -> YarnConfig | None:
    """Return YaRN parameters whose factor of cosines and sines is 1.

    Raises:
      NotImplementedError: another factor is given.
    """
    if not isinstance(scaling, YarnConfig):
        return None
    if scaling.attention_factor not in (None, 1.0) or scaling.mscale or scaling.mscale_all_dim:
        raise NotImplementedError("rope_scaling: expected an attention_factor of 1 and no mscale of a deepseek_v4")
    return dataclasses.replace(scaling, attention_factor=1.0)
