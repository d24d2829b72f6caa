"""Hypothesis, for tests that draw their examples, and Triton without a GPU."""

from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

# Examples have no deadline: how long one takes depends on how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton would have compiled for an H100, one for each set of
    constants. Nothing is compiled, and launches do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names = []

    def compile_variant(kernel: Any, key: Any, _: Any, device: Any, *rest: Any) -> Any:
        names.append(kernel.fn.__name__)
        variant = SimpleNamespace(function=0, packed_metadata=0)
        variant.launch_metadata = variant.run = lambda *_: None
        kernel.device_caches[device][0][key] = variant
        return variant

    monkeypatch.setattr(JITFunction, "_do_compile", compile_variant)
    # Triton keeps the variants of a device; this one is of this test.
    device = object()
    active = {"get_current_device": lambda: device, "get_current_stream": lambda _: 0}
    active["get_current_target"] = lambda: GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**active))
    return names
