"""An HTTP server with the API of OpenAI: `pallas-attn serve --help`.

Modules in reading order: `http_process` (starts the process of the HTTP server), `messages` (between the processes) and
`engine_thread` (the process of the engine). The process of the HTTP server: `limits`, `protocol` (requests), `prepare`
(worker threads), `engine_client`, `responses`, `app` (routes), `server` (sockets and life cycle), `metrics`; generated
text: `output_text`, `reasoning`, `tool_calls`, `tool_grammar`.
"""

import importlib.util

REQUIRED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")

if _missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"pallas_attn.models.server needs {', '.join(_missing)}: pip install 'pallas_attn[server]'", name=_missing[0]
    )
