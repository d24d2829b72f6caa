"""A stand-in for rollout engines that samples with transformers."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl.rollout import RolloutEngine, Sampling
from sparrow_sglang.rl.types import Group, Prompt, Rollout

TOKENS = 8


class Sampler(RolloutEngine):
    """Responses and log-probs come from a stock model, without a cache."""

    dtype = torch.float32

    def __init__(self, model_path: str, schedule: str, **server_args: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.arguments = server_args
        self.entropies: list[float] = []
        self.version = ""

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Group]]:
        self.entropies.clear()
        for position, prompt in enumerate(prompts):
            if is_stopped():
                return
            yield (
                position,
                Group(prompt, tuple(self._sample(prompt, i, sampling) for i in range(n))),
            )

    @torch.no_grad()
    def _sample(self, prompt: Prompt, sample: int, sampling: Sampling) -> Rollout:
        ids, logprobs = list(prompt.input_ids), []
        for _ in range(TOKENS):
            logits = self.model(torch.tensor([ids])).logits[0, -1].double() / sampling.temperature
            distribution = logits.softmax(0)
            token = int(torch.multinomial(distribution, 1))
            ids.append(token)
            logprobs.append(math.log(distribution[token]))
            self.entropies.append(float(torch.special.entr(distribution).sum()))
        answer = tuple(ids[-TOKENS:])
        text = "".join(chr(token % 128) if token % 2 else "é" for token in answer)
        return Rollout(
            prompt.id,
            sample,
            prompt.input_ids,
            answer,
            np.array(logprobs),
            "length",
            self.version,
            "dense",
            text,
        )

    def update_weights(self, tensors: Any, version: str) -> None:
        self.model.load_state_dict(dict(tensors), strict=False)
        self.version = version
