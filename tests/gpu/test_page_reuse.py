"""Requests of random lengths come, grow and end; their pages are used again.

The tests are small enough for NVIDIA's compute-sanitizer; docs/testing.md says how to run it.
"""

import random

import pytest
import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.gpu_decode import DecodeShape, TritonPagedDecode
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks
from sparrow_sglang.attention_backends.metadata import BudgetTable
from sparrow_sglang.schedule import BudgetSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
PAGE = 16
LONGEST = 3000
ROWS = 12
POOL_PAGES = 900
STEPS = 40

SCHEDULE = BudgetSchedule(
    name="sanitize",
    page_size=PAGE,
    bin_tokens=40 * PAGE,
    budget_tokens=tuple(pages * PAGE for pages in (16, 24, 24, 48)),
    dense_layers=(),
)


class Requests:
    """Requests and one layer's page pool, laid out as in SGLang; row 0 is padding."""

    def __init__(self, head_dim: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.num_q_heads, self.num_kv_heads, self.head_dim = 16, 4, head_dim
        size = (POOL_PAGES * PAGE, self.num_kv_heads, head_dim)
        self.k = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
        self.v = torch.zeros_like(self.k)
        shape = (POOL_PAGES, self.num_kv_heads, 1, head_dim)
        self.landmarks = MeanLandmarks(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE))
        width = LONGEST + PAGE
        self.req_to_token = torch.zeros(ROWS + 1, width, dtype=torch.int32, device=DEVICE)
        self.free = list(range(1, POOL_PAGES))
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        budgets = BudgetTable(SCHEDULE, 2, ROWS + 1, DEVICE)
        shape = DecodeShape.of(SCHEDULE, self.num_q_heads, self.num_kv_heads, head_dim, width)
        self.step = TritonPagedDecode(budgets, self.req_to_token, shape)
        self.step.reserve(ROWS)

    def admit(self) -> None:
        """Prefill a new request if a row and enough pages are free."""
        rows = [row for row in range(1, ROWS + 1) if row not in self.lengths]
        length = min(int(2 ** self.draw.uniform(0, 11.5)), LONGEST - 200)
        if not rows or len(self.free) < length // PAGE + 20:
            return
        row = self.draw.choice(rows)
        self.lengths[row], self.pages[row] = 0, []
        slots = [self._grow(row) for _ in range(length)]
        self._write(slots)
        lengths = torch.tensor([length])
        self.step.plan_extend(torch.tensor([row]).to(DEVICE), lengths.to(DEVICE), lengths)
        self.step.update_landmarks(self.k, self.landmarks)

    def leave(self) -> None:
        """Remove a request, as on its end, abort or retraction: its pages are free at once."""
        row = self.draw.choice(list(self.lengths))
        del self.lengths[row]
        self.free += self.pages.pop(row)
        self.draw.shuffle(self.free)

    def advance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a token to every request; return rows and lengths, [B] on the host."""
        rows = list(self.lengths)
        self._write([self._grow(row) for row in rows])
        return torch.tensor(rows), torch.tensor([self.lengths[row] for row in rows])

    def require_landmarks(self) -> None:
        """Assert that the landmark of every full page is the mean of its keys."""
        full = [
            page for row, pages in self.pages.items() for page in pages[: self.lengths[row] // PAGE]
        ]
        index = torch.tensor(full, device=DEVICE)
        keys = self.k.view(POOL_PAGES, PAGE, self.num_kv_heads, self.head_dim)[index]
        expected = reference.page_landmarks(keys).values()
        error = (self.landmarks.at(index).values() - expected).abs()
        assert (error <= 2**-7 * expected.abs() + 1e-6).all(), "a landmark is stale"

    def query(self, batch: int) -> torch.Tensor:
        shape = (batch, self.num_q_heads, self.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    def decode(self, query: torch.Tensor) -> torch.Tensor:
        return self.step.decode(query, self.k, self.v, self.landmarks, 0, self.head_dim**-0.5)

    def _grow(self, row: int) -> int:
        position = self.lengths[row]
        if position % PAGE == 0:
            self.pages[row].append(self.free.pop())
        slot = self.pages[row][-1] * PAGE + position % PAGE
        self.req_to_token[row, position] = slot
        self.lengths[row] += 1
        return slot

    def _write(self, slots: list[int]) -> None:
        index = torch.tensor(slots, device=DEVICE)
        for pool in (self.k, self.v):
            pool[index] = torch.randn_like(pool[index])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_steps_launched_one_by_one(head_dim: int) -> None:
    requests = Requests(head_dim, seed=head_dim)
    for _ in range(STEPS):
        _come_and_go(requests)
        rows, lengths = requests.advance()
        requests.step.plan_decode(rows.to(DEVICE), lengths.to(DEVICE), lengths)
        assert requests.decode(requests.query(len(rows))).isfinite().all()
    requests.require_landmarks()


def _come_and_go(requests: Requests) -> None:
    if len(requests.lengths) > 1 and requests.draw.random() < 0.3:
        requests.leave()
    if max(requests.lengths.values(), default=0) >= LONGEST - 2:
        requests.leave()
    while len(requests.lengths) < 2 or requests.draw.random() < 0.4:
        requests.admit()
