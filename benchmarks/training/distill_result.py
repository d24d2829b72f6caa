"""Gains by bin, from a result of `distill_gain`."""

from collections.abc import Sequence
from typing import Any

GIVEN, AGGRESSIVE = "given", "bolder"
"""Names in results of the given schedule and of the more aggressive one, which reads less."""

Tails = dict[str, list[dict[str, Any]]]
"""Rows of `BinTail` under each of the two schedules."""

PAIRS = [(GIVEN, GIVEN), (AGGRESSIVE, AGGRESSIVE), (GIVEN, AGGRESSIVE)]
"""Schedules before and after training. The last pair shows whether the more aggressive schedule
with the adapter does as well as the given schedule did without it."""


def gains(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each bin in both: both tails, and whether the tail rose.

    `raised` is true if both intervals are known and `after`'s lies above `before`'s; `reached`
    compares the tails themselves.
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
