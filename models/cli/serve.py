"""Serve a model over HTTP with the API of OpenAI: `pallas-attn serve --help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.cli.command_line import (
    FAILED,
    Parser,
    UsageError,
    add_switch,
    as_usage_error,
    exit_status,
    integer,
)
from pallas_attn.models.cli.decode.options import (
    add_attention,
    add_buckets,
    add_engine,
    attention_settings,
    convert_engine_options,
)
from pallas_attn.models.cli.decode.sizes import engine_fields, rounded_up
from pallas_attn.models.cli.mesh import add_mesh, mesh_of
from pallas_attn.models.cli.model import choose_page_size, load, name_of, read_config
from pallas_attn.models.cli.model_options import RANDOM_MODELS, add_compilation_cache, enable_compilation_cache
from pallas_attn.models.cli.output_files import check_output
from pallas_attn.models.cli.prefill import (
    add_prefill,
    check_prefill_options,
    connect_workers,
    is_loopback,
    listen_for_servers,
    run_worker,
)
from pallas_attn.models.cli.prefix_cache import load_prefixes, save_prefixes
from pallas_attn.models.cli.speculate import announce_module, make_speculation
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.config.json_files import read_json
from pallas_attn.models.engine import EngineConfig
from pallas_attn.models.llm import LLM, SamplingParams, model_folder
from pallas_attn.models.server import http_process
from pallas_attn.models.server.engine_thread import EngineThread
from pallas_attn.models.server.formats import REASONING, family_of
from pallas_attn.models.server.options import ServerLimits, ServerOptions
from pallas_attn.models.server.server import listen
from pallas_attn.models.server.tool_calls import PARSERS

PROG = "pallas-attn serve"

KEYS_VARIABLE = "PALLAS_ATTN_API_KEY"
"""Environment variable with API keys, separated by commas."""

_BACKLOG = 2048  # connections that wait until the HTTP server has started

MODEL_LEN, NUM_SEQS, STEP_TOKENS = 8192, 16, 512
"""Defaults of --max-model-len, if the model's limit is not less, --max-num-seqs and --max-batched-tokens."""

DESCRIPTION = """\
Serve a model over HTTP: /v1/completions and /v1/chat/completions of the API of
OpenAI, with streaming, tools, JSON schemas and log probabilities, metrics for
Prometheus, and a page for chats at /."""

EPILOG = """\
examples:
  serve a model of the Hugging Face Hub at http://127.0.0.1:8000:
    %(prog)s Qwen/Qwen3-8B
  for other hosts, with API keys, one per line of a file:
    %(prog)s DIR --host 0.0.0.0 --api-key-file keys.txt
  a request:
    curl http://127.0.0.1:8000/v1/completions \\
        -H 'Content-Type: application/json' \\
        -d '{"prompt": "The capital of France is", "max_tokens": 8}'

exit status:
  0    stopped by SIGTERM or Ctrl-C
  2    wrong input, or not enough device memory; one line on stderr has the
       reason
  3    the engine has failed, or another failure: stderr has the reason
"""

_OF_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Entries of generation_config.json that replace OpenAI's defaults."""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command line and return its exit status.

    Args:
      argv: arguments of the command; None for the arguments of the process.
      prog: name of the command in its help and errors.
    """
    return exit_status(prog, lambda: run(parse_options(argv, prog)))


def run(options: argparse.Namespace) -> int:
    """Load the model and serve it until a signal. Return the exit status.

    Raises:
      UsageError: wrong options, or a wrong input file.
      Failure: the engine has failed, or the prefix cache cannot be saved.
    """
    http_process.log_to_stderr()
    enable_compilation_cache(options.prog, options)
    if options.prefill_listen is not None:
        return _run_worker(options)
    with as_usage_error(OSError, prefix=f"--host, --port: cannot listen on {options.host}:{options.port}: "):
        listener = listen(options.host, options.port)
    with listener:
        llm, server_options, at_end = _load(options)
        workers = connect_workers(options, llm.engine)
        _say(options, f"loaded {options.served_model_name[0]}; compiling")
        listener.listen(_BACKLOG)
        own, end = socket.socketpair()
        with end:
            engine = EngineThread(llm, own, server_options.limits, at_end, workers, starts_checkers=True)
            process = http_process.start(server_options, listener, end)
        _say_address(options, listener)
    status = _wait(process, engine)
    if status not in (0, http_process.FAILED):
        print(f"{options.prog}: error: the HTTP server has ended with status {status}", file=sys.stderr, flush=True)
        status = FAILED
    if engine.thread_runs():  # a step or the compilation has not ended
        os._exit(status)
    return status


def _run_worker(options: argparse.Namespace) -> int:
    """Compute prompts of a server until a signal. Return the exit status."""
    with listen_for_servers(options) as listener:
        llm, _, at_end = _load(options)
        _say(options, f"loaded {options.served_model_name[0]}; compiling")
        run_worker(options, llm.engine, listener)
        at_end()
    return 0


def _wait(process: subprocess.Popen[bytes], engine: EngineThread) -> int:
    """Wait for the end of the HTTP server, which SIGTERM and SIGINT stop. Return its exit status."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, lambda received, _: signals.put(received)) for number in numbers]
    try:
        while process.poll() is None:
            with contextlib.suppress(queue.Empty):
                signals.get(timeout=0.1)
                engine.request_stop()
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    return process.returncode


def _load(options: argparse.Namespace) -> tuple[LLM, ServerOptions, Callable[[], object]]:
    """Return the loaded model, the options of the HTTP server, and the function `at_end` of `EngineThread`."""
    if options.model is not None:
        with as_usage_error(ValueError):
            options.model = model_folder(options.model, options.revision)
    with as_usage_error(ValueError, NotImplementedError, OSError, RuntimeError):
        config, defaults = announce_module(options, read_config(options)), _defaults(options)
        choose_page_size(options, config)
        folder = options.model
        tokenizer = None if folder is None else load_tokenizer(folder)
        engine_config = _engine_config(options, config)
        model = load(options, config, attention_settings(options), engine_config.mesh)
        options.max_tokens = engine_config.max_model_len  # `make_speculation` limits the number of drafts with it
        speculate = make_speculation(options, model, num_prompts=2**20)
    with as_usage_error(ValueError, NotImplementedError, MemoryError, jax.errors.JaxRuntimeError):
        llm = LLM.of_model(model, dataclasses.replace(engine_config, speculate=speculate), tokenizer=tokenizer)
    template = None if tokenizer is None else tokenizer.chat_template
    families = family_of(config.model_type, template)
    for name in ("reasoning", "tool_calls"):
        if (given := getattr(options, name)) is not None:
            families = families._replace(**{name: None if given == "none" else given})
    if options.served_model_name is None:
        options.served_model_name = [options.given_name or name_of(options)]
    server_options = ServerOptions(
        names=options.served_model_name,
        max_len=llm.engine.max_sequence_len,
        families=families,
        api_keys=options.api_keys,
        allowed_origins=options.allow_origin,
        allowed_hosts=options.allowed_host if options.allowed_host or is_loopback(options.host) else None,
        grace_s=options.grace,
        defaults=defaults,
        access_log=options.access_log,
        limits=ServerLimits(**{field.name: getattr(options, field.name) for field in _LIMITS.values()}),
        tokenizer=folder,
        text_workers=options.text_workers,
        prog=options.prog,
    )
    if options.prefix_cache is None:
        return llm, server_options, lambda: None
    load_prefixes(llm.engine, options.prefix_cache)
    return llm, server_options, functools.partial(save_prefixes, llm.engine, options.prefix_cache)


def _engine_config(options: argparse.Namespace, config: ModelConfig) -> EngineConfig:
    """Return the configuration of the engine."""
    num_seqs = options.max_num_seqs or NUM_SEQS
    longest = options.max_model_len or min(config.max_position_embeddings, MODEL_LEN)
    return EngineConfig(
        num_pages=options.num_pages or rounded_up(num_seqs * -(-longest // options.page_size)),
        max_batched_tokens=options.max_batched_tokens or max(STEP_TOKENS, num_seqs),
        max_num_seqs=num_seqs,
        max_model_len=longest,
        max_logprobs=options.max_logprobs,
        mesh=mesh_of(options.mesh),
        freeze_objects=True,
        background_compilation=options.background_compilation,
        **engine_fields(options),
    )


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters of generation_config.json.

    Raises:
      UsageError: the file has wrong values.
    """
    path = None if options.model is None else options.model / "generation_config.json"
    if path is None or not options.generation_config or not path.is_file():
        return {}
    with as_usage_error(ValueError, OSError, prefix=f"{path}: "):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("expected a JSON object")
        given: dict[str, Any] = {name: content[name] for name in _OF_GENERATION_CONFIG if content.get(name) is not None}
        if content.get("do_sample") is False:
            given = {"temperature": 0.0}
        SamplingParams(**given)
    return given


def parse_options(argv: Sequence[str] | None, prog: str = PROG) -> argparse.Namespace:
    """Parse and check the options.

    Raises:
      UsageError: an option or a combination of options is wrong.
    """
    options = _parser(prog).parse_args(argv)
    options.prog = prog
    if (options.model is None) == (options.random is None):
        raise UsageError("expected MODEL or --random")
    if options.model is None and options.revision is not None:
        raise UsageError("--revision: needs MODEL")
    options.given_name = options.model
    convert_engine_options(options)
    if not 0 <= options.port < 2**16:
        raise UsageError(f"--port: expected 0 to 65535, got {options.port}")
    for flag, field in _LIMITS.items():
        value = getattr(options, field.name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{flag}: expected more than 0 and less than 1e9, got {value}")
    if not 0 <= options.grace < 1e9:
        raise UsageError(f"--grace: expected at least 0, got {options.grace}")
    if not 1 <= options.text_workers <= 64:
        raise UsageError(f"--text-workers: expected 1 to 64, got {options.text_workers}")
    options.api_keys = _api_keys(options.api_key_file)
    if options.prefix_cache is not None:
        if not options.prefix_caching:
            raise UsageError("--prefix-cache: not with --no-prefix-caching")
        with as_usage_error(OSError, prefix="--prefix-cache: cannot write the file: "):
            check_output(options.prefix_cache)
    check_prefill_options(options)
    return options


def _api_keys(path: Path | None) -> list[str]:
    """Return the keys of --api-key-file and of the environment variable.

    Raises:
      UsageError: the file cannot be read, or a key has characters that clients cannot send in the same form.
    """
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    _check_keys(KEYS_VARIABLE, keys)
    if path is not None:
        with as_usage_error(OSError, UnicodeDecodeError, prefix=f"--api-key-file: cannot read {path}: "):
            of_file = path.read_text("ascii").splitlines()
        _check_keys(f"--api-key-file: {path}", of_file)
        keys += of_file
    keys = [key.strip() for key in keys if key.strip()]
    if path is not None and not keys:
        raise UsageError(f"--api-key-file: {path} has no key")
    return keys


def _check_keys(name: str, keys: Sequence[str]) -> None:
    """Raise UsageError if a key is not printable ASCII. HTTP has no encoding of other characters in headers."""
    for i, key in enumerate(keys, 1):
        if not (key.isascii() and key.strip().isprintable()):
            raise UsageError(f"{name}: expected keys of printable ASCII characters, key {i} has others")


def _parser(prog: str) -> Parser:
    parser = Parser(prog, usage="%(prog)s MODEL [options]", description=DESCRIPTION, epilog=EPILOG)
    _add_model(parser.add_argument_group("model"))
    _add_server(parser.add_argument_group("server"))
    _add_limits(parser.add_argument_group("limits of requests and connections"))
    add_prefill(parser.add_argument_group("prompts computed by other processes"))
    add_attention(parser.add_argument_group("computation"))
    compilation = parser.add_argument_group("compilation")
    add_compilation_cache(compilation)
    add_switch(
        compilation,
        "--background-compilation",
        "be ready when the programs of the largest batch shapes are compiled, which serve all requests with more"
        " padding, and compile the programs of other shapes while requests run",
        default=False,
    )
    engine = parser.add_argument_group("engine")
    default_sizes = {
        "num_pages": "enough for all running requests",
        "max_batched_tokens": str(STEP_TOKENS),
        "max_num_seqs": str(NUM_SEQS),
        "max_model_len": f"the model's limit, at most {MODEL_LEN}",
    }
    add_engine(engine, default_sizes)
    engine.add_argument(
        "--max-logprobs",
        type=integer,
        default=20,
        metavar="N",
        help="maximum of logprobs and top_logprobs (default: 20)",
    )
    add_buckets(
        parser.add_argument_group("batch shapes", "one program is compiled for each shape"),
        decode_default="1, 4, 16, 32, 64, ... up to it",
        prefill_default="32, 128, 512, ... (factor 4) up to it",
    )
    add_mesh(parser.add_argument_group("several devices"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face folder, or id of a repository of the Hub"
    )
    group.add_argument(
        "--random",
        choices=RANDOM_MODELS,
        metavar="NAME",
        help=f"a small model with random weights, without tokenizer: {', '.join(RANDOM_MODELS)}",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the repository")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests (default: MODEL)"
    )
    add_switch(
        group,
        "--generation-config",
        "use the sampling parameters of generation_config.json as defaults",
        default=True,
    )
    for flag, name, kinds in (
        ("--tool-call-parser", "tool_calls", PARSERS),
        ("--reasoning-parser", "reasoning", REASONING),
    ):
        group.add_argument(
            flag,
            dest=name,
            choices=(*kinds, "none"),
            metavar="NAME",
            help=f"format of the model's {name.replace('_', ' ')}: none, {', '.join(kinds)}"
            " (default: from the chat template)",
        )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    group.add_argument("--port", type=integer, default=8000, metavar="N", help="port; 0 for any (default: %(default)s)")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"require one of the keys of a file, one per line, or of ${KEYS_VARIABLE}, separated by commas",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="allow web pages of this origin to use the server (CORS); may be repeated (default: none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests to this name, besides localhost and IP addresses (header Host); may be repeated (default:"
        " none if --host is a loopback address, otherwise any name)",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds in which earlier requests may end after SIGTERM (default: %(default)g)",
    )
    group.add_argument(
        "--text-workers",
        type=integer,
        default=2,
        metavar="N",
        help="threads for tokenization, each with a process for the tokenizer (default: %(default)s)",
    )
    group.add_argument("--access-log", action="store_true", help="print a line for each request, without its text")


_LIMITS = {
    f"--{field.name.removesuffix('_s').replace('_', '-')}{'-timeout' if field.name.endswith('_s') else ''}": field
    for field in dataclasses.fields(ServerLimits)
}
"""Fields of `ServerLimits` by option."""


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for flag, field in _LIMITS.items():
        is_time = field.name.endswith("_s")
        default = "" if field.default is None else f" (default: {field.default:{'g' if is_time else 'd'}})"
        group.add_argument(
            flag,
            dest=field.name,
            type=float if is_time else integer,
            default=field.default,
            metavar="S" if is_time else "N",
            help=field.metadata["help"] + default,
        )


def _say(options: argparse.Namespace, text: str) -> None:
    print(f"{options.prog}: {text}", file=sys.stderr, flush=True)


def _say_address(options: argparse.Namespace, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    _say(options, f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
