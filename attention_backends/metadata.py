"""What one forward pass needs to know of its requests: page tables, lengths and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparrow_sglang.attention_backends.kernels.page_table import NO_CAP, Budgets
from sparrow_sglang.loaded_schedules import MAX_BINS, MAX_LOADED, LoadedSchedules
from sparrow_sglang.request_options import RequestOption

NUM_SLOTS = MAX_LOADED + 2
_DEFAULT = (0, NO_CAP)


class BudgetTable:
    """The loaded schedules and what requests ask for, as tensors on the device.

    The device computes budgets from these tensors without the host, and the tensors keep their
    addresses, so a captured step needs no new capture when a schedule is switched. Slot 0 of the
    tables is the active schedule, the next ones are the loaded schedules in order, and the last one
    keeps all pages.

    Args:
        loaded: the schedules.
        num_requests: rows of SGLang's token table; a request is identified by its row in it.
        device: where the tensors live.

    Attributes:
        loaded: what the tables hold.
        tensors: see `Budgets`.
    """

    def __init__(
        self, loaded: LoadedSchedules, num_requests: int, device: torch.device | str
    ) -> None:
        self.tensors = Budgets(
            table=torch.empty(NUM_SLOTS, MAX_BINS, dtype=torch.int32, device=device),
            bin_pages=torch.empty(NUM_SLOTS, dtype=torch.int32, device=device),
            options=torch.tensor([_DEFAULT], dtype=torch.int32, device=device).repeat(
                num_requests, 1
            ),
            weights=torch.empty(
                NUM_SLOTS, loaded.weighted_layers or 1, dtype=torch.float32, device=device
            ),
        )
        # Slot and cap of each row that differs from the default. Most rows do not, and need no copy
        # to the device.
        self._asking: dict[int, tuple[int, int]] = {}
        self.load(loaded)

    def load(self, loaded: LoadedSchedules) -> None:
        """Replace the schedules by `loaded`, with no request running, and wait for the device."""
        table = torch.full((NUM_SLOTS, MAX_BINS), NO_CAP, dtype=torch.int32)
        bin_pages = torch.ones(NUM_SLOTS, dtype=torch.int32)
        weights = torch.ones(self.tensors.weights.shape)
        for slot, schedule in enumerate((loaded.active, *loaded.named)):
            table[slot] = schedule.budget_pages[-1]
            table[slot, : len(schedule.budget_pages)] = torch.tensor(schedule.budget_pages)
            bin_pages[slot] = schedule.bin_pages
            if schedule.selection.layer_weights is not None:
                weights[slot] = torch.tensor(schedule.selection.layer_weights)
            if loaded.weighted_layers is not None:
                # Those of them that have landmarks read all pages under any budget.
                weights[slot, list(schedule.dense_layers)] = NO_CAP
        self.tensors.table.copy_(table)
        self.tensors.bin_pages.copy_(bin_pages)
        self.tensors.weights.copy_(weights)
        if self.tensors.table.is_cuda:
            # Steps run on another stream and must see the new tables.
            torch.cuda.synchronize(self.tensors.table.device)
        self.loaded = loaded

    def set_options(self, rows: Sequence[int], options: Sequence[RequestOption]) -> None:
        """Set the options of the requests in these rows of the token table for the next steps."""
        changed = {}
        for row, option in zip(rows, options, strict=True):
            slot_and_cap = self._slot_and_cap(option)
            if self._asking.get(row, _DEFAULT) != slot_and_cap:
                changed[row] = self._asking[row] = slot_and_cap
                if slot_and_cap == _DEFAULT:
                    del self._asking[row]
        if changed:
            written = self.tensors.options
            update = torch.tensor(
                [[row, *slot_and_cap] for row, slot_and_cap in changed.items()],
                dtype=torch.int32,
                # Pinned memory is recycled only once the copy out of it is over.
                pin_memory=written.is_cuda,
            ).to(written.device, non_blocking=True)
            written[update[:, 0].long()] = update[:, 1:]

    def _slot_and_cap(self, option: RequestOption) -> tuple[int, int]:
        slot, cap = _DEFAULT
        if option.schedule is None:
            slot = NUM_SLOTS - 1
        elif option.schedule.name != self.loaded.active.name:
            slot = self.loaded.named.index(option.schedule) + 1
        if option.kv_budget_tokens is not None:
            cap = min(option.kv_budget_tokens // self.loaded.active.page_size, NO_CAP)
        return slot, cap

    def num_selected(self, num_pages: torch.Tensor, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Pages that each layer reads, [layers, B] in num_pages' dtype.

        A single row stands for all layers where no loaded schedule has layer weights.

        Args:
            num_pages: [B], pages that each request holds.
            req_pool_indices: [B], the requests' rows in SGLang's token table.
        """
        slot, cap = self.tensors.options[req_pool_indices.long()].long().unbind(-1)
        bins = (num_pages // self.tensors.bin_pages[slot]).clamp_max(MAX_BINS - 1)
        budget = torch.minimum(self.tensors.table[slot, bins.long()].long(), cap)
        # fp64 holds the product of an fp32 weight and a whole number exactly.
        weighted = (self.tensors.weights[slot].T.double() * budget + 0.5).floor().long()
        weighted = weighted.clamp_min(self.loaded.active.least_pages)
        return torch.minimum(num_pages.long(), weighted).to(num_pages.dtype)


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

    def full_pages(self, page_size: int, first: torch.Tensor | None = None) -> torch.Tensor:
        """Physical pages that are full, each request's in turn, [number of full pages].

        With `first` [B], only those from the page that holds this token on.
        """
        position = torch.arange(self.physical.shape[1], device=self.physical.device)
        full = position < (self.seq_lens // page_size)[:, None]
        if first is not None:
            full &= position >= (first // page_size)[:, None]
        return self.physical[full]
