"""Attention over random selections of pages, by our kernel and by FlashInfer's. FlashInfer has one
list of pages for all heads of a request, so each KV head of a request is a request of one head,
whose pages are strided views of the pool."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedules.schedule import PAGE_SIZE

LAYERS = 12
"""Layers timed together, so that no layer finds its pages in a cache."""
REPEATS = 20
TOLERANCE = 0.01


class Selection(NamedTuple):
    """One layer's inputs: q [B, Hq, D]; k, v [slots, Hkv, D]; page_ids [B, Hkv, n] int32, of which
    all count; seq_lens [B]. All selected pages but the last of a row are full."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_ids: torch.Tensor
    seq_lens: torch.Tensor


def random_selection(
    shape: ModelShape, batch: int, length: int, pages: int, seed: int, device: str
) -> Selection:
    """Requests of `length` tokens in pages all over the pool; `pages` random ones of each KV head,
    the last one among them."""
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


def pages_of_heads(pool: torch.Tensor) -> torch.Tensor:
    """A view of the pool [slots, Hkv, D] as pages of one head, [n, page size, 1, D]: that of head h
    and page p is number p · page size · Hkv + h. The pages overlap, as each number is an offset."""
    slots, heads, dim = pool.shape
    pages = slots * heads - (PAGE_SIZE - 1) * heads
    return pool.as_strided((pages, PAGE_SIZE, 1, dim), (dim, heads * dim, dim, 1))


def numbers_of_pages(page_ids: torch.Tensor) -> torch.Tensor:
    """Numbers [B · Hkv · n] of selected pages in `pages_of_heads`."""
    heads = page_ids.shape[1]
    head = torch.arange(heads, device=page_ids.device)[:, None]
    return (page_ids * (PAGE_SIZE * heads) + head).int().flatten()


def sparrow_attention(layer: Selection, shape: ModelShape) -> Callable[[], torch.Tensor]:
    """A function that attends, by our kernel."""
    from sparrow_sglang.attention_backends.kernels import decode

    batch, heads, pages = layer.page_ids.shape
    launch = decode.decode_launch(
        batch, heads, shape.head_dim, pages * PAGE_SIZE, layer.q.device, layer.k.itemsize
    )
    parts = batch * shape.num_q_heads * launch.splits
    counts = torch.full((batch,), pages, dtype=torch.int32, device=layer.q.device)
    out = torch.empty_like(layer.q)
    attend = partial(
        decode.sparse_decode,
        *layer[:-1],
        counts,
        layer.seq_lens,
        out,
        page_size=PAGE_SIZE,
        sm_scale=shape.head_dim**-0.5,
        scratch=decode.allocate_decode_scratch(parts, shape.head_dim, layer.q.device),
        launch=launch,
    )
    return lambda: (attend(), out)[1]


def flashinfer_attention(
    layer: Selection, shape: ModelShape, tensor_cores: bool, scratch: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """Functions that plan, and that attend once it is planned; `scratch` may be shared."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, heads, pages = layer.page_ids.shape
    rows, group = batch * heads, shape.num_q_heads // heads
    indptr = torch.arange(rows + 1, dtype=torch.int32) * pages
    numbers = numbers_of_pages(layer.page_ids)
    in_last = ((layer.seq_lens.repeat_interleave(heads) - 1) % PAGE_SIZE + 1).int().cpu()
    buffers = (indptr.to(scratch.device), numbers.clone(), in_last.to(scratch.device))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", True, tensor_cores, *buffers)
    plan = partial(
        wrapper.plan,
        *(indptr, numbers, in_last),
        *(group, 1, shape.head_dim, PAGE_SIZE),
        q_data_type=layer.q.dtype,
        kv_data_type=layer.k.dtype,
    )
    pools = pages_of_heads(layer.k), pages_of_heads(layer.v)
    return plan, partial(wrapper.run, layer.q.view(rows, group, shape.head_dim), pools)


def in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """The calls one after the other as a CUDA graph."""
    stream = torch.cuda.Stream()
    # It would not wait for what makes the inputs.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        in_turn(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_turn(calls)
    return graph.replay


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of one of the LAYERS of a call, by the device's clock."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 4)]
    for event in events:
        call()
        event.record()
    torch.cuda.synchronize()
    # The first calls warm up.
    times = [start.elapsed_time(end) for start, end in pairwise(events[3:])]
    return statistics.median(times) / LAYERS * 1e3


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def measure(shape: ModelShape, batch: int, length: int, pages: int) -> dict[str, Any]:
    """Microseconds a layer. Raises `RuntimeError` unless the outputs are equal up to rounding."""
    layers = [random_selection(shape, batch, length, pages, seed, "cuda") for seed in range(LAYERS)]
    ours = [sparrow_attention(layer, shape) for layer in layers]
    scratch = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    row = {"sparrow_us": median_us(captured(ours))}
    for cores in ("tensor", "cuda"):
        theirs = [
            flashinfer_attention(layer, shape, cores == "tensor", scratch) for layer in layers
        ]
        for plan, _ in theirs:
            plan()
        pairs = zip(ours, theirs, strict=True)
        error = max(relative_error(attend().view_as(our()), our()) for our, (_, attend) in pairs)
        if error > TOLERANCE:
            raise RuntimeError(
                f"FlashInfer ({cores} cores): outputs differ by {error:.3f} of their norm; expected"
                f" at most {TOLERANCE}"
            )
        planned = [call for pair in theirs for call in pair]
        row[f"flashinfer_{cores}_us"] = median_us(captured([attend for _, attend in theirs]))
        row[f"flashinfer_{cores}_with_plan_us"] = median_us(partial(in_turn, planned))
        row[f"flashinfer_{cores}_error"] = error
    return row
