"""An engine of random tokens that cost no time, and a trainer worker that only reads them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch

from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group, Prompt, Rollout


class FluentEngine:
    dtype = torch.float32

    def __init__(self, *_: Any, **__: Any) -> None:
        self._drawn = np.random.default_rng(0)

    def require_alive(self) -> None: ...

    def prepare_load(self) -> None: ...

    def finish_load(self, version: str) -> None: ...

    def stream(
        self, groups: Sequence[Group], sampling: Sampling, _: Any, more_groups: Any, stop: Any
    ) -> Iterator[tuple[int, Group]]:
        place = 0
        while not stop():
            for group in more_groups(True):
                count, length = len(group.rollouts), sampling.max_new_tokens
                yield (
                    place,
                    Group(
                        group.prompt,
                        tuple(
                            self._sample(group.prompt, sample, length) for sample in range(count)
                        ),
                    ),
                )
                place += 1

    def _sample(self, prompt: Prompt, sample: int, length: int) -> Rollout:
        ids = tuple(self._drawn.integers(151_936, size=length).tolist())
        logprobs = self._drawn.random(length, dtype=np.float32)
        text = "w" * 4 * length
        return Rollout(
            prompt.id, sample, prompt.input_ids, ids, logprobs, "length", "0", "dense", text
        )


@ray.remote(num_cpus=0)
class Reader:
    def ready(self) -> None: ...

    def read(self, references: list[Any]) -> int:
        batch: Batch = ray.get(references[0])
        return len(batch.rollouts)
