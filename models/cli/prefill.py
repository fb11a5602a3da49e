"""Disaggregated prefill of `pallas-attn serve`: options, and the process that computes prompts of a server."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path

import jax

from pallas_attn.models.cli.command_line import Failure, UsageError, as_usage_error, decimal, integer
from pallas_attn.models.engine import Engine, SocketTransport, TransferError, serve_prefill
from pallas_attn.models.engine.kv_transfer.remote_prefill import LEAST_SECRET
from pallas_attn.models.server.prefill_workers import Address, PrefillWorkers, keep_alive
from pallas_attn.models.server.server import listen

SECRET_VARIABLE = "PALLAS_ATTN_TRANSFER_SECRET"
"""Environment variable with the secret that a server and its prefill workers share."""


def add_prefill(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--prefill-from",
        metavar="HOST:PORT[,HOST:PORT...]",
        help="let prefill workers at these addresses compute prompts, and receive the pages of the KV cache",
    )
    group.add_argument(
        "--prefill-listen",
        metavar="[HOST:]PORT",
        help="run as a prefill worker, which computes the prompts of one server at a time, instead of an HTTP server"
        " (default of HOST: 127.0.0.1)",
    )
    group.add_argument(
        "--prefill-secret-file",
        type=Path,
        metavar="FILE",
        help=f"file with the secret of server and workers, or ${SECRET_VARIABLE}: at least {LEAST_SECRET} bytes"
        " (default: no secret)",
    )
    group.add_argument(
        "--prefill-min-tokens",
        type=integer,
        metavar="N",
        help="compute prompts with fewer tokens that are not in the prefix cache in the server (default:"
        " --max-batched-tokens)",
    )
    group.add_argument(
        "--prefill-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds without the end of a prompt or a layer of new pages after which a worker counts as lost"
        " (default: %(default)g)",
    )


def check_prefill_options(options: argparse.Namespace) -> None:
    """Check the options, and replace `prefill_from` by a list of addresses, `prefill_listen` by an address; add
    `prefill_secret`.

    Raises:
      UsageError: an option, a combination of options or the secret is wrong.
    """
    options.prefill_secret = None
    is_server, is_worker = options.prefill_from is not None, options.prefill_listen is not None
    if not (is_server or is_worker):
        if options.prefill_secret_file is not None:
            raise UsageError("--prefill-secret-file: needs --prefill-from or --prefill-listen")
        return
    flag = "--prefill-from" if is_server else "--prefill-listen"
    if is_server and is_worker:
        raise UsageError("--prefill-listen: not with --prefill-from")
    if not options.prefix_caching:
        raise UsageError(f"{flag}: not with --no-prefix-caching")
    if not 0.001 <= options.prefill_timeout < 1e8:
        raise UsageError(f"--prefill-timeout: expected at least 0.001, got {options.prefill_timeout}")
    if options.prefill_min_tokens is not None and options.prefill_min_tokens < 1:
        raise UsageError(f"--prefill-min-tokens: expected at least 1, got {options.prefill_min_tokens}")
    options.prefill_secret = _secret(options.prefill_secret_file)
    if is_server:
        options.prefill_from = [_address(flag, entry) for entry in options.prefill_from.split(",")]
        return
    options.prefill_listen = host, _ = _address(flag, options.prefill_listen, default_host="127.0.0.1")
    if options.prefill_secret is None and not is_loopback(host):
        raise UsageError(f"{flag}: {host} needs a secret: --prefill-secret-file or ${SECRET_VARIABLE}")


def connect_workers(options: argparse.Namespace, engine: Engine) -> PrefillWorkers | None:
    """Connect a server to its prefill workers. Return None without --prefill-from.

    Raises:
      UsageError: the engine cannot receive pages, or a worker has another model.
    """
    if options.prefill_from is None:
        return None
    with as_usage_error(ValueError, NotImplementedError, prefix="--prefill-from: "):
        return PrefillWorkers(
            engine,
            options.prefill_from,
            secret=options.prefill_secret,
            timeout_s=options.prefill_timeout,
            min_tokens=options.prefill_min_tokens or engine.config.max_batched_tokens,
        )


def listen_for_servers(options: argparse.Namespace) -> socket.socket:
    """Return a socket that is bound to the address of --prefill-listen. Connections are refused until `run_worker`.

    Raises:
      UsageError: the address cannot be used.
    """
    host, port = options.prefill_listen
    with as_usage_error(OSError, prefix=f"--prefill-listen: cannot listen on {host}:{port}: "):
        return listen(host, port)


def run_worker(options: argparse.Namespace, engine: Engine, listener: socket.socket) -> None:
    """Compute the prompts of one server after the other, until SIGTERM or SIGINT.

    Args:
      options: the options.
      engine: the engine.
      listener: result of `listen_for_servers`.

    Raises:
      UsageError: the engine cannot send pages.
      Failure: a step has failed.
    """

    def say(text: str) -> None:
        print(f"{options.prog}: {text}", file=sys.stderr, flush=True)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with as_usage_error(ValueError, NotImplementedError, prefix="--prefill-listen: "):
            feed = engine.watch_written(lambda _: None)
        engine.warmup()  # also steps that copy pages, because the feed is open
        feed.close()
        listener.listen()
        say("prefill worker listening on {}:{}".format(*listener.getsockname()[:2]))
        while True:
            connection, _ = listener.accept()
            keep_alive(connection)
            transport = SocketTransport(connection, timeout_s=options.prefill_timeout)
            try:
                count = serve_prefill(
                    engine, transport, timeout_s=options.prefill_timeout, secret=options.prefill_secret
                )
                say(f"the server has closed the connection; computed {count} prompts")
            except (TransferError, ValueError) as error:
                say(f"connection ended: {error}")
    except KeyboardInterrupt:
        return
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"the engine has failed: {error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Whether an address or name is the loopback interface of this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(flag: str, text: str, default_host: str = "") -> Address:
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or default_host
    number = decimal(port)
    if not host or number is None or not number < 2**16:
        raise UsageError(f"{flag}: expected HOST:PORT with a port from 0 to 65535, got {text!r}")
    return host, number


def _secret(path: Path | None) -> bytes | None:
    """Return the secret of a file or of the environment variable, without whitespace at its ends."""
    secret, name = os.environ.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
    if path is not None:
        name = f"--prefill-secret-file: {path}"
        with as_usage_error(OSError, prefix=f"--prefill-secret-file: cannot read {path}: "):
            secret = path.read_bytes()
    secret = secret.strip()
    if not secret and path is None:
        return None
    if len(secret) < LEAST_SECRET:
        raise UsageError(f"{name}: expected at least {LEAST_SECRET} bytes, got {len(secret)}")
    return secret
