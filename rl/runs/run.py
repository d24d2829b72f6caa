"""A training run while it lasts: what the loop uses, opened in order, closed whatever happens."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter, lora_arguments
from sparrow_sglang.rl.engines.nccl_settings import share_nccl_settings
from sparrow_sglang.rl.engines.rollout_engine import open_engine
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, owned
from sparrow_sglang.rl.runs.log import RunLog
from sparrow_sglang.rl.runs.record import record_start
from sparrow_sglang.rl.runs.setup import Setup
from sparrow_sglang.rl.runs.termination import Termination
from sparrow_sglang.rl.sparse_actor import SparseActor
from sparrow_sglang.rl.tasks.rewards import RewardPool


class Progress:
    """How many steps the policy has taken, and how many of them are in a checkpoint.

    `replaced` counts the prompts that these steps took besides their own, to replace groups.
    """

    def __init__(
        self, checkpoints: Checkpoints, termination: Termination, steps: int, replaced: int = 0
    ) -> None:
        self.steps_taken = steps
        self.replaced = replaced
        self._checkpoints = checkpoints
        self._termination = termination
        self._saved = steps
        self._metrics: dict[str, float] = {}
        self._updating = False

    @contextmanager
    def updating(self, step: int, replaced: int = 0) -> Iterator[None]:
        """The block takes step `step`, which replaced so many groups, with the policy and reports
        it; no signal interrupts it.

        If it raises, the policy may be between two steps, and is not saved any more.
        """
        with self._termination.held_back():
            self._updating = True
            yield
            self.steps_taken, self._updating = step + 1, False
            self.replaced += replaced

    def note(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of a step for the checkpoint."""
        self._metrics = metrics

    @property
    def unsaved(self) -> bool:
        """Whether a checkpoint would hold something new."""
        return not self._updating and self.steps_taken != self._saved

    def save(
        self, policy: DensePolicy, actor: SparseActor, config: TrainConfig, tokenizer: Any
    ) -> None:
        """Write a checkpoint of the steps taken."""
        with self._termination.held_back():
            ladder = actor.ladder.state_dict()
            state = State(
                self.steps_taken, actor.schedule_name, self._metrics, ladder, self.replaced
            )
            self._checkpoints.save(policy, tokenizer, config, state, actor.adapter)
            self._saved = self.steps_taken


@dataclass(frozen=True)
class Run:
    """The parts of a run."""

    config: TrainConfig
    setup: Setup
    policy: DensePolicy
    actor: SparseActor
    reward_workers: RewardPool
    log: RunLog
    progress: Progress

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, and keep them for the checkpoint."""
        self.progress.note(metrics)
        self.log.write(step, metrics)

    def save(self) -> None:
        """Write a checkpoint of the steps taken, unless there is nothing new."""
        if self.progress.unsaved:
            self.log.show("checkpoint")
            self.progress.save(self.policy, self.actor, self.config, self.setup.tokenizer)


@contextmanager
def open_run(config: TrainConfig, setup: Setup, resume: bool) -> Iterator[Run]:
    """A run at the point where it was left; saved at the end, and whenever it ends early.

    Raises `InputError` if `config.run_dir` is in use, holds a run that is not to be resumed,
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
        ladder = Ladder(setup.schedules, config.ladder)
        state = checkpoints.restore(newest, policy, adapter) if newest else State()
        if state.ladder:
            ladder.load_state_dict(state.ladder)
        taken = state.step
        record_start(config, setup.engine, taken)
        reward_workers = RewardPool(
            setup.task.reward, config.task.reward_workers, config.task.reward_timeout_s
        )
        with reward_workers, closing(RunLog(config, taken)) as log:
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
                actor = SparseActor(config, engine, policy, adapter, ladder)
                progress = Progress(checkpoints, termination, taken, state.replaced)
                run = Run(config, setup, policy, actor, reward_workers, log, progress)
                try:
                    yield run
                finally:
                    run.save()


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, or None."""
    return Checkpoints(run_dir, keep=1).newest()
