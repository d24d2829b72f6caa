"""`sparrow bench attention`: attention of a sparse step beside FlashInfer's paged decode, over
the same selected pages. FlashInfer has one list of pages for all heads of a request, so each KV
head of a request is a request of one head, whose pages are strided views of the pool."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow_sglang.benchmarks.common import (
    add_row,
    begin,
    bench_parser,
    known_models,
    require_cuda,
)
from sparrow_sglang.benchmarks.step import batch_and_length, model_config
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import PAGE_SIZE

if TYPE_CHECKING:
    import torch

LAYERS = 12
"""Layers timed together, so that no layer finds its pages in a cache."""
REPEATS = 20
TOLERANCE = 0.01

DESCRIPTION = """\
Time the attention of one layer of a sparse decode step, by this package's kernel and by FlashInfer,
over the same pages, and compare the outputs. FlashInfer is compiled at the first use, which takes
minutes. Its plan depends on lengths, and is timed apart from its run.
"""
EXAMPLES = """\
  sparrow bench attention
  sparrow bench attention --models qwen3-8b --cases 1x32768 16x32768 --schedules qwen3-8b-0.86
"""


class Selection(NamedTuple):
    """One layer's inputs: q [B, Hq, D]; k, v [slots, Hkv, D]; page_ids [B, Hkv, n] int32, of which
    all count; seq_lens [B]. All selected pages but the last of a row are full."""

    q: "torch.Tensor"
    k: "torch.Tensor"
    v: "torch.Tensor"
    page_ids: "torch.Tensor"
    seq_lens: "torch.Tensor"


def random_selection(
    shape: ModelShape, batch: int, length: int, pages: int, seed: int, device: str
) -> Selection:
    """Requests of `length` tokens in pages all over the pool; `pages` random ones of each KV head,
    the last one among them."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    each = -(-length // PAGE_SIZE)
    named: dict[str, Any] = {"device": device, "generator": generator}
    tables = torch.randperm(batch * each, **named).view(batch, 1, each).int()
    order = torch.rand(batch, shape.num_kv_heads, each - 1, **named).argsort(-1)[..., : pages - 1]
    last = torch.full_like(order[..., :1], each - 1)
    chosen = torch.cat([order.sort(-1).values, last], -1)
    page_ids = tables.expand(-1, shape.num_kv_heads, -1).gather(-1, chosen).contiguous()
    pool = (batch * each * PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    named["dtype"] = torch.bfloat16
    q = torch.randn(batch, shape.num_q_heads, shape.head_dim, **named)
    k, v = torch.randn(pool, **named), torch.randn(pool, **named)
    return Selection(q, k, v, page_ids, torch.full((batch,), length, device=device))


def pages_of_heads(pool: "torch.Tensor") -> "torch.Tensor":
    """A view of the pool [slots, Hkv, D] as pages of one head, [n, page size, 1, D]: that of head h
    and page p is number p · page size · Hkv + h. The pages overlap, as each number is an offset."""
    slots, heads, dim = pool.shape
    pages = slots * heads - (PAGE_SIZE - 1) * heads
    return pool.as_strided((pages, PAGE_SIZE, 1, dim), (dim, heads * dim, dim, 1))


def numbers_of_pages(page_ids: "torch.Tensor") -> "torch.Tensor":
    """Numbers [B · Hkv · n] of selected pages in `pages_of_heads`."""
    import torch

    heads = page_ids.shape[1]
    head = torch.arange(heads, device=page_ids.device)[:, None]
    return (page_ids * (PAGE_SIZE * heads) + head).int().flatten()


def sparrow_attention(layer: Selection, shape: ModelShape) -> Callable[[], "torch.Tensor"]:
    """A function that attends, by our kernel."""
    import torch

    from sparrow_sglang.attention_backends.kernels import decode

    batch, heads, pages = layer.page_ids.shape
    launch = decode.decode_launch(
        batch, heads, shape.head_dim, pages * PAGE_SIZE, layer.q.device, layer.k.itemsize
    )
    parts = batch * shape.num_q_heads * launch.splits
    scratch = decode.allocate_decode_scratch(parts, shape.head_dim, layer.q.device)
    counts = torch.full((batch,), pages, dtype=torch.int32, device=layer.q.device)
    out = torch.empty_like(layer.q)

    def attend() -> torch.Tensor:
        decode.sparse_decode(
            layer.q,
            layer.k,
            layer.v,
            layer.page_ids,
            counts,
            layer.seq_lens,
            out,
            page_size=PAGE_SIZE,
            sm_scale=shape.head_dim**-0.5,
            scratch=scratch,
            launch=launch,
        )
        return out

    return attend


class FlashInferAttention:
    """One layer's attention by FlashInfer, once it is planned; `scratch` may be shared."""

    def __init__(
        self, layer: Selection, shape: ModelShape, tensor_cores: bool, scratch: "torch.Tensor"
    ) -> None:
        import torch
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        batch, heads, pages = layer.page_ids.shape
        rows, group = batch * heads, shape.num_q_heads // heads
        self._indptr = torch.arange(rows + 1, dtype=torch.int32) * pages
        self._numbers = numbers_of_pages(layer.page_ids)
        in_last = (layer.seq_lens.repeat_interleave(heads) - 1) % PAGE_SIZE + 1
        self._in_last = in_last.int().cpu()
        self._heads = (group, 1, shape.head_dim, PAGE_SIZE)
        self._q = layer.q.view(rows, group, shape.head_dim)
        self._pools = pages_of_heads(layer.k), pages_of_heads(layer.v)
        buffers = (torch.empty_like(self._indptr, device=scratch.device), self._numbers.clone())
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            "NHD",
            True,
            tensor_cores,
            *buffers,
            torch.empty_like(self._in_last, device=scratch.device),
        )

    def plan(self) -> None:
        self._wrapper.plan(
            self._indptr,
            self._numbers,
            self._in_last,
            *self._heads,
            q_data_type=self._q.dtype,
            kv_data_type=self._q.dtype,
        )

    def __call__(self) -> "torch.Tensor":
        out: torch.Tensor = self._wrapper.run(self._q, self._pools)
        return out


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """The calls one after the other as a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def median_us(call: Callable[[], None]) -> float:
    """Microseconds of one of the LAYERS of a call, by the device's clock."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 4)]
    for event in events:
        call()
        event.record()
    torch.cuda.synchronize()
    # The first calls warm up.
    times = [start.elapsed_time(end) for start, end in pairwise(events[3:])]
    return statistics.median(times) / LAYERS * 1e3


def relative_error(out: "torch.Tensor", wanted: "torch.Tensor") -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def measure(shape: ModelShape, batch: int, length: int, pages: int) -> dict[str, Any]:
    """Microseconds a layer. Raises `RuntimeError` unless the outputs are equal up to rounding."""
    import torch

    layers = [random_selection(shape, batch, length, pages, seed, "cuda") for seed in range(LAYERS)]
    ours = [sparrow_attention(layer, shape) for layer in layers]
    scratch = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    row = {"sparrow_us": median_us(captured(ours))}
    for cores in ("tensor", "cuda"):
        theirs = [FlashInferAttention(layer, shape, cores == "tensor", scratch) for layer in layers]
        for attention in theirs:
            attention.plan()
        pairs = zip(ours, theirs, strict=True)
        error = max(relative_error(their().view_as(our()), our()) for our, their in pairs)
        if error > TOLERANCE:
            raise RuntimeError(
                f"FlashInfer ({cores} cores): outputs differ by {error:.3f} of their norm; expected"
                f" at most {TOLERANCE}"
            )

        def planned(theirs: list[FlashInferAttention] = theirs) -> None:
            for attention in theirs:
                attention.plan()
                attention()

        row |= {
            f"flashinfer_{cores}_us": median_us(captured(theirs)),
            f"flashinfer_{cores}_with_plan_us": median_us(planned),
            f"flashinfer_{cores}_error": error,
        }
    return row


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("attention", DESCRIPTION, EXAMPLES, "attention.json")
    parser.add_argument(
        "--models",
        default="qwen3-8b,qwen3-1.7b",
        help=f"comma-separated names out of {', '.join(known_models())}",
    )
    parser.add_argument("--cases", nargs="+", default=["1x32768", "16x32768"])
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["{model}-0.86", "drafts"],
        help="whose budgets are selected; {model} stands for the model's name"
        " (default: {model}-0.86 drafts)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    cases = [(case, *batch_and_length(case)) for case in options.cases]
    shapes = {
        model: ModelShape.from_config(model_config(model)) for model in options.models.split(",")
    }
    require_cuda()
    begin(options)
    for model, shape in shapes.items():
        for name in options.schedules:
            schedule = load_schedule(name.replace("{model}", model), PAGE_SIZE)
            for case, batch, length in cases:
                pages = schedule.budget_at(length) // PAGE_SIZE
                row = {"model": model, "schedule": schedule.name, "case": case, "pages": pages}
                row |= measure(shape, batch, length, pages)
                add_row(options.out, row)
                print(*(f"{key} {value}" for key, value in row.items()), flush=True)
    return 0
