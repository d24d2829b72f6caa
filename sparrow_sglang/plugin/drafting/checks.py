"""Which servers and requests may use drafts, and SGLang's arguments for them.

SGLang verifies the drafts of its algorithm NGRAM, whose name its scheduler and LoRA know; the
drafts and the verification are ours.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.hf_config import linear_layers, window_layers
from sparrow_sglang.json_values import quoted
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.request_options import RequestError
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.sglang_install import installed_version

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.server_args import ServerArgs

FIELD = "sparrow_draft_tokens"
MAX_DRAFTS = 15
VERSIONS = ("0.5.23",)

_ALGORITHM = "NGRAM"
# Sampling parameters that change the distribution by what was sampled in the same step, or that
# SGLang does not apply to drafts, and the values at which they do nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "min_new_tokens": (0, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
}


def set_arguments(server_args: "ServerArgs") -> None:
    """Have SGLang verify drafts if the arguments ask for them; they are not resolved yet."""
    drafts = getattr(server_args, FIELD)
    if drafts > 0:
        server_args.speculative_algorithm = _ALGORITHM
        # SGLang counts the token before the drafts, too.
        server_args.speculative_num_draft_tokens = drafts + 1
        # Drafts are chains.
        server_args.speculative_ngram_max_bfs_breadth = 1


def argument_problems(server_args: "ServerArgs") -> list[str]:
    """What is wrong with the arguments about drafts, one sentence each."""
    drafts = getattr(server_args, FIELD)
    if not isinstance(drafts, int) or isinstance(drafts, bool) or not 0 <= drafts <= MAX_DRAFTS:
        return [f"{FIELD}={drafts!r}: expected 0, for none, to {MAX_DRAFTS}; pass 3"]
    algorithm = server_args.speculative_algorithm
    if algorithm and (not drafts or algorithm != _ALGORITHM):
        return [
            f"speculative_algorithm={algorithm!r}: its drafts would not be verified under the"
            " sparse distribution; remove --speculative-algorithm, and pass --sparrow-draft-tokens"
            " 3 for drafts from earlier text"
        ]
    problems = []
    if drafts and installed_version() not in VERSIONS:
        problems.append(
            f"{FIELD}={drafts} in SGLang {installed_version()}: fitted to {' and '.join(VERSIONS)};"
            " remove --sparrow-draft-tokens"
        )
    unfit = {
        "enable_deterministic_inference": "how many rows a product has depends on the drafts",
        "enable_watermark": "it depends on the tokens before, which drafts may not be",
    }
    problems += [
        f"{FIELD}={drafts} with {name}: {reason}; remove one of them"
        for name, reason in unfit.items()
        if drafts and getattr(server_args, name, False)
    ]
    return problems


def draft_problems(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> list[str]:
    """Why drafts cannot be verified for this model under this schedule, one sentence each."""
    drafts = getattr(server_args, FIELD)
    if not drafts:
        return []
    problems = []
    kinds = {"sliding windows": window_layers, "linear attention": linear_layers}
    for kind, layers in kinds.items():
        if layers(model_config.hf_config):
            problems.append(
                f"{FIELD}={drafts}: a verification does not serve {kind}; remove"
                " --sparrow-draft-tokens for this model"
            )
    most = (schedule.recent_pages - 1) * schedule.page_size
    if drafts > most:
        problems.append(
            f"{FIELD}={drafts}: schedule {schedule.name} always keeps the last"
            f" {schedule.recent_pages} pages, so that a landmark could be read before its page is"
            f" final; pass at most {most}"
        )
    return problems


def require_draftable(request: "TokenizedGenerateReqInput") -> None:
    """Raise `RequestError` unless each token of a step has a distribution of its own."""
    for name, neutral in _REFUSED.items():
        value = getattr(request.sampling_params, name, None)
        if value not in neutral:
            raise RequestError(
                f"{name}={quoted(value)}: not served with --sparrow-draft-tokens; leave it out, or"
                " ask a server without drafts"
            )
    for name in ("custom_logit_processor", "return_sampling_mask"):
        if getattr(request, name, None):
            raise RequestError(
                f"{name}: not served with --sparrow-draft-tokens; leave it out, or ask a server"
                " without drafts"
            )


def choose_worker(original: Callable[..., type], algorithm: Any, server_args: "ServerArgs") -> type:
    """AROUND hook: drafts and their sampling are ours where the server asks for them.

    Checked with 0.5.23, whose scheduler gives the class the arguments of its own.
    """
    if not getattr(server_args, FIELD, 0):
        return original(algorithm, server_args)
    from sparrow_sglang.plugin.drafting.worker import DraftWorker

    return DraftWorker


def without_lengths_on_host(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """AROUND hook: for its algorithm NGRAM, SGLang waits in each step until the host knows the
    lengths. Verifying drafts of ours reads them on the device.

    Checked with 0.5.23; without drafts it has no effect there.
    """
    return PROCESS.scheduler is None and original(*args, **kwargs)
