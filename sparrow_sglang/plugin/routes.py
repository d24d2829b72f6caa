"""The HTTP side: routes of this package's own calls, and early errors as HTTP errors.

In: requests to SGLang's app. Out: calls of `ServerState.calls`, their answers as JSON.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.json_values import JsonError, require_portable
from sparrow_sglang.plugin.scheduler_calls import ControlError, RanksDisagreeError
from sparrow_sglang.plugin.state import require_server_state

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

_PREFIX = "/sparrow/"
_GENERATE = "/generate"
_ERROR_EVENT = b'data: {"error":'


class _Call(NamedTuple):
    """How one call is made over HTTP; `fields` are those of a POST's body, all of them required."""

    methods: tuple[str, ...]
    fields: frozenset[str] = frozenset()
    body: str = ""


_CALLS = {
    "schedule": _Call(
        ("GET", "POST"),
        frozenset({"schedule"}),
        '{"schedule": ...}, a name or the fields of a schedule',
    ),
    "adapter": _Call(
        ("POST",),
        frozenset({"name", "config", "tensors"}),
        '{"name": ..., "config": ..., "tensors": ...}, the fields of adapter_config.json and a'
        " safetensors file in base64",
    ),
    "landmarks": _Call(("GET",)),
}


def add_routes(app: "FastAPI") -> None:
    """Add /sparrow/<call>, behind the same keys as SGLang's own control routes, at most once.

    Also makes /generate answer with an HTTP error instead of a stream that begins with an error:
    SGLang 0.5.17 checks a streaming request of that route only after it has sent the status 200.
    """
    from fastapi import Request
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", "").startswith(_PREFIX) for route in app.routes):
        return
    for route in app.routes:
        if getattr(route, "path", None) == _GENERATE:
            changed: Any = route
            changed.app = with_early_errors(changed.app)

    def handler(name: str) -> Callable[["Request"], Awaitable["Response"]]:
        async def handle(request: Request) -> "Response":
            return await _handle(name, request)

        return handle

    for name, call in _CALLS.items():
        handle = auth_level(AuthLevel.ADMIN_OPTIONAL)(handler(name))
        app.add_api_route(_PREFIX + name, handle, methods=list(call.methods))


def with_early_errors(app: AsgiApp) -> AsgiApp:
    """Wrap `app` so that a stream that begins with an error becomes a response of its status."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        held: Message | None = None
        refused = False

        async def send_checked(message: Message) -> None:
            nonlocal held, refused
            if refused:
                return
            if message["type"] == "http.response.start" and _is_event_stream(message):
                held = message
                return
            if held is not None:
                head, held = held, None
                error = _error(message)
                if error is not None:
                    refused = True
                    await _send_error(error, send)
                    return
                await send(head)
            await send(message)

        await app(scope, receive, send_checked)

    return answer


async def _handle(name: str, request: "Request") -> "Response":
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state

    manager: Any = get_global_state().tokenizer_manager
    try:
        fields = await _body(_CALLS[name], request) if request.method == "POST" else {}
        return JSONResponse(await require_server_state(manager).calls[name](**fields))
    except ValueError as error:
        fault = isinstance(error, RanksDisagreeError)
        status = HTTPStatus.INTERNAL_SERVER_ERROR if fault else HTTPStatus.BAD_REQUEST
        return JSONResponse({"error": {"message": str(error)}}, status_code=status)


async def _body(call: _Call, request: "Request") -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
        require_portable(body)
    except JsonError as error:
        raise ControlError(f"the body is wrong: {error}") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or set(body) != call.fields or None in body.values():
        raise ControlError(f"the body is wrong: expected a JSON object {call.body}")
    return body


def _is_event_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    kind: bytes = headers.get(b"content-type", b"")
    return message["status"] == HTTPStatus.OK and kind.startswith(b"text/event-stream")


def _error(message: Message) -> dict[str, Any] | None:
    """The error in the first event of a stream; None if the event is no error."""
    event: bytes = message.get("body", b"")
    if not event.startswith(_ERROR_EVENT):
        return None
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


async def _send_error(error: dict[str, Any], send: Send) -> None:
    code = error.get("code")
    is_error = isinstance(code, int) and code >= HTTPStatus.BAD_REQUEST
    body = json.dumps({"error": error}).encode()
    head = {
        "type": "http.response.start",
        "status": code if is_error else int(HTTPStatus.BAD_REQUEST),
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    await send(head)
    await send({"type": "http.response.body", "body": body})
