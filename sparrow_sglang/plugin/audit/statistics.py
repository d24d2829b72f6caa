"""What an audited server reports of its mismatch: tail statistics, Prometheus gauges, warnings.

In: acceptance bounds of audited tokens, lengths of the running requests. Out: gauges on SGLang's
/metrics, a summary, and a warning per position bin whose tail falls below the schedule's target.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from sparrow_sglang.mismatch.tail import BinTail, TailStatistics
from sparrow_sglang.mismatch.token_bins import tail_bin_tokens, token_bins
from sparrow_sglang.plugin.audit.mismatch_log import TokenRows
from sparrow_sglang.request_options import RequestOption
from sparrow_sglang.schedule import BudgetSchedule

WELL_FILLED_TOKENS = 2000
"""Tokens that a bin needs before its tail is warned of: 100 of them lie below the percentile."""

_GAUGES = {
    "sparrow:acceptance_tail": ("5th percentile of the acceptance rate", ("bin", "bound")),
    "sparrow:acceptance_mean": ("Mean acceptance rate", ("bin", "bound")),
    "sparrow:audited_tokens": ("Sparsely decoded tokens scored again densely", ("bin",)),
    "sparrow:audit_requests": ("Finished requests by what the audit did with them", ("outcome",)),
    "sparrow:kv_budget_tokens": (
        "Active KV budget at the start of the bin",
        ("bin",),
    ),
    "sparrow:kv_tokens_cached": ("KV tokens of the running requests", ()),
    "sparrow:kv_tokens_read": ("KV tokens that a sparse layer reads of them in one step", ()),
}

logger = logging.getLogger("sparrow_sglang")


class AuditReport:
    """Counts what one server's audit found under one schedule at a time.

    Bins are the schedule's own, or of 2,000 tokens under a fixed budget. Top-k lists do not give
    the acceptance rate itself, so tails of both its bounds are kept; the true tail lies between.
    """

    def __init__(self, schedule: BudgetSchedule, gauges: bool) -> None:
        """`gauges`: publish to Prometheus."""
        self._gauges = _prometheus_gauges() if gauges else {}
        self.requests: Counter[str] = Counter()
        self._shown_bins: set[tuple[str, tuple[tuple[str, Any], ...]]] = set()
        self.start(schedule)

    def start(self, schedule: BudgetSchedule) -> None:
        """Start counting anew under `schedule`."""
        self.schedule = schedule
        bin_tokens = tail_bin_tokens(schedule)
        self._bounds = {
            "lower": TailStatistics(bin_tokens),
            "upper": TailStatistics(bin_tokens),
        }
        self._warned: set[int] = set()
        # Under SGLang values of several processes lie in files, where labels cannot be removed.
        for name, labels in list(self._shown_bins):
            self._set(name, 0 if name == "sparrow:audited_tokens" else math.nan, **dict(labels))
        for index in range(len(schedule.budget_tokens)):
            budget = schedule.kv_budget_tokens(max(1, index * schedule.bin_tokens))
            self._set("sparrow:kv_budget_tokens", budget, bin=index)

    def add(self, rows: TokenRows) -> None:
        """Count the sparsely decoded tokens of one response."""
        bins = token_bins(self.schedule, int(rows.position[0]), len(rows))
        self._bounds["lower"].add(rows.request_id, bins, rows.alpha_lower)
        self._bounds["upper"].add(rows.request_id, bins, rows.alpha_upper)

    def publish(self) -> dict[str, Any]:
        """Update the gauges, and warn of bins that have fallen below the target.

        Returns the gauges' values with confidence intervals: requests by outcome, and per bound the
        bins, as JSON values.
        """
        requests = dict(self.requests)
        bins = {bound: statistics.bins() for bound, statistics in self._bounds.items()}
        for bound, tails in bins.items():
            for tail in tails:
                self._set("sparrow:acceptance_tail", tail.tail, bin=tail.bin, bound=bound)
                self._set("sparrow:acceptance_mean", tail.mean, bin=tail.bin, bound=bound)
                self._set("sparrow:audited_tokens", tail.tokens, bin=tail.bin)
        # Set last, so that a reader who sees a request counted sees its tokens, too.
        for outcome, count in requests.items():
            self._set("sparrow:audit_requests", count, outcome=outcome)
        for upper in bins["upper"]:
            self._warn_below_target(upper)
        return {
            "schedule": self.schedule.name,
            "requests": requests,
            "bins": {bound: [vars(tail) for tail in tails] for bound, tails in bins.items()},
        }

    def publish_load(self, running: Iterable[tuple[int, RequestOption | None]]) -> None:
        """Publish KV tokens cached and read, for running requests of these lengths in tokens.

        Each comes with what it asked for, None for the active schedule.
        """
        if not self._gauges:
            return
        alike: dict[tuple[int, int | None], tuple[RequestOption, list[int]]] = {}
        for length, given in running:
            option = given or RequestOption(self.schedule)
            key = id(option.schedule), option.kv_budget_tokens
            alike.setdefault(key, (option, []))[1].append(length)
        self._set("sparrow:kv_tokens_cached", sum(sum(of) for _, of in alike.values()))
        read = sum(int(option.tokens_read(of).sum()) for option, of in alike.values())
        self._set("sparrow:kv_tokens_read", read)

    def _warn_below_target(self, upper: BinTail) -> None:
        """Warn by the upper bound: only it proves a tail too low; the lower one may be loose."""
        target = self.schedule.tail_target
        if target is None or upper.tail >= target or upper.bin in self._warned:
            return
        # Of bins whose true tail equals the target, half fall below it at some time by chance. So
        # warn only if the whole confidence interval lies below.
        if upper.tokens < WELL_FILLED_TOKENS or upper.tail_high is None:
            return
        if upper.tail_high < target:
            self._warned.add(upper.bin)
            logger.warning(
                "mismatch: at positions %d to %d the 5th percentile of the acceptance rate is at"
                " most %.3f (95 %% interval %.3f to %.3f, %d tokens), below the %.2f that schedule"
                " %s was made for; calibrate it for this model and these prompts",
                upper.first_position,
                upper.end_position - 1,
                upper.tail,
                upper.tail_low,
                upper.tail_high,
                upper.tokens,
                target,
                self.schedule.name,
            )

    def _set(self, name: str, value: float, **labels: Any) -> None:
        gauge = self._gauges.get(name)
        if gauge is not None:
            if "bin" in labels:
                self._shown_bins.add((name, tuple(labels.items())))
            (gauge.labels(**labels) if labels else gauge).set(value)


@functools.cache
def _prometheus_gauges() -> dict[str, Any]:
    """Create the gauges once per process, as Prometheus lets a name be registered only once.

    The import is here because prometheus_client looks for its folder of shared values when it is
    imported, and SGLang sets that folder only while it starts.
    """
    from prometheus_client import Gauge

    return {
        name: Gauge(name, help, labels, multiprocess_mode="mostrecent")
        for name, (help, labels) in _GAUGES.items()
    }
