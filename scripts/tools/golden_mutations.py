"""Mutations of golden models: typical mistakes in an implementation, as changes to a transformers model.

make_goldens.py applies each mutation to a copy of the correct model and checks that the logits change. A test that
compares logits with the golden then detects the mistake.
"""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]
from transformers import PreTrainedConfig, PreTrainedModel  # pyrefly: ignore[missing-import]
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # pyrefly: ignore[missing-import]

from scripts.tools import golden_v4


def is_gemma(config: PreTrainedConfig) -> bool:
    return config.model_type.startswith("gemma4")


def text_model(model: PreTrainedModel) -> nn.Module:
    """Return the module with the layers of the text model."""
    return getattr(model.model, "language_model", model.model)


def scaled_routers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the router of each layer of a Gemma 4 model with experts."""
    return (layer.router for layer in text_model(model).layers if hasattr(layer, "router"))


def gates(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the router of each mixture-of-experts layer of a DeepSeek or GLM model."""
    return (layer.mlp.gate for layer in text_model(model).layers if hasattr(layer.mlp, "gate"))


def routers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the router of each layer of a gpt-oss model."""
    return (layer.mlp.router for layer in text_model(model).layers if hasattr(layer.mlp, "router"))


def expert_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the experts of each layer of a gpt-oss model."""
    return (layer.mlp.experts for layer in text_model(model).layers if hasattr(layer.mlp, "experts"))


def attentions(model: PreTrainedModel) -> Iterator[nn.Module]:
    return (layer.self_attn for layer in text_model(model).layers)


def is_latent(config: PreTrainedConfig) -> bool:
    """Return whether the model has latent attention (MLA)."""
    return config.model_type.startswith("deepseek") or is_sparse(config)


def is_sparse(config: PreTrainedConfig) -> bool:
    """Return whether the model has sparse attention, in which an indexer selects the keys of each token."""
    return hasattr(config, "index_topk")


def indexers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the indexer of each layer that has one. Other layers have no sparse attention or use an earlier layer's
    keys.
    """
    return (attention.indexer for attention in attentions(model) if getattr(attention, "indexer", None) is not None)


def is_v3(gate: nn.Module) -> bool:
    return hasattr(gate, "e_score_correction_bias")


# --- routing: a copy of transformers' code, with a rule that mutations change


@dataclass(frozen=True)
class Routing:
    """Rule by which a router selects experts. `routing` returns the correct rule."""

    best_in_group: int  # the score of a group is the sum of its `best_in_group` best expert scores
    masked_score: float  # score given to the experts outside the selected groups
    biased_weights: bool = False
    normalise: bool = False


def routing(gate: nn.Module) -> Routing:
    if is_v3(gate):
        return Routing(best_in_group=2, masked_score=-math.inf, normalise=True)
    return Routing(best_in_group=1, masked_score=0.0)


def choose(gate: nn.Module, hidden: torch.Tensor, rule: Routing) -> tuple[torch.Tensor, ...]:
    """Compute the scores of a router by a rule.

    Returns:
      Router logits; scores; scores + bias; scores of the groups; and scores + bias in which experts outside the
      selected groups have `rule.masked_score`. The top-k experts of the last one are selected.

    """
    logits = F.linear(hidden.view(-1, gate.hidden_dim), gate.weight)
    scores = logits.sigmoid() if is_v3(gate) else logits.softmax(-1)
    biased = scores + gate.e_score_correction_bias if is_v3(gate) else scores
    grouped = biased.unflatten(-1, (gate.num_group, -1))
    group_scores = grouped.topk(rule.best_in_group).values.sum(-1)
    chosen = torch.zeros_like(group_scores).scatter(1, group_scores.topk(gate.topk_group).indices, 1).bool()
    return logits, scores, biased, group_scores, grouped.masked_fill(~chosen[..., None], rule.masked_score).flatten(1)


def route(gate: nn.Module, rule: Routing, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the forward pass of a router with a rule. Return router logits, weights and selected experts."""
    logits, scores, biased, _, masked = choose(gate, hidden, rule)
    experts = masked.topk(gate.top_k).indices
    weights = (biased if rule.biased_weights else scores).gather(1, experts)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * gate.routed_scaling_factor, experts


def routing_margin(gate: nn.Module, hidden: torch.Tensor) -> float:
    """Return the smallest margin of a router's decisions over all tokens.

    The margin is the gap between the worst selected and the best unselected expert, or group of experts. For softmax
    scores it is the gap between their logarithms, whose rounding error does not depend on the magnitude of the scores.
    """
    if hasattr(gate, "score_fn"):
        return golden_v4.routing_margin(gate, hidden)
    if hasattr(gate, "proj"):
        return cut_margin(gate.proj(gate.norm(hidden) * gate.scale * gate.scalar_root_size), gate.config.top_k_experts)
    if not hasattr(gate, "num_group"):
        return cut_margin(F.linear(hidden.view(-1, gate.hidden_dim), gate.weight, gate.bias), gate.top_k)
    *_, group_scores, masked = choose(gate, hidden, routing(gate))
    if not is_v3(gate):
        group_scores, masked = group_scores.log(), masked.log()
    margin = cut_margin(masked, gate.top_k)
    return margin if gate.topk_group == gate.num_group else min(margin, cut_margin(group_scores, gate.topk_group))


# --- the indexer: a copy of transformers' code, with a rule that mutations change


@dataclass(frozen=True)
class Indexing:
    """Rule by which an indexer scores and selects keys. `indexing` returns the correct rule."""

    paired: bool  # RoPE rotates columns 2i and 2i + 1 together, otherwise columns i and i + R/2
    first_rotated: int | None = 0  # first of the R rotated columns; None for no rotation
    relu: bool = True
    weighted: bool = True
    centred: bool = True  # keys are normalised by a layer norm, otherwise by an RMS norm
    sign: int = 1
    extra: int = 0  # number of keys that are selected in addition to the configured number


def indexing(indexer: nn.Module) -> Indexing:
    return Indexing(paired=indexer.config.model_type == "glm_moe_dsa")


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, rule: Indexing) -> torch.Tensor:
    """Apply RoPE to `width` columns of x [..., D], beginning with column `rule.first_rotated`. `cos` and `sin` have
    `width` columns, of which the first half is used.
    """
    if rule.first_rotated is None:
        return x
    start = rule.first_rotated % x.shape[-1]
    before, part, after = x.split([start, width, x.shape[-1] - start - width], -1)
    cos, sin = (angles[..., : width // 2] for angles in (cos, sin))
    one, two = (part[..., 0::2], part[..., 1::2]) if rule.paired else part.chunk(2, -1)
    return torch.cat([before, one * cos - two * sin, two * cos + one * sin, after], -1)


def index_scores(indexer: nn.Module, rule: Indexing, hidden, residual, angles, mask, cache) -> torch.Tensor:
    """Compute the scores [B, S, T] of T keys for S tokens by a rule. Keys that the mask hides have the score -inf."""
    cos, sin = angles
    q = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.wk(hidden)
    if rule.centred:
        k = indexer.k_norm(k)
    else:
        k = F.rms_norm(k, k.shape[-1:], indexer.k_norm.weight, 1e-6) + indexer.k_norm.bias
    q = turn(q, cos[:, :, None], sin[:, :, None], indexer.qk_rope_head_dim, rule)
    k = turn(k, cos, sin, indexer.qk_rope_head_dim, rule)
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    products = torch.einsum("bshd,btd->bsht", q, k) * indexer.softmax_scale
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    if not rule.weighted:
        weights = torch.full_like(weights, indexer.n_heads**-0.5)
    scores = torch.einsum("bsht,bsh->bst", products.relu() if rule.relu else products, weights)
    return (rule.sign * scores).masked_fill(mask < 0, -math.inf)


def choose_keys(indexer: nn.Module, rule: Indexing, hidden, residual, angles, mask, *_, past_key_values=None):
    """Run the forward pass of an indexer with a rule. Return the positions of the selected keys."""
    scores = index_scores(indexer, rule, hidden, residual, angles, mask, past_key_values)
    return scores.topk(min(indexer.index_topk + rule.extra, scores.shape[-1]), dim=-1).indices.int()


def change_indexing(model: PreTrainedModel, **changes: Any) -> None:
    """Replace the forward pass of all indexers by `choose_keys` with a changed rule. Without `changes`, the model
    computes the same logits as before.

    """
    for indexer in indexers(model):
        indexer.forward = partial(choose_keys, indexer, replace(indexing(indexer), **changes))


def share_first_choice(model: PreTrainedModel) -> None:
    """Make all layers attend to the keys that the first layer's indexer selected."""
    first, *others = indexers(model)
    choose, chosen = first.forward, {}

    def remember(*args, **kwargs):
        chosen["last"] = choose(*args, **kwargs)
        return chosen["last"]

    first.forward = remember
    for indexer in others:
        indexer.forward = lambda *args, **kwargs: chosen["last"]


def share_last_choice(model: PreTrainedModel) -> None:
    """Make all tokens of a prompt attend to the keys that were selected for its last token."""

    def choose(forward, hidden, residual, angles, mask, *args, **kwargs):
        return forward(hidden, residual, angles, mask[:, -1:].expand_as(mask), *args, **kwargs)[:, -1:].expand(
            -1, mask.shape[1], -1
        )

    for indexer in indexers(model):
        indexer.forward = partial(choose, indexer.forward)


def shared_layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """Return (attention, indexer) for each shared layer. A shared layer has no indexer and attends to the keys that the
    indexer of the nearest earlier layer selected.
    """
    found, last = [], None
    for attention in attentions(model):
        last = attention.indexer if attention.indexer is not None else last
        if attention.indexer is None:
            found.append((attention, last))
    return found


def choose_anew(model: PreTrainedModel) -> None:
    """Make shared layers select keys themselves, with a copy of the indexer whose selection they should use."""
    for attention, indexer in shared_layers(model):
        own = deepcopy(indexer)
        own.layer_idx = attention.layer_idx
        attention.indexer = own


def give_shared_layers(model: PreTrainedModel, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Make shared layers attend to the keys choose(correct keys, attention mask)."""

    def attend(forward, *args, **kwargs):
        kwargs["prev_topk_indices"] = choose(kwargs["prev_topk_indices"], kwargs["attention_mask"])
        return forward(*args, **kwargs)

    for attention, _ in shared_layers(model):
        attention.forward = partial(attend, attention.forward)


def every_key(chosen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.shape[-1], dtype=torch.int32).expand(*chosen.shape[:2], -1)


def share_the_first_choice(model: PreTrainedModel) -> None:
    """Make all shared layers attend to the keys that the first layer selected, instead of the nearest earlier layer
    with an indexer.
    """
    first, chosen = next(indexers(model)), {}
    choose = first.forward

    def remember(*args, **kwargs):
        chosen["first"] = choose(*args, **kwargs)
        return chosen["first"]

    first.forward = remember
    give_shared_layers(model, lambda *_: chosen["first"])


def selection_margin(indexer: nn.Module, hidden, residual, angles, mask) -> float:
    """Return the smallest margin of an indexer's decisions: the gap between the scores of the worst selected and the
    best unselected key, divided by the standard deviation of the token's scores. Tokens that see at most `index_topk`
    keys are left out, because they select all keys.
    """
    scores = index_scores(indexer, indexing(indexer), hidden, residual, angles, mask, None)[0]
    margins = []
    for row in scores:
        seen = row[row > -math.inf]
        if len(seen) > indexer.index_topk:
            margins.append(cut_margin(seen[None], indexer.index_topk) / seen.std().item())
    return min(margins, default=math.inf)


def closest_selection(model: PreTrainedModel, sequences: list[list[int]]) -> float | None:
    """Return the smallest `selection_margin` of all layers and sequences; None for a model without indexers."""
    if golden_v4.is_v4(model.config):
        return golden_v4.closest_entries(model, sequences)
    margins = []

    def measure(indexer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        margins.append(selection_margin(indexer, *args[:4]))

    hooks = [indexer.register_forward_pre_hook(measure, with_kwargs=True) for indexer in indexers(model)]
    for sequence in sequences:
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return min(margins, default=None)


def cut_margin(scores: torch.Tensor, chosen: int) -> float:
    """Return the smallest gap, over the rows of `scores`, between the worst of the `chosen` best scores and the next
    score.
    """
    best = scores.topk(chosen + 1).values
    return (best[:, -2] - best[:, -1]).min().item()


def closest_routing(model: PreTrainedModel, sequences: list[list[int]]) -> float | None:
    """Return the smallest `routing_margin` of all layers and sequences; None for a model without routers."""
    margins = []

    def measure(gate: nn.Module, args: tuple[torch.Tensor]) -> None:
        margins.append(routing_margin(gate, args[0]))

    hooks = [
        gate.register_forward_pre_hook(measure) for gate in (*gates(model), *routers(model), *scaled_routers(model))
    ]
    for sequence in sequences:
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return min(margins, default=None)


# --- mutations, each of which a golden must detect


def drop_softmax_mscale(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.scaling = attention.qk_head_dim**-0.5


def drop_rotary_mscale(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.0


def drop_yarn_interpolation(model: PreTrainedModel) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]


def interpolate_all_frequencies(model: PreTrainedModel) -> None:
    drop_yarn_interpolation(model)
    model.model.rotary_emb.inv_freq /= model.config.rope_parameters["factor"]


def truncate_yarn_ramp(model: PreTrainedModel) -> None:
    config = deepcopy(model.config)
    config.rope_parameters["truncate"] = True
    model.model.rotary_emb.inv_freq = ROPE_INIT_FUNCTIONS["yarn"](config, None)[0]


def rotate_halves(model: PreTrainedModel) -> None:
    """Make RoPE rotate columns i and i + R/2 together instead of 2i and 2i + 1. This is done by permuting the rows of
    the weights that produce these columns.
    """
    width = model.config.qk_rope_head_dim
    order = torch.arange(width).view(2, -1).T.flatten()
    for attention in attentions(model):
        project_q = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        rope_of_head = project_q.weight.data.unflatten(0, (attention.num_heads, -1))[:, -width:]
        rope_of_head.copy_(rope_of_head[:, order].clone())
        rope_of_key = attention.kv_a_proj_with_mqa.weight.data[-width:]
        rope_of_key.copy_(rope_of_key[order].clone())


def rotate_pairs(model: PreTrainedModel) -> None:
    """Make RoPE rotate columns 2i and 2i + 1 together instead of i and i + D/2. This is done by permuting the rows of
    the weights that produce these columns.
    """
    width = model.config.head_dim
    order = torch.arange(width).view(-1, 2).T.flatten()
    for attention in attentions(model):
        for projection in (attention.q_proj, attention.k_proj):
            for parameter in projection.parameters():
                parameter.data = parameter.data.unflatten(0, (-1, width))[:, order].flatten(0, 1)
        for norm in (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ():
            norm.weight.data = norm.weight.data[order]


def drop_qk_norms(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.q_norm = attention.k_norm = nn.Identity()


def deal_kv_heads_round(model: PreTrainedModel) -> None:
    """Make query head h use KV head h mod Hkv instead of h // G. This is done by permuting the query heads."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()
    for attention in attentions(model):
        for parameter in attention.q_proj.parameters():
            parameter.data = parameter.data.unflatten(0, (heads, -1))[order].flatten(0, 1)
        project_out = attention.o_proj.weight
        project_out.data = project_out.data.unflatten(1, (heads, -1))[:, order].flatten(1, 2)
        if hasattr(attention, "sinks"):
            attention.sinks.data = attention.sinks.data[order]


def scale_by_hidden_size(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.scaling = (model.config.hidden_size / model.config.num_attention_heads) ** -0.5


def drop_attention_biases(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.bias.data.zero_()


def see_everything(model: PreTrainedModel) -> None:
    model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers


def swap_windows(model: PreTrainedModel) -> None:
    other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    model.config.layer_types = [other[kind] for kind in model.config.layer_types]


def see_one_more(model: PreTrainedModel) -> None:
    model.config.sliding_window += 1


def drop_sinks(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.sinks.data.fill_(-1e9)


def scale_sinks(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        attention.sinks.data *= attention.scaling


def drop_router_biases(model: PreTrainedModel) -> None:
    for router in routers(model):
        router.bias.data.zero_()


def weigh_among_all_experts(model: PreTrainedModel) -> None:
    """Weight the selected experts by the softmax over all experts, instead of the softmax over the selected experts."""

    def route_wrongly(router: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, router.weight, router.bias)
        weights, experts = logits.softmax(-1).topk(router.top_k)
        return logits, weights, experts

    for router in routers(model):
        router.forward = partial(route_wrongly, router)


def drop_expert_biases(model: PreTrainedModel) -> None:
    for experts in expert_layers(model):
        experts.gate_up_proj_bias.data.zero_()
        experts.down_proj_bias.data.zero_()


def take_gates_from_the_first_half(model: PreTrainedModel) -> None:
    """Take gates from the first half of the columns of gate_up_proj instead of the even columns. This is done by
    permuting the columns.
    """
    for experts in expert_layers(model):
        for parameter in (experts.gate_up_proj, experts.gate_up_proj_bias):
            parameter.data = parameter.data.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def set_experts(model: PreTrainedModel, **attributes: float) -> None:
    for experts in expert_layers(model):
        for name, value in attributes.items():
            setattr(experts, name, value)


def set_attention_eps(model: PreTrainedModel) -> None:
    for attention in attentions(model):
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            if norm is not None:
                norm.variance_epsilon = model.config.rms_norm_eps


def ignore_groups(model: PreTrainedModel) -> None:
    for gate in gates(model):
        gate.topk_group = gate.num_group


def drop_bias(model: PreTrainedModel) -> None:
    for gate in gates(model):
        gate.e_score_correction_bias.zero_()


def drop_routed_scale(model: PreTrainedModel) -> None:
    for gate in gates(model):
        gate.routed_scaling_factor = 1.0


def drop_shared_experts(model: PreTrainedModel) -> None:
    for layer in text_model(model).layers:
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts.down_proj.weight.data.zero_()


def change_routing(model: PreTrainedModel, **changes: Any) -> None:
    """Replace the forward pass of DeepSeek and GLM routers by `route` with a changed rule. Without `changes`, the model
    computes the same logits as before.

    """
    for gate in gates(model):
        gate.forward = partial(route, gate, replace(routing(gate), **changes))


def mutations(config: PreTrainedConfig) -> dict[str, Callable[[PreTrainedModel], None]]:
    """Return the mutations that have an effect for this configuration, by name. A mutation changes a model in place."""
    if is_gemma(config):
        return gemma_mutations(config.get_text_config())
    if golden_v4.is_v4(config):
        return golden_v4.v4_mutations(config)
    return latent_mutations(config) if is_latent(config) else gqa_mutations(config)


def gqa_mutations(config: PreTrainedConfig) -> dict[str, Callable[[PreTrainedModel], None]]:
    table: dict[str, Callable[[PreTrainedModel], None]] = {"rope_in_pairs": rotate_pairs}
    rope = config.rope_parameters["rope_type"]
    if rope != "default":
        table[f"{rope}_interpolation_dropped"] = drop_yarn_interpolation
        table[f"{rope}_interpolates_all_frequencies"] = interpolate_all_frequencies
    if rope == "yarn":
        table["rotary_mscale_dropped"] = drop_rotary_mscale
    if config.rope_parameters.get("truncate") is False:
        table["yarn_ramp_of_whole_frequencies"] = truncate_yarn_ramp
    if config.model_type == "qwen3":
        table["qk_norms_dropped"] = drop_qk_norms
    if config.num_key_value_heads < config.num_attention_heads:
        table["kv_heads_dealt_round"] = deal_kv_heads_round
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        table["scores_scaled_by_the_hidden_size"] = scale_by_hidden_size
    if config.attention_bias:
        table["attention_biases_dropped"] = drop_attention_biases
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        table["windows_dropped"] = see_everything
        table["windows_on_the_other_layers"] = swap_windows
        table["windows_one_wider"] = see_one_more
    if config.model_type == "gpt_oss":
        table |= {
            "sinks_dropped": drop_sinks,
            "sinks_scaled_as_scores": scale_sinks,
            "router_bias_dropped": drop_router_biases,
            "weights_among_all_experts": weigh_among_all_experts,
            "expert_biases_dropped": drop_expert_biases,
            "gates_in_the_first_half": take_gates_from_the_first_half,
            "gates_not_clamped": partial(set_experts, limit=math.inf),
            "swiglu_alpha_is_one": partial(set_experts, alpha=1.0),
        }
    return table


def latent_mutations(config: PreTrainedConfig) -> dict[str, Callable[[PreTrainedModel], None]]:
    table: dict[str, Callable[[PreTrainedModel], None]] = {
        "rope_in_halves": rotate_halves,
        "attention_norms_use_rms_norm_eps": set_attention_eps,
        "routed_scale_dropped": drop_routed_scale,
        "shared_experts_dropped": drop_shared_experts,
    }
    if config.rope_parameters["rope_type"] == "yarn":
        table |= {
            "softmax_mscale_dropped": drop_softmax_mscale,
            "yarn_interpolation_dropped": drop_yarn_interpolation,
            "yarn_interpolates_all_frequencies": interpolate_all_frequencies,
        }
        if config.rope_parameters["mscale"] != config.rope_parameters["mscale_all_dim"]:
            table["rotary_mscale_dropped"] = drop_rotary_mscale
    if config.topk_group < config.n_group:
        table["groups_ignored"] = ignore_groups
    if is_sparse(config):
        table |= {
            "all_keys_attended": partial(change_indexing, extra=10**6),
            "one_key_more": partial(change_indexing, extra=1),
            "worst_keys_chosen": partial(change_indexing, sign=-1),
            "index_rope_dropped": partial(change_indexing, first_rotated=None),
            "index_rope_of_the_last_columns": partial(change_indexing, first_rotated=-config.qk_rope_head_dim),
            "index_rope_of_the_other_family": partial(change_indexing, paired=config.model_type != "glm_moe_dsa"),
            "index_relu_dropped": partial(change_indexing, relu=False),
            "index_weights_dropped": partial(change_indexing, weighted=False),
            "index_keys_not_centred": partial(change_indexing, centred=False),
            "choice_of_the_first_layer": share_first_choice,
            "choice_of_the_last_token": share_last_choice,
        }
    if "shared" in (getattr(config, "indexer_types", None) or []):
        table |= {
            "shared_layers_choose_anew": choose_anew,
            "shared_layers_attend_to_all_keys": partial(give_shared_layers, choose=every_key),
            "shared_layers_take_the_first_choice": share_the_first_choice,
        }
    if config.model_type != "deepseek_v2":
        if config.topk_group < config.n_group:
            table["group_score_is_the_best"] = partial(change_routing, best_in_group=1)
            table["masked_groups_score_zero"] = partial(change_routing, masked_score=0.0)
        table |= {
            "bias_dropped": drop_bias,
            "bias_in_weights": partial(change_routing, biased_weights=True),
            "topk_not_normalised": partial(change_routing, normalise=False),
        }
    else:
        table["topk_normalised"] = partial(change_routing, normalise=True)
        if config.topk_group < config.n_group:
            table["group_score_is_the_sum_of_two"] = partial(change_routing, best_in_group=2)
    return table


# --- mutations of Gemma 4


def change_all(change: Callable[[nn.Module], None], kind: str = "") -> Callable[[PreTrainedModel], None]:
    """Return a mutation that changes each attention module, or each attention module of layers of this kind."""

    def mutate(model: PreTrainedModel) -> None:
        for attention in attentions(model):
            if attention.layer_type.startswith(kind):
                change(attention)

    return mutate


def drop_value_norm(attention: nn.Module) -> None:
    if hasattr(attention, "v_norm"):
        attention.v_norm = nn.Identity()


def scale_scores(attention: nn.Module) -> None:
    attention.scaling = attention.head_dim**-0.5


def drop_embedding_scale(model: PreTrainedModel) -> None:
    text_model(model).embed_tokens.embed_scale.fill_(1.0)


def drop_ple_scale(model: PreTrainedModel) -> None:
    text_model(model).embed_tokens_per_layer.embed_scale.fill_(1.0)


def drop_layer_scalars(model: PreTrainedModel) -> None:
    for layer in text_model(model).layers:
        layer.layer_scalar.fill_(1.0)


def drop_soft_cap(model: PreTrainedModel) -> None:
    model.config.get_text_config().final_logit_softcapping = None


def see_one_more_local(model: PreTrainedModel) -> None:
    model.config.get_text_config().sliding_window += 1


def add_one_to_norms(model: PreTrainedModel) -> None:
    for name, parameter in text_model(model).named_parameters():
        if "norm" in name:
            parameter.data += 1


def rotate_all_columns(model: PreTrainedModel) -> None:
    rotary = text_model(model).rotary_emb
    base = model.config.get_text_config().rope_parameters["full_attention"]["rope_theta"]
    half = rotary.full_attention_inv_freq.shape[0]
    rotary.full_attention_inv_freq = base ** -(torch.arange(half) / half)


def drop_expert_scales(model: PreTrainedModel) -> None:
    for router in scaled_routers(model):
        router.per_expert_scale.data.fill_(1.0)


def drop_router_norm(model: PreTrainedModel) -> None:
    for router in scaled_routers(model):
        router.norm = nn.Identity()


def gemma_mutations(config: PreTrainedConfig) -> dict[str, Callable[[PreTrainedModel], None]]:
    table = {
        "value_norm_dropped": change_all(drop_value_norm),
        "scores_scaled_by_the_width": change_all(scale_scores),
        "embedding_scale_dropped": drop_embedding_scale,
        "layer_scalars_dropped": drop_layer_scalars,
        "soft_cap_dropped": drop_soft_cap,
        "windows_one_wider": see_one_more_local,
        "norm_weights_plus_one": add_one_to_norms,
        "global_rope_of_all_columns": rotate_all_columns,
    }
    if config.hidden_size_per_layer_input:
        table["ple_scale_dropped"] = drop_ple_scale
    if config.enable_moe_block:
        table |= {"expert_scales_dropped": drop_expert_scales, "router_norm_dropped": drop_router_norm}
    return table
