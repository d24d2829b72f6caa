"""KV pools and schedules for tests of the decode step without a server."""

import torch

from sparrow_sglang.schedules.schedule import BudgetSchedule


def make_schedule(page_size: int, bin_pages: int, budgets: list[int]) -> BudgetSchedule:
    return BudgetSchedule(
        name="test",
        page_size=page_size,
        bin_tokens=bin_pages * page_size,
        budget_tokens=tuple(pages * page_size for pages in budgets),
        dense_layers=(),
    )


class Pool:
    """A KV pool in which each request's pages lie scattered, as after many allocations."""

    def __init__(self, lengths: list[int], heads: tuple, head_dim: int, page_size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages), generator=generator) + 1
        self.k = torch.randn((sum(pages) + 1) * page_size, heads[1], head_dim, generator=generator)
        self.v = torch.randn(self.k.shape, generator=generator)
        self.q = torch.randn(len(lengths), heads[0], head_dim, generator=generator)
        self.req_to_token = torch.zeros(
            len(lengths) + 1, max(pages) * page_size + 8, dtype=torch.int32
        )
        self.slots = []
        for row, count in enumerate(pages):
            physical = order[sum(pages[:row]) : sum(pages[:row]) + count]
            slots = (physical[:, None] * page_size + torch.arange(page_size)).flatten()
            slots = slots[: lengths[row]]
            # Rows are used in reverse, so that request index and table row differ.
            self.req_to_token[len(lengths) - row, : len(slots)] = slots.int()
            self.slots.append(slots)
        self.rows = torch.arange(len(lengths), 0, -1)
        self.lengths = torch.tensor(lengths)
