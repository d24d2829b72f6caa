"""Sequences of a batch as micro-batches without padding.

In: sequences of prompt and response token ids. Out: which of them share a micro-batch, and the
tensors of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparrow_sglang.rl.batch import TokenSequence


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch: sequences one after the other, [T].

    `predictors` [n] are the positions whose output predicts the response tokens `targets` [n],
    which are `where` [n] among those of the whole batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    prompt_lengths: tuple[int, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    where: torch.Tensor

    @property
    def response_lengths(self) -> list[int]:
        """Response tokens of each sequence."""
        pairs = zip(self.lengths, self.prompt_lengths, strict=True)
        return [length - prompt for length, prompt in pairs]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of sequences that share a micro-batch of at most `capacity` tokens.

    First fit, longest first, which needs at most 11/9 of the fewest micro-batches; a sequence
    longer than `capacity` is alone in its own.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((k for k, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            packs.append([index])
            room.append(capacity - lengths[index])
        else:
            packs[fit].append(index)
            room[fit] -= lengths[index]
    return packs


def lay_out(sequences: Sequence[TokenSequence], where: np.ndarray, device: torch.device) -> Packed:
    """`sequences` one after the other; `where` [n] places their response tokens in the batch."""
    tokens = np.concatenate([[*prompt, *response] for prompt, response in sequences])
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    ends = np.cumsum(lengths)
    answers = np.concatenate(
        [
            np.arange(end - len(response), end)
            for end, (_, response) in zip(ends, sequences, strict=True)
        ]
    )
    positions = np.concatenate([np.arange(length) for length in lengths])

    def place(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return Packed(
        place(tokens),
        place(positions),
        lengths,
        tuple(len(prompt) for prompt, _ in sequences),
        place(answers - 1),
        place(tokens[answers]),
        place(where),
    )
