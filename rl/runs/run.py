"""A training run while it lasts: what the loop uses, opened in order, closed whatever happens."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter, lora_arguments
from sparrow_sglang.rl.engines.buckets import NamedTensors
from sparrow_sglang.rl.engines.engine import RolloutEngine, open_engine
from sparrow_sglang.rl.engines.nccl_settings import share_nccl_settings
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.rollout import DENSE
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, owned
from sparrow_sglang.rl.runs.log import RunLog
from sparrow_sglang.rl.runs.record import record_start
from sparrow_sglang.rl.runs.setup import Setup
from sparrow_sglang.rl.runs.termination import Termination
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.schedule import BudgetSchedule

Rates = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass
class Run:
    """The parts of a run, and how many steps the policy has taken."""

    config: TrainConfig
    setup: Setup
    policy: DensePolicy
    adapter: SparseAdapter | None
    ladder: Ladder | None
    engine: RolloutEngine
    judges: RewardPool
    log: RunLog
    steps_taken: int
    _checkpoints: Checkpoints
    _termination: Termination
    _saved: int
    _served: BudgetSchedule | None
    _metrics: dict[str, float] = field(default_factory=dict)
    _updating: bool = False

    @property
    def schedule(self) -> BudgetSchedule | None:
        """The one in force, None for dense rollouts."""
        return self.ladder.schedule if self.ladder else None

    def follow_tails(self, step: int, rates: Rates, positions: Positions) -> None:
        """Choose the schedule of the next rollouts by these acceptance rates."""
        move = self.ladder.observe(rates, positions) if self.ladder else None
        if move is not None:
            self.log.event(step, move.line(), asdict(move))

    def load(self, weights: NamedTensors) -> None:
        """Have the engine sample from these weights, of the steps taken so far."""
        # What PyTorch keeps in reserve is not there for the engine of the same device.
        torch.cuda.empty_cache()
        self.engine.resume()
        self.engine.update_weights(weights, str(self.steps_taken))

    def sync_schedule(self) -> None:
        """Have the engine decode under the schedule in force."""
        if self.schedule is not None and self.schedule != self._served:
            self.engine.set_schedule(self.schedule)
            self._served = self.schedule

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """The block takes step `step` with the policy and reports it; no signal interrupts it.

        If it raises, the policy may be between two steps, and is not saved any more.
        """
        with self._termination.held_back():
            self._updating = True
            yield
            self.steps_taken, self._updating = step + 1, False

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, and keep them for the checkpoint."""
        self._metrics = metrics
        self.log.write(step, metrics)

    def save(self) -> None:
        """Write a checkpoint of the steps taken, unless there is nothing new."""
        if self._updating or self.steps_taken == self._saved:
            return
        self.log.show("checkpoint")
        schedule = self.schedule.name if self.schedule else DENSE
        ladder = self.ladder.state_dict() if self.ladder else {}
        with self._termination.held_back():
            state = State(self.steps_taken, schedule, self._metrics, ladder)
            self._checkpoints.save(
                self.policy, self.setup.tokenizer, self.config, state, self.adapter
            )
            self._saved = self.steps_taken


@contextmanager
def open_run(config: TrainConfig, setup: Setup, resume: bool) -> Iterator[Run]:
    """A run at the point where it was left; saved at the end, and whenever it ends early.

    Raises `CheckpointError` if `config.run_dir` is in use, holds a run that is not to be resumed,
    or one that was trained with other settings.
    """
    with owned(config.run_dir), Termination() as termination:
        checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep)
        newest = checkpoints.begin(config, resume)
        if config.engine.transfer == "broadcast":
            share_nccl_settings(config.engine.server_args)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = DensePolicy.load(config.model, config.optimizer, device)
        adapter = SparseAdapter(policy, config.distill) if config.distill.enabled else None
        ladder = Ladder(setup.schedules, config.ladder) if setup.schedules else None
        state = checkpoints.restore(newest, policy, adapter) if newest else State()
        if ladder is not None and state.ladder:
            ladder.load_state_dict(state.ladder)
        taken = state.step
        record_start(config, setup.engine, taken)
        judges = RewardPool(
            setup.task.reward, config.task.reward_workers, config.task.reward_timeout_s
        )
        with judges, closing(RunLog(config, taken)) as log:
            if setup.left_out:
                limit = config.rollout.max_prompt_tokens
                log.say(f"{setup.left_out} prompts are longer than {limit} tokens and left out")
            for note in setup.notes:
                log.say(note)
            log.show("starting the engine")
            # Another seed after each resume, or the engine would draw the same numbers again.
            arguments = {
                "random_seed": config.seed + taken,
                "dtype": str(policy.compute_dtype).removeprefix("torch."),
            } | lora_arguments(config.distill)
            engine = open_engine(setup.engine, setup.model_path, arguments)
            with closing(engine):
                run = Run(
                    config,
                    setup,
                    policy,
                    adapter,
                    ladder,
                    engine,
                    judges,
                    log,
                    taken,
                    checkpoints,
                    termination,
                    taken,
                    next(iter(setup.schedules), None),
                )
                try:
                    yield run
                finally:
                    run.save()


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, or None."""
    return Checkpoints(run_dir, keep=1).newest()
