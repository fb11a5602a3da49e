"""Definitions of the options for model and prompts. `cli.model` loads the model, `cli.prompts` reads the prompts."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from pallas_attn.models import compilation_cache
from pallas_attn.models.cli.command_line import UsageError
from pallas_attn.models.compilation_cache import ENVIRONMENT_VARIABLE

RANDOM_MODELS = (
    *("v3-tiny", "v32-tiny", "v4-tiny", "glm-tiny", "v2-lite-tiny"),
    *("qwen3-tiny", "gpt-oss-tiny", "gemma4-tiny"),
)
"""Values of --random: names of configurations in `pallas_attn.models.config`."""

KV_DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "int8": "int8", "fp8": "float8_e4m3fn"}
"""Values of --kv-dtype, and the names of their dtypes in jax."""


def add_model(group: argparse._MutuallyExclusiveGroup) -> None:
    """Add --model and --random."""
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face directory: config.json and safetensors")
    group.add_argument(
        "--random",
        choices=RANDOM_MODELS,
        metavar="NAME",
        help=f"a small model with random weights: {', '.join(RANDOM_MODELS)}",
    )


def add_prompts(group: argparse._MutuallyExclusiveGroup) -> None:
    """Add --prompt and --prompt-ids."""
    group.add_argument(
        "--prompt", nargs="+", metavar="TEXT", help="texts; the model's chat template is applied if it exists"
    )
    group.add_argument("--prompt-ids", type=Path, metavar="FILE", help="a JSON list of lists of token ids")


def add_computation(group: argparse._ActionsContainer) -> None:
    """Add --dtype and --head-windows."""
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights, activations and cache (default: the checkpoint's; float32 for a random model)",
    )
    group.add_argument(
        "--head-windows",
        type=Path,
        metavar="FILE",
        help="attention windows instead of the model's: a JSON list with one entry per layer: null for no window, a"
        ' number of newest tokens, or {"window": [...], "sink_tokens": [...]} with one entry per KV head, where window'
        " null means no window",
    )


def add_compilation_cache(group: argparse._ActionsContainer) -> None:
    """Add --compilation-cache."""
    group.add_argument(
        "--compilation-cache",
        metavar="DIR|off",
        help="folder of compiled programs, with which later runs start faster; off for none (default:"
        f" ${ENVIRONMENT_VARIABLE}, else ~/.cache/pallas_attn/xla). JAX_COMPILATION_CACHE_DIR overrides it",
    )


def enable_compilation_cache(prog: str, options: argparse.Namespace) -> None:
    """Use the folder of --compilation-cache. If it cannot be used, print a warning of the command `prog`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compilation_cache.enable_compilation_cache(options.compilation_cache)
    for warning in caught:
        print(f"{prog}: warning: {warning.message}", file=sys.stderr)


def check_prompts(options: argparse.Namespace) -> None:
    """Raise UsageError if --prompt is given without --model, whose tokenizer must encode the texts."""
    if options.prompt is not None and options.model is None:
        raise UsageError("--prompt needs a --model with a tokenizer; a random model takes --prompt-ids")
