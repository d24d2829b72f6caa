"""The memory bandwidth that floors of step times are computed from."""


def copy_bandwidth(gib: float = 4.0, repeats: int = 20) -> float:
    """Device-to-device copy bandwidth in bytes/s, bytes read plus bytes written."""
    import torch

    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / sorted(times[3:])[repeats // 2]
