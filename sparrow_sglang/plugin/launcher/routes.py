"""What the launching process adds to a server that decodes sparsely: state, calls, routes, one
shape of errors. Every refusal of our routes and of those in `_CHECKED` has the body {"error":
{"message": ...}}."""

import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import msgspec

from sparrow_sglang.json_values import quoted
from sparrow_sglang.mismatch.exact_rates import RECORD_VARIABLE
from sparrow_sglang.plugin.arguments.server_args import resolve_schedule
from sparrow_sglang.plugin.launcher.adapters import adapter
from sparrow_sglang.plugin.launcher.audit.auditor import Auditor
from sparrow_sglang.plugin.launcher.control import schedule
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import uses_sparrow
from sparrow_sglang.plugin.scheduler_calls import ControlError, RanksDisagreeError
from sparrow_sglang.plugin.state import ServerState, require_server_state, server_state
from sparrow_sglang.schedules.options import ATTRIBUTE
from sparrow_sglang.sglang_compat.arguments import resolved

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

_PREFIX = "/sparrow/"
CALLS: dict[str, tuple[Callable[..., Awaitable[dict[str, Any]]], list[str]]] = {
    "schedule": (schedule, ["GET", "POST"]),
    "adapter": (adapter, ["POST"]),
}
"""Calls of `Endpoint.call_sparrow`, and the methods of their routes."""
_GENERATE = ("sampling_params", "custom_params")
_OPENAI = ("custom_params",)
_CHECKED: dict[str, tuple[str, ...] | None] = {
    "/generate": _GENERATE,
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    # SageMaker's name of the chat route.
    "/invocations": _OPENAI,
    # SGLang hands no custom_params on from these.
    **dict.fromkeys(("/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/v1/score")),
}
"""Routes of requests, and where their bodies hold our option."""
_LOCATIONS = [
    (*outer, *inner)
    for outer in ((), ("sampling_params",), ("extra_body",), ("options",))
    for inner in ((), _OPENAI)
]
_HEALTH = {"/health": HTTPStatus.OK, "/health_generate": HTTPStatus.SERVICE_UNAVAILABLE}
"""Status of a server that generates nothing because it was told so: alive, but not ready."""
_ERROR_EVENT = b'data: {"error":'
_TYPES_OF_OWN = ("/v1/messages", "/v1/systemone")
"""Routes whose errors SGLang shapes itself."""
_MOST_PROBLEMS = 4


def attach_server(result: None, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: attach the state with which the launching process checks, switches and audits."""
    server_args = manager.server_args
    if not uses_sparrow(server_args):
        return
    active = resolve_schedule(server_args, manager.model_config.hf_config)
    calls = {name: partial(call, manager) for name, (call, _) in CALLS.items()}
    state = ServerState(active, active, calls, mode=mode_of(server_args))
    # A calibration measures schedules as they are written.
    records = RECORD_VARIABLE in os.environ
    state.measures_dense = resolved(server_args).device == "cuda" and not records
    rate = server_args.sparrow_audit_rate
    if rate or server_args.enable_metrics:
        state.auditor = Auditor(manager, rate, active, state.released)
    setattr(manager, ATTRIBUTE, state)
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None:
        add_routes(http_server.app)


def add_routes(app: "FastAPI") -> None:
    """Add /sparrow/<call>, behind the keys of SGLang's control routes; wrap routes of requests."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", "").startswith(_PREFIX) for route in app.routes):
        return
    invalid = app.exception_handlers[RequestValidationError]
    app.add_exception_handler(RequestValidationError, _naming_fields(invalid))
    for route in app.routes:
        path, changed = getattr(route, "path", None), cast(Any, route)
        if path in _CHECKED:
            changed.app = with_checks(changed.app, path)
        if path in _HEALTH:
            changed.app = _unless_asleep(changed.app, _HEALTH[path])

    def handler(name: str) -> Callable[["Request"], Awaitable["Response"]]:
        async def handle(request: Request) -> "Response":
            return await _handle(name, request)

        return handle

    for name, (_, methods) in CALLS.items():
        handle = auth_level(AuthLevel.ADMIN_OPTIONAL)(handler(name))
        app.add_api_route(_PREFIX + name, handle, methods=methods)


def _naming_fields(handler: Any) -> Any:
    """Wrap SGLang's handler of bodies with fields of wrong types, whose answer has the whole body
    and the server's paths."""

    async def handle(request: "Request", error: Any) -> "Response":
        from fastapi.responses import JSONResponse

        if request.url.path.startswith(_TYPES_OF_OWN):
            return cast("Response", await handler(request, error))
        status = HTTPStatus.BAD_REQUEST
        fields = {"type": status.phrase, "param": None, "code": status}
        message = invalid_fields(error.errors())
        return JSONResponse({"object": "error", "message": message, **fields}, status)

    return handle


def invalid_fields(problems: Sequence[Mapping[str, Any]]) -> str:
    """An error message of pydantic's `problems` with a body: fields, values and what is allowed."""
    lines: list[str] = []
    # Of a union, one that a body cannot match names no type of JSON.
    for problem in [one for one in problems if one["type"] != "is_instance_of"] or problems:
        kind, (_, *where) = problem["type"], problem["loc"]
        # A union names its types in the location, such as "list[str]"; our field is before them.
        keys = [str(key) for key in where if "[" not in str(key) and key not in ("str", "int")]
        field, message = ".".join(keys) or "body", problem["msg"]
        if kind == "json_invalid":
            lines.append(f"body: expected JSON ({problem['ctx']['error']})")
        else:
            value = (
                f"={quoted(problem['input'])}" if kind != "missing" and "input" in problem else ""
            )
            lines.append(f"{field}{value}: {message}")
    shown = "; ".join(lines[:_MOST_PROBLEMS])
    more = len(lines) - _MOST_PROBLEMS
    return f"{shown} (and {more} more)" if more > 0 else shown


def _unless_asleep(app: AsgiApp, status: HTTPStatus) -> AsgiApp:
    """Wrap the app of a health route, which waits 20 seconds for a token: answer at once, with
    `status`, where a call has made the server stop generating."""

    async def awake_app(scope: Message, receive: Receive, send: Send) -> None:
        from fastapi.responses import JSONResponse
        from sglang.srt.entrypoints.http_server import get_global_state

        if reason := _sleeps(get_global_state().tokenizer_manager):
            await JSONResponse({"message": reason}, status)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return awake_app


def _sleeps(manager: Any) -> str | None:
    # A process that has served with this backend may serve with another.
    if (state := server_state(manager)) is None:
        return None
    if state.released:
        return state.released_message()
    if state.weight_update is not None:
        return "weights are being updated: call /end_weight_update"
    return "generation is paused: call /continue_generation" if manager.is_pause else None


def with_checks(app: AsgiApp, path: str) -> AsgiApp:
    """Wrap the app of a route of requests: refuse misplaced options, give errors one shape. A
    stream that begins with an error becomes a response with the error's status, as SGLang checks
    some requests only after it has sent the status 200."""

    async def checked_app(scope: Message, receive: Receive, send: Send) -> None:
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
        content = b"".join(message.get("body", b"") for message in messages)
        if problem := misplaced_option(content, path):
            await _send_error({"message": problem}, scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        checked = _CheckedSend(scope, receive, send)
        try:
            await app(scope, replay, checked)
        except ValueError as error:
            # Ollama's routes do not turn SGLang's refusals into responses.
            if checked.has_begun:
                raise
            await _send_error({"message": str(error)}, scope, receive, send)

    return checked_app


class _CheckedSend:
    """Sends the messages of one response, or its error in our shape."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._head: Message | None = None
        self._body = b""
        self._is_over = self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start" and _may_be_an_error(message):
            self._head = message
            return
        self.has_begun = True
        if self._head is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if self._head["status"] != HTTPStatus.OK and message.get("more_body"):
            return
        head, self._head = self._head, None
        error = _error(self._body)
        if error is None:
            await self._send(head)
            await self._send({**message, "body": self._body})
            return
        self._is_over = True
        if head["status"] != HTTPStatus.OK:
            error = {**error, "code": head["status"]}
        await _send_error(error, self._scope, self._receive, self._send)


def _may_be_an_error(head: Message) -> bool:
    kind: bytes = dict(head.get("headers", ())).get(b"content-type", b"")
    if head["status"] == HTTPStatus.OK:
        return kind.startswith((b"text/event-stream", b"application/x-ndjson"))
    return bool(head["status"] >= HTTPStatus.BAD_REQUEST) and kind.startswith(b"application/json")


def _error(body: bytes) -> dict[str, Any] | None:
    """The error in the first event of a stream, or in a body of SGLang's; None for other bodies."""
    if not body.startswith((_ERROR_EVENT, b'{"object":"error"', b'{"error":"')):
        return None
    content: dict[str, Any] = json.loads(body.removeprefix(b"data: "))
    error = content.pop("error", content)
    content.pop("object", None)
    return error if isinstance(error, dict) else {"message": str(error)}


async def _send_error(error: dict[str, Any], scope: Message, receive: Receive, send: Send) -> None:
    from fastapi.responses import JSONResponse

    code, wrong = error.get("code"), int(HTTPStatus.BAD_REQUEST)
    status = code if isinstance(code, int) and code >= wrong else wrong
    await JSONResponse({"error": error}, status)(scope, receive, send)


def misplaced_option(content: bytes, path: str) -> str | None:
    """An error message if an option of ours is in a field that nothing reads, else None."""
    if b'"sparrow"' not in content:
        return None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    expected = _CHECKED[path]
    for location in _LOCATIONS:
        value = body
        for key in location:
            value = value.get(key) if isinstance(value, dict) else None
        if location != expected and isinstance(value, dict) and "sparrow" in value:
            where = f" in {'.'.join(location)}" if location else ""
            field, route = expected or _OPENAI, "" if expected else " of /v1/chat/completions"
            return f'"sparrow"{where} has no effect: expected it in {".".join(field)}{route}'
    return None


async def _handle(name: str, request: "Request") -> "Response":
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state

    manager: Any = get_global_state().tokenizer_manager
    call = require_server_state(manager).calls[name]
    try:
        fields = _fields(call, await request.body()) if request.method == "POST" else {}
        answer = await call(**fields)
    except ValueError as error:
        fault = isinstance(error, RanksDisagreeError)
        status = HTTPStatus.INTERNAL_SERVER_ERROR if fault else HTTPStatus.BAD_REQUEST
        return JSONResponse({"error": {"message": str(error)}}, status_code=status)
    if request.query_params.get("full") != "true":
        # The provenance has most of a schedule's characters.
        for value in answer.values():
            if isinstance(value, dict):
                value.pop("provenance", None)
    return JSONResponse(answer)


def _fields(call: Callable[..., Any], content: bytes) -> dict[str, Any]:
    expected = f"expected a JSON object of {', '.join(inspect.signature(call).parameters)}"
    try:
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict)
        inspect.signature(call).bind(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(f"wrong body ({error}): {expected}") from None
    if None in fields.values():
        raise ControlError(f"wrong body, with null: {expected}")
    return fields
