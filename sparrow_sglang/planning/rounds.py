"""The rounds that lossless decoding chooses from, and the tokens that they give."""

from collections.abc import Sequence
from typing import NamedTuple

NARROW = 4
"""Rows of the narrow rounds. At 64 requests 9 rows take twice the time of one."""


class Plan(NamedTuple):
    """A round: sparse steps that each draft a token, then tokens looked up, and how many `rows` of
    each request the dense pass computes, at least one more than drafts. Written K or K+M."""

    drafts: int
    lookups: int
    rows: int

    @property
    def kind(self) -> str:
        names = (("sparse", self.drafts), ("lookups", self.lookups))
        return "+".join(name for name, count in names if count) or "dense"

    def __str__(self) -> str:
        return f"{self.drafts}+{self.lookups}" if self.lookups else str(self.drafts)


DENSE = Plan(0, 0, 1)
"""A dense step."""


def widths(most: int) -> list[int]:
    """Rows that rounds verify, where they are to verify up to `most`."""
    return sorted({min(NARROW, most), most})


def plans(most: int, looks_up: bool) -> list[Plan]:
    """The rounds that verify up to `most` rows. Where tokens are looked up, they fill the rows that
    sparse drafts leave, which are computed anyway."""
    return [DENSE] + [
        Plan(drafts, (rows - 1 - drafts) * looks_up, rows)
        for rows in widths(most)
        for drafts in range(0 if looks_up else 1, rows)
    ]


def runs_twice(plan: Plan, most: int) -> bool:
    """Whether a second such round follows without a return to SGLang's loop. Together they write no
    more tokens than a round of `most` rows, for which SGLang allocates slots."""
    return 1 < plan.rows <= most // 2


def expected_tokens(plan: Plan, sparse: float, lookups: Sequence[float]) -> float:
    """Tokens of a round whose sparse drafts are accepted with probability `sparse` each, and those
    looked up with `lookups` by their place, if all before them are (arXiv 2211.17192)."""
    total = reached = 1.0
    for rate in [sparse] * plan.drafts + list(lookups[: plan.lookups]):
        reached *= rate
        total += reached
    return total
