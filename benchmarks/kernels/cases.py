"""Random KV pools, page tables and launches for the kernel benchmark, and how a launch is timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.kernels import decode, select
from sparrow_sglang.attention_backends.kernels.decode import (
    DecodeLaunch,
    allocate_decode_scratch,
    decode_launch,
)
from sparrow_sglang.attention_backends.kernels.select import (
    SelectLaunch,
    allocate_select_scratch,
    select_launch,
)
from sparrow_sglang.attention_backends.landmarks import (
    Int4Landmarks,
    Landmarks,
    MeanLandmarks,
    kept_pairs,
)
from sparrow_sglang.benchmarks.gpu_times import median_s
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.selection import SelectionRule

HEAD_DIM = 128
NUM_KV_HEADS = 8
ROW_BYTES = HEAD_DIM * 2
SINKS, RECENTS = 1, 2
# Bytes of a case's input sets, of which there are at most 192; several times an L2 cache of 60 MB.
_COLD_BYTES = 240e6
_MIN_LAUNCHES = 24
_REPLAYS = 15

Launch = Callable[[], object]


def replay_us(launches: list[Launch]) -> float:
    """Median microseconds of one launch, from replays of a graph that rotates through them all."""
    launches[0]()
    torch.cuda.synchronize()
    repeats = -(-_MIN_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    return median_s(graph.replay, _REPLAYS) * 1e6 / (repeats * len(launches))


@dataclass
class Pools:
    """KV and landmark pools shared by all cases, and a random order of the landmarks' pages."""

    k: torch.Tensor
    v: torch.Tensor
    landmarks: Landmarks
    order: torch.Tensor
    rule: SelectionRule

    @classmethod
    def random(
        cls, tokens: int, landmark_pages: int, rule: SelectionRule, kv_dtype: torch.dtype
    ) -> "Pools":
        """Pools with random contents; the landmarks have the form that `rule` asks for."""
        shape = (tokens + PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        half: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        return cls(
            k=torch.randn(shape, **half).to(kv_dtype),
            v=torch.randn(shape, **half).to(kv_dtype),
            landmarks=_random_landmarks(landmark_pages + 1, rule),
            order=torch.randperm(landmark_pages, device="cuda", dtype=torch.int32) + 1,
            rule=rule,
        )

    @property
    def landmark_pages(self) -> int:
        """Pages that have landmarks, the unused page 0 included."""
        return len(self.landmarks[0])


def _random_landmarks(pages: int, rule: SelectionRule) -> Landmarks:
    if not rule.int4:
        size = (pages, NUM_KV_HEADS, 1, HEAD_DIM)
        return MeanLandmarks(torch.randn(size, dtype=torch.bfloat16, device="cuda"))
    rows = (pages, NUM_KV_HEADS, rule.landmarks_per_page(PAGE_SIZE))
    members = (2, *rows, rule.pairs_kept(HEAD_DIM))
    first, second = torch.randint(1, 16, members, dtype=torch.uint8, device="cuda")
    scales = torch.rand(rows, device="cuda").half() / 4
    # If a rule chooses the kept pairs by layer, use those of the first layer.
    pairs = kept_pairs(rule, 0, range(NUM_KV_HEADS), HEAD_DIM, "cuda")
    assert pairs is not None
    return Int4Landmarks(first | second << 4, scales, pairs)


@dataclass(frozen=True)
class Shape:
    """One workload: requests, tokens each, KV budget in pages, query heads per KV head, and bytes
    of a page's landmarks for one KV head."""

    batch: int
    context: int
    budget_pages: int
    group: int = 2
    landmark_bytes: int = ROW_BYTES

    @property
    def pages(self) -> int:
        return -(-self.context // PAGE_SIZE)

    @property
    def select_bytes(self) -> int:
        """Bytes that selection must read: every scored landmark once."""
        return self.batch * NUM_KV_HEADS * (self.pages - SINKS - RECENTS) * self.landmark_bytes

    def decode_bytes(self, pools: Pools) -> int:
        """Bytes that attention must read: keys and values of every kept page once."""
        kept = min(self.budget_pages, self.pages) * PAGE_SIZE
        return self.batch * NUM_KV_HEADS * kept * 2 * HEAD_DIM * pools.k.itemsize

    def sets(self, bytes_per_launch: int) -> int:
        return max(2, min(192, int(_COLD_BYTES / bytes_per_launch) + 1))

    def queries(self) -> torch.Tensor:
        heads = NUM_KV_HEADS * self.group
        return torch.randn(self.batch, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def seq_lens(self) -> torch.Tensor:
        """Lengths that do not end on a page edge, where the select kernel would write landmarks."""
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")
        return lengths - 1 - torch.arange(self.batch, device="cuda", dtype=torch.int32) % 14

    def kept(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Pages kept by each row."""
        return ((seq_lens + PAGE_SIZE - 1) // PAGE_SIZE).clamp(max=self.budget_pages)

    def page_table(self, pools: Pools, which: int, limit: int) -> torch.Tensor:
        """Scattered pages up to `limit`; sets use different pages as far as the pool allows."""
        order = pools.order[pools.order <= limit] if limit < len(pools.order) else pools.order
        wanted = self.batch * self.pages
        first = which * wanted % max(1, len(order) - wanted + 1)
        return order[first : first + wanted].view(self.batch, self.pages).contiguous()


class SelectCase:
    """Launches of the select kernel over several cold input sets."""

    def __init__(self, pools: Pools, shape: Shape) -> None:
        self.pools, self.shape = pools, shape
        self.seq_lens = shape.seq_lens()
        sets = range(shape.sets(shape.select_bytes))
        self.q = [shape.queries() for _ in sets]
        limit = pools.landmark_pages - 1
        self.tables = [shape.page_table(pools, which, limit) for which in sets]
        size = (shape.batch, NUM_KV_HEADS, shape.budget_pages)
        self.page_ids = torch.empty(size, dtype=torch.int32, device="cuda")
        self.counts = shape.kept(self.seq_lens)
        device = self.page_ids.device
        self.scratch = allocate_select_scratch(shape.batch, NUM_KV_HEADS, shape.pages, device)
        self.launch_shape = select_launch(
            shape.batch,
            NUM_KV_HEADS,
            HEAD_DIM,
            shape.pages,
            device,
            pools.rule.int4,
        )

    def launches(self, launch: SelectLaunch) -> list[Launch]:
        def one(which: int) -> Launch:
            return lambda: select.select_pages(
                self.q[which],
                self.pools.k,
                self.pools.landmarks,
                self.tables[which],
                self.seq_lens,
                self.counts,
                self.page_ids,
                page_size=PAGE_SIZE,
                sink_pages=SINKS,
                recent_pages=RECENTS,
                scratch=self.scratch,
                launch=launch,
            )

        return [one(which) for which in range(len(self.q))]

    def check(self, launch: SelectLaunch) -> float:
        """Largest relative gap between the kept scores and the definition's; 0 if identical.

        Raises ValueError where the kept pages differ by more than bf16 rounding of a score.
        """
        self.page_ids.fill_(-7)
        self.launches(launch)[0]()
        rows = slice(0, min(self.shape.batch, 8))
        table, lengths = self.tables[0][rows], self.seq_lens[rows]
        num_pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
        kept = self.shape.kept(lengths)
        scores = reference.score_pages(self.q[0][rows], self.pools.landmarks, table.long())
        wanted = reference.select_pages(scores, num_pages, kept, SINKS, RECENTS)
        position = torch.zeros(self.pools.landmark_pages, dtype=torch.long, device="cuda")
        worst = 0.0
        for row in range(len(table)):
            position[table[row].long()] = torch.arange(self.shape.pages, device="cuda")
            got = position[self.page_ids[row, :, : kept[row]].long()]
            if not (got.diff(dim=-1) > 0).all():
                raise ValueError(f"row {row}: pages are not distinct and ascending")
            pair = [scores[row].gather(1, x).sort(-1).values for x in (got, wanted[row])]
            gap = (pair[0] - pair[1]).abs() / pair[1].abs().clamp(min=1e-3)
            worst = max(worst, float(gap.max()))
        if worst > 2**-9:
            raise ValueError(f"kept scores differ by {worst:.1e}: expected at most {2**-9:.1e}")
        return worst


class DecodeCase:
    """Launches of the decode kernel over several cold input sets."""

    def __init__(self, pools: Pools, shape: Shape) -> None:
        self.pools, self.shape = pools, shape
        self.seq_lens = shape.seq_lens()
        sets = range(shape.sets(shape.decode_bytes(pools)))
        self.q = [shape.queries() for _ in sets]
        limit = len(pools.k) // PAGE_SIZE - 1
        # Each set uses different pages, as the pages of one small batch may fit in the L2 cache.
        tables = [shape.page_table(pools, which, limit) for which in sets]
        self.counts = shape.kept(self.seq_lens)
        self.page_ids = [self._kept(table) for table in tables]
        self.out = torch.empty_like(self.q[0])
        self.launch_shape = decode_launch(
            shape.batch,
            NUM_KV_HEADS,
            HEAD_DIM,
            shape.budget_pages * PAGE_SIZE,
            self.seq_lens.device,
            pools.k.itemsize,
        )

    def _kept(self, table: torch.Tensor) -> torch.Tensor:
        """A random ascending choice of each request's pages, the last page among them."""
        width = min(self.shape.budget_pages, self.shape.pages)
        if width == self.shape.pages:
            return table[:, None].expand(-1, NUM_KV_HEADS, -1)
        rank = torch.rand(self.shape.batch, NUM_KV_HEADS, self.shape.pages, device="cuda")
        rank[..., -1] = 2.0
        chosen = rank.topk(width, dim=-1).indices.sort(dim=-1).values
        rows = torch.arange(self.shape.batch, device="cuda")[:, None, None]
        return table[rows, chosen].contiguous()

    def launches(self, launch: DecodeLaunch) -> list[Launch]:
        scratch = allocate_decode_scratch(
            self.q[0].shape[0] * self.q[0].shape[1] * launch.splits,
            self.shape.batch * NUM_KV_HEADS,
            HEAD_DIM,
            self.out.device,
        )

        def one(which: int) -> Launch:
            return lambda: decode.sparse_decode(
                self.q[which],
                self.pools.k,
                self.pools.v,
                self.page_ids[which],
                self.counts,
                self.seq_lens,
                self.out,
                page_size=PAGE_SIZE,
                sm_scale=HEAD_DIM**-0.5,
                scratch=scratch,
                launch=launch,
            )

        return [one(which) for which in range(len(self.q))]

    def check(self, launch: DecodeLaunch) -> float:
        """Relative error against the definition in fp32; raises ValueError above 5e-3."""
        self.out.fill_(torch.nan)
        self.launches(launch)[0]()
        wanted = self.expected(0)
        got = self.out[: len(wanted)]
        error = float((got.float() - wanted).norm() / wanted.norm())
        if not error <= 5e-3:
            raise ValueError(f"relative error {error:.1e}: expected at most 5e-3")
        return error

    def expected(self, which: int) -> torch.Tensor:
        """Output of the torch definition in fp32 for the first rows of a set."""
        rows = slice(0, min(2, self.shape.batch))
        page_ids = self.page_ids[which][rows].long()
        pages = page_ids.unique()
        compact = torch.searchsorted(pages, page_ids)
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).flatten()
        return reference.sparse_decode(
            self.q[which][rows].float(),
            self.pools.k[slots].float(),
            self.pools.v[slots].float(),
            compact,
            self.counts[rows].long(),
            self.seq_lens[rows].long(),
            PAGE_SIZE,
            HEAD_DIM**-0.5,
        )
