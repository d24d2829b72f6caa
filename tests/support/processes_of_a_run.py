"""Several ranks of one run, forked from the test process."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ports import free_port


def on_ranks(world: int, job: Callable[[], Any], folder: Path) -> list[Any]:
    """Results of `job` in `world` processes, started as torchrun starts them; the exit code of a
    process in which it does not return."""

    def run(rank: int) -> None:
        os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        try:
            torch.save(job(), folder / f"result-{rank}")
        except Exception:
            traceback.print_exc()
            os._exit(1)

    folder.mkdir(parents=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = address | {"WORLD_SIZE": str(world)}
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
        if child.exitcode is None:
            child.kill()
    return [
        child.exitcode or torch.load(folder / f"result-{rank}", weights_only=False)
        for rank, child in enumerate(children)
    ]
