"""Sparse decode of one layer in plain torch: update landmarks, select pages, attend to them. It
runs `reference` and serves the CPU. On a GPU `gpu_decode` does the same behind the same calls."""

from typing import Any

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks, Landmarks


class TorchPagedDecode:
    """Plans once per pass from what SGLang knows of its requests, then runs once per layer."""

    def __init__(self, budgets: BudgetTable, req_to_token: torch.Tensor) -> None:
        schedule = budgets.schedule
        self._page_size = schedule.page_size
        self._sink_pages = schedule.sink_pages
        self._recent_pages = schedule.recent_pages
        self._budgets = budgets
        self._req_to_token = req_to_token
        # [B, N] physical pages; entries past a request's end are left over from earlier requests.
        self._pages: torch.Tensor
        self._num_pages: torch.Tensor
        self._seq_lens: torch.Tensor
        self._num_selected: torch.Tensor
        self._full_pages: torch.Tensor

    def reserve(self, max_batch: int) -> None:
        """Prepare for captured batches of up to `max_batch` requests, before the first capture."""

    def _read_pages(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        first_slots = self._req_to_token[
            req_pool_indices, : int(seq_lens_cpu.max()) : self._page_size
        ]
        self._pages = first_slots.long() // self._page_size
        self._num_pages = (seq_lens + self._page_size - 1) // self._page_size
        self._seq_lens = seq_lens

    def _full_from(self, first: torch.Tensor) -> torch.Tensor:
        """Physical pages that are full, from the page that holds token `first` [B] on."""
        position = torch.arange(self._pages.shape[1], device=self._pages.device)
        full = position < (self._seq_lens // self._page_size)[:, None]
        return self._pages[full & (position >= (first // self._page_size)[:, None])]

    def plan_extend(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        new_tokens: int,
    ) -> None:
        """Prepare a prefill pass over requests of `seq_lens` [B] tokens, prefix included, of which
        at most `new_tokens` are new."""
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        self._full_pages = self._full_from((seq_lens - new_tokens).clamp_min(0))

    def plan_verify(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, width: int, captured: bool
    ) -> None:
        """Prepare a dense pass over `width` tokens behind the `seq_lens` [B] cached ones. Landmarks
        are written of the pages that these tokens touch only. Raises as `plan_decode`."""
        total = seq_lens + width
        self._read_pages(req_pool_indices, total, total.cpu())
        self._full_pages = self._full_from(seq_lens)

    def plan_decode(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        captured: bool = False,
    ) -> None:
        """Prepare a decode step over requests of `seq_lens` [B] tokens, the new one included.
        Raises `ValueError` on a GPU if the step is `captured` in a CUDA graph, or replays one, and
        has more requests than were reserved."""
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        self._num_selected = self._budgets.num_selected(self._num_pages, req_pool_indices)
        just_filled = (seq_lens % self._page_size == 0).nonzero().squeeze(-1)
        self._full_pages = self._pages[just_filled, self._num_pages[just_filled] - 1]

    def update_landmarks(
        self, k_buffers: dict[int, torch.Tensor], landmarks: dict[int, Landmarks]
    ) -> None:
        """Write the landmarks of the full pages of the planned dense pass, in the layers given.
        These are the pages that its new tokens touch, at least. `k_buffers` are [num_slots, Hkv,
        D], the same at every call, as are `landmarks`."""
        for layer_id, k_buffer in k_buffers.items():
            self._update(k_buffer, landmarks[layer_id])

    def _update(self, k_buffer: torch.Tensor, landmarks: Landmarks) -> None:
        if self._full_pages.numel():
            k_pages = k_buffer.view(-1, self._page_size, *k_buffer.shape[1:])
            int4 = isinstance(landmarks, Int4Landmarks)
            computed: Any = reference.page_landmarks(k_pages[self._full_pages], int4)
            landmarks.write(self._full_pages, computed)

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: Landmarks | None,
        sm_scale: float,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer of the planned decode step; the new token's KV is in the pool already.
        `landmarks` of a page that this token filled are written; None for a dense layer, which
        reads all pages. Shapes are those of `kernels.decode.sparse_decode`."""
        physical = self._pages[:, None].expand(-1, k_buffer.shape[1], -1)
        num_selected = self._num_pages
        if landmarks is not None:
            self._update(k_buffer, landmarks)
            num_selected = self._num_selected
            if not torch.equal(num_selected, self._num_pages):
                scores = reference.score_pages(q, landmarks, self._pages)
                selected = reference.select_pages(
                    scores, self._num_pages, num_selected, self._sink_pages, self._recent_pages
                )
                physical = physical.gather(-1, selected)
        return reference.sparse_decode(
            q,
            k_buffer,
            v_buffer,
            physical,
            num_selected,
            self._seq_lens,
            self._page_size,
            sm_scale,
            v_scale,
            sinks,
        )
