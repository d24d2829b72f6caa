"""Two tasks for verl's trainer without data files. `python task.py FOLDER [words|problems]` writes
train.parquet and test.parquet in verl's format: long stories in which many given words occur, or
word problems after 32 worked ones, a prompt of 4K tokens. `compute_score` is verl's interface of a
rule-based reward."""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.rl.tasks.story import WORDS

WORDS_OF_PROMPT = 16
WORKED = 32
TRAIN, TEST = 1024, 128
NAMES = ("Ana", "Bela", "Carl", "Dora", "Emil", "Finn", "Gita", "Hugo")
GOODS = ("pears", "candles", "stamps", "bricks", "tickets", "bulbs", "jars", "ribbons")


def words(count: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Prompts, and the words that are to occur."""
    draw = random.Random(seed)
    for _ in range(count):
        chosen = draw.sample(WORDS, WORDS_OF_PROMPT)
        yield f"Write a long story that uses all of these words: {', '.join(chosen)}.", chosen


def problem(draw: random.Random) -> tuple[str, str, int]:
    """A problem, its solution in words, and the answer."""
    one, other = draw.sample(NAMES, 2)
    goods = draw.choice(GOODS)
    many, times, few = draw.randint(12, 60), draw.randint(2, 6), draw.randint(3, 11)
    kind = draw.randrange(3)
    if kind == 0:
        answer = many + many * times - few
        return (
            f"{one} has {many} {goods}, and {other} has {times} times as many. {other} loses {few}"
            f" of them. How many {goods} do the two have now?",
            f"{other} had {times} * {many} = {many * times} {goods}, and has {many * times} - {few}"
            f" = {many * times - few} now. The two have {many} + {many * times - few} = {answer}.",
            answer,
        )
    if kind == 1:
        bought = many + many * times
        answer = bought * few - many
        return (
            f"One of the {goods} costs {few} coins. {one} buys {many} and {other} {times} times as"
            f" many. The seller takes {many} coins off. How many coins do they pay in all?",
            f"{other} buys {times} * {many} = {many * times}, so they buy {many} + {many * times} ="
            f" {bought}. That is {bought} * {few} = {bought * few} coins, and {bought * few} -"
            f" {many} = {answer} after the reduction.",
            answer,
        )
    week = 5 * few + 2 * (few + times)
    answer = times * week + many
    return (
        f"{one} packs {few} {goods} on each of five days and {few + times} on each of the other two"
        f" days of a week. After {times} weeks {many} are still unpacked. How many {goods} were"
        " there at first?",
        f"A week makes 5 * {few} + 2 * {few + times} = {week}. In {times} weeks that is {times} *"
        f" {week} = {times * week}. At first there were {times * week} + {many} = {answer}.",
        answer,
    )


def problems(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Prompts, all with the same worked problems, and the answers."""
    draw = random.Random("worked")
    worked = "\n\n".join(
        f"Problem: {question}\nSolution: {solution} The answer is \\boxed{{{answer}}}."
        for question, solution, answer in (problem(draw) for _ in range(WORKED))
    )
    draw = random.Random(seed)
    for _ in range(count):
        question, _, answer = problem(draw)
        yield (
            f"{worked}\n\nSolve this one step by step in the same way, and put the answer into"
            f" \\boxed{{}}.\n\nProblem: {question}",
            str(answer),
        )


TASKS = {"words": words, "problems": problems}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Sequence[str],
    extra_info: dict[str, Any] | None = None,
) -> float:
    r"""For words, the share of `ground_truth` that occur as whole words; for problems, whether the
    last `\boxed` number is `ground_truth`."""
    if data_source == "problems":
        boxes = re.findall(r"\\boxed\{\s*(-?\d+)\s*\}", solution_str.replace(",", ""))
        return float(boxes[-1:] == [ground_truth])
    used = set(re.findall(r"[a-z]+", solution_str.lower()))
    return sum(word in used for word in ground_truth) / len(ground_truth)


def main(folder: Path, name: str = "words") -> None:
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", TRAIN, 0), ("test", TEST, 1)):
        rows = [
            {
                "data_source": name,
                "prompt": [{"role": "user", "content": text}],
                "ability": name,
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"index": index, "split": split},
            }
            for index, (text, truth) in enumerate(TASKS[name](count, seed))
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
