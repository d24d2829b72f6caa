"""What the launching process keeps for a request while it is under way."""

from dataclasses import dataclass, field
from typing import Any

from sparrow_sglang.requests import RequestOption

ATTRIBUTE = "sparrow"
"""Where state is kept on SGLang's objects, requests and the TokenizerManager."""


@dataclass
class RequestState:
    """What the launching process keeps for one `GenerateReqInput`, and for its copies.

    Attributes:
        option: what it asked for; of a batch, each part has its own.
        reports: `meta_info` of the finished answers that carry a report, by their index.
    """

    option: RequestOption | None = None
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


def request_state(request: Any) -> RequestState:
    """The state of a `GenerateReqInput`, made where there is none yet."""
    state: RequestState | None = getattr(request, ATTRIBUTE, None)
    if state is None:
        state = RequestState()
        setattr(request, ATTRIBUTE, state)
    return state
