"""Messages between the engine and the HTTP server."""

from __future__ import annotations

import dataclasses
import math
import socket
from typing import Any

from pallas_attn.models.llm import Delta, Logprob, SamplingParams, StructuredOutputs
from pallas_attn.models.server import messages
from pallas_attn.models.server.messages import (
    Abort,
    Add,
    EngineEnded,
    EngineSocket,
    Part,
    Prompt,
    StepResults,
)
from pallas_attn.models.server.options import ApiError

VALUES: dict[str, Any] = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "seed": 2**32 - 1,
    "ignore_eos": True,
    "stop_token_ids": (1, 2),
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 2.0,
    "logit_bias": {3: -1.0},
    "allowed_token_ids": (4, 5),
    "min_tokens": 2,
    "logprobs": 1,
    "prompt_logprobs": 0,
    "extra_args": {"a": 1.0},
    "n": 2,
    "stop": ("\u00e9", "b"),
    "bad_words": ("c",),
    "include_stop_str_in_output": True,
    "structured_outputs": StructuredOutputs(choice=["a", "b"]),
    "skip_special_tokens": False,
}


def test_requests_arrive_with_all_parameters() -> None:
    defaults = dataclasses.asdict(SamplingParams())
    assert {name for name in defaults if VALUES[name] != defaults[name]} == {*defaults}
    sent = [Add(1, [Prompt([1, 2], SamplingParams(**VALUES)), Prompt([3], SamplingParams())], "salt"), Abort(2**40)]
    own, other = socket.socketpair()
    engine = EngineSocket(own)
    with other:
        other.sendall(b"".join(map(messages.frame, sent)))
        assert [engine.receive(), engine.receive()] == sent
        other.sendall(messages.frame(sent[0])[:-1])
    assert engine.receive() is None
    engine.send(EngineEnded(None))  # nobody receives it
    engine.close()
    engine.send(EngineEnded(None))


def test_results_arrive_with_log_probabilities_and_errors() -> None:
    table = {7: Logprob(-math.inf, 3, "a"), 8: Logprob(-0.5, 1, "\ufffd")}
    part = Part(1, Delta(2, "ab", [7, 8], "stop", "b", [table, table]), 5, [None, table])
    plain = Part(0, Delta(0, "", [2**31 - 1], None, 9))
    state = {"kv_cache_usage_perc": 0.5, "engine_steps": 2.0}
    sent = StepResults({3: [part, plain], 4: [plain]}, {3: None, 5: ApiError("m", 500, "p", "c").fields}, state, True)
    content = messages.frame(sent)
    assert messages.HEADER.unpack(content[: messages.HEADER.size]) == (len(content) - messages.HEADER.size,)
    assert messages.decode_to_http(content[messages.HEADER.size :]) == sent
