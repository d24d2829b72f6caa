"""The sparse actor: the engine that samples responses, with its weights, adapter and schedule.

In: prompts, and the learner whose weights are served. Out: groups. The actor's ladder holds the
active schedule.
"""

from collections.abc import Iterator, Sequence

from sparrow_sglang.rl.config import DENSE, TrainConfig
from sparrow_sglang.rl.engines.responses import MoreGroups, OnFinished, ShouldStop
from sparrow_sglang.rl.engines.rollout_engine import RolloutEngine
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.learner import Learner
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.schedule import BudgetSchedule


class SparseActor:
    """Samples from the learner's weights, with its adapter if it has one, under a schedule.

    `engine` was started with the first schedule of `ladder`.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: RolloutEngine,
        learner: Learner,
        ladder: Ladder,
    ) -> None:
        self.ladder = ladder
        self._config = config
        self._engine = engine
        self._learner = learner
        self._served = ladder.first
        self._adapter: str | None = None

    @property
    def schedule(self) -> BudgetSchedule | None:
        """The active schedule, None for dense rollouts."""
        return self.ladder.schedule

    @property
    def schedule_name(self) -> str:
        return self.schedule.name if self.schedule else DENSE

    def load(self, version: str) -> None:
        """Have the engine sample from weights, adapter and schedule as they are now."""
        self._adapter = self._learner.deliver(self._engine, version, adapted=True)
        if self.schedule is not None and self.schedule != self._served:
            self._engine.set_schedule(self.schedule)
            self._served = self.schedule

    def stream(
        self,
        groups: Sequence[Group],
        on_finished: OnFinished | None,
        more_groups: MoreGroups | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[tuple[int, Group]]:
        """A step's groups one by one, see `RolloutEngine.stream`; `release` must follow."""
        return self._engine.stream(groups, self._sampling, on_finished, more_groups, should_stop)

    def release(self) -> None:
        """Give the device's memory to the trainer."""
        self._engine.release()

    @property
    def _sampling(self) -> Sampling:
        settings = self._config.rollout
        return Sampling(
            settings.max_new_tokens,
            settings.temperature,
            adapter=self._adapter,
            timeout_s=self._config.rollout.timeout_s,
        )

    def load_policy(self, version: str) -> None:
        """Have the engine sample from the policy's weights, without adapter."""
        self._learner.deliver(self._engine, version, adapted=False)

    def evaluate(self, prompts: Sequence[Prompt], on_finished: OnFinished | None) -> list[Group]:
        """Responses of the policy that `load_policy` has loaded, by dense decode."""
        settings = self._config.evaluation
        sampling = Sampling(
            self._config.evaluation_tokens,
            settings.temperature,
            dense=True,
            top_p=settings.top_p,
            top_k=settings.top_k,
            timeout_s=self._config.rollout.timeout_s,
        )
        return self._engine.generate(prompts, settings.samples_per_prompt, sampling, on_finished)
