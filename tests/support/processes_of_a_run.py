"""Several ranks of one process group, forked from the test process."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparrow_sglang.rl.ranks import Ranks


def on_ranks(world: int, job: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """Results of `job` in `world` processes; the exit code of a process in which it fails."""

    def run(rank: int) -> None:
        try:
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            torch.save(job(Ranks(rank, world)), folder / f"result-{rank}")
            dist.destroy_process_group()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    folder.mkdir(parents=True)
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
