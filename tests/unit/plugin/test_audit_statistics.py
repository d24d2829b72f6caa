"""What an audit reports of scored requests."""

from typing import Any

import numpy as np
import pytest
from engines import SCHEDULE
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.plugin.launcher.audit.mismatch_log import TOKEN_ROW
from sparrow_sglang.plugin.launcher.audit.statistics import FALSE_WARNINGS, AuditReport

TARGETED = SCHEDULE.model_copy(update={"tail_target": 0.86})


def token_rows(alpha: float, tokens: int = 48, first: int = 129) -> NDArray[Any]:
    """The first token is from prefill, the others from sparse steps in the bin of `first`."""
    rows = np.zeros(tokens, TOKEN_ROW)
    rows["position"] = np.arange(tokens) + first
    rows["acceptance_rate"] = alpha
    rows["acceptance_rate"][0] = np.nan
    return rows


def test_one_warning_per_bin_that_falls_below_the_target(warnings):
    report = AuditReport(TARGETED, gauges=False)
    for index in range(42):
        report.add(f"few-{index}", token_rows(0.5))
    report.publish()
    assert not warnings.records
    for index in range(6):
        report.add(f"more-{index}", token_rows(0.5))
    for index in range(40):
        report.add(f"good-{index}", token_rows(0.9, first=193))
    report.publish()
    report.publish()
    messages = {id(record): record.getMessage() for record in warnings.records}
    assert len(messages) == 1
    assert "at positions 128 to 191 the 5th percentile" in next(iter(messages.values()))
    assert "0.500" in next(iter(messages.values()))
    told = [(tail.bin, tail.tokens, tail.tail, tail.mean) for tail in report._tails.bins()]
    expected = [(2, 48 * 47, 0.5, 0.5), (3, 40 * 47, 0.9, 0.9)]
    assert told == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_server_that_is_switched_to_dense_shows_no_budget(monkeypatch):
    shown = set()
    monkeypatch.setattr(AuditReport, "_set", lambda self, name, *_, **__: shown.add(name))
    report = AuditReport(SCHEDULE, gauges=False)
    assert "sparrow:kv_budget_tokens" in shown
    shown.clear()
    report.start(SCHEDULE.as_dense())
    assert "sparrow:kv_budget_tokens" not in shown


def test_samples_of_one_prompt_do_not_warn_of_a_tail_that_meets_its_target(warnings):
    random = np.random.default_rng(3)
    warned = 0
    for server in range(25):
        report = AuditReport(TARGETED, gauges=False)
        before = len(warnings.records)
        for prompt in range(60):
            # A twentieth of the prompts is below 0.86, with all tokens of all eight samples.
            rate = 0.86 + 0.1 * (random.random() - 0.05)
            for _ in range(8):
                report.add(f"{server}-{prompt}", token_rows(rate))
            if prompt % 5 == 4:
                report.publish()
        warned += len(warnings.records) > before
    assert warned <= 2


def test_looks_at_a_bin_share_one_chance_of_a_false_warning(monkeypatch):
    """However often it is published; a fresh chance for each look would be used up by chance."""
    looks = []
    summary = TailStatistics.bin
    monkeypatch.setattr(
        TailStatistics,
        "bin",
        lambda self, index, confidence=0.95: (
            looks.append(confidence) or summary(self, index, confidence=confidence)
        ),
    )
    report = AuditReport(TARGETED, gauges=False)
    for index in range(600):
        report.add(f"{index}", token_rows(0.9))
        report.publish()
    # The gauges' intervals are of 95 %, and nothing hangs on them.
    chances = [(1 - confidence) / 2 for confidence in looks if confidence != 0.95]
    assert 3 <= len(chances) <= 5
    assert sum(chances) <= FALSE_WARNINGS
