"""Milliseconds of decode steps and of lossless rounds, from a model's shapes. A step takes the sum
of its `step_terms` times the factors in step_times.json, which `planning.fit` computes from the
measured steps in benchmarks/results."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.rounds import DENSE, Plan, expected_tokens
from sparrow_sglang.schedules.schedule import BudgetSchedule, landmark_bytes

TERMS = ("matmuls", "kv", "layers", "layer_rows")
CONSTANTS = "step_times.json"
_ITEMSIZE = 2
"""Bytes of a weight and of a cached number."""
_USABLE = 0.9
"""Part of a GPU's memory for weights and KV; the rest holds graphs, logits and the driver."""


class Gpu(NamedTuple):
    """A data sheet: bytes/s of memory, 16-bit FLOP/s without sparsity, bytes, FP8 arithmetic."""

    bandwidth: float
    flops: float
    memory: float
    fp8: bool


GPUS = {
    "h200": Gpu(4.8e12, 989e12, 141e9, True),
    "h100": Gpu(3.35e12, 989e12, 80e9, True),
    "a100": Gpu(2.039e12, 312e12, 80e9, False),
}
"""H200, H100 SXM, A100 80GB SXM."""


@cache
def constants() -> Mapping[str, Any]:
    """What `planning.fit.fit` returned."""
    text = files("sparrow_sglang.planning").joinpath(CONSTANTS).read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def kv_bytes(
    shape: ModelShape, batch: int, cached: int, schedule: BudgetSchedule | None = None
) -> float:
    """Bytes of KV and landmarks that a step of `batch` sequences of `cached` tokens reads; dense
    without a schedule. Dense layers read all KV, sparse ones their budget and, of sequences beyond
    it, the landmarks between sinks and recent pages."""
    token_layers, landmarks = float(shape.num_layers * cached), 0.0
    if schedule is not None:
        sparse = shape.num_layers - sum(n < shape.num_layers for n in schedule.dense_layers)
        token_layers -= sparse * (cached - int(schedule.tokens_read(cached)))
        pages = schedule.num_pages(cached)
        if schedule.pages_read(pages) < pages:
            page = landmark_bytes(schedule.selection, schedule.page_size, shape.head_dim, _ITEMSIZE)
            landmarks = sparse * (pages - schedule.least_pages) * shape.num_kv_heads * page
    width = 2 * shape.num_kv_heads * shape.head_dim
    return batch * (_ITEMSIZE * width * token_layers + landmarks)


def step_terms(
    shape: ModelShape,
    gpu: Gpu,
    batch: int,
    cached: int,
    schedule: BudgetSchedule | None = None,
    rows: int = 1,
    fp8: bool = False,
) -> np.ndarray:
    """What the time of a pass over `rows` tokens of each sequence is linear in, [TERMS]:
    milliseconds by data sheet of multiplying, limited by reading weights or by arithmetic, and of
    reading KV; layers; layers times tokens. `fp8`: weights take one byte."""
    if fp8:
        multiplying = shape.weights / gpu.bandwidth
    else:
        flop = 2 * shape.weights * batch * rows
        multiplying = max(_ITEMSIZE * shape.weights / gpu.bandwidth, flop / gpu.flops)
    reading = kv_bytes(shape, batch, cached, schedule) / gpu.bandwidth
    layers = shape.num_layers
    return np.array([1e3 * multiplying, 1e3 * reading, layers, layers * batch * rows])


def round_terms(
    shape: ModelShape,
    gpu: Gpu,
    batch: int,
    cached: int,
    drafts: int,
    rows: int,
    schedule: BudgetSchedule | None = None,
    fp8: bool = False,
) -> np.ndarray:
    """The terms of a round of so many sparse drafts and a dense pass over `rows` tokens of each
    sequence. Without drafts and with one row, those of a dense step."""
    draft = step_terms(shape, gpu, batch, cached, schedule, fp8=fp8)
    verification = step_terms(shape, gpu, batch, cached, rows=rows)
    return drafts * draft + verification


def milliseconds(terms: np.ndarray) -> float:
    factors = constants()["ms"]
    return float(terms @ [factors[name] for name in TERMS])


def memory_bytes(shape: ModelShape, gpu: Gpu, batch: int, cached: int) -> float:
    """Bytes of weights, of their FP8 copies where `gpu` has FP8, and of the whole KV."""
    return (_ITEMSIZE + gpu.fp8) * shape.weights + kv_bytes(shape, batch, cached)


def fits(shape: ModelShape, gpu: Gpu, batch: int, cached: int) -> bool:
    return memory_bytes(shape, gpu, batch, cached) <= _USABLE * gpu.memory


class Prediction(NamedTuple):
    """Milliseconds of a step of `batch` sequences of `cached` tokens each: of stock SGLang's, of
    lossless decoding for each token of a sequence with its fastest round, and of a sparse one."""

    batch: int
    cached: int
    dense_ms: float
    lossless_ms: float
    round: Plan
    sparse_ms: float


class Acceptance(NamedTuple):
    """Chances that a sparse draft, and that a looked-up token is accepted, each from 0 to 1,
    if all before it were."""

    drafts: float
    lookups: float


ASSUMED = Acceptance(0.94, 0.45)
"""For predictions and random weights, unless others are given."""


def predict(
    shape: ModelShape,
    gpu: Gpu,
    case: tuple[int, int],
    acceptance: Acceptance,
    rounds: Sequence[Plan],
    drafting: BudgetSchedule,
    schedule: BudgetSchedule | None,
) -> Prediction:
    """For `case`, a batch and the cached tokens of each sequence. Lossless decoding takes the best
    of `rounds`, among which is a dense step; these draft under the schedule `drafting`, with FP8
    weights where `gpu` has FP8."""
    times = {
        plan: milliseconds(
            round_terms(shape, gpu, *case, plan.drafts, plan.rows, drafting, gpu.fp8)
        )
        / expected_tokens(plan, acceptance.drafts, [acceptance.lookups] * plan.lookups)
        for plan in rounds
    }
    best = min(times, key=lambda plan: times[plan])
    sparse = milliseconds(step_terms(shape, gpu, *case, schedule))
    return Prediction(*case, times[DENSE], times[best], best, sparse)
