"""Random decode steps, and their outputs by the float64 loop of `contract.py`."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from contract import decode_one, step_budget
from pools import Pool

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.gpu_decode import TritonPagedDecode
from sparrow_sglang.attention_backends.kernels.select import NewTokens
from sparrow_sglang.attention_backends.landmarks import (
    FP8,
    Int4Landmarks,
    Landmarks,
    allocate_landmarks,
)
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import INT4, RULES, BudgetSchedule

Step = TorchPagedDecode | TritonPagedDecode

HEADS = [(9, 3), (2, 2), (16, 1), (6, 2), (7, 1), (4, 4), (10, 2)]
SPARSE_LAYERS = (1, 2)
LAYERS = 3


@dataclass
class StepCase:
    """One decode step of three layers, the first of them dense.

    Attributes:
        options: what each request requires.
        dtype: that of queries; `kv_dtype` that of the pool, whose numbers times `kv_scales` are
            keys and values.
        sinks: [Hq] attention sinks, or None.
        last: slots of the new tokens.
    """

    schedule: BudgetSchedule
    pool: Pool
    options: list[RequestOption]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_scales: tuple[float, float]
    sinks: torch.Tensor | None
    heads: tuple[int, int]
    head_dim: int
    budgets: BudgetTable = field(init=False)
    last: torch.Tensor = field(init=False)

    @classmethod
    def draw(
        cls, seed: int, head_dims: list[int], dtypes: list[tuple[torch.dtype, torch.dtype]]
    ) -> "StepCase":
        """Lengths lie at the edges of pages and bins, or anywhere; rules, budgets, pages that are
        always kept, options of requests and dtypes are drawn."""
        draw = random.Random(seed)
        page_size, head_dim = draw.choice([16, 16, 32, 64]), draw.choice(head_dims)
        heads = draw.choice(HEADS)
        sink_pages, recent_pages = draw.randint(0, 3), draw.randint(1, 3)
        least, bin_pages = sink_pages + recent_pages, draw.randint(1, 6)
        budgets = sorted(least + draw.randint(0, 6) for _ in range(draw.randint(1, 4)))
        schedule = BudgetSchedule(
            name="drawn",
            page_size=page_size,
            bin_tokens=bin_pages * page_size,
            budget_tokens=[page_size * pages for pages in budgets],
            sink_pages=sink_pages,
            recent_pages=recent_pages,
            dense_layers=(0,),
            dense_tokens=8 * page_size if seed % 4 == 1 else 0,
            selection=draw.choice(RULES),
        )
        edges = [1, page_size] + [
            page_size * max(1, bin_pages * index + near)
            for index in range(5)
            for near in (-1, 0, 1)
        ]
        lengths = [
            max(1, draw.choice(edges) + draw.randint(-1, 1))
            if draw.random() < 0.6
            else draw.randint(1, 26 * page_size)
            for _ in range(draw.randint(1, 4))
        ]
        options = [
            draw.choice(
                [
                    RequestOption(schedule),
                    RequestOption(schedule),
                    RequestOption(schedule, page_size * (least + draw.randint(0, 4))),
                    RequestOption(None),
                ]
            )
            for _ in lengths
        ]
        dtype, kv_dtype = draw.choice(dtypes)
        pool = Pool(lengths, heads, head_dim, page_size, seed)
        pool.q = pool.q.to(dtype)
        pool.k, pool.v = pool.k.to(dtype).to(kv_dtype), pool.v.to(dtype).to(kv_dtype)
        return cls(
            schedule,
            pool,
            options,
            dtype,
            kv_dtype,
            # The keys' scale is a power of two: means round alike with it and without it.
            (0.5, 1.7) if kv_dtype == FP8 else (1.0, 1.0),
            torch.linspace(-20, 8, heads[0]) if draw.random() < 0.3 else None,
            heads,
            head_dim,
        )

    def on(self, device: str) -> "StepCase":
        """This case with its tensors on `device`, and its budgets."""
        pool = self.pool
        for name in ("k", "v", "q", "req_to_token", "rows", "lengths"):
            setattr(pool, name, getattr(pool, name).to(device))
        self.last = torch.stack([slots[-1] for slots in pool.slots]).to(device)
        self.sinks = None if self.sinks is None else self.sinks.to(device)
        self.budgets = BudgetTable(self.schedule, len(pool.req_to_token), device)
        self.budgets.set_options(pool.rows.tolist(), self.options)
        return self

    def poison(self) -> "StepCase":
        """Make keys and values NaN in slots that no request owns: kernels must not use them."""
        others = torch.ones(len(self.pool.k), 1, 1, dtype=torch.bool)
        others[torch.cat(self.pool.slots)] = False
        others = others.to(self.pool.k.device)
        for buffer in (self.pool.k, self.pool.v):
            poisoned = buffer.float().masked_fill(others, torch.nan)
            buffer.copy_(poisoned.to(buffer.dtype))
        return self

    def run(self, step: Step) -> list[torch.Tensor]:
        """Prefill all but the last token of each request, then decode it in each layer."""
        landmarks = self.prefill(step)
        step.plan_decode(self.pool.rows, self.pool.lengths, self.pool.lengths.cpu())
        outputs = self.decode(step, landmarks)
        full = self.last[self.pool.lengths % self.schedule.page_size == 0]
        for written in landmarks.values():
            assert written.at(full // self.schedule.page_size).values().isfinite().all()
        return outputs

    def prefill(self, step: Step) -> dict[int, Landmarks]:
        """Landmarks of the sparse layers, of a prefill in two chunks."""
        pool, page_size = self.pool, self.schedule.page_size
        before = (pool.lengths - 1).clamp_min(1)
        landmarks = {}
        for layer in SPARSE_LAYERS:
            int4 = self.schedule.selection == INT4
            landmarks[layer] = allocate_landmarks(
                len(pool.k) // page_size,
                page_size,
                self.heads[1],
                self.head_dim,
                self.kv_dtype,
                pool.k.device,
                int4,
            )
            # Scoring a page before its landmarks are written would give NaN.
            landmarks[layer][1 if int4 else 0].fill_(torch.nan)
        chunk = before * 2 // 3
        for lengths, new in ((chunk, chunk), (before, before - chunk)):
            step.plan_extend(pool.rows, lengths, lengths.cpu(), int(new.max()))
            step.update_landmarks(dict.fromkeys(landmarks, pool.k), landmarks)
        for row, length in zip(pool.rows.tolist(), before.tolist(), strict=True):
            full = pool.req_to_token[row, : length // page_size * page_size : page_size]
            for written in landmarks.values():
                assert written.at(full.long() // page_size).values().isfinite().all()
        return landmarks

    def decode(self, step: Step, landmarks: dict[int, Landmarks]) -> list[torch.Tensor]:
        """Outputs of the planned step, by layer. On GPUs the selection stores the new tokens."""
        pool, (k_scale, v_scale) = self.pool, self.kv_scales
        scale = self.head_dim**-0.5 * k_scale
        stores = isinstance(step, TritonPagedDecode) and self.kv_dtype == self.dtype
        # Views of rows that hold both, as a model's projection writes them.
        both = torch.cat([pool.k[self.last], pool.v[self.last]], dim=1).split(self.heads[1], dim=1)
        outputs = []
        for layer in range(LAYERS):
            arguments: dict[str, Any] = {"sinks": self.sinks}
            if stores and layer in landmarks:
                for buffer in (pool.k, pool.v):
                    buffer.index_fill_(0, self.last, torch.nan)
                arguments["new_tokens"] = NewTokens(*both, self.last)
            outputs.append(
                step.decode(
                    pool.q, pool.k, pool.v, landmarks.get(layer), scale, v_scale, **arguments
                )
            )
        return outputs

    def expected(self, layer: int, row: int) -> np.ndarray:
        """What the contract gives for a request, [Hq, D]."""
        schedule, option, pool = self.schedule, self.options[row], self.pool
        slots, length = pool.slots[row], int(pool.lengths[row])
        budget = length
        if layer in SPARSE_LAYERS and option.schedule is not None:
            budget = step_budget(schedule, length, option.kv_budget_tokens)
        stored = torch.bfloat16 if self.kv_dtype == FP8 else self.kv_dtype
        keys, values = (
            buffer.cpu()[slots].double().numpy() * scale
            for buffer, scale in zip((pool.k, pool.v), self.kv_scales, strict=True)
        )
        out, _ = decode_one(
            pool.q[row].cpu().double().numpy(),
            keys,
            values,
            budget,
            schedule.page_size,
            self.head_dim**-0.5,
            schedule.sink_pages,
            schedule.recent_pages,
            store=lambda mean: torch.from_numpy(mean).to(stored).double().numpy(),
            rule=schedule.selection,
            logit_sinks=None if self.sinks is None else self.sinks.cpu().double().numpy(),
        )
        return out


def rounding(landmarks: Landmarks) -> torch.Tensor:
    """How far the values of the same pages may lie apart if sums run in another order."""
    if isinstance(landmarks, Int4Landmarks):
        # A code may be off by one, and the scale by one unit of fp16, multiplied by the code.
        return landmarks.scales.float()[..., None] * (1 + 8 * torch.finfo(torch.float16).eps) + 1e-6
    # One unit in the last place.
    return torch.finfo(landmarks.means.dtype).eps * landmarks.values().abs() + 1e-6
