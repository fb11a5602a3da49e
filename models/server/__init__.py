"""An HTTP server with the API of OpenAI: `pallas-attn serve --help`.

Modules in reading order: `limits`, `protocol` (requests), `prepare` (worker threads), `engine_thread`, `responses`,
`app` (routes), `server` (sockets and life cycle), `metrics`. Generated text: `output_text`, `reasoning`, `tool_calls`.
"""

import importlib.util

REQUIRED = ("httptools", "msgspec", "prometheus_client", "starlette", "uvicorn")

if _missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"pallas_attn.models.server needs {', '.join(_missing)}: pip install 'pallas_attn[server]'", name=_missing[0]
    )
