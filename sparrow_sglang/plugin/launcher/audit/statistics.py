"""The mismatch report of an audited server: tail statistics, Prometheus gauges."""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.mismatch.tail import NOT_COUNTED, TailStatistics, tail_bin_tokens, token_bins
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

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
        # See `_prometheus_gauges`.
        for name, labels in list(self._shown_bins):
            self._set(name, math.nan, **dict(labels))
        for index in range(0 if schedule.is_dense else len(schedule.budget_tokens)):
            budget = schedule.budget_at(max(1, index * schedule.bin_tokens))
            self._set("sparrow:kv_budget_tokens", budget, bin=index)

    def add(self, prompt: str, prompt_tokens: int, rates: NDArray[np.float64]) -> None:
        """Count the sparsely decoded tokens of one response to the prompt that `prompt` identifies;
        `rates` [T - 1] are those of `exact_rates`."""
        decoded = ~np.isnan(rates)
        bins = token_bins(self.schedule, prompt_tokens, len(rates) + 1)[1:][decoded]
        self._tails.add(prompt, bins, rates[decoded])
        self._changed |= set(bins.tolist()) - {NOT_COUNTED}

    def publish(self) -> None:
        """Update the gauges."""
        for index in sorted(self._changed):
            tail = self._tails.bin(index)
            self._set("sparrow:acceptance_tail", tail.tail, bin=index)
            self._set("sparrow:acceptance_mean", tail.mean, bin=index)
            self._set("sparrow:audited_tokens", tail.tokens, bin=index)
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
