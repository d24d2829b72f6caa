"""Times of GPU work, and the memory bandwidth that floors of times are computed from."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 3


def median_s(launch: Callable[[], object], repeats: int) -> float:
    """Median seconds of a launch on the device, after some to warm up."""
    times = []
    for _ in range(repeats + WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[WARM_UP:])


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of a step on the host, with what it has a GPU do."""
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_bandwidth(gib: float = 4.0, repeats: int = 20) -> float:
    """Device-to-device copy bandwidth in bytes/s, bytes read plus bytes written."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), repeats)
