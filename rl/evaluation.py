"""Rewards of the dense policy on held-out prompts: dense decode, without adapter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.rl.config import EvaluationConfig
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.runs.log import Decode, response_rows
from sparrow_sglang.rl.runs.run import Run
from sparrow_sglang.rl.tasks.rewards import RewardsFailed, Scores
from sparrow_sglang.rl.types import Group, Rewards, known_rewards


@dataclass(frozen=True, eq=False)
class Evaluation:
    sets: tuple[str, ...]
    groups: Sequence[Group]
    scores: Scores
    metrics: dict[str, float]

    def lines(self) -> Iterator[str]:
        for name in dict.fromkeys(self.sets):
            prefix, which = (f"eval/{name}/", f"{name} ") if name else ("eval/", "")
            rate, error = (self.metrics[f"{prefix}pass_rate{end}"] for end in ("", "_stderr"))
            count = self.sets.count(name)
            of = f"± {error:.3f}, {count} prompts" if count > 1 else "of one prompt"
            yield f"held-out {which}pass rate {rate:.3f} {of}"

    def rows(self, decode: Decode) -> list[dict[str, Any]]:
        rows = response_rows(self.groups, self.scores.rewards, self.scores.parts, decode)
        per_group = zip(self.sets, self.groups, strict=True)
        sets = (name for name, group in per_group for _ in group.rollouts)
        return [{"set": name, **row} for name, row in zip(sets, rows, strict=True)]


def evaluate(run: Run) -> Evaluation:
    """Evaluate the policy on the first prompts of each set. `eval/pass_rate` is the mean reward, of
    several sets the mean of `eval/NAME/pass_rate`; missing rewards do not count. Raises
    `RewardsFailed`."""
    settings = run.config.evaluation
    heldout = run.setup.heldout.items()
    prompts_by_set = {name: prompts[: settings.prompts or None] for name, prompts in heldout}
    prompts = [prompt for in_set in prompts_by_set.values() for prompt in in_set]
    sampling = Sampling(
        run.config.evaluation_tokens,
        settings.temperature,
        dense=True,
        top_p=settings.top_p,
        top_k=settings.top_k,
        timeout_s=run.config.rollout.timeout_s,
    )
    run.learner.deliver(run.engine, str(run.state.step), adapted=False)
    samples = settings.samples_per_prompt
    stream = run.engine.stream(prompts, samples, sampling)
    by_position = dict(run.log.counted("evaluation", len(prompts) * samples, stream))
    groups = [by_position[position] for position in range(len(prompts))]
    scores = run.reward_workers.score(groups)
    sets = tuple(name for name, in_set in prompts_by_set.items() for _ in in_set)
    # `metrics()` of scores counts failures, as "sparrow/reward_errors" and the like.
    failures = scores.metrics().items()
    metrics = {f"eval/{key.rpartition('/')[2]}": value for key, value in failures}
    rates = []
    for name in prompts_by_set:
        indices = [index for index, set_name in enumerate(sets) if set_name == name]
        rewards = [scores.rewards[index] for index in indices]
        values = _set_metrics(rewards, [groups[index] for index in indices], settings)
        prefix = f"eval/{name}/" if name else "eval/"
        metrics |= {prefix + key: value for key, value in values.items()}
        rates.append(values["pass_rate"])
    metrics["eval/pass_rate"] = float(np.mean(rates))
    return Evaluation(sets, groups, scores, metrics)


def _set_metrics(
    rewards: Sequence[Rewards], groups: Sequence[Group], settings: EvaluationConfig
) -> dict[str, float]:
    known = [values for group in rewards if (values := known_rewards(group)).size]
    if not known:
        raise RewardsFailed(f"all {len(rewards)} prompts of a held-out set have no reward")
    means = np.array([values.mean() for values in known])
    lengths = [len(rollout.response_ids) for group in groups for rollout in group.rollouts]
    passed = [values >= settings.pass_reward for values in known]
    return {
        "pass_rate": float(means.mean()),
        "pass_rate_stderr": float(means.std() / np.sqrt(len(means))),
        "response_length": float(np.mean(lengths)),
    } | {
        f"pass@{k}": pass_at(k, enough)
        for k in settings.pass_at
        if (enough := [values for values in passed if len(values) >= k])
    }


def pass_at(k: int, passed: Sequence[NDArray[np.bool_]]) -> float:
    """Unbiased probability that one of k responses passes, mean over prompts: 1 - C(n - c, k) /
    C(n, k) for c passes in n >= k responses, `passed` [n] per prompt (Chen et al.,
    arXiv:2107.03374)."""
    # Exact integers: as floats the binomials overflow from about 1,030 responses on.
    counts = [(len(prompt), int(prompt.sum())) for prompt in passed]
    return float(1 - sum(Fraction(comb(n - c, k), comb(n, k)) for n, c in counts) / len(counts))
