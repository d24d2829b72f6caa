"""Response lengths of a rollout: recorded ones, or a long-tailed distribution of a given mean."""

import json
import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any

from scipy.optimize import brentq

# Spread of the logarithm. Responses of a reasoning model spread over an order of magnitude.
SIGMA = 0.8


def synthetic_lengths(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """`count` lengths whose mean is `mean`, log-normal and cut off at `longest`, in random order.

    They are the distribution's quantiles rather than draws, so that even a few sequences have its
    mean and its tail. As in a rollout with a token limit, what would be longer is `longest`.

    Raises `ValueError` unless 1 <= mean < longest.
    """
    if not 1 <= mean < longest:
        raise ValueError(
            f"--mean-tokens {mean}: expected 1 or more, and less than --max-tokens {longest}"
        )
    scores = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]

    def lengths(mu: float) -> list[float]:
        return [min(max(math.exp(mu + SIGMA * score), 1.0), longest) for score in scores]

    widest = SIGMA * scores[-1]
    mu = brentq(
        lambda mu: sum(lengths(mu)) / count - mean, -1 - widest, math.log(longest) + 1 + widest
    )
    whole = [round(length) for length in lengths(mu)]
    random.Random(seed).shuffle(whole)
    return whole


def read_lengths(path: Path) -> list[int]:
    """Recorded lengths in their order: a JSON list, or JSONL, of 1234 or {"length": 1234}.

    Raises `ValueError` with file and place of what is no length.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected a text file") from None
    if text.lstrip().startswith("["):
        places = [(f"item {index}", each) for index, each in enumerate(_parse(text) or [], 1)]
    else:
        lines = enumerate(text.splitlines(), 1)
        places = [(f"line {number}", _parse(line)) for number, line in lines if line.strip()]
    if not places:
        raise ValueError(f"{path}: holds no lengths; expected a JSON list, or one length per line")
    return [_length(value, f"{path}, {place}") for place, value in places]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _length(value: Any, place: str) -> int:
    length = value.get("length") if isinstance(value, dict) else value
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(
            f"{place}: {json.dumps(value)[:60]} is no length; expected a whole number of 1 or more"
            ' tokens, or {"length": 1234}'
        )
    return length
