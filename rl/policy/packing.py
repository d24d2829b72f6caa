"""Sequences of a batch as micro-batches without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sparrow_sglang.rl.batch import TokenSequence


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch: concatenated sequences, [T].

    `predictors` [n] are the positions whose output predicts the response tokens `targets` [n];
    `where` [n] are the indices of these among all response tokens of the batch.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    prompt_lengths: tuple[int, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    where: torch.Tensor

    @property
    def idle(self) -> bool:
        """Whether it predicts nothing, and exists only because other ranks have a micro-batch."""
        return not len(self.where)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of sequences that share a micro-batch of at most `capacity` tokens.

    First-fit decreasing, which needs at most 11/9 of the fewest possible micro-batches. A sequence
    longer than `capacity` gets a micro-batch of its own.
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


def assign_to_ranks(
    packs: list[list[int]], lengths: Sequence[int], ranks: int
) -> list[list[list[int]]]:
    """The packs of each rank: equally many, in rounds whose longest sequences are similar.

    Similar lengths matter because ranks wait for each other after every layer. The fullest packs
    are halved until every rank has one in every round; if there are too few sequences, some packs
    are empty.
    """
    if ranks == 1:
        return [packs]
    packs = list(packs)
    while len(packs) % ranks:
        fullest = max(packs, key=lambda pack: (len(pack) > 1, sum(lengths[i] for i in pack)))
        if len(fullest) > 1:
            packs.remove(fullest)
            packs += [fullest[::2], fullest[1::2]]
        else:
            packs.append([])
    packs.sort(key=lambda pack: -max((lengths[i] for i in pack), default=0))
    return [packs[rank::ranks] for rank in range(ranks)]


def idle(device: torch.device) -> Packed:
    """A micro-batch of two tokens that predicts nothing."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    tokens = build_micro_batch([((0,), (0,))], np.arange(1), device)
    return replace(tokens, predictors=none, targets=none, where=none)


def build_micro_batch(
    sequences: Sequence[TokenSequence], where: np.ndarray, device: torch.device
) -> Packed:
    """Pack `sequences`; `where` [n] are the indices of their response tokens in the batch."""
    tokens = np.concatenate([part for sequence in sequences for part in sequence])
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    positions = np.concatenate([np.arange(length) for length in lengths])
    prompts = np.repeat([len(prompt) for prompt, _ in sequences], lengths)
    sampled = np.flatnonzero(positions >= prompts)

    def place(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return Packed(
        place(tokens),
        place(positions),
        lengths,
        tuple(len(prompt) for prompt, _ in sequences),
        place(sampled - 1),
        place(tokens[sampled]),
        place(where),
    )
