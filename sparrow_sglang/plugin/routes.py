"""The HTTP side: routes of this package's own calls, and early errors as HTTP errors.

In: requests to SGLang's app. Out: calls of `ServerState.calls`, their answers as JSON.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
# SageMaker's name of the chat route.
_INVOCATIONS = "/invocations"
# Routes of which SGLang hands no custom_params on.
_WITHOUT_OPTIONS = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
_CHECKED = (_GENERATE, _CHAT, _COMPLETIONS, _INVOCATIONS, *_WITHOUT_OPTIONS)
_ERROR_EVENT = b'data: {"error":'


class _Call(NamedTuple):
    """How one call is made over HTTP: the keys that a POST's body must and may have."""

    methods: tuple[str, ...]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    body: str = ""


_CALLS = {
    "schedule": _Call(
        ("GET", "POST"),
        frozenset({"schedule"}),
        frozenset({"timeout_s"}),
        '{"schedule": ...}, a name or the fields of a schedule, and, if need be, "timeout_s"',
    ),
    "adapter": _Call(
        ("POST",),
        frozenset({"name", "config", "tensors"}),
        body='{"name": ..., "config": ..., "tensors": ...}, the fields of adapter_config.json and a'
        " safetensors file in base64",
    ),
    "landmarks": _Call(("GET",)),
}


def add_routes(app: "FastAPI") -> None:
    """Add /sparrow/<call>, behind the same keys as SGLang's own control routes, at most once.

    Also makes /generate answer with an HTTP error instead of a stream that begins with an error:
    SGLang 0.5.17 checks a streaming request of that route only after it has sent the status 200.
    And refuses options of ours in a place where nobody reads them, see `body_problem`.
    """
    from fastapi import Request
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", "").startswith(_PREFIX) for route in app.routes):
        return
    for route in app.routes:
        path, changed = getattr(route, "path", None), cast(Any, route)
        if path == _GENERATE:
            changed.app = with_early_errors(changed.app)
        if path in _CHECKED:
            changed.app = with_checked_body(changed.app, path)

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
                    await _send_error(error, scope, receive, send)
                    return
                await send(head)
            await send(message)

        await app(scope, receive, send_checked)

    return answer


def with_checked_body(app: AsgiApp, path: str) -> AsgiApp:
    """Wrap the app of a route so that a body with a `body_problem` is answered with status 400."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        held: list[Message] = []
        while not held or held[-1].get("more_body"):
            held.append(await receive())
        problem = body_problem(b"".join(message.get("body", b"") for message in held), path)
        if problem is not None:
            await _send_error({"message": problem}, scope, receive, send)
            return

        async def received() -> Message:
            return held.pop(0) if held else await receive()

        await app(scope, received, send)

    return answer


def body_problem(content: bytes, path: str) -> str | None:
    """An error message if an option of ours is in a place where nobody reads it, else None."""
    if b'"sparrow"' not in content:
        return None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    sampling, extra = body.get("sampling_params"), body.get("extra_body")
    places = {"": body, "sampling_params": sampling, "extra_body": extra}
    right = '"custom_params"'
    if path == _GENERATE:
        right = f"sampling_params[{right}]"
        places["custom_params"] = body.get("custom_params")
    elif path in _WITHOUT_OPTIONS:
        right = f"{right} of {_CHAT} or {_COMPLETIONS}"
        places["custom_params"] = body.get("custom_params")
    if isinstance(extra, dict):
        places['extra_body["custom_params"]'] = extra.get("custom_params")
    for place, value in places.items():
        if isinstance(value, dict) and "sparrow" in value:
            where = f" in {place}" if place else ""
            return f'"sparrow"{where} is read by nobody: expected it in {right}'
    return None


async def _handle(name: str, request: "Request") -> "Response":
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state

    manager: Any = get_global_state().tokenizer_manager
    try:
        fields = await _body(_CALLS[name], request) if request.method == "POST" else {}
        answer = await require_server_state(manager).calls[name](**fields)
        if request.method == "GET" and request.query_params.get("full") != "true":
            answer = without_provenance(answer)
        return JSONResponse(answer)
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
    given = set(body) - call.optional if isinstance(body, dict) else None
    if given != call.required or None in body.values():
        raise ControlError(f"the body is wrong: expected a JSON object {call.body}")
    return body


def without_provenance(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer whose schedules lack `provenance`, which has most of their characters."""
    return {
        key: {name: part for name, part in value.items() if name != "provenance"}
        if isinstance(value, dict)
        else value
        for key, value in answer.items()
    }


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


async def _send_error(error: dict[str, Any], scope: Message, receive: Receive, send: Send) -> None:
    from fastapi.responses import JSONResponse

    code, wrong = error.get("code"), int(HTTPStatus.BAD_REQUEST)
    status = code if isinstance(code, int) and code >= wrong else wrong
    await JSONResponse({"error": error}, status)(scope, receive, send)
