"""The program that processes of one engine find each other by: jax's coordination service, apart from process 0.

It outlives process 0 by a while, so that the others hear that it is gone: clients of jax abort without it.
Started by `processes.Processes`, as a file, so that nothing but jaxlib is imported.
"""

import sys
import time

from jaxlib import _jax

NEVER_S = 10**6
"""Time limit for what `Processes` watches by itself."""


def main(address: str, num_processes: str, linger_s: str) -> None:
    """Serves until a second after a line arrives on standard input, or `linger_s` seconds after its end."""
    service = _jax.get_distributed_runtime_service(
        address, int(num_processes), heartbeat_timeout=NEVER_S, shutdown_timeout=NEVER_S
    )
    print("ready", flush=True)
    time.sleep(1.0 if sys.stdin.readline() else float(linger_s))  # the others may be about to hang up
    service.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
