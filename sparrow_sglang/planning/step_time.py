"""Bytes of a decode step from a model's shapes, and its milliseconds from bytes and measured steps.
A step takes the sum of `step_terms` times the constants in step_times.json: a non-negative fit, of
least squared relative errors, to rows of `sparrow bench step` on one GPU with 16-bit weights. Some
of these rows are of selection rules that were removed, so the fit cannot be repeated."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.schedules.selection import landmark_bytes

GPUS = {"h200": 4.8e12, "h100": 3.35e12, "a100": 2.039e12}
"""Memory bandwidth in bytes/s by data sheet: H200, H100 SXM, A100 80GB SXM."""
DEFAULT_GPU = "h100"
_FP8_GPUS = ("h200", "h100")
MEMORY = {"h200": 141e9, "h100": 80e9, "a100": 80e9}
"""Bytes, by data sheet."""
VERIFICATION = 1.2
"""Dense steps that verifying a round of drafts takes."""
_FP8_ROWS = 16
_FP8_WEIGHTS = 3.4e9
"""Bytes of Qwen3-1.7B's weights, the smallest model measured: its layers take 0.73 of the time."""
CONSTANTS = Path(__file__).with_name("step_times.json")

DRIVER = Path("/proc/driver/nvidia/gpus")

_BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step of a batch reads, and of linear attention's states also writes. `read` is
    the mean of KV tokens that a layer with whole KV reads of a sequence; `scored` counts pages that
    layers score of a sequence."""

    weights: float
    kv: float
    landmarks: float
    states: float
    read: float
    scored: float


def step_bytes(
    shape: ModelShape, batch: int, cached: int, schedule: BudgetSchedule | None = None
) -> StepBytes:
    """One step of `batch` sequences of `cached` tokens each; dense without a schedule. Weights are
    read once, of experts as many as the batch is expected to choose. Dense layers read all KV,
    layers with a sliding window their window, sparse ones their budget and, of sequences beyond it,
    the landmarks between sinks and recent pages."""
    whole = shape.whole_layers
    token_layers = whole * cached
    landmarks = scored = 0.0
    if schedule is not None and whole:
        dense_layers = shape.dense_layers(schedule)
        sparse_layers = whole - dense_layers
        token_layers = dense_layers * cached + sparse_layers * int(schedule.tokens_read(cached))
        pages = schedule.num_pages(cached)
        if schedule.pages_read(pages) < pages:
            scored = float(sparse_layers * (pages - schedule.least_pages))
        page_bytes = landmark_bytes(
            schedule.selection, schedule.page_size, shape.head_dim, _BYTES_PER_VALUE
        )
        landmarks = batch * page_bytes * shape.num_kv_heads * scored
    windows = len(shape.window_layers) * min(cached, shape.window_tokens)
    return StepBytes(
        weights=_BYTES_PER_VALUE * shape.weights_read(batch),
        kv=float(batch * shape.kv_itemsize * shape.layer_kv_width * (token_layers + windows)),
        landmarks=landmarks,
        states=float(batch * shape.linear.moved_bytes) if shape.linear else 0.0,
        read=token_layers / whole if whole else 0.0,
        scored=scored,
    )


def step_terms(
    shape: ModelShape, gpu: str, batch: int, cached: int, schedule: BudgetSchedule | None
) -> dict[str, float]:
    """What a step's time is linear in: milliseconds at the GPU's bandwidth, and counts."""
    moved = step_bytes(shape, batch, cached, schedule)
    ms = 1e3 / GPUS[gpu]
    return {
        "weights": moved.weights * ms,
        "kv": moved.kv * ms,
        # Dense backends read an FP8 cache at a lower rate.
        "kv_fp8_dense": moved.kv * ms if shape.kv_itemsize == 1 and schedule is None else 0.0,
        "landmarks": moved.landmarks * ms,
        "scored_pages": moved.scored,
        "layers": float(shape.num_layers),
        "expert_layers": float(shape.experts.layers) if shape.experts else 0.0,
        "linear_layers": float(len(shape.linear.layers)) if shape.linear else 0.0,
        "sequence_layers": float(batch * shape.num_layers),
    }


def local_gpu() -> str:
    """The one of `GPUS` that this machine's driver names first; without one `DEFAULT_GPU`."""
    for file in sorted(DRIVER.glob("*/information")):
        name = file.read_text("utf-8").lower()
        return next((gpu for gpu in GPUS if gpu in name), DEFAULT_GPU)
    return DEFAULT_GPU


@cache
def constants() -> Mapping[str, Any]:
    """`fitted_to`, the result files, and `ms`, a factor for each of `step_terms`."""
    return json.loads(CONSTANTS.read_text("utf-8"))


@dataclass(frozen=True)
class StepTime:
    """Predicted milliseconds of a step: reading weights, reading KV, selection, and the rest."""

    weights: float
    kv: float
    selection: float
    fixed: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.selection + self.fixed


def step_time(
    shape: ModelShape,
    gpu: str,
    batch: int,
    cached: int,
    schedule: BudgetSchedule | None = None,
    fp8_weights: bool = False,
) -> StepTime:
    """A step of `batch` sequences of `cached` tokens each; dense without a schedule."""
    factors = constants()["ms"]
    terms = step_terms(shape, gpu, batch, cached, schedule)
    parts = {name: factors[name] * value for name, value in terms.items()}
    weights, kv = parts.pop("weights"), parts.pop("kv") + parts.pop("kv_fp8_dense")
    if fp8_weights:
        # Beyond 16 rows SGLang's kernel multiplies. Fitted to measured rounds of Qwen3-8B.
        weights *= 0.5 if batch <= _FP8_ROWS else 0.75
    selection = sum(parts.pop(name) for name in ("landmarks", "scored_pages"))
    return StepTime(weights, kv, selection, sum(parts.values()))


def fp8_pays(shape: ModelShape, gpu: str) -> bool:
    """Whether lossless decoding would make FP8 copies of weights by itself. Experts stay in 16
    bits, so models with experts are predicted without."""
    large = step_bytes(shape, 1, 1).weights >= _FP8_WEIGHTS
    return gpu in _FP8_GPUS and not shape.experts and large


def lossless_ms(
    dense_ms: float, sparse_ms: float, acceptance: float, most: int
) -> tuple[float, int]:
    """Milliseconds a token of lossless decoding with the best number of drafts up to `most`, and
    that number. A round of k drafts takes k sparse steps and `VERIFICATION` dense ones, or a dense
    step for k = 0, and gives (1 - a^(k + 1)) / (1 - a) tokens at the acceptance rate a below 1
    (Leviathan et al., 2023)."""
    rounds = {0: dense_ms} | {
        k: (k * sparse_ms + VERIFICATION * dense_ms)
        * (1 - acceptance)
        / (1 - acceptance ** (k + 1))
        for k in range(1, most + 1)
    }
    drafts = min(rounds, key=lambda k: rounds[k])
    return rounds[drafts], drafts
