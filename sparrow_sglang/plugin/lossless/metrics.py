"""Prometheus metrics of drafts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

Kind = Literal["sparse", "lookup"]


class Drafted(NamedTuple):
    """Drafts of one kind in a round: all, those whose predecessors were all accepted, and those of
    them that were accepted."""

    drafted: int
    judged: int
    accepted: int


class DraftMetrics:
    """Counters by kind of draft, and a gauge, with the labels of SGLang's scheduler metrics."""

    def __init__(self, server_args: "ServerArgs", dp_rank: int | None) -> None:
        # It looks for the folder that ranks share when it is imported, which SGLang sets by then.
        from prometheus_client import Counter, Gauge
        from sglang.srt.runtime_context import get_serving

        # Lossless decoding has no pipeline stages, and the first rank of a model counts.
        ranks = {"tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
        if dp_rank is not None:
            ranks["dp_rank"] = dp_rank
        labels = {
            "model_name": get_serving().served_model_name,
            "engine_type": "unified",
            **ranks,
            **({"priority": ""} if server_args.enable_priority_scheduling else {}),
            **(server_args.extra_metric_labels or {}),
        }
        names = [*labels]
        counters = (
            Counter("sparrow:drafted_tokens", "Drafts", [*names, "kind"]),
            Counter(
                "sparrow:drafts", "Drafts whose predecessors were all accepted", [*names, "kind"]
            ),
            Counter("sparrow:accepted_drafts", "Drafts that were accepted", [*names, "kind"]),
        )
        self._per_round = Gauge(
            "sparrow:drafts_per_round",
            "Drafts of each request in the latest round",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        kinds: tuple[Kind, ...] = get_args(Kind)
        self._counters = {
            kind: [counter.labels(**labels, kind=kind) for counter in counters] for kind in kinds
        }

    def observe(self, drafts: int, kinds: Mapping[Kind, Drafted]) -> None:
        """Count a round that took `drafts` of each request, `kinds` of all its requests."""
        self._per_round.set(drafts)
        for kind, counts in kinds.items():
            for counter, count in zip(self._counters[kind], counts, strict=True):
                counter.inc(count)
