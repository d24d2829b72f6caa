"""A training run while it lasts: the objects that the loop uses, and their opening and closing."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.mismatch.tail import tail_bin_tokens
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.rl.distill import lora_arguments
from sparrow_sglang.rl.learner import Learner, LocalLearner, TrainersLost
from sparrow_sglang.rl.rollout import RolloutEngine, Sampling
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, owned, step_of
from sparrow_sglang.rl.runs.log import RunLog, recorded_steps
from sparrow_sglang.rl.runs.setup import Setup
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.run_folder import RUN_FILE, read_starts
from sparrow_sglang.schedules.schedule import BudgetSchedule

EARLY_S = 600.0
"""Time between checkpoints before the first of `checkpoint.every_steps` steps."""

AGAIN_S = 1.0
"""A SIGINT so soon after another is not a second one: commands that run a process forward theirs,
which a terminal has sent to the process as well."""


class Stopped(SystemExit):
    """The process received a signal to end; its exit code is 128 + the signal's number."""


class Termination:
    """Raises `Stopped` in the main thread on SIGTERM and SIGINT. A second SIGINT does not wait for
    a block that holds it back; `at_once` is then set, and nothing more is saved. Other further
    signals change nothing, as schedulers send several. `Stopped` is a SystemExit, because
    asyncio keeps other exceptions in the task in which they are raised."""

    def __init__(self) -> None:
        self.at_once = False
        self._held = ""
        self._received: int | None = None
        self._received_at = 0.0

    @contextmanager
    def held_back(self, doing: str) -> Iterator[None]:
        """Delay `Stopped` until the block, which does `doing`, has ended."""
        outer, self._held = self._held, self._held or doing
        try:
            yield
        finally:
            self._held = outer
        if self._received is not None and not self._held:
            raise Stopped(128 + self._received)

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number == self._received == signal.SIGINT and now - self._received_at >= AGAIN_S
        first, self._received = self._received is None, number
        if first:
            self._received_at = now
        if again:
            self.at_once = True
        elif not first:
            return
        elif self._held:
            # Written directly, as the signal may have come in the middle of a print.
            line = f"\nstopping after the {self._held}; Ctrl-C again stops at once, without it\n"
            os.write(2, line.encode())
            return
        raise Stopped(128 + number)


@contextmanager
def termination_signals() -> Iterator[Termination]:
    termination = Termination()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, termination.handle) for number in signals}
    try:
        yield termination
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Run:
    """`saved` is how many of the steps of `state` are in a checkpoint."""

    config: TrainConfig
    setup: Setup
    learner: Learner
    engine: RolloutEngine
    reward_workers: RewardPool
    log: RunLog
    termination: Termination
    checkpoints: Checkpoints
    state: State
    saved: int
    _adapter: str | None = None
    _updating: bool = False
    _saved_at: float = field(default_factory=time.monotonic)

    @property
    def prompts_used(self) -> int:
        """By all steps so far."""
        return self.state.step * self.config.rollout.prompts_per_step

    def load_actor(self) -> None:
        self._adapter = self.learner.deliver(self.engine, str(self.state.step), adapted=True)

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine.stream`; the engine has released its memory afterwards."""
        settings = self.config.rollout
        sampling = Sampling(
            settings.max_new_tokens,
            settings.temperature,
            adapter=self._adapter,
            timeout_s=settings.timeout_s,
        )
        yield from self.engine.stream(prompts, settings.samples_per_prompt, sampling)
        self.engine.release()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """If the block raises, the policy may be only partly updated, and is not saved any more."""
        self._updating = True
        yield
        self._updating = False

    def save(self) -> None:
        """Write a checkpoint, unless there is nothing new."""
        state = self.state
        if self._updating or state.step == self.saved or self.termination.at_once:
            return
        self.log.progress.show("checkpoint")
        with self.termination.held_back("checkpoint"):
            self.checkpoints.save(self.learner, self.setup.tokenizer, self.config, state)
            self.saved, self._saved_at = state.step, time.monotonic()

    def save_if_due(self) -> None:
        every, step = self.config.checkpoint.every_steps, self.state.step
        early = step == 1 or time.monotonic() - self._saved_at >= EARLY_S
        if every and (step % every == 0 or (step < every and early)):
            self.save()

    def save_after(self, error: BaseException) -> None:
        """Save the state if it is whole. Raises `FloatingPointError` for one that ended the run,
        with the checkpoint to go on from."""
        try:
            self.save()
        except (TrainersLost, OSError, FloatingPointError) as unsaved:
            error.__cause__ = unsaved
        if isinstance(error, FloatingPointError):
            last = self.checkpoints.newest() or "none"
            raise FloatingPointError(f"{error}; the last checkpoint: {last}") from error

    def keep_if_best(self, pass_rate: float) -> None:
        best = self.checkpoints.best()
        if not best or pass_rate > best["pass_rate"]:
            self.save()
            self.checkpoints.set_best(self.state.step, pass_rate)


@contextmanager
def open_run(config: TrainConfig, setup: Setup, resume: bool) -> Iterator[Run]:
    """Opens a run where its newest checkpoint left it; saves it at the end, also if it ends early,
    unless by `TrainersLost`. Raises `InputError` if `config.run_dir` is in use or not resumable."""
    with owned(config.run_dir), termination_signals() as termination, ExitStack() as opened:
        checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep, setup.evaluated)
        newest = checkpoints.begin(config, resume, setup.fingerprint)
        if resume:
            print(_start_line(config.run_dir, newest), flush=True)
        if config.cluster is None:
            learner: Learner = LocalLearner.load(config)
        else:
            # Imported here, as only these runs need Ray.
            from sparrow_sglang.rl.cluster.remote_learner import RemoteLearner

            learner = RemoteLearner(config)
        opened.enter_context(closing(learner))
        state = State(prompts=setup.fingerprint)
        if newest:
            state = checkpoints.restore(newest, learner)
        taken = state.step
        record_start(config, setup.engine, taken, setup.schedule, learner.device_name())
        reward_workers = RewardPool(
            setup.task.reward,
            config.task.reward_workers,
            config.task.reward_timeout_s,
            config.task.rewards_timeout_s,
            state.lowest_rewards,
        )
        opened.enter_context(reward_workers)
        log = opened.enter_context(closing(RunLog(config, taken)))
        for note in setup.notes:
            log.progress.print_line(note)
        log.write_skipped([asdict(row) for row in setup.task.skipped])
        log.progress.show("starting the engine")
        # The seed differs after each resume, or engines would draw the same random numbers.
        arguments = {
            "random_seed": config.seed + taken,
            "dtype": str(learner.compute_dtype).removeprefix("torch."),
        } | lora_arguments(config.distill)
        engine = learner.open_engine(setup.engine, setup.model_path, arguments)
        opened.enter_context(closing(engine))
        parts = config, setup, learner, engine, reward_workers, log, termination, checkpoints
        run = Run(*parts, state, saved=taken)
        try:
            yield run
            run.save()
        except BaseException as error:
            if not isinstance(error, TrainersLost):
                run.save_after(error)
            raise


def _start_line(run_dir: Path, newest: Path | None) -> str:
    """Where a resumed run starts, and what it drops."""
    first = 0 if newest is None else step_of(newest)
    later = [step for step in recorded_steps(run_dir) if step >= first]
    dropped = f"; drops the records of {len(later)} steps from step {first} on" if later else ""
    if newest is not None:
        return f"resuming after {first} steps from {newest}{dropped}"
    if later:
        return f"resuming: {run_dir} has no checkpoint, so the run begins again{dropped}"
    return f"resuming: {run_dir} is new, so the run begins at step 0"


def record_start(
    config: TrainConfig,
    engine: EngineConfig,
    step: int,
    schedule: BudgetSchedule | None,
    device: str | None = None,
) -> None:
    """Record in run.json that a run starts after `step` steps. `engine` has "auto" replaced by the
    name of `schedule`. Starts whose steps are all repeated are dropped, as are their metrics."""
    resolved = config.model_copy(update={"engine": engine})
    new = {
        "step": step,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(device),
        "tail_bin_tokens": None if schedule is None else tail_bin_tokens(schedule),
        "tail_target": None if schedule is None else schedule.tail_target,
        "config": resolved.model_dump(mode="json"),
    }
    path = config.run_dir / RUN_FILE
    earlier = [start for start in read_starts(path) if start["step"] < step]
    write_json(path, {"starts": [*earlier, new]})


def newest_checkpoint(run_dir: Path) -> Path | None:
    return Checkpoints(run_dir, keep=1).newest()
