"""`sparrow bench kernels`: times of one layer's kernels beside the time that their bytes take.

Each launch is checked against `attention_backends.reference` before it is timed, over inputs that
do not fit into the L2 cache.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sparrow_sglang.benchmarks.common import (
    add_row,
    begin,
    bench_parser,
    copy_bandwidth,
    median_s,
    require_cuda,
)
from sparrow_sglang.command_line import OneLineParser
from sparrow_sglang.errors import InputError
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

if TYPE_CHECKING:
    import torch

DESCRIPTION = """\
Time selection and attention of one layer of a sparse decode step, each after a check against the
plain torch definition. The floor is the time to move the bytes that a kernel needs, at the copy
bandwidth measured at the start.
"""
EXAMPLES = """\
  sparrow bench kernels --out kernels.json                            the published rule
  sparrow bench kernels --schedule qwen3-1.7b-0.86                    another schedule
  sparrow bench kernels --kv-cache-dtype fp8_e4m3 --out fp8.json      over an FP8 KV cache
"""
# Requests, tokens of each, KV heads, query heads per KV head.
SHAPES = [
    (1, 14336, 2, 6),
    (16, 14336, 2, 6),
    (1, 32768, 8, 2),
    (4, 32768, 8, 2),
    (16, 32768, 8, 2),
    (16, 32768, 8, 4),
    (64, 16384, 8, 2),
    (256, 4096, 8, 2),
]
HEAD_DIM = 128
POOL_TOKENS = 2**20
# Bytes of a launch's input sets, several times an L2 cache of 60 MB.
COLD_BYTES = 240e6
REPLAYS = 15
MEMORY_GB = 24


def _parser() -> OneLineParser:
    parser = bench_parser("kernels", DESCRIPTION, EXAMPLES, "kernels.json")
    add = parser.add_argument
    add("--schedule", default="qwen3-1.7b-0.86", help="shipped name or .json file of a schedule")
    add("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="auto is bf16")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 2 without a GPU. Raises `AssertionError` if a kernel is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = load_schedule(args.schedule, PAGE_SIZE)
    except InputError as error:
        parser.error(str(error))
    require_cuda(parser, MEMORY_GB, "the KV pools")
    _measure(parser, args, schedule)
    return 0


def _measure(
    parser: argparse.ArgumentParser, args: argparse.Namespace, schedule: BudgetSchedule
) -> None:
    import torch

    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    begin(parser, args, selection=str(schedule.selection), copy_bandwidth=bandwidth)
    kv_dtype = torch.float8_e4m3fn if args.kv_cache_dtype == "fp8_e4m3" else torch.bfloat16
    for batch, context, heads, group in SHAPES:
        for row in _layer(schedule, kv_dtype, batch, context, heads, group):
            row["floor_us"] = round(row["bytes"] / bandwidth * 1e6, 2)
            add_row(args.out, row)
            print(
                f"{row['kernel']:9} batch {batch:3} context {context:5} heads {heads} x {group}:"
                f" {row['us']:6.1f} us (floor {row['floor_us']:.1f})",
                flush=True,
            )


def _layer(
    schedule: BudgetSchedule,
    kv_dtype: "torch.dtype",
    batch: int,
    context: int,
    heads: int,
    group: int,
) -> list[dict[str, Any]]:
    import torch

    from sparrow_sglang.attention_backends import reference
    from sparrow_sglang.attention_backends.kernels import decode, select
    from sparrow_sglang.attention_backends.landmarks import kept_pairs

    on_gpu: Any = {"device": "cuda"}
    pool = (POOL_TOKENS // PAGE_SIZE, PAGE_SIZE, heads, HEAD_DIM)
    k, v = (
        torch.randn(pool, dtype=torch.bfloat16, **on_gpu).to(kv_dtype).flatten(0, 1)
        for _ in range(2)
    )
    # If a rule chooses the kept pairs by layer, use those of the first layer and KV head.
    pairs = kept_pairs(schedule.selection, 0, range(1), HEAD_DIM, "cuda")
    pairs = None if pairs is None else pairs.expand(heads, -1).contiguous()
    landmarks = reference.page_landmarks(k.view(pool), pairs)
    pages, budget = -(-context // PAGE_SIZE), schedule.kv_budget_tokens(context) // PAGE_SIZE
    # Lengths that do not end on a page edge, where the select kernel would write landmarks.
    lengths = context - 1 - torch.arange(batch, dtype=torch.int32, **on_gpu) % 14
    counts = (-(-lengths // PAGE_SIZE)).clamp(max=budget)
    page_ids = torch.zeros(batch, heads, pages, dtype=torch.int32, **on_gpu)
    out = torch.zeros(batch, heads * group, HEAD_DIM, dtype=torch.bfloat16, **on_gpu)
    device = out.device
    select_launch = select.select_launch(
        batch, heads, HEAD_DIM, pages, device, schedule.selection.int4
    )
    decode_launch = decode.decode_launch(
        batch, heads, HEAD_DIM, budget * PAGE_SIZE, device, k.itemsize
    )
    select_scratch = select.allocate_select_scratch(batch, heads, pages, device)
    parts = batch * heads * group * decode_launch.splits
    decode_scratch = decode.allocate_decode_scratch(parts, HEAD_DIM, device)

    def selecting(q: torch.Tensor, table: torch.Tensor) -> None:
        select.select_pages(
            q,
            k,
            landmarks,
            table,
            lengths,
            counts,
            page_ids,
            page_size=PAGE_SIZE,
            sink_pages=schedule.sink_pages,
            recent_pages=schedule.recent_pages,
            scratch=select_scratch,
            launch=select_launch,
        )

    def attending(q: torch.Tensor, chosen: torch.Tensor) -> None:
        decode.sparse_decode(
            q,
            k,
            v,
            chosen,
            counts,
            lengths,
            out,
            page_size=PAGE_SIZE,
            sm_scale=HEAD_DIM**-0.5,
            scratch=decode_scratch,
            launch=decode_launch,
        )

    page_bytes = schedule.selection.landmark_bytes(PAGE_SIZE, HEAD_DIM, 2)
    scored = pages - schedule.sink_pages - schedule.recent_pages
    moved = {
        "selection": batch * heads * scored * page_bytes,
        "attention": batch * heads * min(budget, pages) * PAGE_SIZE * 2 * HEAD_DIM * k.itemsize,
    }
    sets = max(2, min(192, int(COLD_BYTES / min(moved.values())) + 1))
    chosen_pages, select_runs, decode_runs = [], [], []
    for _ in range(sets):
        q = torch.randn(out.shape, dtype=torch.bfloat16, **on_gpu)
        table = torch.stack([torch.randperm(pool[0], **on_gpu)[:pages] for _ in range(batch)]).int()
        selecting(q, table)
        chosen_pages.append(page_ids.clone())
        select_runs.append(partial(selecting, q, table))
        decode_runs.append(partial(attending, q, chosen_pages[-1]))
    selecting(q, table)
    scores = reference.score_pages(q[:2], landmarks, table[:2].long())
    wanted = reference.select_pages(
        scores, -(-lengths[:2] // PAGE_SIZE), counts[:2], schedule.sink_pages, schedule.recent_pages
    )
    same = page_ids[:2, :, : wanted.shape[-1]].long() == table[:2].long()[:, None].expand(
        -1, heads, -1
    ).gather(-1, wanted)
    # Scores that fp32 cannot tell apart may change places.
    assert same.float().mean() > 0.99, "selection differs from the definition"
    attending(q, page_ids)
    expected = reference.sparse_decode(
        q[:2].float(),
        k.float(),
        v.float(),
        page_ids[:2, :, :budget],
        counts[:2],
        lengths[:2],
        PAGE_SIZE,
        HEAD_DIM**-0.5,
    )
    error = float((out[:2].float() - expected).norm() / expected.norm())
    assert error <= 5e-3, f"attention has a relative error of {error:.1e}"
    shape = {"batch": batch, "context": context, "kv_heads": heads, "group": group}
    return [
        shape | {"kernel": kernel, "bytes": moved[kernel], "us": round(_replay_us(runs), 2)}
        for kernel, runs in (("selection", select_runs), ("attention", decode_runs))
    ]


def _replay_us(launches: Sequence[Callable[[], None]]) -> float:
    """Median microseconds of one launch, from replays of a graph that runs them all."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return median_s(graph.replay, REPLAYS) * 1e6 / len(launches)
