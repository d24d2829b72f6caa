"""Sparse decode of one layer: update landmarks, select pages, attend to them.

Two classes of one interface. `TorchPagedDecode` runs `reference` and serves the CPU;
`TritonPagedDecode` runs `kernels` in buffers allocated once, so that a step can be captured in a
CUDA graph and never waits for the device.
"""

from typing import Protocol

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.kernels import decode, landmark, page_table, select
from sparrow_sglang.attention_backends.metadata import BudgetTable, PageTable


class PagedDecode(Protocol):
    """Plans once per pass from what SGLang knows of its requests, then runs once per layer.

    Attributes:
        within_budget: no request of the planned decode step exceeds its budget, so that stock
            dense decode gives the same and may be used instead.
    """

    within_budget: bool

    def plan_extend(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Prepare a prefill pass over requests of `seq_lens` [B] tokens, prefix included."""

    def plan_decode(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Prepare a decode step over requests of `seq_lens` [B] tokens, the new one included."""

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: torch.Tensor) -> None:
        """Compute the landmarks of the planned pass's full pages from the KV pool.

        In a prefill pass these are all full pages of every request, not only those of its new
        tokens: a page may have been completed by an earlier chunk or loaded by someone else.

        Args:
            k_buffer: [num_slots, Hkv, D].
            landmarks: [num_pages, Hkv, D], written in place.
        """

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        """One sparse layer of the planned decode step; the new token's KV is in the pool already.

        Args:
            q: [B, Hq, D].
            k_buffer: [num_slots, Hkv, D].
            v_buffer: [num_slots, Hkv, D].
            landmarks: [num_pages, Hkv, D]; that of the page which this token filled is added.
            sm_scale: factor of the logits.

        Returns:
            [B, Hq, D] in q's dtype.
        """


class TorchPagedDecode:
    """The sparse decode step on any device, in plain torch.

    Args:
        budgets: the KV budget by length and request; the schedule in force supplies page size,
            sinks and recent pages, which all others share.
        req_to_token: [requests, max tokens], SGLang's token table.
    """

    def __init__(self, budgets: BudgetTable, req_to_token: torch.Tensor) -> None:
        schedule = budgets.loaded.in_force
        self.within_budget = False
        self._page_size = schedule.page_size
        self._sink_pages = schedule.sink_pages
        self._recent_pages = schedule.recent_pages
        self._budgets = budgets
        self._req_to_token = req_to_token
        self._pages: PageTable
        self._num_selected: torch.Tensor
        self._full_pages: torch.Tensor

    def _read_pages(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        self._pages = PageTable.read(
            self._req_to_token,
            req_pool_indices,
            seq_lens,
            int(seq_lens_cpu.max()),
            self._page_size,
        )

    def plan_extend(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        self._full_pages = self._pages.full_pages(self._page_size)

    def plan_decode(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        num_pages = self._pages.num_pages
        self._num_selected = self._budgets.num_selected(num_pages, req_pool_indices)
        self.within_budget = torch.equal(self._num_selected, num_pages)
        just_filled = (seq_lens % self._page_size == 0).nonzero().squeeze(-1)
        last_page = self._pages.num_pages[just_filled] - 1
        self._full_pages = self._pages.physical[just_filled, last_page]

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: torch.Tensor) -> None:
        if self._full_pages.numel():
            k_pages = k_buffer.view(-1, self._page_size, *k_buffer.shape[1:])
            landmarks[self._full_pages] = reference.page_landmarks(k_pages[self._full_pages])

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        self.update_landmarks(k_buffer, landmarks)
        pages = self._pages
        selected = reference.select_pages(
            reference.score_pages(q, landmarks, pages.physical),
            pages.num_pages,
            self._num_selected,
            self._sink_pages,
            self._recent_pages,
        )
        physical = pages.physical[:, None].expand(-1, landmarks.shape[1], -1)
        return reference.sparse_decode(
            q,
            k_buffer,
            v_buffer,
            physical.gather(-1, selected),
            self._num_selected,
            pages.seq_lens,
            self._page_size,
            sm_scale,
        )


class TritonPagedDecode:
    """The sparse decode step on a CUDA device, by `kernels`.

    What depends on lengths is read by the kernels themselves, so the host prepares nothing but a
    snapshot of the page table, and one captured graph serves every length.

    Args:
        budgets: the KV budget by length and request; launches are tuned for the schedule that is in
            force now, and every other one, switched to or asked for, runs in the same buffers.
        req_to_token: [requests, max tokens] int32, SGLang's token table.
        num_q_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank.
        head_dim: dimensions of a query, key and value.
        max_batch: rows of the buffers; a larger batch runs in slices of it.
        max_context: longest sequence, in tokens.
    """

    def __init__(
        self,
        budgets: BudgetTable,
        req_to_token: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        max_context: int,
    ) -> None:
        # A captured step must take the same path at every length.
        self.within_budget = False
        device = req_to_token.device
        schedule = budgets.loaded.in_force
        page_size = schedule.page_size
        max_pages = -(-max_context // page_size)
        # For the split of the work only: rows that keep more pages make their programs loop longer.
        usual_selected = min(max_pages, max(schedule.budget_pages))
        self._schedule = schedule
        self._req_to_token = req_to_token
        self._max_batch = max_batch
        self._budgets = budgets.tensors
        batches = range(1, max_batch + 1)
        self._select_launch = {
            batch: select.select_launch(batch, num_kv_heads, head_dim, max_pages, device)
            for batch in batches
        }
        self._decode_launch = {
            batch: decode.decode_launch(
                batch, num_kv_heads, head_dim, usual_selected * page_size, device
            )
            for batch in batches
        }
        self._page_table = torch.zeros(max_batch, max_pages, dtype=torch.int32, device=device)
        self._page_ids = torch.zeros(
            max_batch, num_kv_heads, max_pages, dtype=torch.int32, device=device
        )
        self._page_counts = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._select_scratch = select.allocate_select_scratch(
            max_batch, num_kv_heads, max_pages, device
        )
        # Small batches are split most, so the largest batch is not the one with most parts.
        parts = max(batch * launch.splits for batch, launch in self._decode_launch.items())
        self._decode_scratch = decode.allocate_decode_scratch(
            num_q_heads * parts, max_batch * num_kv_heads, head_dim, device
        )
        self._pages: torch.Tensor
        self._counts: torch.Tensor
        self._seq_lens: torch.Tensor
        self._no_prefix: torch.Tensor
        self._longest = 0

    def plan_extend(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        self._longest = -(-int(seq_lens_cpu.max()) // self._schedule.page_size)
        self._pages = self._page_table.new_empty(len(seq_lens), self._longest)
        self._seq_lens = seq_lens
        self._no_prefix = torch.zeros_like(seq_lens)
        page_table.snapshot_page_table(
            self._req_to_token,
            req_pool_indices,
            seq_lens,
            self._pages,
            page_size=self._schedule.page_size,
        )

    def plan_decode(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        batch = len(seq_lens)
        # Always the same addresses: a captured graph reads them at every replay.
        self._pages, self._counts = self._page_table[:batch], self._page_counts[:batch]
        if batch > self._max_batch:
            self._pages = self._page_table.new_empty(batch, self._page_table.shape[1])
            self._counts = self._page_counts.new_empty(batch)
        self._seq_lens = seq_lens
        page_table.snapshot_page_table(
            self._req_to_token,
            req_pool_indices,
            seq_lens,
            self._pages,
            page_size=self._schedule.page_size,
            budgets=self._budgets,
            counts=self._counts,
        )

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: torch.Tensor) -> None:
        landmark.update_landmarks_bulk(
            k_buffer,
            landmarks,
            self._pages,
            self._seq_lens,
            self._no_prefix,
            page_size=self._schedule.page_size,
            max_pages=self._longest,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for start in range(0, len(q), self._max_batch):
            rows = slice(start, start + self._max_batch)
            pages, counts, seq_lens = self._pages[rows], self._counts[rows], self._seq_lens[rows]
            batch = len(seq_lens)
            page_ids = self._page_ids[:batch]
            select.select_pages(
                q[rows],
                k_buffer,
                landmarks,
                pages,
                seq_lens,
                counts,
                page_ids,
                page_size=self._schedule.page_size,
                sink_pages=self._schedule.sink_pages,
                recent_pages=self._schedule.recent_pages,
                scratch=self._select_scratch,
                launch=self._select_launch[batch],
            )
            decode.sparse_decode(
                q[rows],
                k_buffer,
                v_buffer,
                page_ids,
                counts,
                seq_lens,
                out[rows],
                page_size=self._schedule.page_size,
                sm_scale=sm_scale,
                scratch=self._decode_scratch,
                launch=self._decode_launch[batch],
            )
        return out
