"""One interface to a running SGLang: an `sglang.Engine` in this process or a server's URL."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import httpx

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.json_values import quoted
from sparrow_sglang.sglang_compat.versions import request_of

Request = Mapping[str, Any]
Answer = dict[str, Any]

_CONNECT_S = 10.0
_CONNECTIONS = 256

_Result = TypeVar("_Result")


class EndpointError(SparrowError, RuntimeError):
    """A request failed or the server is down; the message says which and why, in one line."""


def connect(target: Any, api_key: str | None = None) -> "EngineEndpoint | HttpEndpoint":
    """The endpoint behind `target`, an `sglang.Engine` or a server's base URL. `api_key` is the
    server's --api-key or --admin-api-key; an engine needs none. Raises `ValueError` for any
    other target; does not contact the server yet. The endpoint's methods block, and raise
    `EndpointError` if the server refuses the request or is down."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return HttpEndpoint(target, api_key)
    if hasattr(target, "tokenizer_manager") and hasattr(target, "loop"):
        return EngineEndpoint(target)
    raise ValueError(
        f"target={quoted(target)}: expected an sglang.Engine or a URL, such as"
        " http://127.0.0.1:30000"
    )


class EngineEndpoint:
    """An engine in this process. Its methods can be called from any thread: if the engine's event
    loop does not run in another, it runs in this one until the work is done. Calls from a
    coroutine, which would block its event loop, are refused."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        return self._run(_gather(self._generate_one(request) for request in requests))

    def generate_pairs(
        self,
        requests: Sequence[Request],
        following: Callable[[int, Answer], Request],
        finished: Callable[[int, Answer], object],
    ) -> None:
        """Send each request, then at once the one that `following` makes of its number and answer.
        `finished` receives the number and the second answer of each completed pair, so that an
        interrupt loses only pairs in flight. Their errors are raised."""

        async def pair(number: int, request: Request) -> None:
            second = following(number, await self._generate_one(request))
            finished(number, await self._generate_one(second))

        self._run(_gather(pair(number, request) for number, request in enumerate(requests)))

    def flush_cache(self, timeout_s: float = 10.0) -> None:
        """Empty the prefix cache, after waiting at most `timeout_s` for the server to be idle."""
        result = self._run(self._engine.tokenizer_manager.flush_cache(timeout_s=timeout_s))
        if not result.success:
            raise EndpointError(f"no flush within {timeout_s} s: {result.message or 'not idle'}")

    def call_sparrow(self, method: str, **fields: Any) -> dict[str, Any]:
        """One of this package's own calls; over HTTP, the route /sparrow/`method`."""
        # The server's route of that name makes the same call, see `plugin.state.ServerState`.
        state = getattr(self._engine.tokenizer_manager, "sparrow", None)
        if state is None or method not in state.calls:
            raise EndpointError(
                f"the engine has no call {method!r}: it serves without --attention-backend sparrow"
            )
        return self._run(state.calls[method](**fields))

    async def _generate_one(self, request: Request) -> Answer:
        # `Engine.generate` lacks some fields, extra_key among them.
        answers = self._engine.tokenizer_manager.generate_request(request_of(request), None)
        try:
            answer: Answer = await anext(answers)
        except (ValueError, TypeError) as error:
            raise EndpointError(
                f"the engine refused a request of {_length(request)} tokens: {error}"
            ) from error
        finally:
            await answers.aclose()
        return _finished(answer, request)

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        loop = self._engine.loop
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not None:
            work.close()
            raise EndpointError("called from a coroutine: expected asyncio.to_thread around it")
        try:
            if loop.is_running():
                return asyncio.run_coroutine_threadsafe(work, loop).result()
            return loop.run_until_complete(work)
        except ValueError as error:
            raise EndpointError(f"the engine refused a call: {error}") from error


async def _gather(work: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """Results of concurrent work; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class HttpEndpoint:
    """A server behind a URL, with the same methods. Thread-safe."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.Client(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # A generation may take any time, and a dead server closes the connection.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=_CONNECTIONS),
        )

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        answers: list[Future[Answer]] = [Future() for _ in requests]
        todo: SimpleQueue[tuple[Future[Answer], Request]] = SimpleQueue()
        for pair in zip(answers, requests, strict=True):
            todo.put(pair)
        # Not a pool of Python's own, which would keep a process that ends by an error of one
        # request alive until the slowest of the others is answered.
        for _ in range(min(len(requests), _CONNECTIONS)):
            Thread(target=self._work_through, args=(todo,), daemon=True).start()
        try:
            wait(answers, return_when=FIRST_EXCEPTION)
            failed = [each for each in answers if each.done() and each.exception() is not None]
            return [each.result() for each in failed or answers]
        finally:
            for future in answers:
                future.cancel()

    def _work_through(self, todo: "SimpleQueue[tuple[Future[Answer], Request]]") -> None:
        with suppress(Empty):
            while True:
                future, request = todo.get_nowait()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(self._generate_one(request))
                except BaseException as error:
                    future.set_exception(error)

    def flush_cache(self, timeout_s: float = 10.0) -> None:
        self._send("POST", f"/flush_cache?timeout={timeout_s}")

    def call_sparrow(self, method: str, **fields: Any) -> dict[str, Any]:
        verb, body = ("POST", fields) if fields or method != "schedule" else ("GET", None)
        return self._send(verb, f"/sparrow/{method}?full=true", body).json()

    def _generate_one(self, request: Request) -> Answer:
        answer: Answer = self._send("POST", "/generate", dict(request)).json()
        return _finished(answer, request)

    def _send(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._client.request(verb, self._url + path, json=body)
        except httpx.TransportError as error:
            raise EndpointError(
                f"{verb} {self._url}{path} failed ({type(error).__name__}: {error}): the server is"
                " not running, or died meanwhile; look at its log"
            ) from error
        if response.is_error:
            hint = "; pass the server's --api-key or --admin-api-key as api_key="
            raise EndpointError(
                f"{verb} {self._url}{path} was answered with {response.status_code}:"
                f" {_reason(response)}{hint if response.status_code == 401 else ''}"
            )
        return response


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _finished(answer: Answer, request: Request) -> Answer:
    reason = answer.get("meta_info", {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise EndpointError(
            f"the server aborted a request of {_length(request)} tokens:"
            f" {reason.get('message') or 'no reason given'}"
        )
    return answer


def _length(request: Request) -> int | str:
    tokens = request.get("input_ids")
    return len(tokens) if tokens is not None else "text, not"
