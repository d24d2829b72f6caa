"""Environments: their replies between two turns of the model, as token ids after the first turn.

In: a task's `Reply`, and responses whose turn has ended. Out: the same responses with the
environment's tokens, to be continued; the model's own tokens stay as they were sampled.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparrow_sglang.rl.types import ABORTED, Prompt, Rollout

logger = logging.getLogger(__name__)

Reply = Callable[[Prompt, tuple[str, ...]], Mapping[str, str] | None]
"""(prompt, texts of the model's turns so far) -> the chat message that answers the last one, or
None if there is no further turn. A function of a module, as it may run in other processes."""

_MARK = "\x02turn\x03"


@dataclass(frozen=True)
class Environment:
    """The `reply` of a task, or of each task by name, and the `variables` of the chat template that
    renders it."""

    reply: Reply | Mapping[str, Reply]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def answered(self, rollout: Rollout, prompt: Prompt, tokenizer: Any, limit: int) -> Rollout:
        """The response with the environment's answer to its last turn; unchanged if there is none.

        If the answer and one more token would exceed `limit` response tokens, the response ends as
        truncated, without the answer. A reply that raises, or that the chat template does not
        accept as a message, ends the response with a warning. Blocks as long as the reply does.
        """
        reply = self.reply.get(prompt.task) if isinstance(self.reply, Mapping) else self.reply
        if rollout.finish_reason != "stop" or reply is None:
            return rollout
        try:
            message = reply(prompt, rollout.turns)
            if message is None:
                return rollout
            given = self.tokens(message, rollout.response_ids[-1], tokenizer)
        except Exception as error:
            name = f"{prompt.task}/{prompt.id}"
            logger.warning("prompt %s: reply: %s: %s", name, type(error).__name__, error)
            return rollout
        if len(rollout.response_ids) + len(given) >= limit:
            return replace(rollout, finish_reason="length")
        return replace(
            rollout,
            response_ids=(*rollout.response_ids, *given),
            finish_reason=ABORTED,
            text="",
            earlier_turns=rollout.turns,
        )

    def tokens(self, message: Mapping[str, str], last: int, tokenizer: Any) -> tuple[int, ...]:
        """Token ids from the end of a turn, its token `last`, to the start of the next one."""
        turn = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        text = tokenizer.apply_chat_template(
            [*turn, dict(message)], tokenize=False, add_generation_prompt=True, **self.variables
        )
        following = text.rpartition(_MARK)[2]
        end = tokenizer.added_tokens_decoder.get(last)
        if end is not None and end.special:
            # If the template ends turns by the token `last`, the turn has that token already. It
            # need not be one that the tokenizer knows by a role, as in `all_special_ids`.
            following = following.removeprefix(end.content)
        return tuple(tokenizer(following, add_special_tokens=False).input_ids)
