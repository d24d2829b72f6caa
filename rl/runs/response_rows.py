"""Rows of responses.jsonl: the responses of some groups of a step, to be read by people."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.batch import Batch, evenly
from sparrow_sglang.rl.metrics import tail_percentile
from sparrow_sglang.rl.types import Group


def response_rows(
    groups: Sequence[Group],
    rewards: Sequence[NDArray[np.float64]],
    parts: Sequence[Sequence[Mapping[str, float]]],
    tails: Mapping[int, float],
    count: int,
) -> list[dict[str, Any]]:
    """A row for each response of `count` groups, spread evenly.

    `rewards` [n] and sub-scores `parts`, if there are any, are given per group, for its responses.
    `tails` are keyed by the index of a response among those of all groups. "length" is in tokens.
    """
    starts = np.cumsum([0, *(len(group.rollouts) for group in groups)])
    return [
        {
            "task": groups[number].prompt.task,
            "prompt_id": rollout.prompt_id,
            "sample": rollout.sample,
            "reward": float(rewards[number][place]),
            "scores": dict(parts[number][place]) if parts else {},
            "length": len(rollout.response_ids),
            "finish_reason": rollout.finish_reason,
            "tail": tails.get(int(starts[number]) + place),
            "text": rollout.text,
        }
        for number in evenly(len(groups), count)
        for place, rollout in enumerate(groups[number].rollouts)
    ]


def measured_tails(batch: Batch, rates: NDArray[np.float64], sequences: int) -> dict[int, float]:
    """Tail percentile of each response that was measured, by its index in the batch.

    `rates` [N] are the acceptance rates of `batch.spread(sequences)`, or empty.
    """
    if not rates.size:
        return {}
    measured = batch.spread_indices(sequences)
    ends = np.cumsum([batch.lengths[index] for index in measured])
    split = np.split(rates, ends[:-1])
    return {index: tail_percentile(part) for index, part in zip(measured, split, strict=True)}
