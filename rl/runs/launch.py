"""Several ranks on one machine: they are started, get signals, and are ended together.

torchrun is not used, as it would end the ranks 30 s after a signal; a checkpoint may take longer.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence

import torch

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.ranks import Ranks
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, owned
from sparrow_sglang.rl.runs.setup import prepare

GRACE_S = 30.0
"""Seconds that the other ranks have to end once a rank has failed by itself."""
STOPPED_GRACE_S = 300.0
"""Likewise once a rank has ended by a signal, as all do: rank 0 may have logs to upload."""

_LOOK_S = 0.2
_SIGNALLED = 128
_PR_SET_PDEATHSIG = 1


def ranks_of(config: TrainConfig) -> int:
    """How many processes the run takes on this machine.

    Raises `InputError` if the machine has GPUs, but fewer than the configured ranks.
    """
    asked, gpus = config.distributed.ranks, torch.cuda.device_count()
    if asked == "auto":
        return max(1, gpus)
    if 0 < gpus < asked:
        raise InputError(f"distributed.ranks={asked}: expected at most {gpus}, one for each GPU")
    return asked


def check(config: TrainConfig, ranks: int, resume: bool) -> None:
    """Raises, before any rank is started, the errors that each rank would raise."""
    prepare(config, ranks)
    with owned(config.run_dir):
        Checkpoints(config.run_dir, config.checkpoint.keep, Ranks(0, ranks)).begin(config, resume)


def launch(command: Sequence[str], ranks: int) -> tuple[int, str]:
    """Run `command` as every rank; returns the exit code, 0 if all ended well, and the reason.

    Signals go to all ranks, which write a checkpoint together. If a rank dies, the others, which
    would wait for it, are killed.
    """
    # The store where the ranks find each other. It is held here because a port that is merely free
    # now may be taken before rank 0 has started.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    processes: list[subprocess.Popen[bytes]] = []

    def tell(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # Each rank has its own session, so that it gets Ctrl-C only once, through `tell`.
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment | own,
                    start_new_session=True,
                    preexec_fn=_stop_with_parent,
                )
            )
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _grace_s(code: int) -> float:
    """Seconds that the other ranks get to end by themselves, once one has ended with `code`."""
    if code > _SIGNALLED:
        return STOPPED_GRACE_S
    return GRACE_S if code > 0 else 0.0


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> tuple[int, str]:
    first: tuple[int, int] | None = None
    deadline = float("inf")
    while None in (codes := [process.poll() for process in processes]) or first is None:
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if first is None and failed:
            # Report a killed rank (negative code) first, as it may be why others have failed.
            first = min(failed, key=lambda end: end[1])
            deadline = time.monotonic() + _grace_s(first[1])
        elif None not in codes:
            return 0, ""
        if time.monotonic() >= deadline:
            for process in processes:
                process.kill()
                process.wait()
        time.sleep(_LOOK_S)
    rank, code = first
    if code > 0:
        failed_here = f"error: rank {rank} failed, as it says above"
        return code, "stopped" if code > _SIGNALLED else failed_here
    return 1, f"error: rank {rank} was killed by {signal.Signals(-code).name}"


def _stop_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
