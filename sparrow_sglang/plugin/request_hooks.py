"""Where SGLang is changed for each request: it is checked, and its answer says what was used.

Usage follows from the numbers of tokens, which the launching process sees with every answer; the
schedulers do nothing for it. The hooks do nothing in a process that serves with another backend.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparrow_sglang.kv_usage import KvRule
from sparrow_sglang.plugin.request_checks import (
    UNREADABLE,
    require_begun,
    require_servable,
    require_whole_n,
    unreadable,
)
from sparrow_sglang.plugin.state import server_state
from sparrow_sglang.requests import KEY, RequestOption

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_DONE = "data: [DONE]\n\n"

logger = logging.getLogger("sparrow_sglang")


def attend_request(
    original: Callable[..., Any], manager: "TokenizerManager", request: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND hook: errors of a wrong request are its own; `meta_info["sparrow"]` if it asks.

    Checked with 0.5.17, where all requests, of `Engine.generate` and of every route, pass through
    `generate_request`, and a ValueError becomes HTTP 400 but other errors HTTP 500.
    """
    found = original(manager, request, *args, **kw)
    return found if server_state(manager) is None else _attended(found, request)


def check_request(
    request: Any, manager: "TokenizerManager", given: Any, *args: Any, **kw: Any
) -> None:
    """AFTER hook: refuse a request that asks for what there is not.

    Keeps the rule that the request is decoded by: the schedule cannot be switched from here until
    the request is finished.

    Checked with 0.5.17, where every part of a request passes through `_create_tokenized_object`.

    Raises:
        RequestOptionError: see `RequestOption.read`.
        RequestError: see `require_servable`.
    """
    state = server_state(manager)
    if state is None:
        return
    option = RequestOption.read(request.sampling_params.custom_params, state.loaded)
    # An embedding request, which this server refuses for its own reasons, has no such fields.
    if hasattr(request, "top_logprobs_num"):
        require_servable(request, manager.model_config.vocab_size)
    if option.report:
        given.sparrow_rule = KvRule.of(option, state.loaded)


def report_in_response(
    response: Any, serving: Any, request: Any, answers: list[dict[str, Any]], *args: Any
) -> None:
    """AFTER hook: `metadata["sparrow"]` in a completion, beside the weight version.

    Checked with 0.5.17, where `metadata` is a dict of SGLang's own. An error has none.
    """
    usages = [answer["meta_info"].get(KEY) for answer in answers]
    if any(usages) and getattr(response, "metadata", None) is not None:
        response.metadata[KEY] = usages


def report_in_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, *args: Any, **kw: Any
) -> AsyncIterator[str]:
    """AROUND hook: one more chunk at the end of a stream, with the same `metadata`.

    Checked with 0.5.17, where a stream consists of whole server-sent events.
    """
    events = original(serving, adapted, *args, **kw)
    return _with_last_chunk(events, adapted) if _asks(adapted) else events


def _asks(adapted: Any) -> bool:
    """Whether an OpenAI request, not checked yet, asks for a report."""
    custom = adapted.sampling_params.get("custom_params")
    wanted = custom.get(KEY) if isinstance(custom, dict) else None
    return isinstance(wanted, dict) and wanted.get("report") is True


async def _attended(answers: Any, request: Any) -> AsyncIterator[Any]:
    finished: dict[int, dict[str, Any]] = {}
    request.sparrow_finished = finished
    begun = False
    # Closing this must close SGLang's generator, which holds locks and request states.
    async with aclosing(answers):
        try:
            require_whole_n(getattr(request, "sampling_params", None))
            async for answer in answers:
                if not begun:
                    require_begun(answer)
                begun = True
                _report(answer, request, finished)
                yield answer
        except UNREADABLE as error:
            if begun:
                raise
            logger.warning("a request was refused that cannot be read", exc_info=True)
            raise unreadable(error) from error
        finally:
            if not hasattr(request, "is_single"):
                # SGLang looks at it when a stream is over, also of a request it could not read.
                request.is_single = True


def _report(answer: Any, request: Any, finished: dict[int, dict[str, Any]]) -> None:
    """Write the usage into the last answer of each part of `request` that asked for it."""
    for place, one in enumerate(answer if isinstance(answer, list) else [answer]):
        index = one.get("index", place)
        samples = getattr(request, "parallel_sample_num", 1)
        part = request if request.is_single else request[index // samples]
        rule: KvRule | None = getattr(part, "sparrow_rule", None)
        meta = one["meta_info"]
        if rule is None or meta.get("finish_reason") is None:
            continue
        # A request that is aborted before it ran has not been counted.
        usage = rule.usage(meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0))
        meta[KEY] = asdict(usage)
        finished[index] = meta


async def _with_last_chunk(events: Any, adapted: Any) -> AsyncIterator[str]:
    first: dict[str, Any] | None = None
    async with aclosing(events):
        async for event in events:
            if first is None:
                first = json.loads(event.removeprefix("data: "))
            finished: dict[int, dict[str, Any]] = getattr(adapted, "sparrow_finished", {})
            if event == _DONE and finished:
                version = finished[min(finished)].get("weight_version")
                usages = [meta[KEY] for _, meta in sorted(finished.items())]
                metadata = {"weight_version": version, KEY: usages}
                head = {key: first.get(key) for key in ("id", "object", "created", "model")}
                yield f"data: {json.dumps(head | {'choices': [], 'metadata': metadata})}\n\n"
            yield event
