"""A tiny model with a tokenizer and a chat template, for tests of `LLM`.

The tokenizer has the 256 bytes, a few longer tokens and special tokens. The model has more tokens than the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pallas_attn.models.checkpoints import save_random_checkpoint
from pallas_attn.models.config import GQAConfig
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.llm import LLM
from scripts.tools.tokenizer_layouts import BYTES, added, byte_level

EOS, USER, ASSISTANT = BYTES, BYTES + 1, BYTES + 2
"""Ids of the special tokens </s>, <user> and <assistant>."""

VOCAB_SIZE = 288

CONFIG = GQAConfig(
    model_type="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_ids=(EOS,),
)

CHAT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' if m.role == 'assistant' else '' }}"
    "{{ m.content }}{% endfor %}{% if suffix is defined %}{{ suffix }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SIZES: dict[str, Any] = {
    "num_pages": 96,
    "page_size": 4,
    "max_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "decode_buckets": (4,),
    "prefill_buckets": (32,),
    "separate_prefill": False,
}
"""Options of `LLM` with which few steps are compiled."""

QUICK = AttentionSettings(implementation="reference")


def write_model(folder: Path) -> Path:
    """Write the model to a folder."""
    save_random_checkpoint(folder, CONFIG, seed=2)
    tokens = [added(text, BYTES + i) for i, text in enumerate(("</s>", "<user>", "<assistant>"))]
    (folder / "tokenizer.json").write_text(json.dumps(byte_level(*tokens)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": CHAT, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def load(model: Path | str, **options: Any) -> LLM:
    return LLM(model, settings=QUICK, **{**SIZES, **options})
