"""Times of a sparse decode step's kernels against their bytes floor.

Every case is checked against the torch definition before it is timed. The times are those of CUDA
graph replays over input sets that do not fit in the L2 cache.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.kernels import landmark
from sparrow_sglang.attention_backends.kernels.page_table import snapshot_page_table
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks
from sparrow_sglang.benchmarks.common import add_row, begin
from sparrow_sglang.benchmarks.gpu_times import copy_bandwidth
from sparrow_sglang.benchmarks.kernels.cases import (
    HEAD_DIM,
    NUM_KV_HEADS,
    DecodeCase,
    Launch,
    Pools,
    SelectCase,
    Shape,
    replay_us,
)
from sparrow_sglang.benchmarks.kernels.peers import flashinfer_decode, torch_select
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.selection import SelectionRule

_KV_DTYPES = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
# Pages of the published 0.86 schedules, rounded; they set how much the select kernel writes.
_BUDGETS = {4096: 96, 16384: 192, 32768: 256, 65536: 320}
_QUICK_SELECT = [(1, 32768), (16, 32768), (64, 16384)]
_SELECT = list(itertools.product((1, 16, 64, 256), (4096, 16384, 32768, 65536)))
_QUICK_DECODE = [
    Shape(1, 32768, 256),
    Shape(16, 32768, 256),
    Shape(16, 32768, 320, group=4),
    Shape(64, 16384, 192),
    Shape(256, 4096, 96),
]
_DENSE = [Shape(16, 32768, 2048), Shape(64, 2048, 128, group=4), Shape(1, 8192, 512)]


@dataclass
class Table:
    """Rows of the file `out`; a row that fails records the error, and the run goes on."""

    out: Path
    copy_bandwidth: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, name: str, num_bytes: int, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure one row; `measure` checks the result and returns what to record."""
        floor = num_bytes / self.copy_bandwidth * 1e6
        row: dict[str, Any] = {"name": name, "bytes": num_bytes, "floor_us": round(floor, 2)}
        try:
            row |= measure()
        except Exception as failure:  # a missing peer, or a variant that does not fit the chip
            row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
        self.rows.append(row)
        add_row(self.out, row)
        found = row["failed"] if "failed" in row else f"{row['us']:.1f} us"
        print(f"{name}: {found} (floor {floor:.1f})", flush=True)


def _measure(case: Callable[[], Any]) -> dict[str, Any]:
    """Check, then time a case."""
    launch = case().launch_shape
    error = case().check(launch)
    us = replay_us(case().launches(launch))
    return {"us": round(us, 2), "error": error, "launch": launch._asdict()}


def _select_name(shape: Shape) -> str:
    return f"select bs {shape.batch} context {shape.context // 1024}K"


def _decode_name(shape: Shape) -> str:
    kind = "dense" if shape.budget_pages >= shape.pages else "decode"
    return f"{kind} bs {shape.batch} pages {shape.budget_pages} group {shape.group}"


def time_rule(table: Table, pools: Pools, schedule: BudgetSchedule, quick: bool) -> None:
    """Selection by a schedule's rule, and attention under its budgets."""
    page_bytes = schedule.selection.landmark_bytes(PAGE_SIZE, HEAD_DIM, 2)
    for batch, context in _QUICK_SELECT if quick else _SELECT:
        budget = schedule.kv_budget_tokens(context) // PAGE_SIZE
        shape = Shape(batch, context, budget, landmark_bytes=page_bytes)
        selecting = cache(partial(SelectCase, pools, shape))
        table.measure(_select_name(shape), shape.select_bytes, partial(_measure, selecting))
        attending = cache(partial(DecodeCase, pools, shape))
        table.measure(_decode_name(shape), shape.decode_bytes(pools), partial(_measure, attending))


def time_landmarks(table: Table, pools: Pools) -> None:
    """Bulk landmarks of a batch of 16 at 32K."""
    shape = Shape(16, 32768, 256)
    pages = len(pools.k) // PAGE_SIZE
    page_table = shape.page_table(pools, 0, pages - 1)
    lengths, none = (torch.full((16,), n, dtype=torch.int32, device="cuda") for n in (32768, 0))
    written = torch.full_like(pools.landmarks[0][:pages], torch.nan)

    def bulk() -> None:
        landmark.update_landmarks_bulk(
            pools.k,
            MeanLandmarks(written),
            page_table,
            lengths,
            none,
            page_size=PAGE_SIZE,
            max_pages=shape.pages,
        )

    def check() -> float:
        bulk()
        chosen = page_table[:2].flatten().long()
        keys = pools.k.view(pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)[chosen]
        expected = reference.page_landmarks(keys).values().squeeze(2)
        gap = (written[chosen].float() - expected).abs().max()
        if not gap <= 2**-7:
            raise ValueError(f"landmarks differ by {gap:.1e}: expected at most one bf16 step")
        return float(gap)

    def measure_bulk() -> dict[str, Any]:
        return {"error": check(), "us": round(replay_us([bulk]), 2)}

    numbers = 16 * 32768 * NUM_KV_HEADS * HEAD_DIM
    moved = numbers * pools.k.itemsize + numbers // PAGE_SIZE * written.itemsize
    table.measure("landmarks of a batch of 16 at 32K", moved, measure_bulk)


def time_snapshot(table: Table, pools: Pools) -> None:
    """Page table snapshots of a batch of 16 at 32K."""
    shape = Shape(16, 32768, 256)
    page_table = shape.page_table(pools, 0, len(pools.k) // PAGE_SIZE - 1)
    lengths = torch.full((16,), 32768, dtype=torch.int32, device="cuda")
    slots = (page_table[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).int()
    req_to_token = slots.view(16, -1)
    copies = [torch.full_like(page_table, -7) for _ in range(2)]
    rows = torch.arange(16, device="cuda")

    def snapshot(copy: torch.Tensor) -> Launch:
        return lambda: snapshot_page_table(req_to_token, rows, lengths, copy, page_size=PAGE_SIZE)

    def measure() -> dict[str, Any]:
        snapshot(copies[0])()
        if not torch.equal(copies[0], page_table):
            raise ValueError("the snapshot differs from the page table")
        return {"us": round(replay_us([snapshot(copy) for copy in copies]), 2)}

    # A 32-byte sector for each entry read, 4 bytes written.
    table.measure("page table snapshot, bs 16 at 32K", 36 * page_table.numel(), measure)


def time_cases(table: Table, pools: Pools, quick: bool) -> None:
    """Our kernels with their default launch shapes."""
    for batch, context in _QUICK_SELECT if quick else _SELECT:
        shape = Shape(batch, context, _BUDGETS[context])
        selecting = cache(partial(SelectCase, pools, shape))
        table.measure(_select_name(shape), shape.select_bytes, partial(_measure, selecting))
    for shape in _QUICK_DECODE if quick else _QUICK_DECODE + _DENSE:
        attending = cache(partial(DecodeCase, pools, shape))
        table.measure(_decode_name(shape), shape.decode_bytes(pools), partial(_measure, attending))


def time_peers(table: Table, pools: Pools) -> None:
    """The libraries on the main shapes; FlashInfer compiles at its first call on a machine."""

    def measure(peer: Callable[[Any], list[Launch]], case: Callable[[], Any]) -> dict[str, Any]:
        return {"us": round(replay_us(peer(case())), 2)}

    for shape in (Shape(16, 32768, 256), Shape(1, 32768, 256)):
        title = f"{_select_name(shape)}: torch einsum + topk"
        selecting = cache(partial(SelectCase, pools, shape))
        table.measure(title, shape.select_bytes, partial(measure, torch_select, selecting))
    for shape in [*_QUICK_DECODE, _DENSE[0]]:
        title = f"{_decode_name(shape)}: flashinfer"
        attending = cache(partial(DecodeCase, pools, shape))
        num_bytes = shape.decode_bytes(pools)
        table.measure(title, num_bytes, partial(measure, flashinfer_decode, attending))


def run(
    parser: argparse.ArgumentParser, args: argparse.Namespace, schedule: BudgetSchedule | None
) -> int:
    """Measure and print; the exit code is 1 if one of our kernels failed."""
    rule = schedule.selection if schedule else SelectionRule()
    torch.manual_seed(0)
    table = Table(args.out, copy_bandwidth())
    begin(parser, args, selection=str(rule), copy_bandwidth=table.copy_bandwidth)
    kv_dtype = _KV_DTYPES[args.kv_cache_dtype]
    pools = Pools.random(2**20, 2**17 if args.quick else 2**20, rule, kv_dtype)
    if schedule:
        time_rule(table, pools, schedule, args.quick)
    else:
        time_landmarks(table, pools)
        time_snapshot(table, pools)
        time_cases(table, pools, args.quick)
        if not args.quick and args.kv_cache_dtype == "auto":
            time_peers(table, pools)
    ours_failed = [row for row in table.rows if "failed" in row and ": " not in row["name"]]
    return 1 if ours_failed else 0
