"""The sparse actor: the engine that samples responses, with its weights, adapter and schedule.

In: prompts, and the policy and adapter that are trained. Out: groups, and their exact acceptance
rates. The actor's ladder holds the active schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from sparrow_sglang.rl.adapter_gate import choose_scale
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import ADAPTER, PolicyTerm, SparseAdapter
from sparrow_sglang.rl.engines.buckets import NamedTensors, Weights
from sparrow_sglang.rl.engines.responses import Enough, Finished, Further, never, nothing
from sparrow_sglang.rl.engines.rollout_engine import RolloutEngine
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.rollout import DENSE, Sampling
from sparrow_sglang.rl.turns import Environment
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.schedule import BudgetSchedule


class SparseActor:
    """Samples from the policy's weights, with its adapter if it has one, under a schedule.

    `engine` was started with the first schedule of `ladder`; without DistillSparse there is no
    `adapter`.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: RolloutEngine,
        policy: DensePolicy,
        adapter: SparseAdapter | None,
        ladder: Ladder,
        environment: Environment | None = None,
    ) -> None:
        self.adapter = adapter
        self.ladder = ladder
        self._config = config
        self._engine = engine
        self._environment = environment
        self._policy = policy
        self._delivers_lora = config.distill.delivery == "lora"
        self._served = ladder.first

    @property
    def schedule(self) -> BudgetSchedule | None:
        """The active schedule, None for dense rollouts."""
        return self.ladder.schedule

    @property
    def schedule_name(self) -> str:
        return self.schedule.name if self.schedule else DENSE

    @property
    def _unmerged(self) -> bool:
        """Whether the engine serves the adapter as unmerged LoRA."""
        return self.adapter is not None and self._delivers_lora and self.adapter.scale > 0

    def load(self, version: str) -> None:
        """Have the engine sample from weights, adapter and schedule as they are now."""
        merged = self.adapter if self._config.distill.delivery == "merged" else None
        self._load(merged.merged_weights if merged else self._policy.named_weights, version)
        if self.schedule is not None and self.schedule != self._served:
            self._engine.set_schedule(self.schedule)
            self._served = self.schedule
        if self.adapter is not None and self._unmerged:
            self._engine.set_adapter(ADAPTER, self.adapter.tensors(), self.adapter.lora_config())

    def roll_out(self, prompts: Sequence[Prompt], finished: Finished) -> list[Group]:
        """A step's responses; afterwards the engine has released the device's memory."""
        samples = self._config.rollout.samples_per_prompt
        groups = self._engine.generate(prompts, samples, self._sampling, finished)
        self._engine.release()
        return groups

    def stream(
        self,
        groups: Sequence[Group],
        finished: Finished,
        further: Further = nothing,
        enough: Enough = never,
    ) -> Iterator[tuple[int, Group]]:
        """A step's groups one by one, see `RolloutEngine.stream`; `release` must follow."""
        return self._engine.stream(groups, self._sampling, finished, further, enough)

    def release(self) -> None:
        """Give the device's memory to the trainer."""
        self._engine.release()

    @property
    def _sampling(self) -> Sampling:
        settings = self._config.rollout
        adapter = ADAPTER if self._unmerged else None
        return Sampling(
            settings.max_new_tokens,
            settings.temperature,
            adapter=adapter,
            environment=self._environment,
        )

    def load_policy(self, version: str) -> None:
        """Have the engine sample from the policy's weights, without adapter."""
        self._load(self._policy.named_weights, version)

    def evaluate(self, prompts: Sequence[Prompt], finished: Finished) -> list[Group]:
        """Responses of the policy that `load_policy` has loaded, by dense decode."""
        settings = self._config.evaluation
        sampling = Sampling(
            self._config.evaluation_tokens,
            settings.temperature,
            dense=True,
            top_p=settings.top_p,
            top_k=settings.top_k,
            environment=self._environment,
        )
        return self._engine.generate(prompts, settings.samples_per_prompt, sampling, finished)

    def acceptance(self, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Exact acceptance rates [N] of some of the batch's responses, and positions of the tokens.

        They are those of the actor with its current adapter and schedule; none for dense rollouts.
        """
        sequences = batch.spread(self._config.mismatch.sequences).segments
        if self.schedule is None or not sequences:
            return np.empty(0), np.empty(0, np.int64)
        adapted = self.adapter.delivered if self.adapter else nullcontext
        temperature = self._config.rollout.temperature
        rates = self._policy.acceptance(sequences, self.schedule, adapted, temperature)
        positions = [np.arange(len(prompt), len(prompt) + len(ids)) for prompt, ids in sequences]
        return np.concatenate(rates), np.concatenate(positions)

    def distill(self, batch: Batch) -> dict[str, float]:
        """Take one step of the adapter towards the policy of the next rollouts; returns metrics.

        The scale of the adapter in these rollouts is then chosen on the responses that `acceptance`
        measures, which the step does not learn from if there are others.
        """
        if self.adapter is None or self.schedule is None:
            return {}
        measured = self._config.mismatch.sequences
        chosen = batch.without_spread(measured).spread(self._config.distill.sequences)
        if not chosen.rollouts:
            return {}
        term = PolicyTerm(
            chosen.rollout_logprobs, chosen.advantages, chosen.lengths, self._config.algorithm
        )
        temperature = self._config.rollout.temperature
        metrics = self.adapter.step(chosen.segments, self.schedule, term, temperature)
        held_out = batch.spread(measured).segments
        return metrics | choose_scale(
            self.adapter, self._policy, held_out, self.schedule, temperature
        )

    def _load(self, read: Callable[[], NamedTensors], version: str) -> None:
        # An engine on the same device cannot use memory that PyTorch's allocator keeps cached.
        torch.cuda.empty_cache()
        self._engine.resume()
        self._engine.update_weights(Weights(read), version)
