"""What a result of `distill_gain` says: gains by bin, and the tables of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from sparrow_sglang.benchmarks.result_files import Run, cited_table, number

GIVEN, BOLDER = "given", "bolder"

Tails = dict[str, list[dict[str, Any]]]
"""Rows of `BinTail` under the given and under the bolder schedule."""

PAIRS = [(GIVEN, GIVEN), (BOLDER, BOLDER), (GIVEN, BOLDER)]
"""Schedules before and after. The last pair says whether the bolder one now does as well."""

_GAIN_TEXT = """\
DistillSparse alone, the model frozen (`benchmarks.distill_gain`): the 5th percentile of the exact
acceptance rate of fresh responses to held-out prompts, by position, without the adapter and with
it. Raised: in so many bins the 95 % intervals lie apart; reached: in so many the tail is at least
as high."""
_COST_TEXT = """\
What that adapter costs: decode merged into the weights and beside them (LoRA), a batch of requests
end to end; the acceptance rate between these two laws; and an adapter step beside a dense update on
the same responses."""


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


def gain_table(runs: Sequence[Run]) -> str:
    heads = "model|before → after|lr|responses|tail before → after, by bin|raised|reached"
    return cited_table(_GAIN_TEXT, heads + "|device|run", 2, runs, _gain_lines)


def cost_table(runs: Sequence[Run]) -> str:
    heads = "model|requests × new tokens|merged tokens/s|LoRA tokens/s|merged step ms|LoRA step ms"
    heads += "|acceptance between, mean|tail|adapter step s|dense update s"
    complete = [run for run in runs if "cost" in run.content]
    return cited_table(_COST_TEXT, heads + "|device|run", 1, complete, _cost_lines)


def _gain_lines(run: Run) -> Iterator[list[str]]:
    names = {which: each["name"] for which, each in run.content["schedules"].items()}
    for row in run.rows:
        tails = row["tails"][-1]
        for old, new in PAIRS:
            found = gains(run.content["before"][old], tails[new])
            yield [
                _model(run),
                f"{names[old]} → {names[new]}",
                f"{row['lr']:g}",
                str(tails["after"]["responses"]),
                ", ".join(f"{each['before']:.3f} → {each['after']:.3f}" for each in found),
                f"{sum(each['raised'] for each in found)} of {len(found)}",
                f"{sum(each['reached'] for each in found)} of {len(found)}",
            ]


def _cost_lines(run: Run) -> Iterator[list[str]]:
    merged, lora = (run.content["decode"][each] for each in ("merged", "lora"))
    agreement, cost = run.content["agreement"]["merged"], run.content["cost"]
    yield [
        _model(run),
        f"{merged['requests']} × {merged['new_tokens']}",
        *(number(each["tokens_per_s"], 0) for each in (merged, lora)),
        *(number(each["step_ms"], 2) for each in (merged, lora)),
        number(agreement["mean"], 4),
        number(agreement["tail"], 4),
        number(cost["adapter_step_s"], 2),
        number(cost["dense_update_s"], 2),
    ]


def _model(run: Run) -> str:
    return str(run.content["settings"]["model"]).rstrip("/").rpartition("/")[2]
