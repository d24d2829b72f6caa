"""Hooks of a scheduler of lossless decoding only; one runs for each token of each request."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.names import WEIGHTS_FIELD
from sparrow_sglang.plugin.state import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def finish_by_token(original: Callable[..., None], req: "Req", new_accepted_len: int = 1) -> None:
    """AROUND hook: end a request where decoding token by token would. SGLang searches the text of a
    whole round for one stop string after the other, and for stop tokens only then, so a later match
    in the round hides an earlier one. In the round that an abort ends it searches nothing."""
    if new_accepted_len <= 1:
        original(req, new_accepted_len)
        return
    aborted, req.to_finish = req.to_finish, None
    if req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs:
        first = len(req.output_ids) - new_accepted_len
        tokens = req.output_ids[first:]
        del req.output_ids[first:]
        for token in tokens:
            req.output_ids.append(token)
            original(req)
            if req.finished():
                break
        req.output_ids.extend(tokens[len(req.output_ids) - first :])
    else:
        original(req, new_accepted_len)
    if aborted and not req.finished():
        req.to_finish = aborted
        original(req)
    if req.finished_len is not None:
        # Counted over the whole round.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def end_turns_at_their_stop(session: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook: a session continues after the returned tokens of its requests; in SGLang, after
    all tokens of their last round."""
    for node in session.req_nodes.values():
        node.req.output_ids = node.req.output_ids_through_stop


def drop_unrequested_logprob(
    _: Any, processor: Any, i: int, req: "Req", *args: Any, **kwargs: Any
) -> None:
    """AFTER hook of what a prefill's log-probs give: with `max_new_tokens` 0 there is no output
    token to have one. Without speculative decoding SGLang samples none."""
    if req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()


def expire_draft_weights(_: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of each call that changes weights, also where it reports a failure."""
    weights = getattr(updater.tp_worker.model_runner, WEIGHTS_FIELD, None)
    if weights is not None:
        weights.stale = True


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CHANGING_WEIGHTS = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "end_weight_update", "check_weights", "resume_memory_occupation"),
)
# In the table of hooks of all modes, as SGLang applies all hooks of a target at once.
WEIGHT_HOOKS = tuple(
    Hook(f"{_UPDATER}.{call}", "AFTER", expire_draft_weights) for call in _CHANGING_WEIGHTS
)
HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "AROUND",
        finish_by_token,
        "new_accepted_len",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.logprob_result_processor"
        ".SchedulerLogprobResultProcessor.add_logprob_return_values",
        "AFTER",
        drop_unrequested_logprob,
        "i req",
    ),
    Hook(
        "sglang.srt.session.session_controller.Session.create_req",
        "BEFORE",
        end_turns_at_their_stop,
    ),
)
