"""Routes of the server, API keys, CORS, metrics and disconnects.

A request to generate text passes these stages:

    Gate                     # API key, shutdown, number of responses
    _body                    # event loop: bytes of the body, with limits of size and time
    Preparer.chat            # worker thread: JSON, chat template, tokenization, grammar
    EngineClient.add         # the engine's process: steps
    Reply                    # event loop: objects of the response
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import pallas_attn
from pallas_attn.models.server.engine_client import EngineClient, ServedRequest
from pallas_attn.models.server.messages import Part
from pallas_attn.models.server.metrics import Metrics
from pallas_attn.models.server.options import ApiError, ServerOptions
from pallas_attn.models.server.prepare import Preparer
from pallas_attn.models.server.responses import DONE, Reply, check_output, event

STATIC = Path(__file__).with_name("static")
PAGE_FILES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css"}

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"transfer-encoding", b"chunked"),  # `_EventStream` writes chunks itself
]

_CLIENT_GONE = 499  # status of nginx for a client that has disconnected; only metrics have it


type _Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _ClientGone(Exception):
    """The client has disconnected."""


class Api:
    """Handlers of the routes.

    Attributes:
      is_stopping: whether new requests are refused because the server stops.
      num_preparing: number of requests before `EngineClient.add`: their body is read, or a worker prepares them.

    Args:
      engine: the engine.
      preparer: prepares requests in worker threads.
      workers: the worker threads.
      options: options of the server.
      metrics: metrics of the server.
    """

    def __init__(
        self,
        engine: EngineClient,
        preparer: Preparer,
        workers: concurrent.futures.Executor,
        options: ServerOptions,
        metrics: Metrics,
    ):
        self.is_stopping = False
        self.num_preparing = 0
        self.engine, self.metrics, self.limits = engine, metrics, options.limits
        self._preparer, self._workers, self._options = preparer, workers, options
        self._hosts = None if options.allowed_hosts is None else {name.lower() for name in options.allowed_hosts}
        self._keys = [key.encode() for key in options.api_keys]
        self._started = int(time.time())

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        partial, preparer = functools.partial, self._preparer
        post: dict[str, _Handler] = {
            "/v1/completions": partial(self._generate, preparer.completion),
            "/v1/chat/completions": partial(self._generate, preparer.chat),
            "/tokenize": partial(self._convert, preparer.tokenize),
            "/detokenize": partial(self._convert, preparer.detokenize),
        }
        get: dict[str, _Handler] = {
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._model,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/version": self._version,
            **dict.fromkeys(PAGE_FILES, self._page),
        }
        handlers = [("POST", *entry) for entry in post.items()] + [("GET", *entry) for entry in get.items()]
        app = Starlette(
            routes=[Route(path, handler, methods=[method]) for method, path, handler in handlers],
            middleware=[Middleware(_Gate, api=self)],
            exception_handlers={ApiError: _on_error, HTTPException: _on_error, Exception: _on_error},
        )
        if not (origins := self._options.allowed_origins):
            return app
        return CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """Check whether a request is accepted. Return the salt of its API key.

        Raises:
          ApiError: a wrong Host or API key, or the server stops.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and host and not _is_local(host) and _name_of(host) not in self._hosts:
            raise ApiError(f"Host: {host!r:.100} is not allowed; see --allowed-host", 403, code="host_not_allowed")
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if not path.startswith(("/v1/", "/tokenize", "/detokenize")):
            return ""
        scheme, _, given = authorization.partition(" ")
        # Compare with all keys, so that the time does not depend on the key.
        matches = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        if self._keys and not (scheme.lower() == "bearer" and any(matches)):
            raise ApiError("expected a valid API key: Authorization: Bearer KEY", 401, code="invalid_api_key")
        if self.is_stopping:
            raise ApiError("the server stops", 503, code="stopping")
        if not self._keys:
            return ""
        return hashlib.sha256(b"salt of the prefix cache\0" + self._keys[matches.index(True)]).hexdigest()[:32]

    # --- generation

    async def _generate(self, prepare: Callable[[bytes], Reply], request: Request) -> Response:
        arrived_s = time.perf_counter()
        reply = await self._prepared(prepare, request, arrived_s)
        salt = ":".join(filter(None, (request.state.salt, reply.request.cache_salt)))
        served = ServedRequest(reply.prompts, salt, arrived_s, is_streamed=reply.request.stream)
        self.metrics.prompt_tokens.inc(reply.usage["prompt_tokens"])
        self.engine.add(served)
        if reply.request.stream:
            return _EventStream(self, served, reply)
        try:
            parts = await _unless_disconnected(request.receive, self._collect(served))
        finally:
            self.engine.abort(served)
        return _json(reply.result(parts))

    async def _collect(self, served: ServedRequest) -> list[Part]:
        """Return all parts of a request."""
        result: list[Part] = []
        async with _deadline(self.limits.request_s, served.arrived_s):
            async for parts in served.batches():
                for part in parts:
                    check_output(part.delta)
                result += parts
        return result

    def _check_capacity(self) -> None:
        """Raise ApiError if there are too many requests, or the engine is not ready."""
        if not self.engine.is_alive:
            raise ApiError("the engine has failed", 503, code="engine_failed")
        if not self.engine.is_ready:
            raise ApiError("the engine is not ready", 503, code="not_ready")
        total = self.engine.num_unfinished + self.num_preparing
        if total >= self.limits.max_requests or self.engine.num_waiting + self.num_preparing >= self.limits.max_waiting:
            raise ApiError("too many requests; try again later", 429, code="overloaded")

    async def _prepared[Result](self, prepare: Callable[[bytes], Result], request: Request, arrived_s: float) -> Result:
        """Read the body, and prepare the request in a worker thread. `arrived_s` is the time of arrival."""
        self._check_capacity()
        self.num_preparing += 1
        try:
            async with _deadline(self.limits.request_s, arrived_s):
                body = await self._body(request)
                task = asyncio.get_running_loop().run_in_executor(self._workers, prepare, body)
                return await _unless_disconnected(request.receive, task)
        finally:
            self.num_preparing -= 1

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
          ApiError: the body is too large, too slow or not JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of another origin cannot send this type without CORS
            raise ApiError("expected the header Content-Type: application/json", 415, code="unsupported_media_type")
        limit, size, parts = self.limits.max_body_bytes, 0, []
        try:
            async with asyncio.timeout(self.limits.read_s):
                more = True
                while more and size <= 4 * limit:  # read on for a while: most clients read no response before the end
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
        except TimeoutError as error:
            raise ApiError("the body arrived too slowly", 408, code="slow_body") from error
        if size > limit:
            raise ApiError(f"body: expected at most {limit} bytes", 413, code="body_too_large")
        return b"".join(parts)

    # --- other routes

    async def _convert(self, convert: Callable[[bytes], dict[str, Any]], request: Request) -> Response:
        return _json(await self._prepared(convert, request, time.perf_counter()))

    def _model_object(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pallas_attn",
            "max_model_len": self._options.max_len,
        }

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object(name) for name in self._options.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._options.names:
            raise ApiError(f"model: {name!r:.200} does not exist", 404, param="model", code="model_not_found")
        return _json(self._model_object(name))

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.engine.is_alive else 503)

    async def _ready(self, request: Request) -> Response:
        is_ready = self.engine.is_alive and self.engine.is_ready and not self.is_stopping
        return Response(status_code=200 if is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(self.engine.state), media_type="text/plain; version=0.0.4")

    async def _version(self, request: Request) -> Response:
        return _json({"version": pallas_attn.__version__})

    async def _page(self, request: Request) -> Response:
        headers = {
            "Content-Security-Policy": "default-src 'self'",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }
        return FileResponse(STATIC / PAGE_FILES[request.url.path], headers=headers)


class _Gate:
    """Middleware that checks and counts requests."""

    def __init__(self, app: ASGIApp, api: Api):
        self._app, self._api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            scope.setdefault("state", {})["salt"] = self._api.check(scope["path"], dict(scope["headers"]))
            await self._app(scope, receive, counted)
        except ApiError as error:
            await _on_error(Request(scope), error)(scope, receive, counted)
        except _ClientGone:
            pass
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            self._api.metrics.responded("other" if route is None else route.path, status)


class _EventStream(Response):
    """Sends the events of a request as they arrive. If the client disconnects, the request is aborted.

    The status is sent together with the first event, so that an error before it can have another status.
    """

    def __init__(self, api: Api, served: ServedRequest, reply: Reply):
        self._api, self._served, self._reply = api, served, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_disconnected(receive, self._send_all(scope, send))
        finally:
            self._api.engine.abort(self._served)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        transport: asyncio.Transport = scope["state"]["transport"]
        started = False

        def send_now(parts: Sequence[Part]) -> bool:
            """Write events to the transport, past all layers of the application."""
            if transport.get_write_buffer_size() or transport.is_closing():
                return False  # the client has not read everything, so the limit of time applies
            if content := self._reply.events(parts):
                transport.write(b"%x\r\n%b\r\n" % (len(content), content))
            return True

        async def write(content: bytes, *, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self._served.send_now = send_now
            message = {"type": "http.response.body", "body": content, "more_body": more}
            try:
                async with asyncio.timeout(self._api.limits.write_s):
                    await send(message)
            except TimeoutError:
                transport.abort()  # a normal end would wait until the client reads
                raise _ClientGone from None

        try:
            async with _deadline(self._api.limits.request_s, self._served.arrived_s):
                async for parts in self._served.batches():
                    if content := self._reply.events(parts):
                        await write(content)
                last = [self._reply.last_event()] if self._reply.request.includes_usage else []
        except ApiError as error:
            if not started:
                raise
            last = [event(error.content)]
        await write(b"".join([*last, DONE]), more=False)


@contextlib.asynccontextmanager
async def _deadline(seconds: float, since: float) -> Any:
    """Context manager that raises ApiError `seconds` after the time `since` of `time.perf_counter`."""
    try:
        async with asyncio.timeout(seconds - (time.perf_counter() - since)):
            yield
    except TimeoutError as error:
        raise ApiError("the request takes too long", 504, code="timeout") from error


async def _unless_disconnected[Result](receive: Receive, work: Awaitable[Result]) -> Result:
    """Await a coroutine or a future. Cancel it and raise _ClientGone if the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGone
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def _name_of(host: str) -> str:
    """Return the name or address of a header Host, without port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_local(host: str) -> bool:
    """Return whether a header Host has an IP address or localhost. Other names may be names of an attacker, who lets
    them refer to this server, so that web pages of the name can read its responses (DNS rebinding)."""
    name = _name_of(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _on_error(request: Request, error: Exception) -> Response:
    """Return OpenAI's error object for an exception."""
    match error:
        case ApiError():
            known = error
        case HTTPException(status_code=404):
            known = ApiError(f"{request.method} {request.url.path}: unknown path", 404, code="not_found")
        case HTTPException():
            known = ApiError(str(error.detail), error.status_code)
        case _:
            known = ApiError("internal error", 500)
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}, 401: {"WWW-Authenticate": "Bearer"}}
    closing = {"Connection": "close"} if known.status in (408, 413, 504) else {}  # the body may not have arrived
    return _json(known.content, known.status, headers.get(known.status, {}) | closing)
