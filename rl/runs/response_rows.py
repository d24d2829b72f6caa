"""Rows of responses.jsonl and evaluations.jsonl: responses, to be read by people."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparrow_sglang.rl.evaluation import Evaluation
from sparrow_sglang.rl.types import Group, Rewards

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens included."""


def response_rows(
    groups: Sequence[Group],
    rewards: Sequence[Rewards],
    parts: Sequence[Sequence[Mapping[str, float]]],
    decode: Decode,
    tails: Mapping[tuple[str, int], float] | None = None,
) -> list[dict[str, Any]]:
    """A row for each response of `groups`.

    `rewards` and sub-scores `parts`, if there are any, are given per group, for its responses.
    `tails`, if they were measured, are keyed by prompt id and sample. "length" is in tokens.
    """
    return [
        {
            "task": group.prompt.task,
            "prompt_id": rollout.prompt_id,
            "prompt": decode(rollout.prompt_ids),
            "sample": rollout.sample,
            "reward": rewards[number][place],
            "scores": dict(parts[number][place]) if parts else {},
            "length": len(rollout.response_ids),
            "finish_reason": rollout.finish_reason,
            **({} if tails is None else {"tail": tails.get((rollout.prompt_id, rollout.sample))}),
            "text": rollout.text,
        }
        for number, group in enumerate(groups)
        for place, rollout in enumerate(group.rollouts)
    ]


def evaluation_rows(evaluation: Evaluation, decode: Decode) -> list[dict[str, Any]]:
    """A row for each response of an evaluation, with the name of its set, "" for a single one."""
    scores = evaluation.scores
    rows = response_rows(evaluation.groups, scores.rewards, scores.parts, decode)
    per_group = zip(evaluation.sets, evaluation.groups, strict=True)
    sets = (name for name, group in per_group for _ in group.rollouts)
    return [{"set": name, **row} for name, row in zip(sets, rows, strict=True)]
