"""Command line of run_decode, and the checks that need no model."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from models.engine import SamplingParams
from scripts.cli.command_line import Parser, UsageError, check_outputs
from scripts.cli.mesh import add_mesh, parse_mesh
from scripts.cli.model_options import (
    KV_DTYPES,
    RANDOM_MODELS,
    add_computation,
    add_model,
    add_prompts,
    check_prompts,
)
from scripts.cli.processes import add_processes, check_processes
from scripts.cli.speculate import add_speculate, parse_speculate

PROG = "run_decode"

DESCRIPTION = """\
Decodes a batch of prompts with continuous batching over a paged cache: prompts are computed in chunks beside
the requests that decode already, pages of equal prefixes are shared, and a table tells what it took.

Without a model, a small one with random weights is made up; without prompts, a batch with a shared prefix is."""

EPILOG = """\
examples:
  run_decode.py --verify                                     the demonstration, its tokens checked
  run_decode.py --model DIR --prompt "What is a page table?" "And a TLB?" --max-tokens 64
  run_decode.py --model DIR --prompt-ids ids.json --json out.json --dump-logits out.npz
  run_decode.py --max-batched-tokens 16 --num-pages 24 --plot run.png
                                                             small chunks and few pages, to see requests preempted
  run_decode.py --temperature 0.8 --top-p 0.9 --seed 7       sampled: the same tokens in any batch
  run_decode.py --speculate ngram:4 --verify                 drafts looked up in the text so far: the same tokens
  run_decode.py --model DIR --speculate mtp:2                drafts by the checkpoint's own prediction module
  run_decode.py --model DIR --mesh tensor=2                  heads, hidden widths and vocabulary over two devices
  run_decode.py --model DIR --mesh data=2                    requests over two devices, and experts
  run_decode.py --model DIR --mesh data=2 --coordinator HOST:PORT --num-processes 2 --process-id I
                                                             the same on two machines, I = 0 and 1; 0 has the results
  run_decode.py --implementation mosaic,xla                  kernels where they can, else the portable form

Compilation is done before the run and timed apart. A file of --prompt-ids looks like [[1, 17, 23], [1, 17, 5, 6]].
Results replace a file once they are complete; a pipe or device, such as /dev/stdout, is written to as it is.

exit status:
  0  decoded (and verified)     1  --verify found a difference     130  interrupted
  2  wrong input, or more than the device holds: one line on stderr says what, and nothing is decoded
  3  anything else that fails, such as a device that does, another process, logits that are NaN or infinite, a result
     that cannot be written or printed, or --verify for want of memory: stderr says what
Whatever ends a run early, Ctrl-C too, what was decoded until then is printed and written.
"""


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options.

    The result also has `params` (sampling parameters), `implementation` in the form of the operations, and `kv_dtype`
    in the form of the engine.

    Raises:
      UsageError: an option or a combination of options is wrong, or a file cannot be written.
    """
    options = _parser().parse_args(argv)
    check_prompts(options)
    sizes = ("page_size", "num_pages", "max_batched_tokens", "max_num_seqs", "max_prefill_seqs", "max_model_len")
    for flag in (*sizes, "index_topk"):
        size = getattr(options, flag)
        if size is not None and size < 1:
            raise UsageError(f"--{flag.replace('_', '-')}: expected at least 1, got {size}")
    if options.model is None and options.random is None:
        options.random = RANDOM_MODELS[0]
    try:
        options.params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    options.implementation = _implementation(options.implementation)
    options.speculate = parse_speculate(options.speculate)
    options.mesh = parse_mesh(options.mesh)
    check_processes(options)
    sized = options.max_batched_tokens is not None or options.prefill_buckets is not None
    if options.batch_invariant and not options.chunked_prefill and not sized:
        raise UsageError(
            "--batch-invariant with --no-chunked-prefill needs --max-batched-tokens, which must not suit the prompts"
        )
    if options.kv_scales is not None and options.kv_dtype not in ("int8", "fp8"):
        raise UsageError("--kv-scales needs --kv-dtype int8 or fp8")
    options.kv_dtype = None if options.kv_dtype is None else KV_DTYPES[options.kv_dtype]
    _check_outputs(options)
    return options


def _parser() -> Parser:
    parser = Parser(PROG, description=DESCRIPTION, epilog=EPILOG)
    model = parser.add_argument_group("model", f"default: --random {RANDOM_MODELS[0]}")
    add_model(model.add_mutually_exclusive_group())
    add_prompts(parser.add_argument_group("prompts", "a request each").add_mutually_exclusive_group())
    _add_sampling(parser.add_argument_group("sampling"))
    _add_engine(parser.add_argument_group("engine"))
    add_processes(parser.add_argument_group("several processes", "each with the same options but --process-id"))
    _add_attention(parser.add_argument_group("computation"))
    _add_outputs(parser.add_argument_group("results"))
    return parser


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        type=int,
        default=32,
        metavar="N",
        help="tokens to generate a request, at most (default: 32)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default: %(default)s)"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens, 0 from all (default: 0)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that together have probability P (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of every request's draws (default: %(default)s)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="generate on past an end-of-sequence token")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page holds (default: 16)")
    group.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="pages of the pool; with too few, requests are preempted (default: what those that run at once can need)",
    )
    group.add_argument(
        "--max-batched-tokens",
        type=int,
        metavar="N",
        help="new tokens of a step, decode and prefill together (default: 64, more if a prompt may not be chunked)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests that run at once, the others wait (default: 4)"
    )
    group.add_argument(
        "--max-prefill-seqs",
        type=int,
        metavar="N",
        help="requests whose prompts one step computes (default: as many as run at once, but at most 8)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of a request at most, prompt and output (default: the model's limit)",
    )
    group.add_argument(
        "--decode-buckets",
        type=sizes,
        metavar="N[,N...]",
        help="requests that a decode step is padded to, ascending up to --max-num-seqs; each is compiled (default:"
        " powers of 2, or one size if it is small)",
    )
    group.add_argument(
        "--prefill-buckets",
        type=sizes,
        metavar="N[,N...]",
        help="prompt tokens that a step is padded to, ascending up to --max-batched-tokens; each is compiled (default:"
        " powers of 4, or one size if it is small)",
    )
    group.add_argument(
        "--chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="spread long prompts over steps (default: yes)",
    )
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the pages of equal prefixes (default: yes)",
    )
    group.add_argument(
        "--prefix-cache",
        type=Path,
        metavar="FILE",
        help="begin with the pages of equal prefixes that FILE has, if there is one, and write it at the end",
    )
    group.add_argument(
        "--recycling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give back the pages that windows leave behind while a request runs (default: yes)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="logits and tokens of the same bits in any company, for equal sizes of the engine; slower, since every"
        " step has the largest shape and prompts attend token by token",
    )
    add_speculate(group)
    add_mesh(group)


def _add_attention(group: argparse._ArgumentGroup) -> None:
    add_computation(group)
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="of the cache; int8 only for keys and values, not for latents (default: as --dtype)",
    )
    group.add_argument(
        "--kv-scales",
        type=Path,
        metavar="FILE",
        help="static scales of an int8 or fp8 cache: safetensors of k_scale and v_scale, [layers, KV heads] or [layers,"
        " KV heads, head width] (default: a scale for every token and head, taken when it is written)",
    )
    group.add_argument(
        "--implementation",
        default="auto",
        metavar="NAME[,NAME...]",
        help="what attention runs on: mosaic, xla, reference; several are tried in the order given (default:"
        " auto, the best that runs here)",
    )
    group.add_argument(
        "--mla",
        choices=("auto", "absorb", "expand"),
        default="auto",
        help="of a model with latent attention: attend to the latents themselves, or to keys and values made of them"
        " (default: auto, which absorbs for decode and expands for prefill)",
    )
    group.add_argument(
        "--index-topk",
        type=int,
        metavar="N",
        help="of a model with sparse attention, for experiments: keys attended to (default: what config.json says)",
    )
    group.add_argument(
        "--verify", action="store_true", help="decode again, uncached and unchunked, and compare every token"
    )


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="OUT", help="all results, and what the table says")
    group.add_argument("--dump-logits", type=Path, metavar="OUT.npz", help="logits of every prompt token computed")
    group.add_argument("--plot", type=Path, metavar="OUT.png", help="steps, pages and latencies in a picture")
    group.add_argument("--profile", type=Path, metavar="DIR", help="a jax.profiler trace of the run")
    group.add_argument("--no-progress", action="store_true", help="no progress bar, though stderr is a terminal")


def sizes(given: str) -> tuple[int, ...]:
    """Parse comma-separated sizes. argparse shows the name of this function in errors."""
    return tuple(int(size) for size in given.split(","))


def _implementation(given: str) -> tuple[str, ...] | None:
    return None if given == "auto" else tuple(name.strip() for name in given.split(","))


def _check_outputs(options: argparse.Namespace) -> None:
    outputs = {"--json": options.json, "--dump-logits": options.dump_logits, "--plot": options.plot}
    check_outputs(outputs | {"--prefix-cache": options.prefix_cache})
    if options.prefix_cache is not None and not options.prefix_caching:
        raise UsageError("--prefix-cache: not with --no-prefix-caching")
    if options.prefix_cache is not None and options.coordinator is not None:
        raise UsageError("--prefix-cache: not with --coordinator, pages on devices of other processes cannot be saved")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    if options.profile is not None:
        try:
            options.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--profile: cannot make {options.profile}: {error.strerror}") from error
