"""jax's coordination service as a separate program, which connects the processes of one engine.

It runs a while longer than process 0, so that the other processes can learn that process 0 has ended: jax's clients
abort if the service disappears. `processes.Processes` starts it as a file, so that it imports only jaxlib.
"""

import sys
import time

from jaxlib import _jax

NEVER_S = 10**6
"""Value of jax's timeouts in seconds; long, because `Processes` has timeouts of its own."""


def main(address: str, num_processes: str, linger_s: str) -> None:
    """Serve until one second after a line arrives on standard input, or `linger_s` seconds after its end."""
    service = _jax.get_distributed_runtime_service(
        address, int(num_processes), heartbeat_timeout=NEVER_S, shutdown_timeout=NEVER_S
    )
    print("ready", flush=True)
    time.sleep(1.0 if sys.stdin.readline() else float(linger_s))  # other processes may still be disconnecting
    service.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
