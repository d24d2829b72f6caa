"""What a result of `distill_gain` says: gains by bin."""

from collections.abc import Sequence
from typing import Any

GIVEN, AGGRESSIVE = "given", "bolder"
"""The given schedule, and one that reads less, as results name them."""

Tails = dict[str, list[dict[str, Any]]]
"""Rows of `BinTail` under each of the two schedules."""

PAIRS = [(GIVEN, GIVEN), (AGGRESSIVE, AGGRESSIVE), (GIVEN, AGGRESSIVE)]
"""Schedules before and after. The last pair says whether the more aggressive one now does as well
as the given one did."""


def gains(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Per bin in both: both tails, and whether `after` lies above `before` with its interval.

    `raised` needs both intervals, and no overlap; `reached` compares the tails themselves.
    """
    first = {row["bin"]: row for row in before}
    pairs = [(first[row["bin"]], row) for row in after if row["bin"] in first]
    return [
        {
            "bin": new["bin"],
            "positions": (new["first_position"], new["end_position"]),
            "tokens": (old["tokens"], new["tokens"]),
            "before": old["tail"],
            "after": new["tail"],
            "raised": None not in (old["tail_high"], new["tail_low"])
            and new["tail_low"] > old["tail_high"],
            "reached": new["tail"] >= old["tail"],
        }
        for old, new in pairs
    ]
