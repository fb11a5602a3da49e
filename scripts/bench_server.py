"""Measure the HTTP server next to the offline engine: `python scripts/bench_server.py [--config v2-lite] [--json OUT]`.

    python scripts/bench_server.py --users 8 32 128 --rates --json-users --json OUT               # users only
    python scripts/bench_server.py --url http://127.0.0.1:8001 --vocab-size 102400 --model NAME   # another server
    python scripts/bench_server.py --config v2-lite --mesh data=4 --max-num-seqs 64               # four GPUs
    python scripts/bench_server.py --config v3-tiny --paced 20 --users 128                        # no GPU

Without --url, the script makes a model with random weights and a tokenizer with random tokens. It measures:

- offline: `LLM` with as many unfinished requests as there are users, without HTTP;
- users: the server, with users that each send the next request when the last one has ended;
- arrivals: the server, with requests that arrive at random;
- shared prefix: arrivals with prompts that start with the same tokens;
- JSON: users whose outputs follow a JSON schema.

The client (`scripts/bench/engine/http_load.py`) and the HTTP server run in other processes. --url sends the same
requests to another server with the API of OpenAI. --paced replaces the device by waits, 20 ms per step in the example.
It measures offline, users, and the processor time per token of the event loop and of the engine's thread. With --mesh,
sizes such as --max-num-seqs and --step-tokens apply to each data rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_attn.models.checkpoints import Tokenizer, load_tokenizer
from pallas_attn.models.cli.command_line import UsageError, as_usage_error, check_outputs, exit_status, write_report
from pallas_attn.models.cli.mesh import add_mesh, mesh_of, parse_mesh
from pallas_attn.models.config import GQA_PRESETS, PRESETS, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, device_part
from pallas_attn.models.engine import EngineConfig
from pallas_attn.models.llm import LLM, SamplingParams
from pallas_attn.models.server import http_process
from pallas_attn.models.server.engine_thread import EngineThread
from pallas_attn.models.server.formats import ParserNames
from pallas_attn.models.server.options import ServerOptions
from pallas_attn.models.server.server import listen
from scripts.bench.engine.http_load import Load
from scripts.bench.engine.paced_runner import PacedRunner
from scripts.bench.engine.random_model import random_model
from scripts.bench.harness.device import description

ROOT = Path(__file__).resolve().parent.parent
CONFIGS: dict[str, ModelConfig] = {**PRESETS, **GQA_PRESETS}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 3, "maxItems": 8},
        "score": {"type": "integer"},
    },
    "required": ["name", "tags", "score"],
    "additionalProperties": False,
}


def loads(args: argparse.Namespace, vocab_size: int) -> list[Load]:
    """Return all measurements of a server."""
    same: dict[str, Any] = {"vocab_size": vocab_size, "model": args.model, "new_tokens": args.new_tokens}
    lengths = same | {"prompt_tokens": args.prompt_tokens}
    shared = same | {"shared_tokens": args.shared_tokens, "prompt_tokens": args.shared_tokens + 128}
    made = [Load("warm-up", 8, users=4, **lengths)]
    made += [Load("users", args.rounds * users, users=users, seed=users, **lengths) for users in args.users]
    made += [Load("arrivals", args.requests, rate=rate, seed=1, **lengths) for rate in args.rates]
    made += [Load("shared prefix", args.requests, rate=rate, seed=2, **shared) for rate in args.rates[-1:]]
    made += [Load("JSON", 2 * users, users=users, seed=3, schema=SCHEMA, **lengths) for users in args.json_users]
    return made


def write_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Write a tokenizer with random tokens of letters to a folder. The last token ends a sequence."""
    draw, letters = np.random.default_rng(0), np.array([*"abcdefghijklmnopqrstuvwxyz", "\u0120"])
    texts = dict.fromkeys(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    while len(texts) < vocab_size - 1:
        texts["".join(draw.choice(letters, draw.integers(1, 9)))] = None
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(texts)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    if loaded is None:
        raise RuntimeError("the tokenizer was not loaded")
    return loaded


def make_llm(args: argparse.Namespace, tokenizer: Tokenizer) -> LLM:
    """Return an LLM with random weights."""
    config = dataclasses.replace(CONFIGS[args.config], eos_token_ids=(CONFIGS[args.config].vocab_size - 1,))
    with as_usage_error(ValueError, NotImplementedError, prefix="--mesh: "):
        mesh = mesh_of(args.mesh)
        device_part(config, mesh)
    longest = max(args.prompt_tokens, args.shared_tokens + 128) + args.new_tokens + 1
    buckets = {size for size in args.decode_buckets if size < args.max_num_seqs} | {args.max_num_seqs}
    sizes = EngineConfig(
        num_pages=args.max_num_seqs * -(-longest // 64),
        page_size=64,
        max_batched_tokens=args.step_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=longest,
        decode_buckets=tuple(sorted(buckets)),
        prefill_buckets=tuple(sorted({min(512, args.step_tokens), args.step_tokens})),
        mesh=mesh,
    )
    return LLM.of_model(random_model(config, args.dtype, AttentionSettings(), mesh=mesh), sizes, tokenizer=tokenizer)


def offline(llm: LLM, load: Load) -> dict[str, Any]:
    """Generate the outputs of a measurement without a server, with `load.users` unfinished requests at a time."""
    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=load.schema is None)
    prompts = [body["prompt"] for body in load.bodies()]
    waiting, running, tokens = [llm.prepare(prompt, params) for prompt in prompts], [], 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < load.users:
            running.append(llm.add(waiting.pop()))
        llm.step()
        tokens += sum(len(delta.token_ids) for stream in running for delta in stream.take())
        running = [stream for stream in running if not stream.is_finished]
    seconds = time.perf_counter() - began
    named = dataclasses.asdict(load) | {"name": f"offline {load.name}"}
    return named | {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}


class Served(NamedTuple):
    """A server.

    Attributes:
      url: its address.
      process: its process.
    """

    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(llm: LLM, tokenizer: Path) -> Iterator[Served]:
    """Context manager that serves an LLM on a free port of 127.0.0.1. `tokenizer` is a folder with a tokenizer."""
    options = ServerOptions(
        ["model"],
        llm.engine.max_sequence_len,
        ParserNames(None, None),
        grace_s=0.0,
        tokenizer=tokenizer,
        prog="bench_server",
    )
    own, end = socket.socketpair()
    with listen("127.0.0.1", 0) as listener, end:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        engine = EngineThread(llm, own, options.limits, starts_checkers=True)
        process = http_process.start(options, listener, end)
    try:
        while not is_ready(url):
            time.sleep(0.1)
        yield Served(url, process)
    finally:
        engine.request_stop()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready") as response:
            return response.status == 200
    except urllib.error.HTTPError:
        return False


def measure(url: str, each: list[Load]) -> Iterator[dict[str, Any]]:
    """Send requests from another process. Yield the results of each measurement."""
    command = [sys.executable, "-m", "scripts.bench.engine.http_load", url]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        if client.stdin is None or client.stdout is None:
            raise RuntimeError("the client has no pipes")
        json.dump([dataclasses.asdict(load) for load in each], client.stdin)
        client.stdin.close()
        yield from map(json.loads, client.stdout)
    if client.returncode:
        raise RuntimeError(f"the client ended with status {client.returncode}")


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of each measurement."""
    if args.url is not None:
        yield from measure(args.url, loads(args, args.vocab_size))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llm = make_llm(args, write_tokenizer(folder, CONFIGS[args.config].vocab_size))
        yield from compared((own_results if args.paced is None else paced_results)(args, llm, folder))


def compared(results: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add `of_offline` to the results of the server's users: tokens per second as a share of the offline engine's."""
    offline_rates: dict[int, float] = {}
    for result in results:
        if result["name"] == "offline users":
            offline_rates[result["users"]] = result["output_tokens_per_s"]
        elif result["name"] == "users":
            result["of_offline"] = result["output_tokens_per_s"] / offline_rates[result["users"]]
        yield result


def own_results(args: argparse.Namespace, llm: LLM, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of each measurement of a model and its server. `folder` has the tokenizer."""
    seconds = llm.engine.warmup()
    mesh, programs = llm.engine.config.mesh, llm.engine.stats().compilations
    yield {"name": "warmup", "seconds": seconds, "programs": programs, "devices": 1 if mesh is None else mesh.size}
    each = loads(args, CONFIGS[args.config].vocab_size - 1)
    for load in each:
        if load.users and load.schema is None:
            yield offline(llm, dataclasses.replace(load, seed=load.seed + 1000))  # prompts that are not cached later
    with serving(llm, folder) as served:
        yield from measure(served.url, each)


def paced_results(args: argparse.Namespace, llm: LLM, folder: Path) -> Iterator[dict[str, Any]]:
    """As `own_results`, without a model. The results have microseconds of processor time per output token."""
    vocab_size = CONFIGS[args.config].vocab_size
    tokens = np.random.default_rng(0).integers(256, vocab_size - 1, 2**16).tolist()
    PacedRunner(llm.engine, tokens, args.paced / 1e3)
    each = [load for load in loads(args, vocab_size - 1) if load.users and load.schema is None]
    for load in each:
        began = time.thread_time()
        result = offline(llm, dataclasses.replace(load, seed=load.seed + 1000))
        yield result | {"engine_thread_us": 1e6 * (time.thread_time() - began) / result["output_tokens"]}
    with serving(llm, folder) as served:
        before = processor_times(served)
        for result in measure(served.url, each):
            after = processor_times(served)
            yield result | {name: 1e6 * (after[name] - before[name]) / result["output_tokens"] for name in after}
            before = after


def processor_times(served: Served) -> dict[str, float]:
    """Return the processor time in seconds of the server's event loop and of the engine's thread."""
    process = served.process.pid
    (engine,) = [thread for thread in threading.enumerate() if thread.name == "engine"]
    files = {
        "event_loop_us": f"/proc/{process}/schedstat",
        "engine_thread_us": f"/proc/self/task/{engine.native_id}/schedstat",
    }
    return {name: int(Path(file).read_text().split()[0]) / 1e9 for name, file in files.items()}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_server", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", choices=CONFIGS, default="v2-lite", help="default: %(default)s")
    parser.add_argument("--url", help="measure the server at this address instead; it must be on this machine")
    parser.add_argument(
        "--paced", type=float, metavar="MS", help="measure without a device: a step without prompts takes MS ms"
    )
    parser.add_argument("--vocab-size", type=int, default=32000, help="with --url: token ids below it are sent")
    parser.add_argument("--model", help="with --url: name of the model")
    parser.add_argument("--users", nargs="+", type=int, default=[1, 8, 32, 128], help="default: 1 8 32 128")
    parser.add_argument("--rounds", type=int, default=3, help="requests per user (default: 3)")
    parser.add_argument("--rates", nargs="*", type=float, default=[4, 8, 16], help="requests per s (default: 4 8 16)")
    parser.add_argument("--requests", type=int, default=96, help="requests per rate (default: 96)")
    parser.add_argument("--json-users", nargs="*", type=int, default=[32], help="users with JSON outputs (default: 32)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="default: 512")
    parser.add_argument("--shared-tokens", type=int, default=2048, help="of the shared prefix (default: 2048)")
    parser.add_argument("--new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="default: 128")
    parser.add_argument("--decode-buckets", nargs="+", type=int, default=[8, 32], help="default: 8 32, and the maximum")
    parser.add_argument("--step-tokens", type=int, default=2048, help="maximum tokens of a step (default: 2048)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="default: bfloat16")
    add_mesh(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="results, written after each measurement")
    args = parser.parse_args(argv)
    numbers = (args.rounds, args.requests, args.prompt_tokens, args.shared_tokens, args.new_tokens, *args.users)
    if min(*numbers, *args.json_users, args.max_num_seqs) < 1 or not all(0 < rate < 1e6 for rate in args.rates):
        parser.error("expected positive numbers")
    if args.paced is not None and (args.paced <= 0 or args.url is not None):
        parser.error("--paced: expected a positive number, not with --url")
    try:
        args.mesh = parse_mesh(args.mesh)
    except UsageError as error:
        parser.error(str(error))
    if args.mesh is not None and (args.paced is not None or args.url is not None):
        parser.error("--mesh: expected neither --paced, which replaces the devices, nor --url")
    if args.step_tokens < args.max_num_seqs:
        parser.error("--step-tokens: expected at least --max-num-seqs, one token per request")
    return args


def run(args: argparse.Namespace) -> int:
    check_outputs({"--json": args.json})
    options = {name: value for name, value in vars(args).items() if name not in ("json", "url")}
    report: dict[str, Any] = description() | {"options": options, "results": []}
    for result in results(args):
        report["results"].append(result)
        shown = {name: value for name, value in result.items() if name not in ("schema", "errors")}
        print(json.dumps(shown), flush=True)
        if args.json is not None:
            write_report("--json", args.json, report)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status("bench_server", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
