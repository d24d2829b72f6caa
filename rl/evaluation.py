"""Rewards of the dense policy on held-out prompts: dense decode, without adapter."""

from collections.abc import Sequence
from fractions import Fraction
from math import comb

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.config import EvaluationConfig
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.types import Group


def evaluate(run: Run) -> dict[str, float]:
    """Mean reward of held-out prompts, and the probability that one of k responses passes.

    `eval/pass_rate` is the mean reward, even for a task that gives rewards between 0 and 1. With
    several sets each has its own, `eval/NAME/pass_rate`, and `eval/pass_rate` is their mean.
    """
    settings, steps = run.config.evaluation, run.progress.steps_taken
    sets = {name: prompts[: settings.prompts] for name, prompts in run.setup.heldout.items()}
    prompts = [prompt for chosen in sets.values() for prompt in chosen]
    finished = run.log.responses("evaluation", len(prompts) * settings.samples_per_prompt)
    run.actor.load_policy(str(steps))
    groups = run.actor.evaluate(prompts, finished)
    rewards = run.reward_workers.score(groups).rewards
    metrics: dict[str, float] = {}
    first, rates = 0, []
    for name, chosen in sets.items():
        part = slice(first, first + len(chosen))
        first += len(chosen)
        values = _set_metrics(rewards[part], groups[part], settings)
        metrics |= {"/".join(filter(None, ("eval", name, key))): v for key, v in values.items()}
        rates.append(values["pass_rate"])
        run.log.say(
            f"after {steps} steps: held-out {name + ' ' if name else ''}pass rate"
            f" {values['pass_rate']:.3f} +- {values['pass_rate_stderr']:.3f} of"
            f" {len(chosen)} prompts"
        )
    return metrics | {"eval/pass_rate": float(np.mean(rates))}


def _set_metrics(
    rewards: Sequence[NDArray[np.float64]], groups: Sequence[Group], settings: EvaluationConfig
) -> dict[str, float]:
    means = np.array([group.mean() for group in rewards])
    lengths = [len(rollout.response_ids) for group in groups for rollout in group.rollouts]
    passed = [group >= settings.pass_reward for group in rewards]
    return {
        "pass_rate": float(means.mean()),
        "pass_rate_stderr": float(means.std() / np.sqrt(len(means))),
        "response_length": float(np.mean(lengths)),
    } | {f"pass@{k}": pass_at(k, passed) for k in settings.pass_at}


def pass_at(k: int, passed: Sequence[NDArray[np.bool_]]) -> float:
    """Probability that at least one of k responses to a prompt passes, mean over prompts.

    `passed` holds one array [n] per prompt, n >= k. If c of n responses pass, C(n - c, k) of the
    C(n, k) choices of k responses hold none that passes, so 1 - C(n - c, k) / C(n, k) is an
    unbiased estimate (Chen et al., arXiv:2107.03374).
    """
    rates = []
    for prompt in passed:
        n, c = len(prompt), int(prompt.sum())
        # Exact integers: as floats the binomials overflow from about 1,030 responses on.
        rates.append(1 - Fraction(comb(n - c, k), comb(n, k)))
    return float(sum(rates) / len(rates))
