"""Options of run_decode.py, and checks of the options that need no model."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from pallas_attn.models.cli.command_line import Parser, UsageError, add_switch, bounded, check_outputs, integer
from pallas_attn.models.cli.decode.sizes import CHAT_TOKENS, DEMO_STEP_TOKENS, STEP_TOKENS
from pallas_attn.models.cli.mesh import add_mesh, parse_mesh
from pallas_attn.models.cli.model_options import (
    KV_DTYPES,
    RANDOM_MODELS,
    add_compilation_cache,
    add_computation,
    add_model,
    add_prompts,
    check_prompts,
)
from pallas_attn.models.cli.processes import add_processes, check_processes
from pallas_attn.models.cli.speculate import add_speculate, parse_speculate
from pallas_attn.models.decoder import AttentionSettings
from pallas_attn.models.engine import SamplingParams

PROG = "run_decode"

MAX_TOKENS, CHAT_MAX_TOKENS = 32, 1024
"""Defaults of --max-tokens."""

USAGE = "%(prog)s [--model DIR] [--prompt TEXT ... | --chat] [options]"

DESCRIPTION = """\
Answer prompts with a model, or chat with it. Answers go to standard output;
progress, statistics and errors go to standard error. All prompts are decoded
together (continuous batching) over a paged cache of keys and values, and
prompts with equal prefixes share pages.

Default model: a small model with random weights. Default prompts: a batch of
prompts that share a prefix."""

EPILOG = """\
examples:
  one answer, printed while it is generated:
    %(prog)s --model DIR --prompt "What is a page table?" --max-tokens 64
  a chat:
    %(prog)s --model DIR --chat --system "Be brief."
  several answers, and a table of times and memory:
    %(prog)s --model DIR --prompt "What is a page?" "And a TLB?" --stats
  token ids instead of texts, and results in files:
    %(prog)s --model DIR --prompt-ids ids.json --json out.json
  sampling; draws do not depend on other requests:
    %(prog)s --model DIR --prompt Hello --temperature 0.8 --seed 7
  default model and prompts, with all tokens checked:
    %(prog)s --verify
  drafts from earlier text, or from the checkpoint's prediction module:
    %(prog)s --model DIR --speculate ngram:4
    %(prog)s --model DIR --speculate mtp:2
  small chunks and few pages, which preempt requests:
    %(prog)s --max-batched-tokens 16 --num-pages 24 --plot run.png
  heads, hidden columns and vocabulary on two devices:
    %(prog)s --model DIR --mesh tensor=2
  requests and experts on two devices:
    %(prog)s --model DIR --mesh data=2
  the same on two hosts, with I = 0 on one and I = 1 on the other; process 0
  prints the results:
    %(prog)s --model DIR --mesh data=2 --coordinator HOST:PORT \\
        --num-processes 2 --process-id I
  Mosaic kernels for supported calls, else XLA:
    %(prog)s --implementation mosaic,xla

notes:
  Example of a --prompt-ids file: [[1, 17, 23], [1, 17, 5, 6]]. Without a
  tokenizer, answers are printed as token ids. Control characters in answers
  are printed as escapes such as \\x1b; --json has the unchanged text.
  Programs are compiled before the first token, and stored for later runs.
  An output file is replaced when its content is complete; a pipe or device,
  such as /dev/stdout, is written directly.

exit status:
  0    decoded (and verified)
  1    --verify found a difference
  2    wrong input, or not enough device memory; nothing is decoded: the last
       line on stderr has the reason
  3    any other failure, such as a failed device or process, NaN or infinite
       logits, a result that cannot be written or printed, or not enough memory
       for --verify: stderr has the reason
  130  interrupted
If a run ends early, for example by Ctrl-C, the tokens decoded until then are
printed and written.
"""


def parse_options(argv: Sequence[str] | None, prog: str = PROG) -> argparse.Namespace:
    """Parse and check the options.

    Returns:
      The options, and attributes `prog` and `params` with the sampling parameters. Some options are converted:
      `implementation` is None or a tuple of names, `speculate` a SpeculateOption or None, `mesh` a dict of sizes or
      None, and `kv_dtype` the name of a dtype or None.

    Raises:
      UsageError: an option or a combination of options is wrong, or a file cannot be written.
    """
    options = _parser(prog).parse_args(argv)
    options.prog = prog
    check_prompts(options)
    _check_chat(options)
    if options.max_tokens is None:
        options.max_tokens = CHAT_MAX_TOKENS if options.chat else MAX_TOKENS
    convert_engine_options(options)
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
    check_processes(options)
    sized = options.max_batched_tokens is not None or options.prefill_buckets is not None
    if options.batch_invariant and not options.chunked_prefill and not sized:
        raise UsageError(
            "--batch-invariant with --no-chunked-prefill needs --max-batched-tokens: its default depends on the prompts"
        )
    _check_outputs(options)
    return options


def convert_engine_options(options: argparse.Namespace) -> None:
    """Check and convert the options of `add_engine`, `add_attention` and `add_mesh`.

    Raises:
      UsageError: an option or a combination of options is wrong.
    """
    sizes = ("page_size", "num_pages", "max_batched_tokens", "max_num_seqs", "max_prefill_seqs", "max_model_len")
    for flag in (*sizes, "index_topk"):
        size = getattr(options, flag)
        if size is not None and size < 1:
            raise UsageError(f"--{flag.replace('_', '-')}: expected at least 1, got {size}")
    options.implementation = _implementation(options.implementation)
    options.speculate = parse_speculate(options.speculate)
    options.mesh = parse_mesh(options.mesh)
    if options.kv_scales is not None and options.kv_dtype not in ("int8", "fp8"):
        raise UsageError("--kv-scales needs --kv-dtype int8 or fp8")
    options.kv_dtype = None if options.kv_dtype is None else KV_DTYPES[options.kv_dtype]


def _parser(prog: str) -> Parser:
    name = f"{prog}.py" if prog == PROG else prog
    parser = Parser(name, usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    model = parser.add_argument_group("model", f"default: --random {RANDOM_MODELS[0]}")
    add_model(model.add_mutually_exclusive_group())
    _add_prompts(parser.add_argument_group("prompts", "one request per prompt"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_outputs(parser.add_argument_group("results"))
    computation = parser.add_argument_group("computation")
    add_attention(computation)
    computation.add_argument(
        "--verify",
        action="store_true",
        help="compute every sequence again, uncached and unchunked, and compare all tokens",
    )
    add_compilation_cache(parser.add_argument_group("compilation"))
    add_engine(parser.add_argument_group("engine"), DEFAULT_SIZES)
    add_buckets(
        parser.add_argument_group("batch shapes", "one program is compiled for each shape"),
        decode_default="only --max-num-seqs if it is at most 64, else 64, 256, ... (factor 4) up to it",
        prefill_default="only --max-batched-tokens; 32, 128, 512, ... (factor 4) up to it if many requests wait for"
        " others",
    )
    add_mesh(parser.add_argument_group("several devices"))
    add_processes(parser.add_argument_group("several processes", "all with the same options except --process-id"))
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    prompts = group.add_mutually_exclusive_group()
    add_prompts(prompts)
    prompts.add_argument(
        "--chat",
        action="store_true",
        help="read messages from standard input, one per line, and answer each; needs a model with a chat template",
    )
    group.add_argument("--system", metavar="TEXT", help="system prompt of --chat")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        type=integer,
        metavar="N",
        help=f"maximum tokens generated per request (default: {MAX_TOKENS}; with --chat {CHAT_MAX_TOKENS})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 selects the most likely token (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=integer,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0 for all (default: 0)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with total probability P (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of every request (default: %(default)s)")
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


DEFAULT_SIZES = {
    "num_pages": "enough for all running requests",
    "max_batched_tokens": f"{STEP_TOKENS}, fewer if the prompts are shorter, more without chunked prefill;"
    f" {DEMO_STEP_TOKENS} for the default prompts and with --batch-invariant",
    "max_num_seqs": "4",
    "max_model_len": f"the model's limit; with --chat at most {CHAT_TOKENS}",
}
"""Descriptions of the default sizes of the engine."""


def add_engine(group: argparse._ArgumentGroup, default_sizes: Mapping[str, str]) -> None:
    """Add the options of the engine. `default_sizes` has the description of the default of each size."""
    group.add_argument(
        "--page-size", type=int, metavar="N", help="tokens per page (default: 16, or the smallest of the model)"
    )
    group.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="number of pages of the cache; if pages run out, requests are preempted"
        f" (default: {default_sizes['num_pages']})",
    )
    group.add_argument(
        "--max-batched-tokens",
        type=integer,
        metavar="N",
        help="maximum new tokens of a step, decode and prefill together"
        f" (default: {default_sizes['max_batched_tokens']})",
    )
    group.add_argument(
        "--max-num-seqs",
        type=integer,
        metavar="N",
        help=f"maximum running requests; others wait (default: {default_sizes['max_num_seqs']})",
    )
    group.add_argument(
        "--max-prefill-seqs",
        type=integer,
        metavar="N",
        help="maximum requests with prompt tokens in one step (default: --max-num-seqs, but at most 8)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"maximum tokens of a request, prompt and output (default: {default_sizes['max_model_len']})",
    )
    add_switch(group, "--chunked-prefill", "split long prompts over several steps", default=True)
    add_switch(group, "--prefix-caching", "share the pages of equal prefixes", default=True)
    group.add_argument(
        "--prefix-cache",
        type=Path,
        metavar="FILE",
        help="load cached prefixes from FILE if it exists, and save them at the end",
    )
    add_switch(
        group,
        "--recycling",
        "while a request runs, release its pages before the attention windows",
        default=True,
    )
    group.add_argument(
        "--cascade-attention",
        action=argparse.BooleanOptionalAction,
        help="read pages that all sequences of a decode step share, such as a system prompt, once per step instead of"
        " once per sequence if this saves enough reads; compiles more programs; not for latent attention, and not with"
        " --batch-invariant or --speculate (default: if supported)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="make logits and tokens of a request bitwise independent of other requests, for equal engine sizes;"
        " slower, because every step has the largest shape and prompts attend token by token",
    )
    add_speculate(group)


def add_buckets(group: argparse._ArgumentGroup, *, decode_default: str, prefill_default: str) -> None:
    """Add the options of the shapes of steps. The texts describe the defaults."""
    group.add_argument(
        "--decode-buckets",
        type=sizes,
        metavar="N[,N...]",
        help="numbers of requests that decode steps are padded to, ascending up to --max-num-seqs"
        f" (default: {decode_default})",
    )
    group.add_argument(
        "--prefill-buckets",
        type=sizes,
        metavar="N[,N...]",
        help="numbers of prompt tokens that steps are padded to, ascending up to --max-batched-tokens"
        f" (default: {prefill_default})",
    )


def add_attention(group: argparse._ArgumentGroup) -> None:
    """Add the options of attention, dtypes and the cache's dtype."""
    add_computation(group)
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="dtype of the cache; int8 is for keys and values only, not for latents (default: --dtype)",
    )
    group.add_argument(
        "--kv-scales",
        type=Path,
        metavar="FILE",
        help="static scales of an int8 or fp8 cache: safetensors file with k_scale and v_scale, [layers, KV heads] or"
        " [layers, KV heads, head width] (default: a scale per token and head, computed when the token is written)",
    )
    group.add_argument(
        "--implementation",
        default="auto",
        metavar="NAME[,NAME...]",
        help="implementation of attention: mosaic (Pallas kernels for Hopper), triton (Triton kernels for Ampere and"
        " newer), xla (any device), reference (slow); several names are tried in order (default: auto, the first of"
        " mosaic, triton and xla that supports the call on this device)",
    )
    group.add_argument(
        "--mla",
        choices=("auto", "absorb", "expand"),
        default="auto",
        help="form of latent attention: attend to the latents (absorb), or compute keys and values from them (expand)"
        " (default: auto: absorb for decode, expand for prefill)",
    )
    group.add_argument(
        "--index-topk",
        type=int,
        metavar="N",
        help="number of selected keys of sparse attention, for experiments (default: from config.json)",
    )


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stats", action="store_true", help="print a table of times, tokens and memory to stderr")
    group.add_argument("--quiet", action="store_true", help="print only answers and errors: no progress, no statistics")
    group.add_argument("--json", type=Path, metavar="OUT", help="all results and statistics")
    group.add_argument("--dump-logits", type=Path, metavar="OUT.npz", help="logits of every computed prompt token")
    group.add_argument("--plot", type=Path, metavar="OUT.png", help="plot of steps, pages and latencies")
    group.add_argument("--profile", type=Path, metavar="DIR", help="a jax.profiler trace of the run")
    group.add_argument("--no-progress", action="store_true", help="no progress of compilation and decoding")


def attention_settings(options: argparse.Namespace) -> AttentionSettings:
    """Return the settings of `add_attention`."""
    return AttentionSettings(
        mla=options.mla,
        implementation=options.implementation,
        index_topk=options.index_topk,
        batch_invariant=options.batch_invariant,
    )


def sizes(given: str) -> tuple[int, ...]:
    """Parse comma-separated integers. The function is named for argparse, whose errors say "invalid sizes value"."""
    return tuple(bounded(int(size)) for size in given.split(","))


def _implementation(given: str) -> tuple[str, ...] | None:
    """Return the argument `implementation` of operations for a value of --implementation."""
    return None if given == "auto" else tuple(name.strip() for name in given.split(","))


def _check_chat(options: argparse.Namespace) -> None:
    """Raise UsageError if --chat or --system is given with an option that excludes it."""
    if not options.chat:
        if options.system is not None:
            raise UsageError("--system needs --chat")
        return
    if options.model is None:
        raise UsageError("--chat needs a --model with a chat template")
    excluded = ("verify", "json", "dump_logits", "plot", "profile", "prefix_cache", "coordinator")
    for name in excluded:
        if getattr(options, name):
            raise UsageError(f"--chat: not with --{name.replace('_', '-')}")


def _check_outputs(options: argparse.Namespace) -> None:
    """Check the options that name output files.

    Raises:
      UsageError: a file or the folder of --profile cannot be written, --prefix-cache is given with an option that
        excludes it, or --plot is given and matplotlib is not installed.
    """
    outputs = {"--json": options.json, "--dump-logits": options.dump_logits, "--plot": options.plot}
    check_outputs(outputs | {"--prefix-cache": options.prefix_cache})
    if options.prefix_cache is not None and not options.prefix_caching:
        raise UsageError("--prefix-cache: not with --no-prefix-caching")
    if options.prefix_cache is not None and options.coordinator is not None:
        raise UsageError("--prefix-cache: not with --coordinator, pages on devices of other processes cannot be saved")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'pallas_attn[plot]'")
    if options.profile is not None:
        try:
            options.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--profile: cannot make {options.profile}: {error.strerror}") from error
