"""The process of the HTTP server, which the process of the engine starts.

The processes exchange the messages of `messages` and detect each other's end by the end of their sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys

from pallas_attn.models.checkpoints import load_tokenizer
from pallas_attn.models.server.options import ServerOptions
from pallas_attn.models.server.server import Server

FAILED = 3
"""Exit status of the process if the engine has failed. The process has printed the reason."""


def start(options: ServerOptions, listener: socket.socket, end: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process.

    Args:
      options: options of the server.
      listener: bound socket on which the process accepts connections.
      end: end of a pair of sockets; the caller closes it, and gives the other end to an `EngineThread`.
    """
    sockets = (listener.fileno(), end.fileno())
    code = "import sys; from pallas_attn.models.server.http_process import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, sockets)],
        stdin=subprocess.PIPE,
        pass_fds=sockets,
        # The process imports jax and uses no device.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,  # Ctrl-C must reach the engine's process only, which then sends `Stop`
    )
    if process.stdin is not None:
        with process.stdin:
            pickle.dump(options, process.stdin)
    return process


def main() -> int:
    """Serve until the engine's process sends `Stop` or ends. Return the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    listener, end = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    options: ServerOptions = pickle.load(sys.stdin.buffer)
    log_to_stderr()
    folder = options.tokenizer
    loaded = [] if folder is None else [load_tokenizer(folder) for _ in range(options.text_workers)]
    tokenizers = [tokenizer for tokenizer in loaded if tokenizer is not None]
    failure = asyncio.run(Server(end, tokenizers, options).run(listener))
    if failure is not None:
        print(f"{options.prog}: error: {failure}", file=sys.stderr, flush=True)
    return FAILED if failure is not None else 0


def log_to_stderr() -> None:
    """Print log messages to standard error."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("pallas_attn.server", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.INFO)
