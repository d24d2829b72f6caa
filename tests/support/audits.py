"""The audit of an engine, whose launching process is the test's own."""

import asyncio
import time
from typing import Any


def outcomes(engine: Any, wait_s: float = 60.0) -> dict[str, int]:
    """What has become of all requests so far, once no audit is left to do or `wait_s` is over. All
    rows of audited requests are in the log."""
    auditor = engine.tokenizer_manager.sparrow.auditor

    async def finish() -> None:
        deadline = time.monotonic() + wait_s
        queue = auditor._queue
        while queue._recording or queue.first or auditor._score is not None:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        if auditor._log is not None:
            await auditor._flush(auditor._log)

    engine.loop.run_until_complete(finish())
    return {name: auditor.report.requests[name] for name in ("audited", "dropped", "failed")}
