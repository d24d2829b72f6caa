"""What a rollout costs, dense and under a budget schedule: the paper's formulas and a step model.

In: a model's shapes, lengths, a `BudgetSchedule`. Out: FLOPs and bytes. Imports neither torch nor
SGLang.

Units. With P multiplied weights, H_q and H_kv heads of width d and n layers, the paper's formulas
are consistent under one reading only: D = 2 * H_kv * d * n counts *values* per cached token, keys
and values together, over *all* layers; r = H_q / H_kv; a value takes 2 bytes. At c cached tokens
attention multiplies q.k and p.v, 4 * H_q * d * n * c = 2 * r * D * c FLOPs, and reads 2 * D * c
bytes; the sum over a generation from L_in to L_in + L_out cached tokens is the printed term. A
landmark is half of D wide, hence L_out^2 / (2p) in the scoring terms.

For a mixture of experts, P counts the weights that one token is multiplied with.

The printed formulas leave out reading the weights (free in the limit of a large batch), the layers
that stay dense, and L < B; layers with a sliding window or linear attention are not counted in D
here. The formulas read a prompt's KV once for all N samples. Their scoring terms for the prompt
have neither r nor 1/p, so the prompt is charged the cost of reading its whole KV. `step_costs`
counts the step of this backend instead, without these simplifications.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import BudgetSchedule

Array = NDArray[np.float64]

# For weights, for landmarks that are means and, in the paper's formulas, for KV.
_BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Hardware:
    """Peak dense bf16 FLOP/s and memory bandwidth in bytes/s of one GPU, by its data sheet."""

    name: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def intensity(self) -> float:
        """I: FLOPs that the GPU computes in the time of reading one byte."""
        return self.flops_per_s / self.bytes_per_s


GPUS = {
    "h200": Hardware("H200", 989e12, 4.8e12),
    "h100": Hardware("H100 SXM", 989e12, 3.35e12),
    "a100": Hardware("A100 80GB SXM", 312e12, 2.039e12),
}


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes; `eflops` counts a byte as the FLOPs computed in the time of reading it."""

    flops: float
    bytes: float

    def eflops(self, intensity: float) -> float:
        return self.flops + intensity * self.bytes


def paper_costs(
    shape: ModelShape,
    prompt_tokens: int,
    output_lengths: Sequence[int],
    samples: int,
    schedule: BudgetSchedule | None = None,
) -> Cost:
    """C_comp and C_mem as printed, summed over prompts (L_in) with N `samples` of each length
    (L_out).

    Dense without a schedule. With one, the term that is linear in the KV budget B is integrated
    over the generation's lengths, and the printed cost of scoring is added.
    """
    l_in, l_out = prompt_tokens, np.asarray(output_lengths, dtype=np.float64)
    n, p, d, r = samples, shape.parameters, shape.kv_width, shape.gqa_ratio
    flops = 2 * n * p * l_out
    if schedule is None:
        flops += r * n * d * (2 * l_in + l_out) * l_out
        read = 2 * d * l_in * l_out + n * d * l_out**2
    else:
        kept = tokens_read_by_length(schedule, prompt_tokens, output_lengths)
        landmarks = n * d * l_out**2 / (2 * schedule.page_size)
        flops += 2 * r * n * d * kept + 2 * n * d * l_in * l_out + r * landmarks
        read = 2 * n * d * kept + 2 * d * l_in * l_out + landmarks
    return Cost(float(flops.sum()), float(read.sum()))


def tokens_read_by_length(
    schedule: BudgetSchedule, prompt_tokens: int, output_lengths: Sequence[int]
) -> NDArray[np.int64]:
    """Tokens that a sparse layer reads over the steps of a generation, for each length of one."""
    steps = np.arange(prompt_tokens + 1, prompt_tokens + max(output_lengths) + 1)
    sums: NDArray[np.int64] = schedule.tokens_read(steps).cumsum()
    return sums[np.asarray(output_lengths) - 1]


@dataclass(frozen=True)
class StepCosts:
    """Costs per decoded token, by cause; each field is an array over lengths, or its sum.

    State bytes are those of linear attention, read and written; its arithmetic counts as attention.
    """

    weight_bytes: Array
    kv_bytes: Array
    scoring_bytes: Array
    state_bytes: Array
    linear_flops: Array
    attention_flops: Array
    scoring_flops: Array

    @property
    def bytes(self) -> Array:
        return self.weight_bytes + self.kv_bytes + self.scoring_bytes + self.state_bytes

    @property
    def flops(self) -> Array:
        return self.linear_flops + self.attention_flops + self.scoring_flops

    def eflops(self, intensity: float) -> Array:
        return self.flops + intensity * self.bytes

    def total(self, weights: Array) -> "StepCosts":
        """Sum over lengths, each taken `weights` times."""
        return StepCosts(*(np.asarray(getattr(self, f.name) @ weights) for f in fields(self)))


def step_costs(
    shape: ModelShape,
    seq_lens: Sequence[int] | NDArray[np.int64],
    batch: float,
    schedule: BudgetSchedule | None = None,
) -> StepCosts:
    """One decoded token at each of `seq_lens` cached tokens in a batch of `batch`; dense without
    a schedule.

    Weights are read once a step and shared by the batch, those of experts as far as the batch is
    expected to choose them; KV is read by each sequence for itself; dense layers read everything,
    layers with a sliding window their window, and layers with linear attention read and write a
    state of fixed size; landmarks score every page between sinks and recent pages, once the
    sequence exceeds the layer's budget: by one product per landmark and KV head, or per query head.
    """
    if not batch > 0:
        raise InputError(f"batch={batch}: expected 1 or more running sequences")
    lengths = np.asarray(seq_lens, dtype=np.int64)
    per_layer = float(shape.layer_kv_width)
    whole = shape.whole_layers
    token_layers: Array = lengths * np.float64(whole)
    scoring_bytes: Array = np.zeros(lengths.shape)
    scoring_flops: Array = np.zeros(lengths.shape)
    if schedule is not None:
        dense_layers = shape.dense_layers(schedule)
        sparse_layers = whole - dense_layers
        read = schedule.tokens_read(lengths).astype(np.float64)
        token_layers = dense_layers * lengths + sparse_layers * read
        pages = -(-lengths // schedule.page_size)
        scored = pages - schedule.sink_pages - schedule.recent_pages
        weights = schedule.sparse_weights
        over = np.mean([schedule.pages_read(pages, w) < pages for w in weights], axis=0)
        head_pages = shape.num_kv_heads * sparse_layers * over * scored
        rule, page_size = schedule.selection, schedule.page_size
        page_bytes = rule.landmark_bytes(page_size, shape.head_dim, _BYTES_PER_VALUE)
        channels = 2 * rule.pairs_kept(shape.head_dim) * rule.landmarks_per_page(page_size)
        queries = shape.gqa_ratio if rule.int4 else 1
        scoring_bytes = page_bytes * head_pages
        scoring_flops = 2 * queries * channels * head_pages
    token_layers = token_layers + len(shape.window_layers) * np.minimum(
        lengths, shape.window_tokens
    )
    linear = shape.linear
    state_bytes, state_flops = (linear.moved_bytes, linear.state_flops) if linear else (0, 0)
    return StepCosts(
        weight_bytes=np.full(lengths.shape, _BYTES_PER_VALUE * shape.weights_read(batch) / batch),
        kv_bytes=shape.kv_itemsize * per_layer * token_layers,
        scoring_bytes=scoring_bytes,
        state_bytes=np.full(lengths.shape, float(state_bytes)),
        linear_flops=np.full(lengths.shape, 2.0 * shape.parameters),
        attention_flops=2 * shape.gqa_ratio * per_layer * token_layers + state_flops,
        scoring_flops=scoring_flops,
    )


def rollout_costs(
    shape: ModelShape,
    prompt_tokens: int,
    output_lengths: Iterable[int],
    batch: float,
    schedule: BudgetSchedule | None = None,
) -> StepCosts:
    """Sum of `step_costs` over all decoded tokens of generations with these lengths.

    The batch counts as always full, which continuous batching comes close to until the last
    requests run out. Raises `InputError` without any length, or with one below 1.
    """
    ordered = np.sort(np.asarray(list(output_lengths), dtype=np.int64))
    if not ordered.size or ordered[0] < 1 or prompt_tokens < 0:
        raise InputError(
            f"prompt_tokens={prompt_tokens}, output_lengths={ordered[:3].tolist()}: expected a"
            " prompt of 0 or more tokens and at least one length, each of 1 or more"
        )
    steps = np.arange(1, ordered[-1] + 1)
    still_running = ordered.size - np.searchsorted(ordered, steps, side="left")
    costs = step_costs(shape, prompt_tokens + steps, batch, schedule)
    return costs.total(still_running.astype(np.float64))
