"""`sparrow schedules`: the shipped schedules."""

import argparse

from sparrow_sglang.command_line import table
from sparrow_sglang.schedules.names import known_schedules, shipped_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

_HEADS = ("name", "model", "tail target", "KV budget, tokens", "up to", "evidence")
DESCRIPTION = "List the schedules that are shipped, and the models that have one."
EPILOG = """\
A server takes the schedule of its model whose tail target is nearest to 0.86, unless
--sparrow-schedule names another. For a model that has none: sparrow calibrate --model-path MODEL,
or fixed-4096, a budget of 4,096 tokens at every length, which is not calibrated.
"""


def add_arguments(_: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_: argparse.Namespace) -> int:
    rows = [_HEADS, *(_row(shipped_schedule(name)) for name in known_schedules())]
    print(f"{table(rows)}\n\n{EPILOG}", end="")
    return 0


def _row(schedule: BudgetSchedule) -> tuple[str, str, str, str, str, str]:
    budgets = schedule.budget_tokens
    evidence = "measured" if "tails" in schedule.provenance or "bins" in schedule.provenance else ""
    return (
        schedule.name,
        schedule.model or "",
        "" if schedule.tail_target is None else f"{schedule.tail_target:g}",
        f"{budgets[0]:,} to {budgets[-1]:,}",
        f"{len(budgets) * schedule.bin_tokens:,}",
        evidence or "as published",
    )
