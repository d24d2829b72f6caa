"""Response lengths that benchmarks replay: recorded ones, or long-tailed ones of a given mean."""

import argparse
import math
import random
from pathlib import Path
from statistics import NormalDist

from scipy.optimize import brentq

from sparrow_sglang.command_line import count
from sparrow_sglang.planning.response_lengths import read_lengths

GROUP = 8
"""Sequences that share one prompt."""

# Standard deviation of the logarithm. A reasoning model's response lengths span an order of
# magnitude.
SIGMA = 0.8


def synthetic_lengths(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """`count` lengths whose mean is `mean`, log-normal and cut off at `longest`, in random order.

    The lengths are quantiles of the distribution rather than draws, so that even a few sequences
    have its mean and its tail. As in a rollout with a token limit, longer ones become `longest`.

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


def add_length_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `request_lengths` reads, and those of the prompts."""
    add = parser.add_argument
    add(
        "--sequences",
        type=count,
        default=64,
        help=f"number of sequences, a multiple of {GROUP} (default: %(default)s)",
    )
    add(
        "--mean-tokens",
        type=count,
        default=8192,
        help="mean of the lengths, which are log-normal (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=count,
        default=32768,
        help="longer lengths are cut off there (default: %(default)s)",
    )
    add(
        "--lengths-file",
        type=Path,
        help="file of recorded lengths to use instead, the first --sequences of them: a JSON list"
        ' or JSONL, with items like 1234 or {"length": 1234}',
    )
    add("--prompt-tokens", type=count, default=256, help="tokens per prompt (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of prompts and order (default: %(default)s)")


def request_lengths(options: argparse.Namespace) -> list[int]:
    """Response lengths in tokens, cut off at --max-tokens.

    Raises `ValueError` if --lengths-file or --mean-tokens is not usable, or if --sequences is not a
    multiple of the group size.
    """
    if options.sequences % GROUP:
        raise ValueError(
            f"--sequences {options.sequences}: expected a multiple of {GROUP}, the size of a group"
        )
    if options.lengths_file is None:
        return synthetic_lengths(
            options.sequences, options.mean_tokens, options.max_tokens, options.seed
        )
    recorded = read_lengths(options.lengths_file)[: options.sequences]
    return [min(length, options.max_tokens) for length in recorded]
