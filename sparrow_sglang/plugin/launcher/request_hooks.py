"""Hooks of the launching process that check each request and report the KV read in its answer.
SGLang answers their errors with HTTP 400. The KV read is computed from the token counts in the
answers, so the schedulers do nothing for it."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparrow_sglang.json_values import quoted
from sparrow_sglang.mismatch.exact_rates import RATES
from sparrow_sglang.plugin.launcher.control import measure_once
from sparrow_sglang.plugin.launcher.request_checks import (
    UNREADABLE,
    require_samples,
    require_servable,
    unreadable,
)
from sparrow_sglang.plugin.state import require_server_state, server_state
from sparrow_sglang.schedules.options import (
    ATTRIBUTE,
    KEY,
    RETRACTED,
    RequestError,
    RequestOption,
    RequestState,
    request_state,
)
from sparrow_sglang.sglang_compat.versions import weight_metadata

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sparrow_sglang.plugin.launcher.audit.auditor import Auditor
    from sparrow_sglang.plugin.mode import Mode

_DONE = "data: [DONE]\n\n"

logger = logging.getLogger("sparrow_sglang")


def wrap_generate_request(
    original: Callable[..., Any], manager: "TokenizerManager", request: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND hook: turn errors of a wrong request into ValueErrors; add `meta_info["sparrow"]`. All
    requests, of `Engine.generate` and of every route, pass through `generate_request`."""
    answers = original(manager, request, *args, **kw)
    if server_state(manager) is None:
        return answers
    return _wrapped_answers(manager, answers, request)


def check_request(
    request: Any, manager: "TokenizerManager", original: Any, *args: Any, **kw: Any
) -> None:
    """AFTER hook: refuse a request that this server cannot serve, and store its option. The option
    stays valid, as the schedule cannot be switched until the request is finished. Every part of a
    request passes through `_create_tokenized_object`. Raises `RequestError`."""
    state = server_state(manager)
    if state is None:
        return
    request_state(original).option = RequestOption.read(
        request.sampling_params.custom_params, state.schedule
    )
    if state.released:
        raise RequestError(state.released_message())
    if getattr(request, "lora_id", None) is not None and not original.lora_path:
        raise RequestError(
            f"lora_id={quoted(request.lora_id)}: expected an adapter's name in lora_path instead"
        )
    # An embedding request has no such fields; SGLang rejects it later.
    if hasattr(request, "top_logprobs_num"):
        require_servable(request, manager.model_config.vocab_size, manager.context_len)
        state.mode.require_servable(request, request_state(original).option)


def report_in_response(
    response: Any, serving: Any, request: Any, answers: list[dict[str, Any]], *args: Any
) -> None:
    """AFTER hook: add `metadata["sparrow"]` to a completion; an error response has no metadata."""
    usages = [answer["meta_info"].get(KEY) for answer in answers]
    if any(usages) and getattr(response, "metadata", None) is not None:
        response.metadata[KEY] = usages


def report_in_stream(
    original: Callable[..., AsyncIterator[str]], serving: Any, adapted: Any, *args: Any, **kw: Any
) -> AsyncIterator[str]:
    """AROUND hook: add the same `metadata` to a stream's chunk of usage, or in one more chunk."""
    events = original(serving, adapted, *args, **kw)
    if server_state(serving.tokenizer_manager) is None:
        return events
    return _with_last_chunk(events, adapted)


async def _wrapped_answers(
    manager: "TokenizerManager", answers: Any, request: Any
) -> AsyncIterator[Any]:
    setattr(request, ATTRIBUTE, RequestState())
    begun = False
    # Closing this generator must close SGLang's, which holds locks and request states.
    async with aclosing(answers):
        await measure_once(manager)
        try:
            require_samples(request)
            async for answer in answers:
                begun = True
                _report(answer, request, require_server_state(manager).mode)
                if not getattr(request, "stream", False):
                    # The caller may keep this generator, and with it a lock that switches wait for.
                    await answers.aclose()
                yield answer
        except UNREADABLE as error:
            if begun:
                raise
            logger.warning("a request was refused that cannot be read", exc_info=True)
            raise unreadable(error) from error
        finally:
            if not hasattr(request, "is_single"):
                # SGLang reads it when a stream is over, even if it could not read the request.
                request.is_single = True


def _report(answer: Any, request: Any, mode: "Mode") -> None:
    """Write the usage into the last answer of each part of `request` that requested it."""
    for position, output in enumerate(answer if isinstance(answer, list) else [answer]):
        meta = output["meta_info"]
        if RATES in meta and all(rates is None for rates in meta[RATES]):
            # An entry for another request's rates, which shared a batch with this one.
            del meta[RATES]
        # Of other requests in the batch, too.
        retracted = [count for count in meta.pop(RETRACTED, ()) if count is not None]
        # A stream has an answer per token.
        if meta.get("finish_reason") is None:
            continue
        index = output.get("index", position)
        samples = getattr(request, "parallel_sample_num", 1)
        part = request if request.is_single else request[index // samples]
        option = request_state(part).option
        if option is None or not option.report:
            continue
        meta[KEY] = asdict(mode.usage(option, meta, retracted))
        request_state(request).reports[index] = meta


async def _with_last_chunk(events: Any, adapted: Any) -> AsyncIterator[str]:
    first, is_reported = "", False
    async with aclosing(events):
        async for event in events:
            first = first or event
            reports = {} if is_reported else request_state(adapted).reports
            if reports and (event == _DONE or ('"choices":[]' in event and '"usage":{' in event)):
                is_reported = True
                usages = [meta[KEY] for _, meta in sorted(reports.items())]
                metadata = weight_metadata(reports[min(reports)]) | {KEY: usages}
                chunk = json.loads((first if event == _DONE else event).removeprefix("data: "))
                if event == _DONE:
                    chunk = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
                chunk |= {"choices": [], "metadata": metadata}
                yield f"data: {json.dumps(chunk)}\n\n"
                if event != _DONE:
                    continue
            yield event


def show_requests(manager: "TokenizerManager", requests: Any) -> None:
    """BEFORE hook: show the auditor a request, or a list of them, before it leaves this process."""
    listed = requests if isinstance(requests, list) else [requests]
    _show(manager, lambda auditor: auditor.on_requests(listed))


def show_outputs(manager: "TokenizerManager", outputs: Any) -> None:
    """BEFORE hook: show the auditor outputs before SGLang turns them into the users' answers."""
    if hasattr(outputs, "output_ids"):
        _show(manager, lambda auditor: auditor.on_outputs(outputs))


def _show(manager: "TokenizerManager", show: Callable[["Auditor"], None]) -> None:
    state = server_state(manager)
    if state is not None and (auditor := state.auditor) is not None:
        try:
            show(auditor)
        except Exception as error:
            # An exception would end the loop in which SGLang reads all answers.
            auditor.switch_off(error)
