"""Model and prompt options of several command lines. `cli.model` and `cli.prompts` read them."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.cli.command_line import UsageError

RANDOM_MODELS = ("v3-tiny", "v32-tiny", "glm-tiny", "v2-lite-tiny", "qwen3-tiny", "gpt-oss-tiny")

KV_DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "int8": "int8", "fp8": "float8_e4m3fn"}
"""Values of --kv-dtype and their dtypes."""


def add_model(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face directory: config.json and safetensors")
    group.add_argument("--random", choices=RANDOM_MODELS, help="a small model with random weights")


def add_prompts(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--prompt", nargs="+", metavar="TEXT", help="texts; the model's chat template is applied if it exists"
    )
    group.add_argument("--prompt-ids", type=Path, metavar="FILE", help="a JSON list of lists of token ids")


def add_computation(group: argparse._ActionsContainer) -> None:
    """Add the options for the model's dtype and windows."""
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights, activations and cache (default: the checkpoint's; float32 for a random model)",
    )
    group.add_argument(
        "--head-windows",
        type=Path,
        metavar="FILE",
        help="windows of each KV head, replacing the model's windows: a JSON list with one entry per layer: null for no"
        ' window, a number of newest tokens, or {"window": [...], "sink_tokens": [...]} with one value per KV head,'
        " null for no window",
    )


def check_prompts(options: argparse.Namespace) -> None:
    """Raise UsageError for text prompts without a model to encode them."""
    if options.prompt is not None and options.model is None:
        raise UsageError("--prompt needs a --model with a tokenizer; a random model takes --prompt-ids")
