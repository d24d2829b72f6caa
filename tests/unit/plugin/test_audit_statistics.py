"""What an audit reports of scored requests."""

import numpy as np
import pytest
from engines import SCHEDULE

from sparrow_sglang.plugin.launcher.audit.statistics import AuditReport


def test_a_bin_shows_the_tokens_that_were_decoded_sparsely():
    report = AuditReport(SCHEDULE, gauges=False)
    for index in range(48):
        report.add(f"low-{index}", 129, np.full(47, 0.5))
    for index in range(40):
        report.add(f"good-{index}", 193, np.array([np.nan] + [0.9] * 46))
    told = [(tail.bin, tail.tokens, tail.tail, tail.mean) for tail in report._tails.bins()]
    expected = [(2, 48 * 47, 0.5, 0.5), (3, 40 * 46, 0.9, 0.9)]
    assert told == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_server_that_is_switched_to_dense_shows_no_budget(monkeypatch):
    shown = set()
    monkeypatch.setattr(AuditReport, "_set", lambda self, name, *_, **__: shown.add(name))
    report = AuditReport(SCHEDULE, gauges=False)
    assert "sparrow:kv_budget_tokens" in shown
    shown.clear()
    report.start(SCHEDULE.as_dense())
    assert "sparrow:kv_budget_tokens" not in shown
