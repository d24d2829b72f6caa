"""Sparse decode of one layer on a CUDA device, by `kernels`. Its buffers are allocated once, so
that a step can be captured in a CUDA graph and never waits for the device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.kernels import decode, landmark, page_table, select
from sparrow_sglang.attention_backends.landmarks import Landmarks
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

# Rows of the buffers where no graph is captured; a larger batch runs in slices.
EAGER_ROWS = 256


@dataclass(frozen=True)
class DecodeShape:
    """The numbers from which the size of the buffers follows; heads are those on this rank.
    Launches are tuned for rows that keep at most `usual_pages` of the longest sequence's
    `max_pages`; rows that keep more make their programs loop longer. `kv_itemsize` is the bytes of
    a number in the KV pool, 2 or 1."""

    schedule: BudgetSchedule
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    kv_itemsize: int = 2

    @property
    def max_pages(self) -> int:
        return self.schedule.num_pages(self.max_context)

    @property
    def usual_pages(self) -> int:
        return min(self.max_pages, max(self.schedule.budget_pages))

    @classmethod
    def of_model(
        cls,
        schedule: BudgetSchedule,
        model_config: "ModelConfig",
        attn_tp_size: int,
        kv_dtype: torch.dtype,
        draft_tokens: int | None = None,
    ) -> "DecodeShape":
        """The shape for a model whose heads are split over `attn_tp_size` ranks. A round of
        lossless decoding goes `draft_tokens` past the end of the context."""
        return cls(
            schedule,
            model_config.num_attention_heads // attn_tp_size,
            model_config.get_num_kv_heads(attn_tp_size),
            model_config.head_dim,
            model_config.context_len + (draft_tokens or 0),
            kv_dtype.itemsize,
        )


class DecodeBuffers:
    """Buffers for batches of up to `rows` requests, and the launches that fill them, which are
    tuned for `launch_device` if it is not `device`. `page_table` is [rows, max_pages] int32,
    `num_selected` [rows] int32, `page_ids` [rows, Hkv, max_pages] int32; besides scratch of
    both kernels, and launches of both and of attention in dense layers, by batch size."""

    def __init__(
        self,
        shape: DecodeShape,
        rows: int,
        device: torch.device,
        launch_device: torch.device | None = None,
    ) -> None:
        tuned_for, int4 = launch_device or device, shape.schedule.selection == INT4
        heads, head_dim, max_pages = shape.num_kv_heads, shape.head_dim, shape.max_pages
        batches = range(1, rows + 1)

        def decode_launches(pages: int) -> dict[int, decode.DecodeLaunch]:
            tokens, itemsize = pages * shape.schedule.page_size, shape.kv_itemsize
            return {
                batch: decode.decode_launch(batch, heads, head_dim, tokens, tuned_for, itemsize)
                for batch in batches
            }

        self.rows = rows
        self.select_launch = {
            batch: select.select_launch(batch, heads, head_dim, max_pages, tuned_for, int4)
            for batch in batches
        }
        self.decode_launch = decode_launches(shape.usual_pages)
        # Dense layers read whole sequences.
        self.dense_launch = decode_launches(max_pages)
        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.page_ids = torch.zeros(rows, heads, max_pages, dtype=torch.int32, device=device)
        self.num_selected = torch.zeros(rows, dtype=torch.int32, device=device)
        self.select_scratch = select.allocate_select_scratch(rows, heads, max_pages, device)
        # Small batches are split most, so the largest batch is not the one with most parts.
        launches = [*self.decode_launch.items(), *self.dense_launch.items()]
        parts = max(batch * launch.splits for batch, launch in launches)
        self.decode_scratch = decode.allocate_decode_scratch(
            shape.num_q_heads * parts, head_dim, device
        )

    @property
    def num_bytes(self) -> int:
        tensors = (self.page_table, self.page_ids, self.num_selected)
        return sum(
            tensor.nbytes for tensor in (*tensors, *self.select_scratch, *self.decode_scratch)
        )


class TritonPagedDecode:
    """The sparse decode step on a CUDA device, by `kernels`. The kernels read everything that
    depends on lengths themselves, so one captured graph, which begins with a snapshot of the page
    table, serves every length. Launches are tuned for the schedule that is active first; any other
    runs in the same buffers. `req_to_token` is [requests, max tokens] int32."""

    def __init__(
        self, budgets: BudgetTable, req_to_token: torch.Tensor, shape: DecodeShape
    ) -> None:
        self._schedule = budgets.schedule
        self._req_to_token = req_to_token
        self._shape = shape
        self._budgets = budgets.tensors
        self._buffers: DecodeBuffers | None = None
        self._captured = False
        self._addresses: torch.Tensor | None = None
        self._pages: torch.Tensor
        self._num_selected: torch.Tensor
        self._seq_lens: torch.Tensor
        # Landmarks are written from the page on that holds the first of so many tokens before the
        # end of `_seq_lens`, and so many after it.
        self._new_tokens = 0, 0

    def reserve(self, max_batch: int) -> None:
        """Allocate buffers, unless there are large enough ones."""
        if self._buffers is not None and self._buffers.rows >= max_batch:
            return
        # A graph holds the addresses.
        assert not self._captured, f"{max_batch} requests: a graph has smaller buffers"
        # Free the old buffers first, so that both sets are never allocated at the same time.
        self._buffers = None
        self._buffers = DecodeBuffers(self._shape, max_batch, self._req_to_token.device)

    def compile_prefill(
        self, k_buffers: dict[int, torch.Tensor], landmarks: dict[int, Landmarks]
    ) -> None:
        """Compile the kernels of a prefill, which no captured graph contains, before a request."""
        # No page of a sequence of one token is full, so no landmark is written.
        length = torch.ones(1, dtype=torch.int64)
        on_device = length.to(self._req_to_token.device)
        self.plan_extend(torch.zeros_like(on_device), on_device, length, 1)
        self.update_landmarks(k_buffers, landmarks)

    def plan_extend(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        new_tokens: int,
    ) -> None:
        longest = int(seq_lens_cpu.max())
        # Triton compiles kernels anew for a width of 1 and for one that 16 does not divide.
        width = -(-longest // (16 * self._schedule.page_size)) * 16
        self._pages = self._req_to_token.new_empty(len(seq_lens), width)
        self._seq_lens, self._new_tokens = seq_lens, (new_tokens, 0)
        self._snapshot(req_pool_indices, seq_lens)

    def plan_verify(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, width: int, captured: bool
    ) -> None:
        self._reserve_step(len(seq_lens), captured)
        self._seq_lens, self._new_tokens = seq_lens, (0, width)
        self._snapshot(req_pool_indices, seq_lens + width)

    def plan_decode(
        self,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        captured: bool = False,
    ) -> None:
        self._reserve_step(len(seq_lens), captured)
        self._seq_lens, self._new_tokens = seq_lens, (1, 0)
        self._snapshot(
            req_pool_indices,
            seq_lens,
            budgets=self._budgets,
            num_selected=self._num_selected,
        )

    def _snapshot(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, **budgets: Any
    ) -> None:
        page_table.snapshot_page_table(
            self._req_to_token,
            req_pool_indices,
            seq_lens,
            self._pages,
            page_size=self._schedule.page_size,
            **budgets,
        )

    def _reserve_step(self, batch: int, captured: bool) -> None:
        buffers = self._reserved(batch)
        fits = batch <= buffers.rows or not captured
        assert fits, f"a graph of {batch} requests, SGLang announced {buffers.rows} at most"
        self._captured |= captured
        # The addresses must not change: a captured graph reads them at every replay.
        self._pages = buffers.page_table[:batch]
        self._num_selected = buffers.num_selected[:batch]
        if batch > buffers.rows:
            self._pages = buffers.page_table.new_empty(batch, self._shape.max_pages)
            self._num_selected = buffers.num_selected.new_empty(batch)

    def _reserved(self, batch: int) -> DecodeBuffers:
        """The buffers, allocated for `batch` if none were reserved yet, as in a warm-up."""
        if self._buffers is None:
            self.reserve(min(batch, EAGER_ROWS))
        assert self._buffers is not None
        return self._buffers

    def update_landmarks(
        self, k_buffers: dict[int, torch.Tensor], landmarks: dict[int, Landmarks]
    ) -> None:
        if self._addresses is None:
            self._addresses = landmark.address_table(k_buffers, landmarks)
        before, after = self._new_tokens
        landmark.update_landmarks(
            self._addresses,
            next(iter(k_buffers.values())),
            next(iter(landmarks.values())),
            self._pages,
            self._seq_lens,
            page_size=self._schedule.page_size,
            before=before,
            after=after,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        landmarks: Landmarks | None,
        sm_scale: float,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        new_tokens: select.NewTokens | None = None,
    ) -> torch.Tensor:
        """`TorchPagedDecode.decode`. In sparse layers, `new_tokens` are written to the pool first;
        None if they are in it already."""
        out = torch.empty_like(q)
        buffers = self._reserved(len(q))
        for start in range(0, len(q), buffers.rows):
            rows = slice(start, start + buffers.rows)
            pages, seq_lens = self._pages[rows], self._seq_lens[rows]
            batch, num_selected, launch = len(seq_lens), None, buffers.dense_launch
            page_ids = pages[:, None].expand(-1, k_buffer.shape[1], -1)
            if landmarks is not None:
                num_selected, launch = self._num_selected[rows], buffers.decode_launch
                page_ids = buffers.page_ids[:batch]
                new = new_tokens and select.NewTokens(*(of[rows] for of in new_tokens))
                select.select_pages(
                    q[rows],
                    k_buffer,
                    v_buffer,
                    landmarks,
                    pages,
                    seq_lens,
                    num_selected,
                    page_ids,
                    new,
                    page_size=self._schedule.page_size,
                    sink_pages=self._schedule.sink_pages,
                    recent_pages=self._schedule.recent_pages,
                    scratch=buffers.select_scratch,
                    launch=buffers.select_launch[batch],
                )
            decode.sparse_decode(
                q[rows],
                k_buffer,
                v_buffer,
                page_ids,
                num_selected,
                seq_lens,
                out[rows],
                page_size=self._schedule.page_size,
                sm_scale=sm_scale,
                v_scale=v_scale,
                sinks=sinks,
                scratch=buffers.decode_scratch,
                launch=launch[batch],
                after_select=landmarks is not None,
            )
        return out
