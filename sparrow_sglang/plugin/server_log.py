"""Log lines of a server about its schedules, written whatever its log level."""

import logging
import sys
from typing import Any

from sparrow_sglang.hf_config import linear_layers, num_layers_of, window_layers
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule

_logger = logging.getLogger("sparrow_sglang")


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is now, which may change after a fork."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def announce(line: str) -> None:
    """Log on a handler of our own, so that SGLang's log level cannot hide it."""
    if not _logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] sparrow: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
    _logger.info(line)


def keep_warnings() -> None:
    """Let this package's warnings through: an engine raises the root logger's level. A level that
    the user has chosen for this package stays."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.WARNING)


def describe_schedule(
    schedule: BudgetSchedule, hf_config: Any, needs_calibration: bool = True
) -> str:
    """One line on `schedule`."""
    if schedule.is_dense:
        return f"schedule {schedule.name}: every step reads everything"
    budgets = schedule.budget_tokens
    selection = ", int4 landmarks" if schedule.selection == INT4 else ""
    kinds = {
        "sliding windows": window_layers(hf_config),
        "linear attention": linear_layers(hf_config),
    }
    partial = {layer for of_kind in kinds.values() for layer in of_kind}
    layers = f"dense layers {[layer for layer in schedule.dense_layers if layer not in partial]}"
    for kind, of_kind in kinds.items():
        if of_kind:
            layers += f", {kind} in {len(of_kind)} of {num_layers_of(hf_config)} layers"
    state = "needs no calibration"
    if needs_calibration or schedule.calibrated:
        state = schedule.describe_calibration(hf_config)
    return (
        f"schedule {schedule.name} ({state}): KV budget {budgets[0]}..{budgets[-1]} tokens,"
        f" sparse from {schedule.first_sparse_length()} tokens on, page size {schedule.page_size},"
        f" {layers}{selection}"
    )
