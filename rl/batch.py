"""Groups and their advantages as flat tensors over the response tokens of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparrow_sglang.rl.advantages import Advantages
from sparrow_sglang.rl.types import Group, Rollout

TokenSequence = tuple[Sequence[int], Sequence[int]]
"""Token ids prefilled, and then decoded; at least one of each."""


def evenly(number: int, count: int) -> list[int]:
    """At most `count` of the indices below `number`, evenly spaced, starting at 0."""
    return sorted({index * number // count for index in range(count if number else 0)})


@dataclass(frozen=True, eq=False)
class Batch:
    """Responses of S rollouts, concatenated, with N tokens in all. `rollout_logprobs` and
    `advantages` are fp32 [N], `group` is int64 [S], the index of each rollout's group, and
    `in_loss` bool [S]."""

    rollouts: tuple[Rollout, ...]
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    group: torch.Tensor
    in_loss: torch.Tensor

    @classmethod
    def of(cls, groups: Sequence[Group], advantages: Advantages) -> "Batch":
        sizes = torch.tensor([len(group.rollouts) for group in groups])
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        lengths = torch.tensor([len(rollout.logprobs) for rollout in rollouts])
        values = torch.from_numpy(np.concatenate(advantages.values)).float()
        return cls(
            rollouts,
            torch.from_numpy(np.concatenate([rollout.logprobs for rollout in rollouts])),
            values.repeat_interleave(lengths),
            torch.arange(len(groups)).repeat_interleave(sizes),
            torch.from_numpy(np.concatenate(advantages.in_loss)),
        )

    @property
    def sequences(self) -> list[TokenSequence]:
        return [(rollout.prompt_ids, rollout.response_ids) for rollout in self.rollouts]

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each rollout."""
        return [len(rollout.logprobs) for rollout in self.rollouts]

    def sample_evenly(self, count: int) -> "Batch":
        """At most `count` rollouts, evenly spread. Retracted ones are excluded: the distribution
        that they were sampled from cannot be computed."""
        return self._subset(self._split_evenly(count)[0])

    def holdout_of(self, count: int) -> "Batch":
        """The rollouts that `sample_evenly` leaves out, or all if it leaves out none."""
        sampled, left = self._split_evenly(count)
        return self._subset(left or sampled)

    def _split_evenly(self, count: int) -> tuple[list[int], list[int]]:
        computable = [index for index, one in enumerate(self.rollouts) if not one.retracted]
        sampled = [computable[index] for index in evenly(len(computable), count)]
        return sampled, [index for index in computable if index not in sampled]

    def _subset(self, chosen: list[int]) -> "Batch":
        tokens = torch.arange(len(self.advantages)).split(self.lengths)
        kept = torch.cat([torch.empty(0, dtype=torch.int64), *(tokens[i] for i in chosen)])
        return Batch(
            tuple(self.rollouts[i] for i in chosen),
            self.rollout_logprobs[kept],
            self.advantages[kept],
            self.group[chosen],
            self.in_loss[chosen],
        )

    def mini_batches(self, count: int) -> Iterator[tuple[list[TokenSequence], torch.Tensor]]:
        """For each optimizer step its sequences, and the indices of their tokens. Groups are split
        into `count` consecutive parts of equal length; zero-advantage groups and empty parts are
        left out."""
        part = self.group * count // (int(self.group[-1]) + 1)
        for number in range(count):
            sequences, tokens = self.sequences_of((part == number) & self.in_loss)
            if sequences:
                yield sequences, tokens

    def sequences_of(self, chosen: torch.Tensor) -> tuple[list[TokenSequence], torch.Tensor]:
        """Sequences of the rollouts `chosen` [S] bool, and the indices of their tokens."""
        tokens = chosen.repeat_interleave(torch.tensor(self.lengths)).nonzero().flatten()
        sequences = self.sequences
        return [sequences[i] for i in chosen.nonzero().flatten().tolist()], tokens
