"""What one forward pass needs to know of its requests: page tables, lengths and budgets."""

from dataclasses import dataclass

import torch

from sparrow_sglang.schedule import BudgetSchedule


class BudgetTable:
    """A schedule as tensors on the device, so that budgets follow from lengths without the host.

    Args:
        schedule: the schedule in force.
        device: where the tensors live.
    """

    def __init__(self, schedule: BudgetSchedule, device: torch.device | str) -> None:
        self.page_size = schedule.page_size
        self.bin_pages = schedule.bin_pages
        self.budget_pages = torch.tensor(schedule.budget_pages, dtype=torch.int32, device=device)

    def num_selected(self, num_pages: torch.Tensor) -> torch.Tensor:
        """Pages that a sparse layer reads of requests that hold `num_pages` [B]; same dtype."""
        last_bin = self.budget_pages.numel() - 1
        bins = (num_pages // self.bin_pages).clamp_max(last_bin)
        return torch.minimum(num_pages, self.budget_pages[bins].to(num_pages.dtype))


@dataclass(frozen=True)
class PageTable:
    """The pages of a batch's requests.

    Attributes:
        physical: [B, N], physical page of each logical page; entries past a request's end are
            those of whatever request held the row before and must be ignored.
        num_pages: [B], pages that each request holds, the partial one included.
        seq_lens: [B], cached tokens of each request, those of this pass included.
    """

    physical: torch.Tensor
    num_pages: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def read(
        cls,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int,
        page_size: int,
    ) -> "PageTable":
        """Read the page table of a batch from SGLang's token table.

        Args:
            req_to_token: [requests, max tokens], KV slot of each token of each request.
            req_pool_indices: [B], the batch's rows in it.
            seq_lens: [B], cached tokens.
            longest: largest of seq_lens, known on the host.
            page_size: tokens a page.
        """
        first_slots = req_to_token[req_pool_indices, :longest:page_size]
        num_pages = torch.div(seq_lens + page_size - 1, page_size, rounding_mode="floor")
        return cls(physical=first_slots.long() // page_size, num_pages=num_pages, seq_lens=seq_lens)

    def full_pages(self, page_size: int) -> torch.Tensor:
        """Physical pages that are full, each request's in turn, [number of full pages]."""
        position = torch.arange(self.physical.shape[1], device=self.physical.device)
        return self.physical[position < (self.seq_lens // page_size)[:, None]]
