"""Rounds of lossless decoding as benchmarks name, count and predict them."""

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.plugin.names import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    import torch

ACCEPTANCE, LOOKUP_ACCEPTANCE = 0.96, 0.45


class Rates(NamedTuple):
    """Chances that a sparse draft and a looked-up token are accepted, given their predecessors."""

    drafts: float = ACCEPTANCE
    lookups: float = LOOKUP_ACCEPTANCE


class Round(NamedTuple):
    """Sparse drafts of a round, and looked-up tokens behind them; written K or K+M."""

    drafts: int
    lookups: int = 0

    @property
    def total(self) -> int:
        return self.drafts + self.lookups

    @property
    def kind(self) -> str:
        names = (("sparse", self.drafts), ("lookups", self.lookups))
        return "+".join(name for name, count in names if count) or "dense"

    def __str__(self) -> str:
        return f"{self.drafts}+{self.lookups}" if self.lookups else str(self.drafts)

    def tokens(self, rates: Rates) -> float:
        """Mean tokens of a round, the bonus token included."""
        behind = sum(rates.lookups**count for count in range(1, self.lookups + 1))
        of_drafts = sum(rates.drafts**count for count in range(self.drafts + 1))
        return of_drafts + rates.drafts**self.drafts * behind


def parse_round(text: str) -> Round:
    """An argparse `type`."""
    most = MAX_DRAFT_TOKENS - 1
    match = re.fullmatch(r"(\d{1,3})(?:\+(\d{1,3}))?", text, re.ASCII)
    round_ = Round(int(match[1]), int(match[2] or 0)) if match else Round(0)
    if not 1 <= round_.total <= most:
        raise argparse.ArgumentTypeError(
            f"expected K or K+M, 1 to {most} sparse drafts and looked-up tokens, got {text}"
        )
    return round_


def accepted_at(rates: Rates, round_: Round, batch: int, device: Any) -> "torch.Tensor":
    """[batch] accepted drafts of a round, by chance."""
    import torch

    position = torch.arange(round_.total, device=device)
    # On the device, as a copy from the host would wait for it.
    chances = torch.full_like(position, rates.drafts, dtype=torch.float32)
    chances.masked_fill_(position >= round_.drafts, rates.lookups)
    hits = torch.rand(batch, round_.total, device=device) < chances
    return hits.long().cumprod(1).sum(1)


class RoundCounts:
    """Rounds of requests, by kind: `rounds`, their `tokens`, `drafts` and `lookups` whose
    predecessors were all accepted, and those accepted of them."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, int]] = {}

    def add(self, round_: Round, accepted: Sequence[int]) -> None:
        """Count a round, in which so many drafts of each request were accepted."""
        names = ("rounds", "tokens", "drafts", "accepted_drafts", "lookups", "accepted_lookups")
        row = self.kinds.setdefault(round_.kind, dict.fromkeys(names, 0))
        drafts, lookups = round_
        for hits in map(int, accepted):
            of_lookups = hits - drafts
            row["rounds"] += 1
            row["tokens"] += hits + 1
            row["drafts"] += min(hits + 1, drafts)
            row["accepted_drafts"] += min(hits, drafts)
            row["lookups"] += max(0, min(of_lookups + 1, lookups))
            row["accepted_lookups"] += max(0, of_lookups)


def measured_rounds(counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What a row records of `counts`: tokens of a round by kind, and the shares accepted, None
    where nothing was drafted."""

    def share(name: str) -> float | None:
        judged = sum(row[name] for row in counts.values())
        accepted = sum(row[f"accepted_{name}"] for row in counts.values())
        return accepted / judged if judged else None

    kinds = {
        kind: row | {"tokens_per_round": row["tokens"] / row["rounds"]}
        for kind, row in sorted(counts.items())
        if row["rounds"]
    }
    return {
        "rounds": kinds,
        "acceptance_rate": share("drafts"),
        "lookup_acceptance": share("lookups"),
    }
