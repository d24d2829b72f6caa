"""All groups of a step are sampled, then rewarded."""

from sparrow_sglang.rl.collect.base import Collected, Collector, count_tokens, with_penalties


def collect(collector: Collector, first: int) -> Collected:
    """Groups of the step's prompts, the run's from number `first` on; the engine is released."""
    settings = collector.settings
    prompts = collector.prompts_from(first, settings.prompts_per_step)
    with collector.clock("rollout"):
        groups = collector.actor.roll_out(prompts, collector.count_finished())
    with collector.clock("reward"):
        scores = collector.reward_workers.score(groups)
    rewards = with_penalties(settings, scores.rewards, groups)
    return Collected(groups, rewards, scores.parts, scores.metrics(), count_tokens(groups))
