"""Configurations of Gemma 4 text models, from and to config.json.

A model has local layers ("sliding_attention") with a window, and global layers ("full_attention") without. Both kinds
have their own head width, number of KV heads and rotary embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pallas_attn import FULL
from pallas_attn.models.config.entries import (
    Json,
    at_least,
    check_chosen_experts,
    check_kv_heads,
    check_scalars,
    dtype_of,
    integer,
    json_object,
    number,
    read_fields,
    refuse_unsupported,
    token_ids,
)
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.config.rope import RopeScaling
from pallas_attn.models.config.windows import GLOBAL_KIND, LOCAL_KIND, HeadShape, Windows, layer_kinds

NESTED, TEXT = "gemma4", "gemma4_text"
"""Values of model_type: a model with towers for images and audio, whose text model is the entry `text_config`; and a
text model."""

ACTIVATION = "gelu_pytorch_tanh"
"""The only supported activation of MLPs and experts: the tanh approximation of GELU."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "layer_types",
    "hidden_size_per_layer_input",
)

_EXPERT_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")

_GLOBAL_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Entries of `per_layer_config`, and the entries of config.json with the same values for all global layers."""


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """A Gemma 4 text model. Fields have the names and meanings of Hugging Face's config.json, except the fields of the
    rotary embedding.

    Attributes:
      num_key_value_heads, head_dim: Hkv and D of local layers.
      num_global_key_value_heads, global_head_dim: Hkv and D of global layers.
      layer_types: kind of each layer, "sliding_attention" or "full_attention". The last layer is global.
      sliding_window: number of keys that a token sees in local layers, including its own key.
      attention_k_eq_v: whether global layers compute keys and values from one projection.
      num_kv_shared_layers: number of last layers without a cache. A layer of them uses the cache of the last layer
        before them of the same kind.
      use_double_wide_mlp: whether the MLPs of layers without a cache have 2 · intermediate_size hidden columns.
      hidden_size_per_layer_input: width of per-layer embeddings (PLE); 0 for no per-layer embeddings.
      vocab_size_per_layer_input: rows of the table of per-layer embeddings.
      num_experts, top_k_experts, moe_intermediate_size: experts of a layer, experts that a token selects, and hidden
        width of an expert; 0 for a model without experts. A layer with experts also has a dense MLP.
      rope_theta, global_rope_theta: bases of the rotary embeddings of local and of global layers.
      global_rotary_share: share of the columns of a head that global layers rotate.
      global_rope_factor: divisor of the rotary frequencies of global layers.
      final_logit_softcapping: c in logits = c · tanh(x / c); None for no cap.
      eos_token_ids: ids that end a sequence.
      dtype: dtype of the checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    num_global_key_value_heads: int
    global_head_dim: int = 512
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 262144
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    rope_theta: float = 1e4
    global_rope_theta: float = 1e6
    global_rotary_share: float = 0.25
    global_rope_factor: float = 1.0
    final_logit_softcapping: float | None = None
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        sizes = (*_REQUIRED[:-2], "num_global_key_value_heads", "global_head_dim", "vocab_size_per_layer_input")
        at_least(1, {name: getattr(self, name) for name in sizes})
        at_least(0, {name: getattr(self, name) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers")})
        for kind, (heads, width) in {"": self.heads_of(LOCAL_KIND), "global_": self.heads_of(GLOBAL_KIND)}.items():
            check_kv_heads(self.num_attention_heads, heads, width, kind)
        for theta in (self.rope_theta, self.global_rope_theta):
            check_scalars(theta, self.rms_norm_eps)
        if not 0 <= self.global_rotary_share <= 1:
            raise ValueError(f"partial_rotary_factor: expected 0 to 1, got {self.global_rotary_share}")
        if self.global_rope_factor < 1:
            raise ValueError(f"rope factor: expected at least 1, got {self.global_rope_factor}")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(f"final_logit_softcapping: expected a positive number, got {self.final_logit_softcapping}")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            wanted = f"at least vocab_size={self.vocab_size}"
            raise ValueError(f"vocab_size_per_layer_input: expected {wanted}, got {self.vocab_size_per_layer_input}")
        self._check_layers()
        self._check_experts()

    def _check_layers(self) -> None:
        kinds, layers = self.layer_types, self.num_hidden_layers
        if len(kinds) != layers:
            raise ValueError(f"layer_types: expected one for each of {layers} layers, got {len(kinds)}")
        _check_kinds(kinds)
        if not 1 <= self.sliding_window <= FULL:
            raise ValueError(f"sliding_window: expected 1 to {FULL}, got {shown(self.sliding_window)}")
        if self.num_kv_shared_layers >= layers:
            raise ValueError(f"num_kv_shared_layers: expected less than {layers}, got {self.num_kv_shared_layers}")
        first = layers - self.num_kv_shared_layers
        if alone := sorted({*kinds[first:]} - {*kinds[:first]}):
            raise ValueError(f"num_kv_shared_layers: expected a layer with a cache of each kind, none is {alone[0]}")

    def _check_experts(self) -> None:
        sizes = {name: getattr(self, name) for name in _EXPERT_SIZES}
        if not any(sizes.values()):
            return
        at_least(1, {"moe_intermediate_size": self.moe_intermediate_size})
        check_chosen_experts(
            self.num_hidden_layers, ("num_experts", self.num_experts), ("top_k_experts", self.top_k_experts)
        )

    @property
    def model_type(self) -> str:
        """The model_type of a text model."""
        return TEXT

    @property
    def fp8_block(self) -> None:
        """None: checkpoints are not quantised."""
        return None

    @property
    def is_sparse(self) -> bool:
        """False: tokens attend to all keys within their windows."""
        return False

    @property
    def rotary_dim(self) -> int:
        """Number of rotated columns of a query or key of local layers: D."""
        return self.head_dim

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """None: rotary embeddings are not scaled to longer contexts."""
        return None

    @property
    def sm_scale(self) -> float:
        """Factor of query-key products: 1, because the weights of the query norms contain the scale."""
        return 1.0

    @property
    def windows(self) -> Windows:
        """Window of each layer."""
        return tuple(self.sliding_window if kind == LOCAL_KIND else None for kind in self.layer_types)

    @property
    def mtp_layers(self) -> range:
        """Layer indices of multi-token prediction modules: empty."""
        return range(self.num_hidden_layers, self.num_hidden_layers)

    @property
    def cached_layers(self) -> range:
        """Layers that have a cache."""
        return range(self.num_hidden_layers - self.num_kv_shared_layers)

    def cache_source(self, layer: int) -> int:
        """Return the layer whose cache a layer uses: the layer itself, or the last layer of the same kind that has a
        cache."""
        if layer in self.cached_layers:
            return layer
        return max(source for source in self.cached_layers if self.layer_types[source] == self.layer_types[layer])

    def is_global(self, layer: int) -> bool:
        """Return whether a layer has no window."""
        return self.layer_types[layer] == GLOBAL_KIND

    def heads_of(self, kind: str) -> HeadShape:
        """Return the shape of keys and values of the layers of a kind."""
        if kind == GLOBAL_KIND:
            return HeadShape(self.num_global_key_value_heads, self.global_head_dim)
        return HeadShape(self.num_key_value_heads, self.head_dim)

    def kv_heads(self, layer: int) -> HeadShape:
        """Return the shape of keys and values of a layer."""
        return self.heads_of(self.layer_types[layer])

    def mlp_width(self, layer: int) -> int:
        """Return the number of hidden columns of the MLP of a layer."""
        is_wide = self.use_double_wide_mlp and layer not in self.cached_layers
        return self.intermediate_size * (2 if is_wide else 1)

    def is_dense(self, layer: int) -> bool:
        """Return whether a layer has no experts. It is the same for all layers."""
        return not self.num_experts

    @classmethod
    def from_hf(cls, config: Json) -> Gemma4Config:
        """Read the contents of a config.json of a text model, or of a model with towers for images and audio, whose
        text model is read.

        Raises:
          ValueError: an entry is missing, malformed or contradicts another entry.
          NotImplementedError: the model has an unsupported feature, which the message names.
        """
        config = _text_entries(config)
        if missing := [name for name in _REQUIRED if config.get(name) is None]:
            raise ValueError(f"{', '.join(missing)} missing")
        bidirectional = config.get("use_bidirectional_attention")
        refuse_unsupported(
            config,
            attention_bias=False,
            final_logit_softcapping=config.get("final_logit_softcapping"),
            hidden_act=None,
            hidden_activation=ACTIVATION,
            quantization_config=None,
            rope_scaling=None,
            rope_theta=None,
            # "vision" concerns tokens of images only.
            use_bidirectional_attention="vision" if bidirectional == "vision" else False,
        )
        fields = read_fields(cls, config)
        kinds = layer_kinds(config, fields["num_hidden_layers"]) or []
        _check_kinds(kinds)
        if LOCAL_KIND in kinds and config.get("sliding_window") is None:
            raise ValueError("sliding_window missing")
        entries: dict[str, Any] = {
            "sliding_window": FULL,  # not used by a model without local layers
            **fields,
            **_global_heads(config, fields, kinds),
            **_experts(config),
            **_read_rope(config),
            "layer_types": tuple(kinds),
            "dtype": dtype_of(config),
            "eos_token_ids": token_ids("eos_token_id", config.get("eos_token_id")),
        }
        return cls(**entries)

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json of a text model, from which `from_hf` makes an equal configuration."""
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        eos, width, heads = (entries.pop(name) for name in ("eos_token_ids", *_GLOBAL_HEADS.values()))
        local, base, share, factor = (
            entries.pop(name)
            for name in ("rope_theta", "global_rope_theta", "global_rotary_share", "global_rope_factor")
        )
        of_global = {"head_dim": width, "num_key_value_heads": heads}
        layers = [layer for layer in range(self.num_hidden_layers) if self.is_global(layer)]
        return {
            **entries,
            **({} if self.num_experts else dict.fromkeys(_EXPERT_SIZES)),
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": TEXT,
            "enable_moe_block": bool(self.num_experts),
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_activation": ACTIVATION,
            "layer_types": list(self.layer_types),
            "per_layer_config": {str(layer): of_global for layer in layers},
            "rope_parameters": {
                LOCAL_KIND: {"rope_type": "default", "rope_theta": local},
                GLOBAL_KIND: {
                    "rope_type": "proportional",
                    "rope_theta": base,
                    "partial_rotary_factor": share,
                    "factor": factor,
                },
            },
        }


def _text_entries(config: Json) -> Json:
    """Return the entries of the text model. Entries of the text model that are also next to `text_config`, such as
    dtype, must have equal values."""
    if config.get("model_type") != NESTED:
        return config
    text = json_object(config, "text_config")
    if not text:
        raise ValueError("text_config missing")
    if text.get("model_type", TEXT) != TEXT:
        raise NotImplementedError(f"text_config: model_type {shown(text['model_type'])}: expected {TEXT}")
    outer = {
        name: config[name]
        for name in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "bos_token_id")
        if config.get(name) is not None
    }
    for name, value in outer.items():
        if text.get(name) not in (None, value):
            raise ValueError(f"{name}: expected the value of text_config, {shown(text[name])}, got {shown(value)}")
    # Published models have all ids that end a sequence next to text_config, and the first of them inside.
    eos = {} if config.get("eos_token_id") is None else {"eos_token_id": config["eos_token_id"]}
    return {**text, **outer, **eos}


def _check_kinds(kinds: Sequence[str]) -> None:
    if unknown := [kind for kind in kinds if kind not in (LOCAL_KIND, GLOBAL_KIND)]:
        raise NotImplementedError(f"layer_types: expected {GLOBAL_KIND} or {LOCAL_KIND}, got {shown(unknown[0])}")
    if kinds[-1] != GLOBAL_KIND:
        raise ValueError(f"layer_types: expected {GLOBAL_KIND} for the last layer, got {kinds[-1]}")


def _global_heads(config: Json, fields: Mapping[str, Any], kinds: list[str]) -> dict[str, int]:
    """Return head width and number of KV heads of global layers, from `per_layer_config`, or from `global_head_dim` and
    `num_global_key_value_heads`. Without `attention_k_eq_v`, transformers ignores `num_global_key_value_heads`."""
    given = {name: integer(name, config[name]) for name in _GLOBAL_HEADS.values() if config.get(name) is not None}
    if not config.get("attention_k_eq_v"):
        given.pop("num_global_key_value_heads", None)
    of_layers = config.get("per_layer_config")
    if of_layers is None:
        return {"global_head_dim": 512, "num_global_key_value_heads": fields["num_key_value_heads"], **given}
    if not isinstance(of_layers, Mapping) or not all(isinstance(entry, Mapping) for entry in of_layers.values()):
        raise ValueError(f"per_layer_config: expected an object per layer, got {shown(of_layers)}")
    if unknown := sorted({str(name) for name in of_layers} - {str(layer) for layer in range(len(kinds))}):
        raise ValueError(f"per_layer_config: expected layers from 0 to {len(kinds) - 1}, got {shown(unknown[0])}")
    local = {name: fields[name] for name in _GLOBAL_HEADS}
    found: dict[str, dict[str, int]] = {LOCAL_KIND: local}
    for layer, kind in enumerate(kinds):
        entry = of_layers.get(str(layer)) or {}
        if unknown := sorted(entry.keys() - _GLOBAL_HEADS.keys()):
            raise NotImplementedError(
                f"per_layer_config of layer {layer}: expected {' and '.join(_GLOBAL_HEADS)}, got {shown(unknown[0])}"
            )
        heads = local | {name: integer(name, value) for name, value in entry.items()}
        if found.setdefault(kind, heads) != heads:
            raise NotImplementedError(
                f"per_layer_config of layer {layer}: expected {shown(found[kind])} as in other {kind} layers,"
                f" got {shown(heads)}"
            )
    heads = {name: found[GLOBAL_KIND][entry] for entry, name in _GLOBAL_HEADS.items()}
    for name, value in given.items():
        if value != heads[name]:
            raise ValueError(f"{name}: expected the value of per_layer_config, {heads[name]}, got {value}")
    return heads


def _experts(config: Json) -> dict[str, int]:
    """Return the sizes of the experts, 0 without experts."""
    enabled = config.get("enable_moe_block", False)
    if not isinstance(enabled, bool | None):
        raise ValueError(f"enable_moe_block: expected true or false, got {shown(enabled)}")
    given = {name: integer(name, config[name]) for name in _EXPERT_SIZES if config.get(name) is not None}
    if enabled and len(given) < len(_EXPERT_SIZES):
        raise ValueError(f"{', '.join(name for name in _EXPERT_SIZES if name not in given)} missing")
    if not enabled and any(given.values()):
        raise ValueError(f"enable_moe_block: expected true with {', '.join(given)}, got {shown(enabled)}")
    return given if enabled else dict.fromkeys(_EXPERT_SIZES, 0)


def _read_rope(config: Json) -> dict[str, float]:
    """Read the rotary embeddings of both kinds of layers from `rope_parameters`, with the defaults of transformers."""
    ropes = json_object(config, "rope_parameters")
    if not ropes:
        return {}
    if unknown := sorted(ropes.keys() - {LOCAL_KIND, GLOBAL_KIND}):
        wanted = f"entries for {LOCAL_KIND} and {GLOBAL_KIND}"
        raise ValueError(f"rope_parameters: expected {wanted}, got {shown(unknown[0])}")
    names = {
        LOCAL_KIND: ("default", {"rope_theta": "rope_theta"}),
        GLOBAL_KIND: (
            "proportional",
            {
                "rope_theta": "global_rope_theta",
                "partial_rotary_factor": "global_rotary_share",
                "factor": "global_rope_factor",
            },
        ),
    }
    # Defaults of transformers if rope_parameters has an object for the kind of layer.
    read: dict[str, float] = {"global_rotary_share": 1.0}
    for kind, (rope_type, fields) in names.items():
        entries = {name: value for name, value in json_object(ropes, kind).items() if value is not None}
        if kind in (config.get("layer_types") or []) and "rope_theta" not in entries:
            raise ValueError(f"rope_parameters of {kind}: rope_theta missing")
        given = entries.pop("rope_type", "default")
        if given != rope_type:
            raise NotImplementedError(f"rope type {shown(given)} of {kind} layers: expected {rope_type}")
        for name, value in entries.items():
            if name not in fields:
                wanted = ", ".join(fields)
                raise ValueError(f"rope_parameters of {kind}: expected {wanted}, got {name}: {shown(value)}")
            read[fields[name]] = number(name, value)
    return read
