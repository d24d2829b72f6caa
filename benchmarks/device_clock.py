"""Milliseconds of decode steps by the device's clock, from a trace of SGLang's profiler. Beside the
wall clock they tell a slow host from a slow step."""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# A kernel outside a graph has a launch of its own.
_LEAST_KERNELS_OF_A_GRAPH = 8


def profiled(engine: Any, generate: Callable[[], object], launches: int) -> dict[str, float]:
    """`device_times` of the decode steps of `generate`; empty without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False)
        generate()
        engine.stop_profile()
        # Each rank writes a trace.
        for trace in Path(folder).rglob("*TP-0*.trace.json.gz"):
            content = json.loads(gzip.decompress(trace.read_bytes()))
            return device_times(content["traceEvents"], launches)
    return {}


def device_times(events: Iterable[Mapping[str, Any]], launches: int) -> dict[str, float]:
    """Of the later half of the steps in a trace, each of which launches so many CUDA graphs:
    `device_ms`, in which the device is busy, and `device_wall_ms`, from one step to the next, by
    the same clock. Empty if the trace holds too few graphs."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = (event for event in events if event.get("cat") in kinds)
    work = [(e["ts"], e["ts"] + e["dur"], e["args"].get("correlation", -1)) for e in spans]
    work.sort()
    kernels = Counter(launch for *_, launch in work)
    starts: dict[Any, float] = {}
    for start, _, launch in work:
        if kernels[launch] >= _LEAST_KERNELS_OF_A_GRAPH:
            starts.setdefault(launch, start)
    begins = list(starts.values())
    steps = (len(begins) - 1) // 2 // launches
    if steps < 1:
        return {}
    first, last = begins[-1 - steps * launches], begins[-1]
    busy, until = 0.0, first
    for start, end, _ in work:
        start, end = max(start, until), min(end, last)
        busy, until = busy + max(0.0, end - start), max(until, end)
    return {"device_ms": busy / steps / 1e3, "device_wall_ms": (last - first) / steps / 1e3}
