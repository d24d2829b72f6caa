"""What an audit reports of scored requests."""

from typing import Any

import numpy as np
import pytest
from engines import SCHEDULE
from numpy.typing import NDArray

from sparrow_sglang.plugin.launcher.audit.mismatch_log import TOKEN_ROW
from sparrow_sglang.plugin.launcher.audit.statistics import AuditReport


def token_rows(alpha: float, tokens: int = 48, first: int = 129) -> NDArray[Any]:
    """The first token is from prefill, the others from sparse steps in the bin of `first`."""
    rows = np.zeros(tokens, TOKEN_ROW)
    rows["position"] = np.arange(tokens) + first
    rows["acceptance_rate"] = alpha
    rows["acceptance_rate"][0] = np.nan
    return rows


def test_a_bin_shows_the_tokens_that_were_decoded_sparsely():
    report = AuditReport(SCHEDULE, gauges=False)
    for index in range(48):
        report.add(f"low-{index}", token_rows(0.5))
    for index in range(40):
        report.add(f"good-{index}", token_rows(0.9, first=193))
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
