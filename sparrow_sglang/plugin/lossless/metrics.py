"""Acceptance rates of drafts on SGLang's /metrics: the mismatch of sparse decode, exactly."""

from collections import deque

import torch

from sparrow_sglang.plugin.lossless.acceptance import Outcome

_MOST_IN_FLIGHT = 8


class DraftCounters:
    """Counts drafts whose predecessors were all accepted, and the sum of their rates.

    One process may have one instance.
    """

    def __init__(self) -> None:
        from prometheus_client import Counter

        self._drafts = Counter("sparrow:drafts", "Drafts whose predecessors were accepted")
        self._rates = Counter("sparrow:draft_acceptance", "Sum of the acceptance rates of drafts")
        self._in_flight: deque[torch.Tensor] = deque(maxlen=_MOST_IN_FLIGHT)

    def add(self, outcome: Outcome) -> None:
        """Start copying a round's sums to the host."""
        position = torch.arange(outcome.rates.shape[1], device=outcome.rates.device)
        known = position <= outcome.accepted[:, None]
        sums = torch.stack([known.sum(), (outcome.rates * known).sum()])
        self._in_flight.append(sums.to("cpu", non_blocking=True))

    def publish(self) -> None:
        """Count the oldest round; its results have arrived on the host."""
        if self._in_flight:
            drafts, rates = self._in_flight.popleft().tolist()
            self._drafts.inc(drafts)
            self._rates.inc(rates)
