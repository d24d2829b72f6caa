"""What is wrong with a request that SGLang would answer with HTTP 500, or with its scheduler's end.

In: requests as SGLang 0.5.17 has them in the launching process. Out: nothing, or an error that
names the field, its value and what is allowed; SGLang makes HTTP 400 of it.
"""

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sparrow_sglang.json_values import cut, quoted

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

UNREADABLE = (
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    re.error,
    msgspec.MsgspecError,
)
"""What SGLang raises, beside ValueError, on fields of a wrong type or form."""


class RequestError(ValueError):
    """A request cannot be served as it is; the message says why."""


def require_whole_n(sampling_params: Any) -> None:
    """Raise `RequestError` unless `n`, in a dict or in each of a list of dicts, is 1 or more.

    SGLang fails on texts and takes 0 for 1.
    """
    for parameters in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        n = parameters.get("n", 1) if isinstance(parameters, dict) else 1
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise RequestError(f"n={quoted(n)}: expected a whole number of 1 or more")


def require_servable(request: "TokenizedGenerateReqInput", vocab_size: int) -> None:
    """Raise `RequestError` on what would fail in the scheduler, with all other requests.

    Those are token ids that the model does not have, more top log-probs than it has tokens, and
    parameters that the scheduler cannot read.
    """
    if request.input_ids:
        ids = np.asarray(request.input_ids)
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if wrong.size:
            raise RequestError(
                f"input_ids[{wrong[0]}]={ids[wrong[0]]}: expected token ids of the model, from 0 to"
                f" {vocab_size - 1}"
            )
    top = request.top_logprobs_num
    if top is not None and not 0 <= top <= vocab_size:
        raise RequestError(f"top_logprobs_num={top}: expected a whole number, 0 to {vocab_size}")
    parameters = request.sampling_params
    try:
        msgspec.convert(msgspec.to_builtins(parameters), type(parameters))
    except msgspec.ValidationError as error:
        raise RequestError(_named(str(error), parameters)) from None


def require_begun(answer: Any) -> None:
    """Raise `RequestError` if the first answer of a stream says that the scheduler refused it.

    SGLang does so itself where it does not stream.
    """
    for one in answer if isinstance(answer, list) else [answer]:
        reason = one["meta_info"].get("finish_reason")
        if isinstance(reason, dict) and reason.get("status_code") == HTTPStatus.BAD_REQUEST:
            raise RequestError(reason.get("message") or "the scheduler refused the request")


def unreadable(error: Exception) -> RequestError:
    """What to answer to a request on which SGLang raised one of UNREADABLE."""
    return RequestError(
        f"the request cannot be read ({type(error).__name__}: {cut(str(error))}): expected"
        " fields of the types that SGLang's GenerateReqInput and SamplingParams have"
    )


def _named(message: str, parameters: Any) -> str:
    """msgspec knows the place of a wrong field, as the parameters travel as an array."""
    place = re.search(r"\$\[(\d+)\]", message)
    names = parameters.__struct_fields__
    if place is None or int(place[1]) >= len(names):
        return f"sampling_params: {cut(message)}"
    name = names[int(place[1])]
    shown = name.replace("_strs", "")
    return f"{shown}={quoted(getattr(parameters, name))}: {message.partition(' - at')[0]}"
