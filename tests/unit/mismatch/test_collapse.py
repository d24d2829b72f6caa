"""The alarm of a collapse: on the study's runs, in the log, and across a restart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sparrow_sglang.mismatch.collapse import ALARM, ENTROPY, REWARD, TAIL, WINDOW, collapse_alarm
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.log import RunLog, step_line

EARLIER = json.loads(Path(__file__).with_name("earlier_runs.json").read_text("utf-8"))
LEARNING = json.loads(Path(__file__).with_name("learning_runs.json").read_text("utf-8"))
REST = {
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.0,
    "sparrow/rollout_tokens_per_s": 1.0,
    "timing_s/step": 1.0,
    "sparrow/kv_tokens_read": 1.0,
    "sparrow/kv_tokens_cached": 2.0,
}


def rows(
    entropies: list[float], tails: list[float], rewards: list[float]
) -> list[dict[str, float]]:
    columns = zip(entropies, tails, rewards, strict=True)
    return [{ENTROPY: e, TAIL: t, REWARD: r} for e, t, r in columns]


def alarms(steps: Sequence[Mapping[str, float]]) -> list[int]:
    return [n for n in range(1, len(steps) + 1) if collapse_alarm(steps[:n])]


@pytest.mark.parametrize("run", EARLIER["runs"])
def test_it_strikes_in_the_runs_that_collapsed_and_in_no_other(run: str) -> None:
    """The entropy is the sampled estimate, as these runs have not logged the entropy itself."""
    assert EARLIER["columns"] == ["rollout_corr/training_log_ppl", REWARD, TAIL]
    entropies, rewards, tails = map(list, zip(*EARLIER["runs"][run], strict=True))
    found = alarms(rows(entropies, tails, rewards))
    assert found[0] in (10, 11) if run.startswith("fixed-64") else not found


def test_a_policy_that_learns_its_task_does_not_set_it_off() -> None:
    assert LEARNING["columns"] == [ENTROPY, REWARD, TAIL]
    surer = 0
    for name, run in LEARNING["runs"].items():
        entropies, rewards, tails = map(list, zip(*run, strict=True))
        assert not alarms(rows(entropies, tails, rewards)), name
        # With rewards that fall, it strikes wherever entropy and tail say so.
        surer += bool(alarms(rows(entropies, tails, [-float(n) for n in range(len(run))])))
    assert surer == 3


def test_all_three_must_move() -> None:
    high, low = [1.0] * WINDOW, [0.4] * WINDOW
    dull, bright = [0.8] * WINDOW, [0.9] * WINDOW
    worse = [0.5] * WINDOW + [0.3] * WINDOW
    assert collapse_alarm(rows(high + low, dull + bright, worse)) is True
    assert collapse_alarm(rows(high + low, dull + bright, worse[::-1])) is False
    assert collapse_alarm(rows(high + low, bright + dull, worse)) is False
    assert collapse_alarm(rows(high + low, dull + dull, worse)) is False
    assert collapse_alarm(rows(high + high, dull + bright, worse)) is False
    assert collapse_alarm(rows(high + low[1:], dull + bright[1:], worse[1:])) is None
    # Other rows, such as the last evaluation's, are not steps.
    between = [{"eval/pass_rate": 0.3}]
    halves = rows(high, dull, worse[:WINDOW]), rows(low, bright, worse[WINDOW:])
    assert collapse_alarm(halves[0] + between + halves[1] + between) is True


def test_the_log_says_so_and_remembers_across_a_restart(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path, steps=11, task={"name": "story"})
    given = rows([1.0] * 5 + [0.4] * 6, [0.8] * 5 + [0.9] * 6, [0.5] * 5 + [0.3] * 6)
    log = RunLog(config, 0)
    for step, row in enumerate(given[:10]):
        log.write(step, REST | row)
    log.close()
    # The last step was not in the checkpoint that the run goes on from.
    log = RunLog(config, 9)
    for step, row in enumerate(given[9:], 9):
        log.write(step, REST | row)
    log.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == list(range(11))
    assert [row.get(ALARM) for row in written] == [None] * 9 + [1.0, 1.0]
    assert ["ALARM" in step_line(step, 11, written[step]) for step in (8, 10)] == [False, True]
