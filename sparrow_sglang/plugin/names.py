"""Names by which a server is configured for this package, and the error of a wrong one."""

from typing import TYPE_CHECKING

from sparrow_sglang.errors import InputError
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.sglang_compat.arguments import attention_backends

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

BACKEND = "sparrow"
"""Name of the backend in SGLang's --attention-backend."""
LOSSLESS = "SPARROW"
"""Name of the algorithm in SGLang's --speculative-algorithm."""
WEIGHTS_FIELD = "sparrow_draft_weights"
MODEL, FP8 = "model", "fp8"
DRAFT_WEIGHTS = AUTO, MODEL, FP8
"""Values of the field: FP8 copies where they pay, the model's own weights, FP8 copies."""
LOOKUPS_FIELD = "sparrow_disable_lookups"
DEFAULT_DRAFTS = 8
MAX_DRAFT_TOKENS = 33


def uses_sparrow(server_args: "ServerArgs") -> bool:
    """Whether this backend is selected for prefill, decode or both."""
    return BACKEND in attention_backends(server_args)


def refuse(problems: list[str]) -> None:
    """Raise `InputError` that lists the problems, if there are any."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"attention backend {BACKEND!r} cannot run here:\n{listed}")
