"""Steps by the device's clock, from traces."""

from typing import Any

from sparrow_sglang.benchmarks.device_clock import device_times


def kernels(launch: int, start: float, count: int, dur: float, gap: float) -> list[dict[str, Any]]:
    """Kernels of one launch, microseconds."""
    return [
        {
            "cat": "kernel",
            "ts": start + i * (dur + gap),
            "dur": dur,
            "args": {"correlation": launch},
        }
        for i in range(count)
    ]


def steps(launches: int, count: int = 8) -> list[dict[str, Any]]:
    """Steps of 1 ms: graphs of ten kernels of 20 us with gaps of 5, and one kernel of 100 us at the
    end. A slow first graph, as of a prefill, comes before."""
    events = kernels(999, 0.0, 50, 1000.0, 0.0)
    for step in range(count):
        at = 100_000.0 + 1000.0 * step
        for launch in range(launches):
            events += kernels(10 * step + launch, at + 250.0 * launch, 10, 20.0, 5.0)
        events += kernels(1000 + step, at + 900.0, 1, 100.0, 0.0)
    host = {"cat": "cuda_runtime", "ts": 0.0, "dur": 1e9, "args": {"correlation": 1}}
    return [*events, host, {"ph": "M", "args": {}}]


def test_a_step_is_the_time_in_which_the_device_is_busy() -> None:
    assert device_times(steps(1), 1) == {"device_ms": 0.3, "device_wall_ms": 1.0}
    # A round of three graphs.
    assert device_times(steps(3), 3) == {"device_ms": 0.7, "device_wall_ms": 1.0}


def test_kernels_side_by_side_count_once() -> None:
    events = steps(1)
    beside = [event | {"args": {"correlation": 5000 + i}} for i, event in enumerate(events[:-2])]
    assert device_times([*events, *beside], 1)["device_ms"] == 0.3


def test_a_trace_of_too_few_graphs_has_no_times() -> None:
    assert device_times([], 1) == {}
    assert device_times(steps(1, count=1), 1) == {}
