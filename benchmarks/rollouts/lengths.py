"""Response lengths for a rollout without a recording: long-tailed, of a given mean."""

import math
import random
from statistics import NormalDist

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
