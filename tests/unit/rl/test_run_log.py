"""Metrics, responses and starts of a run on disk, also of one that was resumed."""

import json
from pathlib import Path

from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.log import RunLog, step_line
from sparrow_sglang.rl.runs.run import record_start
from sparrow_sglang.run_folder import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    RESPONSES_FILE,
    RUN_FILE,
    read_starts,
)


def config(run_dir: Path) -> TrainConfig:
    fields = {"run_dir": run_dir, "task": {"name": "story"}, "logging": {"tensorboard": False}}
    return TrainConfig.parse(fields)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    spent = {"evaluation": 26.0, "rollout": 4.0, "reward": 0.01, "logprobs": 2.2, "step": 33.0}
    metrics = {f"timing_s/{stage}": seconds for stage, seconds in spent.items()}
    metrics |= dict.fromkeys(("critic/score/mean", "response_length/mean"), 0.5)
    metrics |= dict.fromkeys(("response_length/clip_ratio", "sparrow/rollout_tokens_per_s"), 0.5)
    parts = "evaluation 26.0, rollout 4.0, log-probs 2.2, rest 0.8"
    assert step_line(0, 1, metrics).endswith(f"| 33.0 s: {parts}")


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    for first, last in ((0, 4), (2, 5)):
        log = RunLog(config(tmp_path), first)
        for step in range(first, last):
            log.append(RESPONSES_FILE, step, [{"text": f"{first} {sample}"} for sample in range(2)])
        log.close()
    rows = [json.loads(line) for line in (tmp_path / RESPONSES_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [row["text"][0] for row in rows] == ["0"] * 4 + ["2"] * 6


def test_a_resumed_run_keeps_what_its_weights_were_evaluated_at(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE

    def written() -> list[dict[str, float]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def begin(first: int) -> RunLog:
        log = RunLog(config(tmp_path), first)
        log.close()
        return RunLog(config(tmp_path), first)

    ended = [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.4}, {"step": 2, "eval/pass_rate": 0.7}]
    path.write_text("".join(json.dumps(row) + "\n" for row in ended))
    # `begin` opens the log twice, as if the first start had been killed before its first step.
    log = begin(2)
    assert written() == ended
    log.write(2, {"loss": 0.3})
    log.write_evaluation(3, {"eval/pass_rate": 0.8}, [])
    log.write(3, {"loss": 0.2})
    log.close()
    # Killed runs have taken steps 2 and 3 already; each resumed one evaluates once more.
    for before, rate in ((0.7, 0.5), (0.5, 0.6)):
        log = begin(2)
        assert written() == [*ended[:2], {"step": 2, "eval/pass_rate": before}]
        log.write_evaluation(2, {"eval/pass_rate": rate}, [{"set": "", "reward": rate}])
        log.write(2, {"loss": 0.3})
        log.close()
    last = [{"step": 2, "eval/pass_rate": 0.6}, {"step": 2, "loss": 0.3}]
    assert written() == [*ended[:2], *last]
    evaluated = json.loads((tmp_path / EVALUATIONS_FILE).read_text())
    assert evaluated == {"step": 2, "set": "", "reward": 0.6}


def test_a_start_replaces_those_whose_steps_it_takes_again(tmp_path: Path) -> None:
    noted = []
    for step in (0, 3, 5, 3, 8, 0):
        record_start(config(tmp_path), config(tmp_path).engine, step, None)
        noted.append([start["step"] for start in read_starts(tmp_path / RUN_FILE)])
    assert noted == [[0], [0, 3], [0, 3, 5], [0, 3], [0, 3, 8], [0]]
