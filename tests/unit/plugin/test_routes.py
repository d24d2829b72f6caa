"""Errors that a stream would begin with, as HTTP errors; everything else passes through."""

import asyncio
import json

import pytest

from sparrow_sglang.plugin.routes import with_early_errors

ERROR = {"error": {"message": "wrong", "code": 413}}
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def sent(status: int, headers: list[tuple[bytes, bytes]], bodies: list[bytes]) -> list[dict]:
    """The messages that reach the client of an app that sends this response."""
    messages: list[dict] = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep(message):
        messages.append(message)

    async def never():
        raise AssertionError("the app did not ask for the request's body")

    asyncio.run(with_early_errors(app)({"type": "http"}, never, keep))
    return messages


def test_an_error_first_becomes_the_answer():
    head, body = sent(200, STREAM, [event(ERROR), DONE])
    assert head["status"] == 413
    assert json.loads(body["body"]) == ERROR
    assert (b"content-length", str(len(body["body"])).encode()) in head["headers"]


def test_an_error_without_a_status_is_a_bad_request():
    for error in ({"message": "x"}, {"message": "x", "code": "odd"}, {"message": "x", "code": 200}):
        assert sent(200, STREAM, [event({"error": error}), DONE])[0]["status"] == 400


@pytest.mark.parametrize(
    ("status", "headers", "bodies"),
    [
        (200, STREAM, [event({"text": "a"}), event(ERROR), DONE]),
        (200, STREAM, []),
        (200, STREAM, [event({"text": '"error":', "meta_info": {}}), DONE]),
        (200, [(b"content-type", b"application/json")], [event(ERROR)]),
        (503, STREAM, [event(ERROR)]),
    ],
)
def test_other_answers_are_left_as_they_are(status, headers, bodies):
    messages = sent(status, headers, bodies)
    assert (messages[0]["status"], messages[0]["headers"]) == (status, headers)
    assert [message["body"] for message in messages[1:]] == [*bodies, b""]
