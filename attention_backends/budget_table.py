"""The KV budgets of requests, on the device."""

from collections.abc import Sequence

import torch

from sparrow_sglang.attention_backends.kernels.page_table import EVERY_PAGE, NO_CAP, Budgets
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import MAX_BINS, BudgetSchedule


class BudgetTable:
    """The active schedule and what requests require, as tensors on the device. The device computes
    budgets from these tensors without the host, and the tensors keep their addresses, so a captured
    step needs no new capture when the schedule is switched. A request is identified by its row in
    SGLang's token table, which has `num_requests`."""

    def __init__(
        self, schedule: BudgetSchedule, num_requests: int, device: torch.device | str
    ) -> None:
        self.tensors = Budgets(
            table=torch.empty(MAX_BINS, dtype=torch.int32, device=device),
            bin_pages=torch.empty(1, dtype=torch.int32, device=device),
            caps=torch.empty(num_requests, dtype=torch.int32, device=device),
            dense_pages=torch.empty(1, dtype=torch.int32, device=device),
        )
        # Caps of the rows that have one. Most rows have none, and need no copy to the device.
        self._capped: dict[int, int] = {}
        self.load(schedule)

    def load(self, schedule: BudgetSchedule) -> None:
        """Replace the active schedule, with no request running, and wait for the device."""
        budgets = schedule.budget_pages
        table = torch.full((MAX_BINS,), budgets[-1], dtype=torch.int32)
        table[: len(budgets)] = torch.tensor(budgets)
        self.tensors.table.copy_(table)
        self.tensors.bin_pages.fill_(schedule.bin_pages)
        self.tensors.dense_pages.fill_(schedule.dense_tokens // schedule.page_size)
        # Caps of finished requests would change what is timed next.
        self.tensors.caps.fill_(NO_CAP)
        self._capped.clear()
        if self.tensors.table.is_cuda:
            # Steps run on another stream and must see the new tables.
            torch.cuda.synchronize(self.tensors.table.device)
        self.schedule = schedule
        self._first_sparse_length = schedule.first_sparse_length()

    def reads_everything(self, longest: int) -> bool:
        """Whether requests of up to `longest` tokens leave no page out under the schedule. False
        while any row has a cap, which holds until the row is assigned again."""
        capped = any(cap != EVERY_PAGE for cap in self._capped.values())
        return longest < self._first_sparse_length and not capped

    def set_options(self, rows: Sequence[int], options: Sequence[RequestOption]) -> None:
        """Set the options of the requests in these rows of the token table for the next steps."""
        changed = {}
        for row, option in zip(rows, options, strict=True):
            cap = self._cap(option)
            if self._capped.get(row, NO_CAP) != cap:
                changed[row] = self._capped[row] = cap
                if cap == NO_CAP:
                    del self._capped[row]
        if changed:
            caps = self.tensors.caps
            update = torch.tensor(
                [*changed.keys(), *changed.values()],
                dtype=torch.int32,
                # Pinned memory is recycled only once the copy out of it is over.
                pin_memory=caps.is_cuda,
            ).to(caps.device, non_blocking=True)
            caps[update[: len(changed)].long()] = update[len(changed) :]

    def _cap(self, option: RequestOption) -> int:
        if option.schedule is None:
            return EVERY_PAGE
        if option.kv_budget_tokens is None:
            return NO_CAP
        return min(option.kv_budget_tokens // self.schedule.page_size, NO_CAP)

    def num_selected(self, num_pages: torch.Tensor, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Pages that a sparse layer reads of the cached `num_pages` [B], in their dtype."""
        cap = self.tensors.caps[req_pool_indices.long()].long()
        bins = (num_pages // self.tensors.bin_pages).clamp_max(MAX_BINS - 1)
        budget = torch.minimum(self.tensors.table[bins.long()].long(), cap)
        cached = num_pages.long()
        dense = (cap == NO_CAP) & (cached <= self.tensors.dense_pages)
        whole = dense | (cap == EVERY_PAGE)
        return torch.where(whole, cached, torch.minimum(cached, budget)).to(num_pages.dtype)
