"""Decoding along a given response: a logit processor of SGLang that leaves one token a step.

The engine must take logit processors and not overlap its steps, see `ENGINE_ARGS`: an overlapping
scheduler launches a step before the request knows the token of the one before.
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
    """Of a request: its `custom_logit_processor`, and what its `custom_params` need beside."""

    processor: str
    parameters: dict[str, Any]


def given_response(response_ids: Sequence[int]) -> GivenResponse:
    """Makes a generation give the first of these tokens, as many as it may generate."""
    return GivenResponse(_processor(), {_GIVEN: [int(token) for token in response_ids]})


@cache
def _processor() -> str:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class OneToken(CustomLogitProcessor):  # type: ignore[misc]
        def __call__(
            self, logits: "torch.Tensor", custom_param_list: list[dict[str, Any]] | None = None
        ) -> "torch.Tensor":
            steps = [
                # A chunk of a long prompt is followed by a token, too, which nobody keeps.
                parameters[_GIVEN][min(len(request.output_ids), len(parameters[_GIVEN]) - 1)]
                for parameters in custom_param_list or ()
                for request in [parameters["__req__"]]
            ]
            logits.fill_(-float("inf"))
            for row, token in enumerate(steps):
                logits[row, token] = 0.0
            return logits

    return str(OneToken.to_str())
