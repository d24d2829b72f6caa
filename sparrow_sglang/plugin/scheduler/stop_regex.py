"""`stop_regex` by RE2 (https://github.com/google/re2), in time linear in the text. SGLang searches
the response after each step, in the process that serves everybody, by `re`, which may take
exponential time."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import re2  # type: ignore[import-untyped]

from sparrow_sglang.json_values import quoted
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.schedules.options import RequestError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

MAX_SIZE = 1000
"""Largest number of RE2's instructions for the patterns of a request: a step may take so many
times the length of the text."""
_NO_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*\{,\d+\}")
_COMPILED = "sparrow_stop"
"""Attribute of requests that holds their compiled `stop_regex`."""


def compiled(patterns: Sequence[str]) -> re2._Regexp:
    r"""An expression whose `search` finds any of `patterns`, as RE2 reads them: `\w`, `\d`, `\s`
    and `\b` go by ASCII, and `$` is the end of the text. Raises `RequestError`."""
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, 2**20
    shown = quoted(patterns[0] if len(patterns) == 1 else list(patterns))
    if any(_NO_REPEAT.search(pattern) for pattern in patterns):
        raise RequestError(f"stop_regex={shown}: RE2 reads {{,n}} as text, expected {{0,n}}")
    try:
        expression = re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)
    except re2.error as error:
        reason = error.args[0]
        reason = reason.decode() if isinstance(reason, bytes) else reason
        raise RequestError(f"stop_regex={shown}: {reason}; expected RE2's syntax") from None
    if (size := expression.programsize) > MAX_SIZE:
        raise RequestError(f"stop_regex={shown}: {size} instructions, expected {MAX_SIZE} at most")
    return expression


def finish_by_pattern(original: Callable[..., bool], req: "Req", new_accepted_len: int = 1) -> bool:
    """AROUND hook: search for `stop_regex` by RE2, after SGLang has searched for stop strings."""
    parameters, patterns = req.sampling_params, req.sampling_params.stop_regex_strs
    if PROCESS.scheduler is None or not patterns:
        return original(req, new_accepted_len)
    assert new_accepted_len == 1, "rounds of several tokens are taken token by token"
    from sglang.srt.managers.schedule_batch import FINISHED_MATCHED_REGEX

    text = req.tail_str().encode("utf-8", "replace")
    parameters.stop_regex_strs = []
    is_over = original(req)
    parameters.stop_regex_strs = patterns
    if is_over:
        return True
    if (expression := getattr(req, _COMPILED, None)) is None:
        setattr(req, _COMPILED, expression := compiled(patterns))
    if not expression.search(text):
        return False
    matched = next(each for each in patterns if compiled([each]).search(text))
    req.finished_reason = FINISHED_MATCHED_REGEX(matched=matched)
    req.finished_len = len(req.output_ids)
    return True
