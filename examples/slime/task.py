"""A task for slime without data files: long stories in which many given words occur.

`python task.py FILE` writes prompts for `--prompt-data`, with the words as the label. slime loads
the reward by `--custom-rm-path task.reward`.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.tasks.story import WORDS

WORDS_OF_PROMPT = 16
PROMPTS = 256


async def reward(args: Any, sample: Any) -> float:
    """The share of the given words that occur as whole words."""
    used = set(re.findall(r"[a-z]+", sample.response.lower()))
    words = sample.label.split(", ")
    return sum(word in used for word in words) / len(words)


def main(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(PROMPTS):
            words = ", ".join(draw.sample(WORDS, WORDS_OF_PROMPT))
            prompt = f"Write a long story that uses all of these words: {words}."
            file.write(json.dumps({"prompt": prompt, "label": words}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
