"""Times of GPU work, and the memory bandwidth from which lower bounds of times are computed."""

import statistics
from collections.abc import Callable

import torch

WARM_UP = 3


def median_s(launch: Callable[[], object], repeats: int) -> float:
    """Median device time of a launch in seconds, after `WARM_UP` launches that are not counted."""
    times = []
    for _ in range(repeats + WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[WARM_UP:])


def copy_bandwidth(gib: float = 4.0, repeats: int = 20) -> float:
    """Device-to-device copy bandwidth in bytes/s, bytes read plus bytes written."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), repeats)
