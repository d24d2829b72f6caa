"""The logs of a run: metrics.jsonl, the terminal, and optionally TensorBoard."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import naming, write_text
from sparrow_sglang.progress import Progress
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.metrics import MIN_PROMPTS
from sparrow_sglang.rl.tasks.rewards import FAILURES
from sparrow_sglang.rl.types import Group, Rewards
from sparrow_sglang.run_folder import (
    ENTROPY,
    EVALUATIONS_FILE,
    METRICS_FILE,
    RESPONSES_FILE,
    TAIL,
    read_rows,
)
from sparrow_sglang.schedules.schedule import DENSE

# Rows of metrics.jsonl and of evaluations.jsonl that belong to an evaluation have one of these.
_EVALUATED = {"eval/pass_rate", "set"}


class Clock:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._progress.show(_title(stage))
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    def metrics(self, tokens: int) -> dict[str, float]:
        named = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        return named | {
            "timing_s/step": time.perf_counter() - self._began,
            "sparrow/rollout_tokens_per_s": tokens / self.seconds["rollout"],
        }


class RunLog:
    """Writes a row of metrics per step, from `first` on, and one per evaluation. Rows of step
    `first` and later, which a killed run wrote after its last checkpoint, are dropped. An
    evaluation of the weights that the run resumes from is kept until they are evaluated again."""

    def __init__(self, config: TrainConfig, first: int) -> None:
        self._path = config.run_dir / METRICS_FILE
        self._steps = config.steps
        self._dense = config.engine.schedule == DENSE
        self._first = first
        # An evaluation after no step is dropped: without a checkpoint, a run may start again with
        # another model.
        evaluations = first + 1 if first else 0
        _drop_rows(self._path, first, evaluations)
        _drop_rows(self._path.with_name(RESPONSES_FILE), first, first)
        _drop_rows(self._path.with_name(EVALUATIONS_FILE), first, evaluations)
        self._path.touch()
        self._tensorboard: Any = None
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = config.run_dir / "tensorboard"
            self._tensorboard = SummaryWriter(folder, purge_step=first)
        self.progress = Progress(config.steps, "step", first, quiet=True)

    def counted(
        self, stage: str, total: int, groups: Iterable[tuple[int, Group]]
    ) -> Iterator[tuple[int, Group]]:
        """`groups` with their positions, whose responses are counted on the terminal."""
        finished = self.progress.counter(stage, total, "responses")
        for position, group in groups:
            finished(len(group.rollouts))
            yield position, group

    def append(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to the file `name`, each with its step; flushed to the disk."""
        path = self._path.with_name(name)
        if rows:
            with naming(path), open(path, "a", encoding="utf-8") as file:
                file.write(_json_lines([{"step": step, **row} for row in rows]))
                file.flush()
                os.fsync(file.fileno())

    def write_evaluation(
        self, steps: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        if steps == self._first:
            # A run that resumes from these weights may have evaluated them before.
            for name in (METRICS_FILE, EVALUATIONS_FILE):
                _drop_rows(self._path.with_name(name), steps, steps)
        self.append(EVALUATIONS_FILE, steps, rows)
        self.write(steps, metrics)

    def write_skipped(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            write_text(self._path.with_name("skipped_rows.jsonl"), _json_lines(rows))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append(METRICS_FILE, step, [metrics])
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if "timing_s/step" in metrics:
            self.progress.print_line(step_line(step, self._steps, metrics, self._dense))
            self.progress.advance()

    def close(self) -> None:
        self.progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def step_line(step: int, steps: int, metrics: Mapping[str, float], dense: bool = False) -> str:
    facts = [
        f"step {step} ({step + 1}/{steps})",
        f"reward {metrics['critic/score/mean']:.3f}",
        f"length {metrics['response_length/mean']:.0f}",
        f"truncated {metrics['response_length/clip_ratio']:.0%}",
    ]
    if ENTROPY in metrics:
        facts.append(f"entropy {metrics[ENTROPY]:.3f}")
    if "sparrow/tokens_per_round" in metrics:
        facts.append(f"{metrics['sparrow/tokens_per_round']:.1f} tokens a round")
    elif dense:
        facts.append("dense")
    elif "sparrow/kv_tokens_read" in metrics:
        read, cached = metrics["sparrow/kv_tokens_read"], metrics["sparrow/kv_tokens_cached"]
        tail = f"{metrics[TAIL]:.3f}" if TAIL in metrics else "–"
        facts.append(f"p05 acceptance {tail}")
        facts.append(f"KV read {read:.0f} of {cached:.0f} tokens")
        if read == cached:
            facts.append("nothing sparse: all lengths are within the budget")
    if "sparrow/distill_scale" in metrics:
        judged = metrics["sparrow/distill_gate_prompts"]
        short = f" ({judged:.0f} of {MIN_PROMPTS} prompts measured)" if judged < MIN_PROMPTS else ""
        facts.append(f"adapter scale {metrics['sparrow/distill_scale']:g}{short}")
    facts.append(f"{metrics['sparrow/rollout_tokens_per_s']:.0f} tokens/s")
    failed = sum(metrics.get(name, 0.0) for name in FAILURES.values())
    if failed:
        facts.append(f"{failed:.0f} rewards failed")
    if metrics.get("actor/optimizer_steps") == metrics.get("actor/skipped_steps") == 0:
        facts.append("no gradient: all groups equal")
    if metrics.get("actor/skipped_steps"):
        facts.append(f"{metrics['actor/skipped_steps']:.0f} optimizer steps skipped")
    seconds = {n.removeprefix("timing_s/"): s for n, s in metrics.items() if "timing_s/" in n}
    seconds["rest"] = 2 * seconds["step"] - sum(seconds.values())
    split = [f"{_title(n)} {s:.1f}" for n, s in seconds.items() if n != "step" and s >= 0.05]
    return ", ".join(facts) + f" | {metrics['timing_s/step']:.1f} s: " + ", ".join(split)


def _title(stage: str) -> str:
    return stage.replace("logprobs", "log-probs")


Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens included."""


def response_rows(
    groups: Sequence[Group],
    rewards: Sequence[Rewards],
    parts: Sequence[Sequence[Mapping[str, float]]],
    decode: Decode,
    tails: Mapping[tuple[str, tuple[int, ...]], float] | None = None,
) -> list[dict[str, Any]]:
    """`rewards` and `parts` are per group; `tails` are keyed by prompt id and token ids."""
    return [
        {
            "task": group.prompt.task,
            "prompt_id": rollout.prompt_id,
            "prompt": decode(rollout.prompt_ids),
            "sample": rollout.sample,
            "reward": rewards[group_index][index],
            "scores": dict(parts[group_index][index]) if parts else {},
            "length": len(rollout.response_ids),
            "finish_reason": rollout.finish_reason,
            **(
                {}
                if tails is None
                else {"tail": tails.get((rollout.prompt_id, rollout.response_ids))}
            ),
            "text": rollout.text,
        }
        for group_index, group in enumerate(groups)
        for index, rollout in enumerate(group.rollouts)
    ]


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def recorded_steps(run_dir: Path) -> set[int]:
    """The training steps whose metrics are in the folder of a run."""
    rows = read_rows(run_dir / METRICS_FILE)
    return {row["step"] for row in rows if not row.keys() & _EVALUATED}


def _drop_rows(path: Path, first: int, evaluations: int) -> None:
    """Keeps the rows of steps before `first`, and of evaluations before `evaluations`."""
    if not path.exists():
        return
    kept = [
        row
        for row in read_rows(path)
        if row["step"] < (evaluations if row.keys() & _EVALUATED else first)
    ]
    write_text(path, _json_lines(kept))
