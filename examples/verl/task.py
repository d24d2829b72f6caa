"""A task for verl's trainer without data files: long stories in which many given words occur.
`python task.py FOLDER` writes train.parquet and test.parquet in verl's format. `compute_score` is
verl's interface of a rule-based reward."""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.tasks.story import WORDS

NAME = "words"
WORDS_OF_PROMPT = 16
TRAIN, TEST = 1024, 64


def prompts(count: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Prompts, and the words that are to occur."""
    draw = random.Random(seed)
    for _ in range(count):
        words = draw.sample(WORDS, WORDS_OF_PROMPT)
        yield f"Write a long story that uses all of these words: {', '.join(words)}.", words


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Sequence[str],
    extra_info: dict[str, Any] | None = None,
) -> float:
    """The share of the given words, `ground_truth`, that occur as whole words."""
    used = set(re.findall(r"[a-z]+", solution_str.lower()))
    return sum(word in used for word in ground_truth) / len(ground_truth)


def main(folder: Path) -> None:
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", TRAIN, 0), ("test", TEST, 1)):
        rows = [
            {
                "data_source": NAME,
                "prompt": [{"role": "user", "content": text}],
                "ability": "writing",
                "reward_model": {"style": "rule", "ground_truth": words},
                "extra_info": {"index": index, "split": split},
            }
            for index, (text, words) in enumerate(prompts(count, seed))
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
