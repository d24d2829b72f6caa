"""What a server says of its schedules in its log, whatever its log level."""

import logging
import sys
from typing import Any

from sparrow_sglang.schedule import BudgetSchedule

_logger = logging.getLogger("sparrow_sglang")


def announce(line: str) -> None:
    """Log on a handler of our own, so that SGLang's log level cannot hide it."""
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] sparrow: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
    _logger.info(line)


def describe(schedule: BudgetSchedule, source: str, hf_config: Any) -> str:
    """One schedule in one line.

    `source` says where it comes from; `hf_config` is that of the model that is served by it.
    """
    budgets = schedule.budget_tokens
    return (
        f"schedule {schedule.name} ({schedule.calibration(hf_config)}), from {source}: KV budget"
        f" {budgets[0]}..{budgets[-1]} tokens, sparse from {schedule.first_sparse_length()} tokens"
        f" on, page size {schedule.page_size}, dense layers {list(schedule.dense_layers)}"
    )
