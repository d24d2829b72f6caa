"""State that the launching process keeps for a running request."""

from dataclasses import dataclass, field
from typing import Any

from sparrow_sglang.requests import RequestOption

ATTRIBUTE = "sparrow"
"""Attribute of SGLang's objects, requests and the TokenizerManager, that holds our state."""


@dataclass
class RequestState:
    """State that the launching process keeps for one `GenerateReqInput`, and for its copies.

    Attributes:
        option: what the request asked for; each request of a batch has its own.
        reports: `meta_info` of the finished answers that carry a report, by their index.
    """

    option: RequestOption | None = None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


def request_state(request: Any) -> RequestState:
    """The state of a `GenerateReqInput`, created if there is none yet."""
    state: RequestState | None = getattr(request, ATTRIBUTE, None)
    if state is None:
        state = RequestState()
        setattr(request, ATTRIBUTE, state)
    return state
