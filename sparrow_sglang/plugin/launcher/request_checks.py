"""Validation of a tokenised request before it leaves the launching process. SGLang's schedulers
trust what they receive: a field of another type, or a number out of range, ends the scheduler, and
with it all requests. So each field is compared here with the type that SGLang's own class gives it,
and with a range. Fields that would keep a process busy for seconds are bounded."""

import math
import re
import typing
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from sparrow_sglang.json_values import cut, quoted
from sparrow_sglang.plugin.scheduler.stop_regex import compiled
from sparrow_sglang.schedules.options import RequestError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

MAX_SAMPLES = 1024
"""Largest `n`: SGLang prepares all samples of a prompt in one go, and serves no other request."""
MAX_REQUESTS = 4096
"""Largest number of prompts times `n` in one call, for the same reason."""
MAX_LOGPROBS = 2**22
"""Largest number of listed log-probs over all positions of a request: SGLang makes a Python tuple
of each, in the process that serves everybody. `FREE_LOGPROBS` per position are always allowed."""
FREE_LOGPROBS = 20

UNREADABLE = (
    *(TypeError, AttributeError, LookupError, ArithmeticError),
    *(re.error, RecursionError, msgspec.MsgspecError),
)
"""Errors that SGLang raises, besides ValueError, on fields of a wrong type or form."""


class _Range(NamedTuple):
    least: float
    most: float
    what: str = "a number"


_INT32 = _Range(-(2**31), 2**31 - 1, "a whole number")
_INT64 = _Range(-(2**63), 2**63 - 1, "a whole number")
_FLOAT32 = _Range(-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))

_NOT_SENT = ("time_stats", "mm_inputs", "positional_embed_overrides", "custom_params")
"""Fields that `_round_trip_error` leaves out: not from the request, or objects of the caller's own,
which may be pickled."""


def _ranges(prompt_tokens: int, vocab_size: int) -> dict[str, _Range]:
    """Ranges other than that of 32 bits."""
    token_ids = _Range(0, vocab_size - 1, "token ids of the model")
    of_the_prompt = _Range(0, prompt_tokens - 1, "positions in the prompt")
    return {
        "input_ids": token_ids,
        "token_ids_logprob": token_ids,
        "stop_token_ids": token_ids,
        "multi_item_delimiter_indices": of_the_prompt,
        "token_indices_to_pool": of_the_prompt,
        "logprob_start_len": _Range(-1, prompt_tokens, "a position in the prompt"),
        "routed_experts_start_len": _Range(0, prompt_tokens, "a position in the prompt"),
        "top_logprobs_num": _Range(0, vocab_size, "a whole number"),
        "stream_interval": _Range(1, 2**31 - 1, "a whole number"),
        "sampling_seed": _INT64,
        "bootstrap_room": _INT64,
        # SGLang counts 2**30 for each repeat without an end.
        "stop_regex_max_len": _INT64,
        # Divided by repetition penalty and temperature, down to 1e-6 each, they must stay finite.
        "logit_bias": _Range(-1e20, 1e20),
        "repetition_penalty": _Range(1e-6, 2.0),
    }


def require_samples(request: Any) -> None:
    """Raise `RequestError` unless each `n` is 1 to MAX_SAMPLES, and all within MAX_REQUESTS."""
    sampling = getattr(request, "sampling_params", None)
    samples = 1
    for parameters in sampling if isinstance(sampling, list) else [sampling]:
        n = parameters.get("n", 1) if isinstance(parameters, dict) else 1
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_SAMPLES:
            raise RequestError(f"n={quoted(n)}: expected a whole number from 1 to {MAX_SAMPLES}")
        samples = max(samples, n)
    inputs = (getattr(request, name, None) for name in ("text", "input_ids", "input_embeds"))
    batch = next((value for value in inputs if isinstance(value, list) and value), [None])
    prompts = 1 if isinstance(batch[0], (int, float)) else len(batch)
    if prompts > 1 and prompts * samples > MAX_REQUESTS:
        raise RequestError(
            f"{prompts} prompts with n={samples}: expected {MAX_REQUESTS} samples at most"
        )


def require_servable(
    request: "TokenizedGenerateReqInput", vocab_size: int, context_tokens: int
) -> None:
    """Raise `RequestError` unless each field has its type and range."""
    prompt = request.input_ids if request.input_ids is not None else request.input_embeds
    if not prompt and request.mm_inputs is None:
        raise RequestError("input_ids=[]: expected one token or more in every prompt")
    ranges = _ranges(len(prompt or ()), vocab_size)
    parameters = request.sampling_params
    if patterns := parameters.stop_regex_strs:
        _require_patterns(tuple(patterns))
    session = getattr(request, "session_params", None)
    packed = isinstance(request, msgspec.Struct)
    error = _round_trip_error(request) if packed else None
    for part in (request, parameters, *([] if session is None else [session])):
        for name, (hint, usual) in _hints(part.__class__).items():
            value = getattr(part, name)
            if value is None:
                continue
            # A message that can be decoded holds the right types, and says so much sooner.
            if not packed or error is not None or name in _NOT_SENT:
                _require_type(name, value, hint)
            if (limits := ranges.get(name, usual)) is not None:
                _require_range(name, value, limits)
    _require_logprobs(request, len(prompt or ()), context_tokens)
    if error is not None:
        raise unreadable(error)


def _require_logprobs(
    request: "TokenizedGenerateReqInput", prompt_tokens: int, context_tokens: int
) -> None:
    listed = max(request.top_logprobs_num or 0, len(request.token_ids_logprob or ()))
    start = request.logprob_start_len
    room, new = max(1, context_tokens - prompt_tokens), request.sampling_params.max_new_tokens
    positions = room if new is None else min(new, room)
    positions += prompt_tokens - start if start >= 0 else 0
    if request.return_logprob and listed > FREE_LOGPROBS and listed * positions > MAX_LOGPROBS:
        raise RequestError(
            f"{listed} log-probs at {positions} positions: expected {MAX_LOGPROBS} at most, or"
            f" {FREE_LOGPROBS} at each position"
        )


@lru_cache(maxsize=64)
def _require_patterns(patterns: tuple[str, ...]) -> None:
    """Raise `RequestError` unless RE2 can search for each of `patterns`, and for all at once."""
    for chosen in (*((pattern,) for pattern in patterns), patterns):
        compiled(chosen)


def _round_trip_error(request: Any) -> Exception | None:
    """Why the scheduler cannot decode the message that carries `request`; None if it can."""
    from sglang.srt.managers import io_struct

    plain = copy(request)
    plain.sampling_params = copy(request.sampling_params)
    for part in (plain, plain.sampling_params):
        for name in _NOT_SENT:
            if hasattr(part, name):
                setattr(part, name, None)
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(plain))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        return error
    return None


def unreadable(error: Exception) -> RequestError:
    """The error for a request on which SGLang raised one of UNREADABLE."""
    if isinstance(error, re.error):
        return RequestError(
            f"stop_regex={quoted(error.pattern)}: {error}; expected a regular expression of Python"
        )
    return RequestError(
        f"the request cannot be read ({type(error).__name__}: {cut(str(error))}): expected the"
        " types of SGLang's GenerateReqInput and SamplingParams"
    )


@cache
def _hints(cls: Any) -> dict[str, tuple[Any, _Range | None]]:
    """Of the fields of SGLang's class whose annotated types msgspec can compare values with: the
    type, and the range of its numbers."""
    hints = {}
    for name, hint in typing.get_type_hints(cls).items():
        try:
            msgspec.convert(None, hint)
        except msgspec.ValidationError:
            pass
        except (TypeError, RuntimeError):
            continue
        kinds = set(_scalars(hint))
        usual = _FLOAT32 if float in kinds else _INT32 if int in kinds else None
        # Parameters of one's own reach no tensor.
        hints[name] = hint, None if name == "custom_params" else usual
    return hints


def _require_type(name: str, value: Any, hint: Any) -> None:
    if not isinstance(value, (bool, int, float, str, list, set, Mapping)):
        # An object that SGLang has made; what JSON holds is of one of these types.
        return
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        what, _, _ = str(error).partition(" - at")
        raise RequestError(f"{_shown(name)}={quoted(value)}: {what[0].lower()}{what[1:]}") from None


def _require_range(name: str, value: Any, limits: _Range) -> None:
    least, most, what = limits
    # Each request has a dozen numbers, for which NumPy would take a third of a millisecond.
    if isinstance(value, (int, float)) and least <= value <= most:
        return
    if isinstance(value, (bool, str)):
        return
    keys = list(value) if isinstance(value, Mapping) else None
    values = value.values() if isinstance(value, Mapping) else value
    numbers = np.asarray(list(values) if isinstance(value, (Mapping, set)) else values)
    if not numbers.size or (least <= numbers.min() and numbers.max() <= most):
        return
    wrong = np.argwhere(~((numbers >= least) & (numbers <= most)))
    if len(wrong):
        where = "".join(f"[{index if keys is None else repr(keys[index])}]" for index in wrong[0])
        first = numbers[tuple(wrong[0])]
        raise RequestError(
            f"{_shown(name)}{where}={quoted(first.item() if hasattr(first, 'item') else first)}:"
            f" expected {what} from {_number(least)} to {_number(most)}"
        )


def _scalars(hint: Any) -> Iterator[Any]:
    parts = typing.get_args(hint)
    if not parts:
        yield hint
    for part in parts:
        yield from _scalars(part)


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and not math.isinf(value) else str(value)


def _shown(name: str) -> str:
    """The name that users know."""
    return name.replace("_strs", "")
