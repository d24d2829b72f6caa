"""Decoding along a given response: an SGLang logit processor that allows one token per step.

The engine must accept logit processors and not overlap its steps, see `ENGINE_ARGS`: an overlapping
scheduler launches a step before the request has the token of the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ENGINE_ARGS = {"enable_custom_logit_processor": True, "disable_overlap_schedule": True}
_GIVEN = "sparrow_given_response"


@dataclass(frozen=True)
class GivenResponse:
    """A request's `custom_logit_processor`, and the entries that it needs in `custom_params`."""

    processor: str
    parameters: dict[str, Any]


def given_response(response_ids: Sequence[int]) -> GivenResponse:
    """Make a generation produce these tokens, up to its limit of new tokens."""
    return GivenResponse(_processor(), {_GIVEN: [int(token) for token in response_ids]})


@cache
def _processor() -> str:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class OneToken(CustomLogitProcessor):  # type: ignore[misc]
        def __call__(
            self, logits: "torch.Tensor", custom_param_list: list[dict[str, Any]] | None = None
        ) -> "torch.Tensor":
            steps = [
                # After each chunk of a long prompt SGLang samples, too, and discards the token.
                parameters[_GIVEN][min(len(request.output_ids), len(parameters[_GIVEN]) - 1)]
                for parameters in custom_param_list or ()
                for request in [parameters["__req__"]]
            ]
            logits.fill_(-float("inf"))
            for row, token in enumerate(steps):
                logits[row, token] = 0.0
            return logits

    return str(OneToken.to_str())
