"""Write tests/goldens/rope.json: rotary embeddings that Hugging Face transformers makes of entries of a config.json.

    pip install torch==2.13.0 transformers==5.23.0
    python -m scripts.tools.rope_goldens [--out tests/goldens/rope.json]

`families` has all other entries of a config.json for each family. `cases` has the entries of the rotary embedding, and
the results for each family: `inv_freq` (radians per position of each pair), `attention_factor` (factor of cos and sin)
and `scale` (factor of query-key products). Families with equal results are listed together.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
from pathlib import Path
from typing import Any

_LAYERS = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
_GQA = _LAYERS | {"num_key_value_heads": 2, "head_dim": 16}
_LATENT = _LAYERS | {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_INDEXER = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "sliding_window": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GQA),
    "qwen3": ("Qwen3", _GQA),
    "gpt_oss": ("GptOss", _GQA | _EXPERTS),
    "deepseek_v2": ("DeepseekV2", _LATENT),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "deepseek_v32": ("DeepseekV32", _LATENT | _INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", _LATENT | _INDEXER),
}
"""Prefix of the class names, and all entries except the rotary embedding, by model_type."""

_THETA = {"rope_theta": 500.0}
_DEFAULT, _LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


def _long(length: int) -> dict[str, int]:
    return {"original_max_position_embeddings": length}


CASES: dict[str, dict[str, Any]] = {
    "default, theta outside": {**_THETA, "rope_scaling": _DEFAULT},
    "default, theta inside": {"rope_parameters": {**_DEFAULT, **_THETA}},
    "default, no scaling": {**_THETA, "rope_scaling": None, "rope_parameters": _DEFAULT},
    "default, full rotation": {**_THETA, "rope_scaling": _DEFAULT, "partial_rotary_factor": 1.0},
    "linear": {**_THETA, "rope_scaling": _LINEAR},
    "dynamic": {**_THETA, "rope_scaling": _DYNAMIC},
    "longrope": {**_THETA, "rope_scaling": {**_LONGROPE, **_long(64)}},
    **{
        f"{name}, {where}": {**_THETA, **entries}
        for name, rope in (("yarn", _YARN), ("llama3", _LLAMA3))
        for where, entries in {
            "no length": {"rope_scaling": rope},
            "length inside": {"rope_scaling": {**rope, **_long(64)}},
            "length outside": {"rope_scaling": rope, **_long(64)},
            "equal lengths": {"rope_scaling": {**rope, **_long(64)}, **_long(64)},
            "longer outside": {"rope_scaling": {**rope, **_long(64)}, **_long(512)},
            "longer inside": {"rope_scaling": {**rope, **_long(512)}, **_long(64)},
            "longer inside, new entries": {"rope_parameters": {**rope, **_THETA, **_long(512)}, **_long(64)},
            "old and new entries": {"rope_scaling": {**rope, **_long(64)}, "rope_parameters": {**rope, **_long(64)}},
        }.items()
    },
    "yarn, old name of the type": {**_THETA, "rope_scaling": {"type": "yarn", "factor": 4.0, **_long(64)}},
    "yarn, one temperature": {**_THETA, "rope_scaling": {**_YARN, **_long(64), "mscale": 0.5}},
    "yarn, temperatures": {**_THETA, "rope_scaling": {**_YARN, **_long(64), "mscale": 0.5, "mscale_all_dim": 0.8}},
    "yarn, factor of cos and sin": {
        **_THETA,
        "rope_scaling": {**_YARN, **_long(64), "mscale": 0.5, "mscale_all_dim": 0.8, "attention_factor": 1.7},
    },
    "yarn, boundaries": {
        **_THETA,
        "rope_scaling": {**_YARN, **_long(64), "beta_fast": 8, "beta_slow": 0.5, "truncate": False},
    },
}
"""Entries of config.json by name of the case."""


def rotary_embedding(family: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers computes for a config.json of a family with these entries."""
    prefix, base = FAMILIES[family]
    folder = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{folder}.configuration_{family}")
    modeling = importlib.import_module(f"{folder}.modeling_{family}")
    config = getattr(configuration, f"{prefix}Config").from_dict(copy.deepcopy({**base, **entries}))
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    scale = config.head_dim**-0.5
    if hasattr(modeling, "yarn_apply_mscale"):
        scale = modeling.yarn_apply_mscale(config.rope_parameters, config.qk_head_dim**-0.5)
    numbers = {"attention_factor": rotary.attention_scaling, "scale": scale}
    return {"inv_freq": [float(f"{x:.7g}") for x in rotary.inv_freq.tolist()], **numbers}


def results(entries: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of all families for these entries."""
    found: list[dict[str, Any]] = []
    for family in FAMILIES:
        result = rotary_embedding(family, entries)
        same = next((other for other in found if {**other, **result} == other), None)
        if same is None:
            found.append({"families": [family], **result})
        else:
            same["families"].append(family)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/goldens/rope.json"))
    out: Path = parser.parse_args().out
    families = {family: {"model_type": family, **base} for family, (_, base) in FAMILIES.items()}
    cases = [{"case": name, "entries": entries, "results": results(entries)} for name, entries in CASES.items()]
    lines = ",\n".join(map(json.dumps, cases))
    out.write_text(f'{{"families": {json.dumps(families)},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
