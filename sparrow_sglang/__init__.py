"""Sparse decode for stock SGLang under a KV budget that grows with the sequence length. The names
below are the public surface; everything else may change. They load on first use, so that importing
the package costs nothing and never pulls in SGLang."""

from importlib import import_module
from importlib.metadata import version

_EXPORTS = {
    "BudgetSchedule": "sparrow_sglang.schedules.schedule",
    "TailStatistics": "sparrow_sglang.mismatch.tail",
    "acceptance_rate": "sparrow_sglang.mismatch.acceptance",
    "get_schedule": "sparrow_sglang.client.control",
    "measure_acceptance": "sparrow_sglang.client.acceptance",
    "push_adapter": "sparrow_sglang.client.control",
    "score_dense": "sparrow_sglang.client.acceptance",
    "set_schedule": "sparrow_sglang.client.control",
    "token_bins": "sparrow_sglang.mismatch.tail",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("sparrow-sglang")
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
