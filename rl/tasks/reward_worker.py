"""One process that calls reward functions, and can be killed."""

import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from sparrow_sglang.json_values import cut, quoted

# (prompt, text) -> reward, or a mapping of "score" and sub-scores. A function with a parameter
# `finish_reason` receives SGLang's, too. A function (prompts, texts), optionally with a parameter
# `finish_reasons`, receives all responses of a group, and returns a reward for each.
# A reward of None, or a "score" of None, is missing.
Reward = Callable[..., Any]
# Task name, the reward's positional arguments, and its keyword arguments.
Job = tuple[str, tuple[Any, Any], dict[str, Any]]
# "reward", "errors", "crashes", "timeouts", or "unloaded" if the function cannot be loaded; and the
# rewards with their sub-scores, or the reason.
Outcome = tuple[str, Any]
# Time for a worker to import the reward function with its libraries, such as sympy.
START_UP_S = 120.0
# Time for processes that a killed worker has started to end by themselves.
_CLEANUP_S = 2.0
# Advantages are 32-bit numbers.
_LARGEST = 1e38


class Worker:
    def __init__(self, reward: Reward | Mapping[str, Reward]) -> None:
        # Not fork: the child would inherit threads and a CUDA context that it cannot use.
        context = multiprocessing.get_context("forkserver")
        self._connection, child_end = context.Pipe()
        # Not a daemon, as daemons may not start processes, which a reward may need to do.
        self._process = context.Process(target=_serve, args=(child_end, reward), daemon=False)
        self._process.start()
        child_end.close()
        self._ready = False
        self.ended = False

    def score(self, job: Job, timeout_s: float) -> Outcome:
        if not self._ready:
            kind, value = self._receive(START_UP_S)
            if kind != "ready":
                return "unloaded", value
            self._ready = True
        # If the process has ended, `_receive` finds the connection closed, and says how.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(job)
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Outcome:
        try:
            if not self._connection.poll(timeout_s):
                return "timeouts", "no reward in time"
            outcome: Outcome = self._connection.recv()
            return outcome
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return "crashes", f"the process ended with status {self._process.exitcode}"

    def end(self) -> None:
        """Kill the process and what it has started."""
        self.ended = True
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(self._process.pid)
            # So that it starts no more processes once they are listed.
            worker.suspend()
            started = worker.children(recursive=True)
        self._process.kill()
        self._process.join()
        # The sandbox cleans up on SIGTERM.
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(started, timeout=_CLEANUP_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def reward_of(reward: Reward | Mapping[str, Reward], task: str) -> Reward:
    return reward[task] if isinstance(reward, Mapping) else reward


def import_libraries(reward: Reward | Mapping[str, Reward]) -> None:
    """In advance, as the time limit of the first response does not allow for it."""
    for function in reward.values() if isinstance(reward, Mapping) else [reward]:
        module = sys.modules.get(getattr(function, "__module__", ""))
        # A call of the reward reports what is not installed.
        with suppress(ImportError):
            getattr(module, "import_libraries", lambda: None)()


def _serve(connection: Connection, reward: Reward | Mapping[str, Reward]) -> None:
    # A terminal sends Ctrl-C to this process, too; the run decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_libraries(reward)
    connection.send(("ready", None))
    while True:
        try:
            task, arguments, keywords = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            result = reward_of(reward, task)(*arguments, **keywords)
            results = list(result) if isinstance(arguments[1], list) else [result]
            outcome: Outcome = "reward", [_split(value) for value in results]
        except Exception as error:
            outcome = "errors", cut(f"{type(error).__name__}: {error}")
        connection.send(outcome)


def _split(value: Any) -> tuple[float | None, dict[str, float]]:
    """Reward, None if it could not be computed, and sub-scores."""
    parts = {**value} if isinstance(value, Mapping) else {"score": value}
    if "score" not in parts:
        raise ValueError(f"returned {quoted(value)}: expected a number, or some with a 'score'")
    score = parts.pop("score")
    numbers = {name: _number(name, part) for name, part in parts.items()}
    return None if score is None else _number("score", score), numbers


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise ValueError(
            f"returned {name}={quoted(value)}: expected a finite number of at most {_LARGEST:g}"
        )
    return number
