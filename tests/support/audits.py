"""The audit of an engine, whose launching process is the test's own."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sparrow_sglang.plugin.arguments import refusals


@contextmanager
def unseen_audits() -> Iterator[None]:
    """Allow engines an audit without metrics, which would be kept in the test's own process."""
    with mock.patch.object(refusals, "_audit_problems", lambda server_args: []):
        yield


def outcomes(engine: Any, wait_s: float = 60.0) -> dict[str, int]:
    """What has become of all requests so far, once no audit is left to do or `wait_s` is over."""
    auditor = engine.tokenizer_manager.sparrow.auditor

    async def finish() -> None:
        deadline = time.monotonic() + wait_s
        queue = auditor._queue
        while queue._recording or queue.first or auditor._score is not None:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)

    engine.loop.run_until_complete(finish())
    return {name: auditor.report.requests[name] for name in ("audited", "dropped", "failed")}
