"""A training run while it lasts: the objects that the loop uses, and their opening and closing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter, lora_arguments
from sparrow_sglang.rl.engines.nccl_settings import share_nccl_settings
from sparrow_sglang.rl.engines.rollout_engine import RolloutEngine, open_engine
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.ranks import ALONE, Ranks
from sparrow_sglang.rl.reference_policy import ReferencePolicy
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, owned
from sparrow_sglang.rl.runs.log import NoLog, RunLog
from sparrow_sglang.rl.runs.record import record_start
from sparrow_sglang.rl.runs.setup import Setup
from sparrow_sglang.rl.runs.termination import Stopped, Termination
from sparrow_sglang.rl.sparse_actor import SparseActor
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Group

_Result = TypeVar("_Result")

EngineOpener = Callable[[EngineConfig, str, Mapping[str, Any]], RolloutEngine]
"""A function with the signature of `open_engine`."""


class RankFailed(SparrowError, RuntimeError):
    """A rank failed in work that each does by itself; all raise this, and can save together."""


_ON_ALL_RANKS = (RankFailed, Stopped, FloatingPointError)


class Progress:
    """How many steps the policy has taken, and how many of them are in a checkpoint.

    `replaced` counts the additional prompts that these steps used to replace groups. `carried` are
    groups that these steps began and did not train on.
    """

    def __init__(self, checkpoints: Checkpoints, termination: Termination, state: State) -> None:
        self.steps_taken = state.step
        self.replaced = state.replaced
        self.carried = state.carried
        self._checkpoints = checkpoints
        self._termination = termination
        self._saved = state.step
        self._metrics: dict[str, float] = {}
        self._updating = False

    @contextmanager
    def updating(
        self, step: int, replaced: int = 0, carried: tuple[Group, ...] = ()
    ) -> Iterator[None]:
        """Context in which step `step` updates the policy and is reported; signals are held back.

        The step replaced `replaced` groups, and leaves those `carried`. If the block raises, the
        policy may be only partly updated, and is not saved any more.
        """
        with self._termination.held_back():
            self._updating = True
            yield
            self.steps_taken, self._updating = step + 1, False
            self.replaced += replaced
            self.carried = carried

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
                self.steps_taken,
                actor.schedule_name,
                self._metrics,
                ladder,
                self.replaced,
                self.carried,
            )
            self._checkpoints.save(policy, tokenizer, config, state, actor.adapter)
            self._saved = self.steps_taken


@dataclass(frozen=True)
class Run:
    """The parts of a run."""

    config: TrainConfig
    setup: Setup
    policy: DensePolicy
    reference: ReferencePolicy | None
    actor: SparseActor
    reward_workers: RewardPool
    log: RunLog
    progress: Progress
    termination: Termination

    @property
    def ranks(self) -> Ranks:
        return self.policy.ranks

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Run `work()`, in which each rank does a part by itself; returns this rank's result.

        If it raises on one of several ranks, all raise: `Stopped` on a signal, else `RankFailed`.
        """
        if self.ranks.world == 1:
            return work()
        error: BaseException | None = None
        try:
            with self.termination.let_in():
                result = work()
        except (Exception, Stopped) as caught:
            error = caught
        code = error.code if isinstance(error, Stopped) else None
        ends = self.ranks.each((code, error and f"{type(error).__name__}: {error}"))
        for rank, (code, line) in enumerate(ends):
            if line is not None and code is None:
                raise RankFailed(f"rank {rank}: {line}") from error
        for code, _ in ends:
            if code is not None:
                raise Stopped(code)
        return result

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
def open_run(
    config: TrainConfig,
    setup: Setup,
    resume: bool,
    ranks: Ranks = ALONE,
    engines: EngineOpener | None = None,
) -> Iterator[Run]:
    """Opens a run where its newest checkpoint left it; saves it at the end, also if it ends early.

    `engines` opens the engine instead of `open_engine`.

    Raises `InputError` if `config.run_dir` is in use, holds a run that is not to be resumed,
    or one that was trained with other settings.
    """
    first = ranks.rank == 0
    own = owned(config.run_dir) if first else nullcontext()
    with own, Termination(held=ranks.world > 1) as termination:
        checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep, ranks)
        newest = ranks.each(checkpoints.begin(config, resume) if first else None)[0]
        if config.engine.transfer == "broadcast":
            share_nccl_settings(config.engine.server_args)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = DensePolicy.load(config.model, config.optimizer, device, ranks)
        # Made before a checkpoint's weights are loaded: the reference is the model at `model.path`.
        reference = ReferencePolicy(policy) if config.algorithm.kl_coefficient else None
        # What is drawn from here on, the adapter first.
        torch.manual_seed(config.seed)
        adapter = SparseAdapter(policy, config.distill) if config.distill.enabled else None
        ladder = Ladder(setup.schedules, config.ladder)
        state = checkpoints.restore(newest, policy, adapter) if newest else State()
        if state.ladder:
            ladder.load_state_dict(state.ladder)
        taken = state.step
        if first:
            record_start(config, setup.engine, taken)
        reward_workers = RewardPool(
            setup.task.reward, config.task.reward_workers, config.task.reward_timeout_s
        )
        with reward_workers, closing(RunLog(config, taken) if first else NoLog()) as log:
            if setup.left_out:
                limit = config.rollout.max_prompt_tokens
                log.say(f"{setup.left_out} prompts are longer than {limit} tokens and left out")
            for note in setup.notes:
                log.say(note)
            log.show("starting the engine")
            # The seed differs after each resume and on each rank, or engines would draw the same
            # random numbers.
            arguments = {
                "random_seed": config.seed + taken + ranks.rank * (config.steps + 1),
                "dtype": str(policy.compute_dtype).removeprefix("torch."),
            } | lora_arguments(config.distill)
            # A single rank needs no shield: it can save even if its engine has died of a signal,
            # and Ctrl-C should interrupt the engine's start.
            shielded = termination.kept_from_children() if ranks.world > 1 else nullcontext()
            with shielded:
                engine = (engines or open_engine)(setup.engine, setup.model_path, arguments)
            with closing(engine):
                actor = SparseActor(config, engine, policy, adapter, ladder, setup.environment)
                progress = Progress(checkpoints, termination, state)
                run = Run(
                    config,
                    setup,
                    policy,
                    reference,
                    actor,
                    reward_workers,
                    log,
                    progress,
                    termination,
                )
                try:
                    yield run
                except BaseException as error:
                    # Saving needs all ranks, so it is done only for errors that all ranks raise.
                    if ranks.world == 1 or isinstance(error, _ON_ALL_RANKS):
                        run.save()
                    raise
                run.save()


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, or None."""
    return Checkpoints(run_dir, keep=1).newest()
