"""The sparse actor: the engine that samples responses, with its weights and adapter."""

from collections.abc import Iterator, Sequence

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.learner import Learner
from sparrow_sglang.rl.rollout import MoreGroups, OnFinished, RolloutEngine, Sampling, ShouldStop
from sparrow_sglang.rl.types import Group, Prompt


class SparseActor:
    def __init__(self, config: TrainConfig, engine: RolloutEngine, learner: Learner) -> None:
        self._config = config
        self.engine = engine
        self._learner = learner
        self._adapter: str | None = None

    def load(self, version: str) -> None:
        self._adapter = self._learner.deliver(self.engine, version, adapted=True)

    def stream(
        self,
        groups: Sequence[Group],
        on_finished: OnFinished | None,
        more_groups: MoreGroups | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine.stream`; `release` must follow."""
        return self.engine.stream(groups, self._sampling, on_finished, more_groups, should_stop)

    def release(self) -> None:
        self.engine.release()

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
        self._learner.deliver(self.engine, version, adapted=False)

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
        return self.engine.generate(prompts, settings.samples_per_prompt, sampling, on_finished)
