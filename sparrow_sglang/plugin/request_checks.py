"""What a tokenised request must be like before it leaves the launching process.

SGLang's schedulers trust what they receive: a field of another type, a number that a tensor of 32
bits cannot hold or an index outside the prompt ends the scheduler, and with it everybody's requests
(seen with 0.5.17 and 0.5.23). So each field is compared here with the type that SGLang's own class
gives it, and with a range.
"""

import math
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from sparrow_sglang.json_values import cut, quoted
from sparrow_sglang.request_options import RequestError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

MAX_SAMPLES = 1024
"""Largest `n`: SGLang prepares all samples of a prompt at once, and serves nobody meanwhile."""

UNREADABLE = (
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    re.error,
    msgspec.MsgspecError,
)
"""Errors that SGLang raises, besides ValueError, on fields of a wrong type or form."""


class _Range(NamedTuple):
    least: float
    most: float
    what: str = "a number"


_INT32 = _Range(-(2**31), 2**31 - 1, "a whole number")
_INT64 = _Range(-(2**63), 2**63 - 1, "a whole number")
_FLOAT32 = _Range(-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))


def _ranges(prompt_tokens: int, vocab_size: int) -> dict[str, _Range]:
    """Ranges of the fields that another one applies to than that of 32 bits.

    Biases are divided by repetition penalty and temperature, down to 1e-6 each, and must stay
    finite in 32 bits.
    """
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
        "logit_bias": _Range(-1e20, 1e20),
        "repetition_penalty": _Range(1e-6, 2.0),
    }


def require_samples(sampling_params: Any) -> None:
    """Raise `RequestError` unless `n`, in a dict or each of a list of them, is 1 to MAX_SAMPLES.

    Checked before SGLang makes the samples; it fails on strings and treats 0 as 1.
    """
    for parameters in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        n = parameters.get("n", 1) if isinstance(parameters, dict) else 1
        if n is None:
            continue
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_SAMPLES:
            raise RequestError(f"n={quoted(n)}: expected a whole number from 1 to {MAX_SAMPLES}")


def require_servable(request: "TokenizedGenerateReqInput", vocab_size: int) -> None:
    """Raise `RequestError` unless each field has its type and lies in its range."""
    prompt = request.input_ids if request.input_ids is not None else request.input_embeds
    if not prompt and request.mm_inputs is None:
        raise RequestError("input_ids=[]: expected one token or more in every prompt")
    ranges = _ranges(len(prompt or ()), vocab_size)
    for part in (request, request.sampling_params):
        for name, hint in _hints(part.__class__).items():
            value = getattr(part, name)
            if value is not None:
                _require_type(name, value, hint)
                _require_range(name, value, hint, ranges)


def unreadable(error: Exception) -> RequestError:
    """The error for a request on which SGLang raised one of UNREADABLE."""
    return RequestError(
        f"the request cannot be read ({type(error).__name__}: {cut(str(error))}): expected"
        " fields of the types that SGLang's GenerateReqInput and SamplingParams have"
    )


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """Annotated types of the fields of SGLang's class that msgspec can compare values with."""
    hints = {}
    for name, hint in typing.get_type_hints(cls).items():
        try:
            msgspec.convert(None, hint)
        except msgspec.ValidationError:
            pass
        except (TypeError, RuntimeError):
            continue
        hints[name] = hint
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


def _require_range(name: str, value: Any, hint: Any, ranges: Mapping[str, _Range]) -> None:
    kinds = set(_scalars(hint))
    numeric = name in ranges or bool(kinds & {int, float})
    # Parameters of one's own reach no tensor.
    if name == "custom_params" or not numeric or isinstance(value, (bool, str)):
        return
    least, most, what = ranges.get(name) or (_FLOAT32 if float in kinds else _INT32)
    keys = list(value) if isinstance(value, Mapping) else None
    values = value.values() if isinstance(value, Mapping) else value
    numbers = np.asarray(list(values) if keys or isinstance(value, set) else values)
    wrong = np.argwhere(~((numbers >= least) & (numbers <= most)))
    if len(wrong):
        place = "".join(f"[{index if keys is None else repr(keys[index])}]" for index in wrong[0])
        found = numbers[tuple(wrong[0])]
        raise RequestError(
            f"{_shown(name)}{place}={quoted(found.item() if hasattr(found, 'item') else found)}:"
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
    """The name by which users give the field."""
    return name.replace("_strs", "")
