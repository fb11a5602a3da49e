"""An HTTP server with the API of OpenAI: `pallas-attn serve --help`.

The path of a streamed chat request. The process of the HTTP server:

    app            route, API key, limits; reads the body
    prepare        worker thread: `protocol` (JSON to `ChatRequest`), template, tokens, `tool_grammar`
    engine_client  sends `messages.Add`

The process of the engine:

    engine_thread  `LLM.add`, steps; sends `messages.StepResults`

The process of the HTTP server:

    engine_client  gives new tokens to the request
    responses      `ChatReply`: `reasoning` and `tool_calls` divide the text; returns events
    app            writes the events to the socket

`options` has options, limits and errors. `server` has sockets and life cycle, `http_process` the start of the process.
`prefill_workers` has the connections of the engine to prefill workers.
`formats` has the markers of the model families, `output_text` the base of the parsers, `metrics` the metrics.
"""

import importlib.util

REQUIRED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")

if _missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"pallas_attn.models.server needs {', '.join(_missing)}: pip install 'pallas_attn[server]'", name=_missing[0]
    )
