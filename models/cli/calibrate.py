"""Compute static scales of a quantised KV cache: `python scripts/calibrate.py --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich import box
from rich.table import Table

from pallas_attn.models.checkpoints import kv_scales_content, load_tokenizer
from pallas_attn.models.checkpoints.calibration import calibrate, check_inputs
from pallas_attn.models.cli.command_line import (
    Parser,
    StandardOutput,
    UsageError,
    as_usage_error,
    check_outputs,
    exit_status,
    integer,
    writing,
)
from pallas_attn.models.cli.model import load, name_of, read_config
from pallas_attn.models.cli.model_options import (
    KV_DTYPES,
    add_compilation_cache,
    add_computation,
    add_model,
    add_prompts,
    check_prompts,
    enable_compilation_cache,
)
from pallas_attn.models.cli.prompts import read_prompts
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import AttentionSettings, KVScales

PROG = "calibrate"

MOST_TOKENS = 10**8
"""Maximum value of --tokens. It bounds the memory of the random tokens, which are drawn before the model is loaded."""

DESCRIPTION = """\
Run a model on sample prompts and compute static scales of an int8 or fp8 cache
from the keys and values: one scale per KV head, or per channel of a KV head.
Prompts should be similar to the expected requests. The default, random tokens,
gives the least accurate scales."""

EPILOG = """\
examples:
  %(prog)s --model DIR --prompt-ids sample.json --kv-dtype int8 \\
      --out scales.safetensors
  {decode} --model DIR --kv-dtype int8 \\
      --kv-scales scales.safetensors --prompt "What is a page table?"

The file has k_scale and v_scale (float32, [layers, KV heads] or [layers, KV
heads, head width]), or k_scale.0, k_scale.1, ... of each layer if the heads of
layers differ. If all keys or values of a channel or head are zero, its scale
is 1.

exit status:
  0    written
  2    wrong input, or not enough device memory: one line on stderr has the
       reason
  3    any other failure, such as scales that cannot be written: stderr has the
       reason
  130  interrupted
"""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command line and return its exit status.

    Args:
      argv: arguments of the command; None for the arguments of the process.
      prog: name of the command in its help and errors.
    """
    return exit_status(prog, lambda: run(parse_options(argv, prog)))


def run(options: argparse.Namespace) -> int:
    """Compute scales with the options, write them to --out and print a summary. Return the exit status.

    Raises:
      UsageError: wrong options, or a wrong input file.
      Failure: the scales cannot be written or printed.
    """
    enable_compilation_cache(options.prog, options)
    with as_usage_error(ValueError, NotImplementedError, OSError):
        config = read_config(options)
        prompts = _prompts(options, config)
        check_inputs(config, prompts, KV_DTYPES[options.kv_dtype], options.scales, options.percentile)
        model = load(options, config, AttentionSettings())
    with as_usage_error(ValueError, MemoryError, jax.errors.JaxRuntimeError):
        scales = calibrate(model, prompts, KV_DTYPES[options.kv_dtype], options.scales, options.percentile)
    with writing("--out", options.out) as file:
        file.write(kv_scales_content(scales))
    console = StandardOutput()
    console.print(_table(f"{options.kv_dtype} scales of {name_of(options)}", scales))
    count = sum(map(len, prompts))
    console.print(f"{count:,} tokens in {len(prompts)} prompts; written to {options.out}", soft_wrap=True)
    return 0


def parse_options(argv: Sequence[str] | None, prog: str = PROG) -> argparse.Namespace:
    """Parse and check the options.

    Raises:
      UsageError: an option or a combination of options is wrong, or a file cannot be written.
    """
    options = _parser(prog).parse_args(argv)
    options.prog = prog
    check_prompts(options)
    if not 1 <= options.tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens: expected at least 1, at most {MOST_TOKENS}, got {options.tokens}")
    check_outputs({"--out": options.out})
    return options


def _parser(prog: str) -> Parser:
    is_script = prog == PROG
    decode = "run_decode.py" if is_script else f"{prog.rpartition(' ')[0]} decode"  # the command that reads the scales
    parser = Parser(f"{prog}.py" if is_script else prog, description=DESCRIPTION, epilog=EPILOG.format(decode=decode))
    add_model(parser.add_mutually_exclusive_group(required=True))
    prompts = parser.add_mutually_exclusive_group()
    add_prompts(prompts)
    prompts.add_argument(
        "--tokens", type=integer, default=512, metavar="N", help="number of random tokens (default: 512)"
    )
    add_computation(parser)
    add_compilation_cache(parser)
    parser.add_argument(
        "--kv-dtype", choices=("int8", "fp8"), default="int8", help="dtype of the cache (default: int8)"
    )
    parser.add_argument(
        "--scales",
        choices=("head", "channel"),
        default="channel",
        help="one scale per KV head, or per channel (default: channel)",
    )
    parser.add_argument(
        "--percentile",
        type=float,
        default=100.0,
        metavar="P",
        help="percentile of the magnitudes in a prompt that is stored as the largest int8 or fp8 number; larger"
        " magnitudes are clipped (default: 100, the maximum)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.safetensors", help="input of --kv-scales when decoding"
    )
    return parser


def _prompts(options: argparse.Namespace, config: ModelConfig) -> list[list[int]]:
    """Return the prompts of the options as token ids, or random tokens, split into prompts that fit the model."""
    given = read_prompts(options, None if options.prompt is None else load_tokenizer(options.model))
    if given is not None:
        return given
    drawn = np.random.default_rng(0).integers(config.vocab_size, size=options.tokens).tolist()
    longest = config.max_position_embeddings
    return [drawn[start : start + longest] for start in range(0, len(drawn), longest)]


def _table(title: str, scales: KVScales) -> Table:
    """Return a table with the smallest, median and largest scale of each layer."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layer", justify="right")
    for kind in ("keys", "values"):
        for header in (f"{kind}: least", "median", "most"):
            table.add_column(header, justify="right", no_wrap=True)
    for layer, of_kinds in enumerate(zip(scales.k, scales.v, strict=True)):
        cells = [f"{value:.3g}" for of_kind in of_kinds for value in np.percentile(of_kind, [0, 50, 100])]
        table.add_row(str(layer), *cells)
    return table
