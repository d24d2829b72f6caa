"""What the launching process adds to a server that decodes sparsely: calls, routes, the audit."""

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow_sglang.mismatch.exact_rates import RECORD_VARIABLE
from sparrow_sglang.plugin.arguments.modes import mode_of
from sparrow_sglang.plugin.arguments.server_args import resolve_schedule
from sparrow_sglang.plugin.launcher.adapters import adapter
from sparrow_sglang.plugin.launcher.audit.auditor import Auditor
from sparrow_sglang.plugin.launcher.audit.mismatch_log import MismatchLog
from sparrow_sglang.plugin.launcher.control import schedule
from sparrow_sglang.plugin.launcher.routes import add_routes
from sparrow_sglang.plugin.names import uses_sparrow
from sparrow_sglang.plugin.state import ServerState
from sparrow_sglang.schedules.options import ATTRIBUTE
from sparrow_sglang.sglang_compat.arguments import resolved

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

CALLS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "schedule": schedule,
    "adapter": adapter,
}
"""Calls of `Endpoint.call_sparrow`; `routes.CALLS` gives some a route."""


def attach_server(result: None, manager: "TokenizerManager", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: attach the state with which the launching process checks, switches and audits."""
    server_args = manager.server_args
    if not uses_sparrow(server_args):
        return
    active = resolve_schedule(server_args, manager.model_config.hf_config)
    calls = {name: partial(call, manager) for name, call in CALLS.items()}
    state = ServerState(active, active, calls, mode=mode_of(server_args))
    # A calibration measures schedules as they are written.
    records = RECORD_VARIABLE in os.environ
    state.measures_dense = resolved(server_args).device == "cuda" and not records
    rate, folder = server_args.sparrow_audit_rate, server_args.sparrow_audit_log
    if rate or server_args.enable_metrics:
        log = None if folder is None else MismatchLog(Path(folder))
        state.auditor = Auditor(manager, rate, active, log, state.released)
    setattr(manager, ATTRIBUTE, state)
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is not None:
        add_routes(http_server.app)
