"""The processes of an engine, and the text of its responses."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from sparrow_sglang.rl.rollout import EngineDied
from sparrow_sglang.rl.tasks.answers import THINKING_MARK

POLL_S = 1.0
"""Seconds between checks that the engine is still alive, while waiting for it."""


class EngineProcesses:
    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def are_running(self) -> bool:
        return all(process.is_running() for process in self._processes)

    def require_alive(self) -> None:
        """Raise `EngineDied` if a process has ended."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise EngineDied(f"process {process.pid} of the SGLang engine died; see stderr")

    def kill(self) -> None:
        """End the processes and their children, and no others."""
        family: list[psutil.Process] = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                family += [*process.children(recursive=True), process]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=10)


def response_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text without special tokens, except those around thinking, which a reward has to see."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    marks = {number for number, content in special.items() if THINKING_MARK.fullmatch(content)}
    if not marks.intersection(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([one for one in ids if one in marks or one not in special]))
