"""A training run while it lasts: the objects that the loop uses, and their opening and closing."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sparrow_sglang.rl.collect.base import Collected
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.distill import lora_arguments
from sparrow_sglang.rl.ladder import Ladder
from sparrow_sglang.rl.learner import Learner, TrainersLost
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, owned
from sparrow_sglang.rl.runs.log import RunLog
from sparrow_sglang.rl.runs.record import record_start
from sparrow_sglang.rl.runs.setup import Setup
from sparrow_sglang.rl.runs.termination import Termination
from sparrow_sglang.rl.sparse_actor import SparseActor
from sparrow_sglang.rl.tasks.rewards import RewardPool


class Progress:
    """How many steps the policy has taken, and how many of them are in a checkpoint.

    `replaced` counts the additional prompts that these steps used to replace groups, `tokens` the
    response tokens that they sampled. `carried` are groups that these steps began and did not train
    on.
    """

    def __init__(self, state: State) -> None:
        self.steps_taken = self.saved = state.step
        self.replaced = state.replaced
        self.tokens = state.tokens
        self.carried = state.carried
        self.metrics: dict[str, float] = {}
        self._updating = False

    @contextmanager
    def updating(self, collected: Collected) -> Iterator[None]:
        """Context in which a step on the groups `collected` updates the policy.

        If the block raises, the policy may be only partly updated, and is not saved any more.
        """
        self._updating = True
        yield
        self._updating = False
        self.steps_taken += 1
        self.replaced += collected.replaced
        self.tokens += collected.tokens
        self.carried = collected.carried

    @property
    def unsaved(self) -> bool:
        """Whether a checkpoint would hold something new."""
        return not self._updating and self.steps_taken != self.saved


@dataclass(frozen=True)
class Run:
    """The parts of a run."""

    config: TrainConfig
    setup: Setup
    learner: Learner
    actor: SparseActor
    reward_workers: RewardPool
    log: RunLog
    progress: Progress
    termination: Termination
    checkpoints: Checkpoints

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, and keep them for the checkpoint."""
        self.progress.metrics = metrics
        self.log.write(step, metrics)

    def save(self) -> None:
        """Write a checkpoint of the steps taken, unless there is nothing new."""
        progress = self.progress
        if not progress.unsaved or self.termination.at_once:
            return
        self.log.show("checkpoint")
        with self.termination.held_back("checkpoint"):
            state = State(
                progress.steps_taken,
                self.actor.schedule_name,
                progress.metrics,
                self.actor.ladder.state_dict(),
                progress.replaced,
                progress.tokens,
                self.setup.fingerprint,
                progress.carried,
            )
            self.checkpoints.save(self.learner, self.setup.tokenizer, self.config, state)
            progress.saved = progress.steps_taken

    def keep_if_best(self, pass_rate: float) -> None:
        """Keep a checkpoint of the policy, if no earlier evaluation was as good as this one."""
        if self.checkpoints.is_best(pass_rate):
            self.save()
            self.checkpoints.set_best(self.progress.steps_taken, pass_rate)


@contextmanager
def open_run(config: TrainConfig, setup: Setup, resume: bool) -> Iterator[Run]:
    """Opens a run where its newest checkpoint left it; saves it at the end, also if it ends early.

    Raises `InputError` if `config.run_dir` is in use, holds a run that is not to be resumed,
    or one that was trained with other settings. A run that raises `TrainersLost` is not saved.
    """
    with owned(config.run_dir), Termination() as termination, ExitStack() as opened:
        checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep)
        newest = checkpoints.begin(config, resume, setup.fingerprint)
        learner = opened.enter_context(closing(_open_learner(config)))
        ladder = Ladder(setup.schedules, config.ladder)
        state = checkpoints.restore(newest, learner) if newest else State()
        if state.ladder:
            ladder.load_state_dict(state.ladder)
        taken = state.step
        record_start(config, setup.engine, taken, ladder.first)
        reward_workers = RewardPool(
            setup.task.reward,
            config.task.reward_workers,
            config.task.reward_timeout_s,
            config.task.rewards_timeout_s,
        )
        with reward_workers, closing(RunLog(config, taken)) as log:
            if setup.left_out:
                limit = config.rollout.max_prompt_tokens
                log.say(f"{setup.left_out} prompts are longer than {limit} tokens and left out")
            for note in setup.notes:
                log.say(note)
            log.keep_skipped([asdict(row) for row in setup.task.skipped])
            log.show("starting the engine")
            # The seed differs after each resume, or engines would draw the same random numbers.
            arguments = {
                "random_seed": config.seed + taken,
                "dtype": str(learner.compute_dtype).removeprefix("torch."),
            } | lora_arguments(config.distill)
            engine = learner.open_engine(setup.engine, setup.model_path, arguments)
            with closing(engine):
                actor = SparseActor(config, engine, learner, ladder, setup.environment)
                run = Run(
                    config,
                    setup,
                    learner,
                    actor,
                    reward_workers,
                    log,
                    Progress(state),
                    termination,
                    checkpoints,
                )
                try:
                    yield run
                except TrainersLost:
                    # There is nothing left to save.
                    raise
                except BaseException as error:
                    try:
                        run.save()
                    except TrainersLost as lost:
                        raise error from lost
                    raise
                run.save()


def _open_learner(config: TrainConfig) -> Learner:
    if config.cluster is None:
        return Learner.load(config)
    # Imported here, as only these runs need Ray.
    from sparrow_sglang.rl.cluster.remote_learner import RemoteLearner

    return RemoteLearner(config)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the newest checkpoint of a run, or None."""
    return Checkpoints(run_dir, keep=1).newest()
