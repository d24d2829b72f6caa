"""Sparse decode of one layer: update landmarks, select pages, attend to them.

`TorchPagedDecode` runs `reference` and serves the CPU.
"""

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.metadata import BudgetTable, PageTable
from sparrow_sglang.schedule import BudgetSchedule


class TorchPagedDecode:
    """The sparse decode step on any device, in plain torch.

    Args:
        schedule: page size, sinks, recent pages and the KV budget by length.
        req_to_token: [requests, max tokens], SGLang's token table.
    """

    def __init__(self, schedule: BudgetSchedule, req_to_token: torch.Tensor) -> None:
        self._page_size = schedule.page_size
        self._sink_pages = schedule.sink_pages
        self._recent_pages = schedule.recent_pages
        self._budget = BudgetTable(schedule, req_to_token.device)
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
        """Prepare a prefill pass over requests of `seq_lens` [B] tokens, prefix included."""
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        self._full_pages = self._pages.full_pages(self._page_size)

    def plan_decode(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Prepare a decode step over requests of `seq_lens` [B] tokens, the new one included."""
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        self._num_selected = self._budget.num_selected(self._pages.num_pages)
        just_filled = (seq_lens % self._page_size == 0).nonzero().squeeze(-1)
        last_page = self._pages.num_pages[just_filled] - 1
        self._full_pages = self._pages.physical[just_filled, last_page]

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: torch.Tensor) -> None:
        """Compute the landmarks of the planned pass's full pages from the KV pool.

        In a prefill pass these are all full pages of every request, not only those of its new
        tokens: a page may have been completed by an earlier chunk or loaded by someone else.

        Args:
            k_buffer: [num_slots, Hkv, D].
            landmarks: [num_pages, Hkv, D], written in place.
        """
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
        """One sparse layer of the planned decode step; the new token's KV is in the pool already.

        Args:
            q: [B, Hq, D].
            k_buffer: [num_slots, Hkv, D].
            v_buffer: [num_slots, Hkv, D].
            landmarks: [num_pages, Hkv, D]; the page that this token filled is added.
            sm_scale: factor of the logits.

        Returns:
            [B, Hq, D] in q's dtype.
        """
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
