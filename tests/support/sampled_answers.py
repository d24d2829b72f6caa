"""Sampled answers of a tiny model, against their exact joint distribution. The model has six
tokens; its schedule reads four of the prompt's nine pages, so that sparse decode has another
distribution than dense decode."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import SCHEDULE, random_prompt, save_tiny_model, start_engine
from frequencies import p_value, sampled_from

WORDS = 6
LENGTH = 3
SAMPLES = 800
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.25, "temperature": 0.7},
)
PROMPT = [token % WORDS for token in random_prompt(80, 140)]
# Log-probs closer to a cut by top-k, top-p or min-p than this may fall on either of its two ends in
# 16 bits.
CLEAR = 0.03


class SampledAnswers:
    """A model and its schedule, in `folder`, and the distribution of the first three tokens of an
    answer. Of checkpoints in 16 bits one whose cuts are clear is chosen."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._dtype = dtype
        self._schedule = str(folder / "narrow.json")
        fields = SCHEDULE.model_dump() | {"name": "narrow", "dense_layers": ()}
        type(SCHEDULE)(**fields | {"budget_tokens": (4 * 16,)}).save(self._schedule)
        for seed in itertools.count():
            self._model = save_tiny_model(
                folder / str(seed),
                seed=seed,
                spread=0.35,
                vocab_size=WORDS,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=64,
                dtype=dtype,
            )
            self._logits = self._exact_logits()
            if dtype == "float32" or self._cuts_are_clear():
                break

    def p_values(self, settings: Any, **arguments: Any) -> list[float]:
        """Chi-square of SAMPLES answers under each setting, of one engine, in mixed batches."""
        parameters = [
            {"max_new_tokens": LENGTH} | setting for _ in range(SAMPLES) for setting in settings
        ]
        with start_engine(
            self._model,
            attention_backend="sparrow",
            sparrow_schedule=self._schedule,
            max_running_requests=64,
            dtype=self._dtype,
            disable_prefill_cuda_graph=True,
            max_total_tokens=32768,
            **arguments,
        ) as engine:
            engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
            answers = engine.generate(
                input_ids=[PROMPT] * len(parameters), sampling_params=parameters
            )
        drawn = [tuple(answer["output_ids"]) for answer in answers]
        return [
            p_value(drawn[start :: len(settings)], self._joint(setting))
            for start, setting in enumerate(settings)
        ]

    @torch.inference_mode()
    def _exact_logits(self) -> dict[tuple[int, ...], list[float]]:
        """Logits after each context of up to LENGTH - 1 tokens, by transformers."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float64).eval()
        contexts = list(itertools.product(range(WORDS), repeat=LENGTH - 1))
        logits = model(torch.tensor([[*PROMPT, *context] for context in contexts])).logits
        return {
            context[:length]: logits[row, len(PROMPT) - 1 + length].tolist()
            for row, context in enumerate(contexts)
            for length in range(LENGTH)
        }

    def _joint(self, setting: dict[str, Any]) -> dict[tuple[int, ...], float]:
        probs = {context: sampled_from(row, **setting) for context, row in self._logits.items()}
        return {
            answer: float(np.prod([probs[answer[:i]][answer[i]] for i in range(LENGTH)]))
            for answer in itertools.product(range(WORDS), repeat=LENGTH)
        }

    def _cuts_are_clear(self) -> bool:
        noise = np.random.default_rng(0)
        for row in self._logits.values():
            for setting in SETTINGS:
                kept = sampled_from(row, **setting) > 0
                for _ in range(20):
                    moved = np.array(row) + noise.uniform(-CLEAR, CLEAR, WORDS)
                    if ((sampled_from(moved.tolist(), **setting) > 0) != kept).any():
                        return False
        return True
