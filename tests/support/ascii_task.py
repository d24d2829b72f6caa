"""A task that a random model of bytes can learn in a few steps: to write ASCII."""

import json
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks.base import Render, Task
from sparrow_sglang.rl.types import Prompt

NAME = "ascii"


def load(config: TaskConfig, render: Render) -> Task:
    prompts = tuple(
        Prompt(f"{i}", config.name, render([{"role": "user", "content": f"{i:03d} " * 12}]))
        for i in range(24)
    )
    return Task(prompts[:20], prompts[20:], reward)


def reward(prompt: Prompt, text: str) -> float:
    return sum(ord(character) < 128 for character in text) / max(1, len(text))


def save_model_of_bytes(folder: Path, **overrides: Any) -> str:
    """A tiny random checkpoint with a tokenizer of one token per byte, and a chat template.
    `overrides` are fields of its config."""
    # Imported here, because reward workers import this file and do not need these modules.
    from engines import save_tiny_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny_model(folder, spread=0.1, **overrides)
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)
    return str(folder)


def rows(run_dir: Path) -> list[dict]:
    """The run's metrics by step, in order; those of an evaluation are with the step after it."""
    merged: dict[int, dict] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        merged[row["step"]] = merged.get(row["step"], {}) | row
    return list(merged.values())


def untimed(run_dir: Path) -> list[dict[str, float]]:
    timed = ("timing_s/", "sparrow/rollout_tokens_per_s")
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in rows(run_dir)
    ]
