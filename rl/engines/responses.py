"""The responses of one rollout that an `sglang.Engine` of this process samples."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from sparrow_sglang.rl.rollout import EngineDied, OnFinished, Sampling, sample_request, sampled
from sparrow_sglang.rl.tasks.answers import THINKING_MARK
from sparrow_sglang.rl.types import Group, Prompt, Rollout

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


@dataclass(eq=False)
class Responses:
    """Groups of `samples` responses each. `manager` is SGLang's TokenizerManager. `switchable`: the
    engine has the sparrow backend."""

    manager: Any
    loop: asyncio.AbstractEventLoop
    processes: EngineProcesses
    sampling: Sampling
    samples: int
    weight_version: str
    schedule: str
    switchable: bool
    _running: set[asyncio.Task[tuple[int, Rollout]]] = field(default_factory=set)

    def stream(
        self, prompts: Sequence[Prompt], on_finished: OnFinished, is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[int, Group]]:
        """As `RolloutEngine.stream`, until `is_stopped`. Raises `RolloutError`, and `EngineDied` if
        a process ended or no response is finished within `sampling.timeout_s`."""
        groups: list[list[Rollout]] = [[] for _ in prompts]
        self._running = {
            self.loop.create_task(self._sampled(position, prompt, sample))
            for position, prompt in enumerate(prompts)
            for sample in range(self.samples)
        }
        silent_s = 0.0
        try:
            while self._running and not is_stopped():
                began = time.monotonic()
                done, self._running = self.loop.run_until_complete(
                    asyncio.wait(self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                )
                self.processes.require_alive()
                silent_s = 0.0 if done else silent_s + time.monotonic() - began
                if silent_s > self.sampling.timeout_s:
                    limit = self.sampling.timeout_s
                    raise EngineDied(f"no response within rollout.timeout_s={limit:.0f}")
                for task in done:
                    position, rollout = task.result()
                    group = groups[position]
                    group.append(rollout)
                    on_finished(1)
                    if len(group) == self.samples:
                        group.sort(key=lambda rollout: rollout.sample)
                        yield position, Group(prompts[position], tuple(group))
        finally:
            if self._running:
                self._abandon()

    async def _sampled(self, position: int, prompt: Prompt, sample: int) -> tuple[int, Rollout]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = sample_request(prompt.input_ids, self.sampling, self.switchable)
        outputs = self.manager.generate_request(GenerateReqInput(**request), None)
        try:
            output = await anext(outputs)
        finally:
            await outputs.aclose()
        source = self.weight_version, self.schedule
        return position, sampled(prompt, sample, output, self.sampling, *source, self._decode)

    def _decode(self, ids: Sequence[int]) -> str:
        return response_text(self.manager.tokenizer, ids) if self.manager.tokenizer else ""

    async def _abort(self) -> None:
        """Abort all requests; a coroutine, as the engine's socket belongs to the event loop."""
        self.manager.abort_request(abort_all=True)

    def _abandon(self) -> None:
        if self.processes.are_running():
            self.loop.run_until_complete(self._abort())
        for task in self._running:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._running, return_exceptions=True))


def response_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text without special tokens, except those around thinking, which a reward has to see."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    marks = {number for number, content in special.items() if THINKING_MARK.fullmatch(content)}
    if not marks.intersection(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([one for one in ids if one in marks or one not in special]))
