"""Send requests to a server with the API of OpenAI, and measure throughput and latencies.

    python -m scripts.bench.engine.http_load URL < loads.json > results.json

The client runs in a process of its own, so that it does not delay the server. It works with any server that has
/v1/completions, so other servers can be measured with the same requests.

- Time to first token: from the start of a request to its first event with text.
- Time between tokens: between two events with text. An event may have several tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import sys
import time
import urllib.parse
from typing import Any


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of one measurement. Exactly one of `users` and `rate` is not 0.

    Attributes:
      name: name of the measurement.
      requests: number of requests.
      users: number of users. Each sends its next request when the last one has ended.
      rate: mean number of requests per second that arrive at random (Poisson).
      prompt_tokens, new_tokens: lengths of each request. Outputs do not end earlier.
      shared_tokens: number of the first prompt tokens that all requests share.
      schema: JSON schema of the outputs; None for any output. Outputs then end with the JSON text.
      vocab_size: token ids of prompts are random, from 16 to this number.
      seed: seed of prompts and arrivals.
      model: field `model` of the requests; None for no field.
    """

    name: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    users: int = 0
    rate: float = 0.0
    shared_tokens: int = 0
    schema: dict[str, Any] | None = None
    seed: int = 0
    model: str | None = None

    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests."""
        draw = random.Random(self.seed)

        def ids(number: int) -> list[int]:
            return [draw.randrange(16, self.vocab_size) for _ in range(number)]

        shared = ids(self.shared_tokens)
        common: dict[str, Any] = {"max_tokens": self.new_tokens, "temperature": 0, "stream": True}
        common["stream_options"] = {"include_usage": True}
        if self.model is not None:
            common["model"] = self.model
        if self.schema is None:
            common["ignore_eos"] = True
        else:
            common["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": self.schema}}
        return [common | {"prompt": shared + ids(self.prompt_tokens - len(shared))} for _ in range(self.requests)]


@dataclasses.dataclass
class TimedReply:
    """Times of a response, in seconds of `time.perf_counter`.

    Attributes:
      start: start of the request.
      events: times of events with text.
      tokens: number of output tokens, from the usage of the response.
      error: status line or exception of a failed request; None if it succeeded.
    """

    start: float
    events: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    error: str | None = None


async def send(url: str, body: dict[str, Any]) -> TimedReply:
    """Send one request on a connection of its own, and read its stream of events."""
    parts = urllib.parse.urlsplit(url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    reply = TimedReply(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            reply.error = (status + await reader.read(500)).decode(errors="replace")
        has_ended = False
        while reply.error is None and (line := await reader.readline()):
            if line.startswith(b"data: [DONE]"):
                has_ended = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    reply.error = json.dumps(event)
                elif any(choice.get("text") for choice in event.get("choices", ())):
                    reply.events.append(time.perf_counter())
                if event.get("usage"):
                    reply.tokens = event["usage"]["completion_tokens"]
        if reply.error is None and not has_ended:
            reply.error = "the response ended early"
        writer.close()
    except OSError as error:
        reply.error = repr(error)
    return reply


async def measure(url: str, load: Load) -> dict[str, Any]:
    """Send the requests of a measurement. Return its results."""
    bodies, replies = load.bodies(), list[TimedReply]()

    async def user(queue: list[dict[str, Any]]) -> None:
        while queue:
            replies.append(await send(url, queue.pop()))

    began = time.perf_counter()
    if load.users:
        await asyncio.gather(*(user(bodies) for _ in range(load.users)))
    else:
        draw, tasks = random.Random(load.seed + 1), []
        for body in bodies:
            tasks.append(asyncio.create_task(send(url, body)))
            await asyncio.sleep(draw.expovariate(load.rate))
        replies = await asyncio.gather(*tasks)
    return dataclasses.asdict(load) | summary(replies, time.perf_counter() - began)


def summary(replies: list[TimedReply], seconds: float) -> dict[str, Any]:
    """Return throughput, latencies and errors of a measurement."""
    errors = [reply.error for reply in replies if reply.error is not None]
    good = [reply for reply in replies if reply.error is None and reply.events]
    between = [later - earlier for reply in good for earlier, later in itertools.pairwise(reply.events)]
    return {
        "seconds": seconds,
        "failed": len(errors),
        "errors": errors[:3],
        "output_tokens": sum(reply.tokens for reply in good),
        "output_tokens_per_s": sum(reply.tokens for reply in good) / seconds,
        "ttft_s": quantiles([reply.events[0] - reply.start for reply in good]),
        "between_tokens_s": quantiles(between),
        "request_s": quantiles([reply.events[-1] - reply.start for reply in good]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Return median, 90th and 99th percentile; empty without values."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[round(share * (len(ordered) - 1))] for name, share in shares.items()} if ordered else {}


def main() -> int:
    url, loads = sys.argv[1], [Load(**load) for load in json.load(sys.stdin)]
    for load in loads:
        print(json.dumps(asyncio.run(measure(url, load))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
