"""Sparse decode of one layer: update landmarks, select pages, attend to them.

Two classes of one interface. `TorchPagedDecode` runs `reference` and serves the CPU;
`TritonPagedDecode` runs `kernels` in buffers allocated once, so that a step can be captured in a
CUDA graph and never waits for the device.
"""

from typing import Protocol

import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.decode_buffers import EAGER_ROWS, DecodeBuffers, DecodeShape
from sparrow_sglang.attention_backends.kernels import decode, landmark, page_table, select
from sparrow_sglang.attention_backends.kernels.checks import Int4Codes, dependent_launch
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks, Landmarks
from sparrow_sglang.attention_backends.metadata import BudgetTable, PageTable


class PagedDecode(Protocol):
    """Plans once per pass from what SGLang knows of its requests, then runs once per layer.

    Attributes:
        within_budget: no request of the planned decode step exceeds its budget, so that stock
            dense decode gives the same and may be used instead.
    """

    within_budget: bool

    def reserve(self, max_batch: int) -> None:
        """Be ready for captured batches of up to `max_batch` requests; before the first capture."""

    def plan_extend(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        """Prepare a prefill pass over requests of `seq_lens` [B] tokens, prefix included."""

    def plan_decode(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        captured: bool = False,
    ) -> None:
        """Prepare a decode step over requests of `seq_lens` [B] tokens, the new one included.

        Raises:
            ValueError: the step is `captured` in a CUDA graph, or replays one, and has more
                requests than were reserved.
        """

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: Landmarks) -> None:
        """Compute the landmarks of the planned pass's full pages from the KV pool.

        In a prefill pass these are all full pages of every request, not only those of its new
        tokens: a page may have been completed by an earlier chunk or loaded by someone else.

        Args:
            k_buffer: [num_slots, Hkv, D].
            landmarks: those of the layer, written in place.
        """

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: Landmarks,
        layer_id: int,
        sm_scale: float,
    ) -> torch.Tensor:
        """One sparse layer of the planned decode step; the new token's KV is in the pool already.

        Args:
            q: [B, Hq, D].
            k_buffer: [num_slots, Hkv, D].
            v_buffer: [num_slots, Hkv, D].
            landmarks: those of the layer; that of the page which this token filled is added.
            layer_id: index of the layer in the model, which its share of the budget goes by.
            sm_scale: factor of the logits.

        Returns:
            [B, Hq, D] in q's dtype.
        """

    def decode_dense(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """One dense layer of the planned decode step: `decode` of all pages, without landmarks."""


class TorchPagedDecode:
    """The sparse decode step on any device, in plain torch.

    Args:
        budgets: the KV budget by length and request; the active schedule supplies page size,
            sinks, recent pages and the selection rule, which all others share.
        req_to_token: [requests, max tokens], SGLang's token table.
    """

    def __init__(self, budgets: BudgetTable, req_to_token: torch.Tensor) -> None:
        schedule = budgets.loaded.active
        self.within_budget = False
        self._page_size = schedule.page_size
        self._sink_pages = schedule.sink_pages
        self._recent_pages = schedule.recent_pages
        self._rule = schedule.selection
        self._budgets = budgets
        self._req_to_token = req_to_token
        self._pages: PageTable
        self._num_selected: torch.Tensor
        self._full_pages: torch.Tensor

    def reserve(self, max_batch: int) -> None:
        """Nothing to do: a step allocates what it needs."""

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
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        captured: bool = False,
    ) -> None:
        self._read_pages(req_pool_indices, seq_lens, seq_lens_cpu)
        num_pages = self._pages.num_pages
        self._num_selected = self._budgets.num_selected(num_pages, req_pool_indices)
        self.within_budget = bool((self._num_selected == num_pages).all())
        just_filled = (seq_lens % self._page_size == 0).nonzero().squeeze(-1)
        last_page = self._pages.num_pages[just_filled] - 1
        self._full_pages = self._pages.physical[just_filled, last_page]

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: Landmarks) -> None:
        if self._full_pages.numel():
            k_pages = k_buffer.view(-1, self._page_size, *k_buffer.shape[1:])
            computed = reference.page_landmarks(k_pages[self._full_pages], self._rule)
            landmarks.write(self._full_pages, computed)

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: Landmarks,
        layer_id: int,
        sm_scale: float,
    ) -> torch.Tensor:
        self.update_landmarks(k_buffer, landmarks)
        pages = self._pages
        num_selected = self._num_selected[layer_id if len(self._num_selected) > 1 else 0]
        selected = reference.select_pages(
            reference.score_pages(q, landmarks, pages.physical, self._rule),
            pages.num_pages,
            num_selected,
            self._sink_pages,
            self._recent_pages,
        )
        physical = pages.physical[:, None].expand(-1, k_buffer.shape[1], -1)
        return reference.sparse_decode(
            q,
            k_buffer,
            v_buffer,
            physical.gather(-1, selected),
            num_selected,
            pages.seq_lens,
            self._page_size,
            sm_scale,
        )

    def decode_dense(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        pages = self._pages
        return reference.sparse_decode(
            q,
            k_buffer,
            v_buffer,
            pages.physical[:, None].expand(-1, k_buffer.shape[1], -1),
            pages.num_pages,
            pages.seq_lens,
            self._page_size,
            sm_scale,
        )


class TritonPagedDecode:
    """The sparse decode step on a CUDA device, by `kernels`.

    What depends on lengths is read by the kernels themselves, so the host prepares nothing but a
    snapshot of the page table, and one captured graph serves every length.

    Args:
        budgets: the KV budget by length and request; launches are tuned for the schedule that
            is active now, and every other one, switched to or asked for, runs in the same buffers.
        req_to_token: [requests, max tokens] int32, SGLang's token table.
        shape: heads on this rank and the longest sequence.
    """

    def __init__(
        self, budgets: BudgetTable, req_to_token: torch.Tensor, shape: DecodeShape
    ) -> None:
        # A captured step must take the same path at every length.
        self.within_budget = False
        self._schedule = budgets.loaded.active
        self._req_to_token = req_to_token
        self._shape = shape
        self._budgets = budgets.tensors
        self._dependent = dependent_launch(req_to_token.device)
        self._buffers: DecodeBuffers | None = None
        self._captured = False
        self._pages: torch.Tensor
        self._counts: torch.Tensor
        self._seq_lens: torch.Tensor
        self._no_prefix: torch.Tensor
        self._longest = 0

    def reserve(self, max_batch: int) -> None:
        """Allocate buffers for batches of up to `max_batch` requests.

        Raises:
            ValueError: a graph has been captured with smaller ones, whose addresses it holds.
        """
        if self._buffers is not None and self._buffers.rows >= max_batch:
            return
        if self._captured:
            raise ValueError(
                f"decode buffers for {max_batch} requests: a CUDA graph was captured with smaller"
                " ones already"
            )
        # Freed first, so that both never exist at a time.
        self._buffers = None
        self._buffers = DecodeBuffers(
            self._shape,
            max_batch,
            self._req_to_token.device,
            counts_layers=self._budgets.weights.shape[1],
        )

    def plan_extend(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor
    ) -> None:
        self._longest = -(-int(seq_lens_cpu.max()) // self._schedule.page_size)
        self._pages = self._req_to_token.new_empty(len(seq_lens), self._longest)
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
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        captured: bool = False,
    ) -> None:
        batch = len(seq_lens)
        buffers = self._reserved(batch)
        if captured and batch > buffers.rows:
            raise ValueError(
                f"a CUDA graph of {batch} requests does not fit the decode buffers: SGLang"
                f" announced at most {buffers.rows}"
            )
        self._captured |= captured
        # Always the same addresses: a captured graph reads them at every replay.
        self._pages, self._counts = buffers.page_table[:batch], buffers.counts[:, :batch]
        if batch > buffers.rows:
            self._pages = buffers.page_table.new_empty(batch, self._shape.max_pages)
            self._counts = buffers.counts.new_empty(len(buffers.counts), batch)
        self._seq_lens = seq_lens
        page_table.snapshot_page_table(
            self._req_to_token,
            req_pool_indices,
            seq_lens,
            self._pages,
            page_size=self._schedule.page_size,
            budgets=self._budgets,
            counts=self._counts,
            least_pages=self._schedule.least_pages,
        )

    def _reserved(self, batch: int) -> DecodeBuffers:
        """The buffers; a step before any were asked for, such as a warm-up, gets its own."""
        if self._buffers is None:
            self.reserve(min(batch, EAGER_ROWS))
        assert self._buffers is not None
        return self._buffers

    def update_landmarks(self, k_buffer: torch.Tensor, landmarks: Landmarks) -> None:
        landmark.update_landmarks_bulk(
            k_buffer,
            _for_kernels(landmarks),
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
        landmarks: Landmarks,
        layer_id: int,
        sm_scale: float,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        buffers = self._reserved(len(q))
        layer_counts = self._counts[layer_id if len(self._counts) > 1 else 0]
        for start in range(0, len(q), buffers.rows):
            rows = slice(start, start + buffers.rows)
            pages, counts, seq_lens = self._pages[rows], layer_counts[rows], self._seq_lens[rows]
            batch = len(seq_lens)
            page_ids = buffers.page_ids[:batch]
            select.select_pages(
                q[rows],
                k_buffer,
                _for_kernels(landmarks),
                pages,
                seq_lens,
                counts,
                page_ids,
                page_size=self._schedule.page_size,
                sink_pages=self._schedule.sink_pages,
                recent_pages=self._schedule.recent_pages,
                scratch=buffers.select_scratch,
                launch=buffers.select_launch[batch],
                best_head=self._schedule.selection.group_score == "best_head",
                dependents=self._dependent,
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
                scratch=buffers.decode_scratch,
                launch=buffers.decode_launch[batch],
                after_select=self._dependent,
            )
        return out

    def decode_dense(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        buffers = self._reserved(len(q))
        num_kv_heads = k_buffer.shape[1]
        for start in range(0, len(q), buffers.rows):
            rows = slice(start, start + buffers.rows)
            pages, seq_lens = self._pages[rows], self._seq_lens[rows]
            decode.sparse_decode(
                q[rows],
                k_buffer,
                v_buffer,
                pages[:, None].expand(-1, num_kv_heads, -1),
                None,
                seq_lens,
                out[rows],
                page_size=self._schedule.page_size,
                sm_scale=sm_scale,
                scratch=buffers.decode_scratch,
                launch=buffers.dense_launch[len(seq_lens)],
            )
        return out


def _for_kernels(landmarks: Landmarks) -> torch.Tensor | Int4Codes:
    """The same memory as the kernels take it."""
    if isinstance(landmarks, Int4Landmarks):
        return Int4Codes(landmarks.codes, landmarks.scales)
    if landmarks.means.shape[2] != 1:
        raise ValueError("the GPU kernels are not built for several 16-bit landmarks a page")
    return landmarks.means.squeeze(2)
