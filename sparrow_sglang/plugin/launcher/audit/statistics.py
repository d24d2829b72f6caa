"""The mismatch report of an audited server: tail statistics, Prometheus gauges, warnings."""

import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import TailStatistics
from sparrow_sglang.mismatch.token_bins import NOT_COUNTED, tail_bin_tokens, token_bins
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

WELL_FILLED_TOKENS = 2000
"""Tokens that a bin needs before its tail is warned of: 100 of them lie below the percentile."""
FALSE_WARNINGS = 0.025
"""Largest chance that a bin whose tail meets the target is ever warned of."""

SKIPPED = ("dense", "own_schedule", "input")
"""Reasons why a request cannot be audited, see `queue.skip_reason`."""
OUTCOMES = ("audited", "dropped", "failed", *(f"skipped_{reason}" for reason in SKIPPED))

_GAUGES = {
    "sparrow:acceptance_tail": ("5th percentile of the acceptance rate", ("bin",)),
    "sparrow:acceptance_mean": ("Mean acceptance rate", ("bin",)),
    "sparrow:audited_tokens": ("Sparsely decoded tokens scored again densely", ("bin",)),
    "sparrow:audit_requests": ("Requests by what the audit did with them", ("outcome",)),
    "sparrow:kv_budget_tokens": ("Active KV budget at the start of the bin", ("bin",)),
    "sparrow:kv_tokens_cached": ("KV tokens of the running requests", ()),
    "sparrow:kv_tokens_read": ("KV tokens that a sparse layer reads of them in one step", ()),
}

logger = logging.getLogger("sparrow_sglang")


class AuditReport:
    """Statistics of one server's audit under one schedule at a time; not thread-safe."""

    def __init__(self, schedule: BudgetSchedule, gauges: bool) -> None:
        """`gauges`: publish to Prometheus."""
        self._gauges = _prometheus_gauges() if gauges else {}
        self.requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._shown_bins: set[tuple[str, tuple[tuple[str, Any], ...]]] = set()
        self.start(schedule)
        self.publish_load(())

    def start(self, schedule: BudgetSchedule) -> None:
        """Restart all counts, under `schedule`."""
        self.schedule = schedule
        width = tail_bin_tokens(schedule)
        self._tails = TailStatistics(width)
        self._changed: set[int] = set()
        self._looks: Counter[int] = Counter()
        self._next_look: dict[int, int] = {}
        # See `_prometheus_gauges`.
        for name, labels in list(self._shown_bins):
            self._set(name, math.nan, **dict(labels))
        for index in range(0 if schedule.is_dense else len(schedule.budget_tokens)):
            budget = schedule.budget_at(max(1, index * schedule.bin_tokens))
            self._set("sparrow:kv_budget_tokens", budget, bin=index)

    def add(self, prompt: str, rows: NDArray[Any]) -> None:
        """Count the sparsely decoded tokens among rows [T] of `mismatch_log.TOKEN_ROW`, those of
        one response to the prompt that `prompt` identifies."""
        decoded = ~np.isnan(rows["acceptance_rate"])
        bins = token_bins(self.schedule, int(rows["position"][0]), len(rows))[decoded]
        self._tails.add(prompt, bins, rows["acceptance_rate"][decoded])
        self._changed |= set(bins.tolist()) - {NOT_COUNTED}

    def publish(self) -> None:
        """Update the gauges; warn of low tails."""
        for index in sorted(self._changed):
            tail = self._tails.bin(index)
            self._set("sparrow:acceptance_tail", tail.tail, bin=index)
            self._set("sparrow:acceptance_mean", tail.mean, bin=index)
            self._set("sparrow:audited_tokens", tail.tokens, bin=index)
            self._warn_if_low(index)
        self._changed.clear()
        # Set last, so that a reader who sees a request counted sees its tokens, too.
        for outcome, count in self.requests.items():
            self._set("sparrow:audit_requests", count, outcome=outcome)

    def publish_load(self, running: Iterable[tuple[int, RequestOption | None]]) -> None:
        """Publish KV tokens cached and read, of requests' lengths and options (None: default)."""
        if not self._gauges:
            return
        groups: dict[tuple[int, int | None], tuple[RequestOption, list[int]]] = {}
        for length, requested in running:
            option = requested or RequestOption(self.schedule)
            key = id(option.schedule), option.kv_budget_tokens
            groups.setdefault(key, (option, []))[1].append(length)
        self._set("sparrow:kv_tokens_cached", sum(sum(lengths) for _, lengths in groups.values()))
        read = sum(int(option.tokens_read(of).sum()) for option, of in groups.values())
        self._set("sparrow:kv_tokens_read", read)

    def _warn_if_low(self, index: int) -> None:
        """Warn of a bin if even the upper end of its tail's interval lies below the target.
        Repeated looks at a tail that equals the target would see it fall below by chance, so look
        again only after the tokens have doubled, and spend FALSE_WARNINGS on all looks together:
        one part in k (k + 1) on the k-th."""
        target, statistics = self.schedule.tail_target, self._tails
        tokens = statistics.tokens()[index]
        if target is None or tokens < self._next_look.get(index, WELL_FILLED_TOKENS):
            return
        self._looks[index] += 1
        self._next_look[index] = 2 * tokens
        look = self._looks[index]
        bin_tail = statistics.bin(index, confidence=1 - 2 * FALSE_WARNINGS / (look * (look + 1)))
        if bin_tail.tail_high is None or bin_tail.tail_high >= target:
            return
        self._next_look[index] = sys.maxsize
        logger.warning(
            "mismatch: at positions %d to %d the 5th percentile of the acceptance rate is"
            " %.3f (interval %.3f to %.3f, %d tokens), below the %.2f that schedule"
            " %s was made for; calibrate it for this model and these prompts",
            bin_tail.first_position,
            bin_tail.end_position - 1,
            bin_tail.tail,
            bin_tail.tail_low,
            bin_tail.tail_high,
            bin_tail.tokens,
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
    """Create the gauges once per process, as Prometheus lets a name be registered only once. Under
    SGLang the values lie in files, where labels cannot be removed, so NaN marks those of another
    schedule, which are left out when the files are read. prometheus_client looks for the folder of
    these files when it is imported, and SGLang sets it only while it starts."""
    from prometheus_client import Gauge
    from prometheus_client.multiprocess import MultiProcessCollector

    collect = MultiProcessCollector.collect

    def collect_known(self: Any) -> Any:
        metrics = list(collect(self))
        for metric in metrics:
            if metric.name.startswith("sparrow:"):
                metric.samples = [one for one in metric.samples if not math.isnan(one.value)]
        return metrics

    MultiProcessCollector.collect = collect_known  # type: ignore[method-assign]
    return {
        name: Gauge(name, help, labels, multiprocess_mode="mostrecent")
        for name, (help, labels) in _GAUGES.items()
    }
