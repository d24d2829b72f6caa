"""The alarm of a collapse: on the study's runs, in the log, and across a restart."""

import json
from pathlib import Path

import pytest

from sparrow_sglang.mismatch.collapse import ALARM, ENTROPY, TAIL, WINDOW, collapse_alarm
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.log import RunLog, step_line

STUDY = Path(__file__).parents[3] / "examples" / "stability" / "results" / "metrics"
REST = {
    "critic/score/mean": 0.5,
    "response_length/mean": 100.0,
    "sparrow/rollout_tokens_per_s": 1.0,
    "timing_s/step": 1.0,
}


def rows(entropies: list[float], tails: list[float]) -> list[dict[str, float]]:
    return [{ENTROPY: e, TAIL: t} for e, t in zip(entropies, tails, strict=True)]


@pytest.mark.parametrize("path", sorted(STUDY.glob("[!d]*.jsonl")) + sorted(STUDY.glob("dist*")))
def test_it_strikes_in_the_studys_collapsed_runs_and_in_no_other(path: Path) -> None:
    """The entropy is the sampled estimate, as these runs have not logged the entropy itself."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    known = [
        {ENTROPY: row["rollout_corr/training_log_ppl"], TAIL: row[TAIL]}
        for row in found
        if "timing_s/step" in row
    ]
    alarms = [n for n in range(1, len(known) + 1) if collapse_alarm(known[:n])]
    if path.name.startswith("fixed-64"):
        assert alarms[0] in (10, 11)
    else:
        assert not alarms


def test_both_must_move() -> None:
    high, low = [1.0] * WINDOW, [0.4] * WINDOW
    dull, bright = [0.8] * WINDOW, [0.9] * WINDOW
    assert collapse_alarm(rows(high + low, dull + bright)) is True
    assert collapse_alarm(rows(high + low, bright + dull)) is False
    assert collapse_alarm(rows(high + low, dull + dull)) is False
    assert collapse_alarm(rows(high + high, dull + bright)) is False
    assert collapse_alarm(rows(high + low[1:], dull + bright[1:])) is None
    # Other rows, such as the last evaluation's, are not steps.
    between = [{"eval/pass_rate": 0.3}]
    halves = rows(high, dull), rows(low, bright)
    assert collapse_alarm(halves[0] + between + halves[1] + between) is True


def test_the_log_says_so_and_remembers_across_a_restart(tmp_path: Path) -> None:
    config = TrainConfig(run_dir=tmp_path, steps=11, task={"name": "story"})
    given = rows([1.0] * 5 + [0.4] * 6, [0.8] * 5 + [0.9] * 6)
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
    line = step_line(10, 11, written[10])
    assert "entropy 0.400, p05 acceptance 0.900" in line
    assert "ALARM: entropy has fallen while the tail rose" in line
    assert "ALARM" not in step_line(8, 11, written[8])


def test_skipped_steps_are_in_the_line() -> None:
    assert "2 optimizer steps skipped" in step_line(0, 3, REST | {"actor/skipped_steps": 2.0})
    assert "skipped" not in step_line(0, 3, REST | {"actor/skipped_steps": 0.0})
