"""Errors that a stream would begin with, and SGLang's flat ones, in one shape; the rest passes."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from sparrow_sglang.plugin.launcher.routes import (
    _sleeps,
    invalid_fields,
    misplaced_option,
    with_checks,
)

ERROR = {"error": {"message": "wrong", "code": 413}}
FLAT = {"object": "error", "message": "wrong", "type": "BadRequestError", "code": 400}
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def plain(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def sent(status: int, headers: list[tuple[bytes, bytes]], bodies: list[bytes]) -> list[dict]:
    """The messages that reach the client of an app that sends this response."""
    messages: list[dict] = []

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            if isinstance(body, ValueError):
                raise body
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    asyncio.run(with_checks(app, "/generate")({"type": "http"}, receive, keep))
    return messages


def test_an_error_first_becomes_the_answer():
    head, body = sent(200, STREAM, [event(ERROR), DONE])
    assert head["status"] == 413
    assert json.loads(body["body"]) == ERROR
    assert (b"content-length", str(len(body["body"])).encode()) in head["headers"]


def test_an_error_without_a_status_is_a_bad_request():
    for error in ({"message": "x"}, {"message": "x", "code": "odd"}, {"message": "x", "code": 200}):
        assert sent(200, STREAM, [event({"error": error}), DONE])[0]["status"] == 400


def test_a_value_error_before_the_body_is_a_bad_request():
    lines = [(b"content-type", b"application/x-ndjson")]
    head, body = sent(200, lines, [ValueError("wrong")])
    assert head["status"] == 400 and json.loads(body["body"]) == {"error": {"message": "wrong"}}
    with pytest.raises(ValueError, match="late"):
        sent(200, lines, [b"{}", ValueError("late")])


def test_a_flat_error_gets_the_shape_of_the_others():
    head, body = sent(422, JSON, [plain(FLAT)[:20], plain(FLAT)[20:]])
    assert head["status"] == 422
    expected = {"message": "wrong", "type": "BadRequestError", "code": 422}
    assert json.loads(body["body"]) == {"error": expected}


@pytest.mark.parametrize(
    ("status", "headers", "bodies"),
    [
        (200, STREAM, [event({"text": "a"}), event(ERROR), DONE]),
        (200, STREAM, []),
        (200, STREAM, [event({"text": '"error":', "meta_info": {}}), DONE]),
        (200, JSON, [event(ERROR)]),
        (200, JSON, [plain(FLAT)]),
        (503, STREAM, [event(ERROR)]),
        (400, JSON, [plain({"success": False})]),
    ],
)
def test_other_answers_are_left_as_they_are(status, headers, bodies):
    messages = sent(status, headers, bodies)
    assert (messages[0]["status"], messages[0]["headers"]) == (status, headers)
    assert b"".join(message["body"] for message in messages[1:]) == b"".join(bodies)


OPTION = {"sparrow": {"dense": True}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", OPTION),
        ("/generate", {"custom_params": OPTION}),
        ("/generate", {"sampling_params": OPTION}),
        ("/v1/completions", OPTION),
        ("/v1/completions", {"sampling_params": {"custom_params": OPTION}}),
        ("/v1/chat/completions", {"extra_body": {"custom_params": OPTION}}),
        # SGLang drops custom_params here.
        ("/v1/responses", {"custom_params": OPTION}),
        ("/v1/messages", {"custom_params": OPTION}),
        ("/api/generate", {"custom_params": OPTION}),
        ("/invocations", OPTION),
        ("/api/chat", {"options": OPTION}),
        ("/api/chat", {"options": {"custom_params": OPTION}}),
    ],
    ids=str,
)
def test_an_option_that_nothing_reads_is_misplaced(route, body):
    right = "in sampling_params.custom_params" if route == "/generate" else "in custom_params"
    problem = misplaced_option(json.dumps(body).encode(), route)
    assert problem.startswith('"sparrow"') and right in problem


def test_an_option_in_its_place_is_not():
    for route, body in (
        ("/generate", {"sampling_params": {"custom_params": OPTION}}),
        ("/v1/completions", {"custom_params": OPTION}),
        ("/api/chat", {"messages": [{"role": "user", "content": '"sparrow"'}]}),
    ):
        assert misplaced_option(json.dumps(body).encode(), route) is None


def test_health_of_another_backend_is_that_of_sglang():
    """In a process that has served with ours before, whose routes stay wrapped."""
    assert _sleeps(SimpleNamespace(is_pause=True)) is None


class Body(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    image: SimpleNamespace | None = None
    size: int | SimpleNamespace = 0


@pytest.mark.parametrize(
    ("body", "expected"), [({"image": 5}, "image=5: "), ({"size": "x"}, "size='x': ")]
)
def test_a_field_of_a_wrong_type_is_named(body, expected):
    with pytest.raises(ValidationError) as failure:
        Body.model_validate(body)
    problems = [one | {"loc": ("body", *one["loc"])} for one in failure.value.errors()]
    message = invalid_fields(problems)
    assert message.startswith(expected) and "; " not in message
