"""Memory of the sparse decode step on a GPU, allocated once: graphs hold its addresses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparrow_sglang.attention_backends.kernels.decode import (
    allocate_decode_scratch,
    decode_launch,
)
from sparrow_sglang.attention_backends.kernels.select import (
    allocate_select_scratch,
    select_launch,
)
from sparrow_sglang.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

# Rows of the buffers where no graph is captured; a larger batch runs in slices.
EAGER_ROWS = 256


@dataclass(frozen=True)
class DecodeShape:
    """The numbers from which the size of the buffers follows.

    Attributes:
        num_q_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank.
        head_dim: dimensions of a query, key and value.
        max_pages: pages of the longest sequence.
        usual_pages: pages that a row keeps at most under the schedule that launches are tuned for;
            rows that keep more make their programs loop longer.
        page_size: tokens a page.
        kv_itemsize: bytes of a number in the KV pool, 2 or 1.
        int4: landmarks are int4 codes, not means in 16 bits.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_pages: int
    usual_pages: int
    page_size: int
    kv_itemsize: int = 2
    int4: bool = False

    @classmethod
    def of(
        cls,
        schedule: BudgetSchedule,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_context: int,
        kv_itemsize: int = 2,
    ) -> "DecodeShape":
        """The shape for sequences of up to `max_context` tokens under `schedule`."""
        max_pages = -(-max_context // schedule.page_size)
        return cls(
            num_q_heads,
            num_kv_heads,
            head_dim,
            max_pages,
            usual_pages=min(max_pages, max(schedule.budget_pages)),
            page_size=schedule.page_size,
            kv_itemsize=kv_itemsize,
            int4=schedule.selection.int4,
        )

    @classmethod
    def of_model(
        cls,
        schedule: BudgetSchedule,
        model_config: "ModelConfig",
        attn_tp_size: int,
        kv_dtype: torch.dtype,
    ) -> "DecodeShape":
        """The shape for a model whose heads are split over `attn_tp_size` ranks."""
        return cls.of(
            schedule,
            model_config.num_attention_heads // attn_tp_size,
            model_config.get_num_kv_heads(attn_tp_size),
            model_config.head_dim,
            model_config.context_len,
            kv_dtype.itemsize,
        )


class DecodeBuffers:
    """Buffers for batches of up to `rows` requests, and the launches that fill them.

    Args:
        shape: heads and pages.
        rows: the largest batch.
        num_layers: layers of the model.
        device: where the buffers live.
        launch_device: the device that launches are tuned for, if it is another one.

    Attributes:
        page_table: [rows, max_pages] int32; num_selected: [layers, rows] int32; page_ids: [rows,
            Hkv, max_pages] int32; verify_lens: [2, rows] int64, tokens before and after those that
            a verification adds; scratch of both kernels; launches of both, and of attention in
            dense layers, by batch size.
    """

    def __init__(
        self,
        shape: DecodeShape,
        rows: int,
        num_layers: int,
        device: torch.device,
        launch_device: torch.device | None = None,
    ) -> None:
        tuned_for = launch_device or device
        heads, head_dim, max_pages = shape.num_kv_heads, shape.head_dim, shape.max_pages
        kept_tokens = shape.usual_pages * shape.page_size
        batches = range(1, rows + 1)
        self.rows = rows
        self.select_launch = {
            batch: select_launch(batch, heads, head_dim, max_pages, tuned_for, shape.int4)
            for batch in batches
        }
        self.decode_launch = {
            batch: decode_launch(batch, heads, head_dim, kept_tokens, tuned_for, shape.kv_itemsize)
            for batch in batches
        }
        # Dense layers read whole sequences.
        longest = max_pages * shape.page_size
        self.dense_launch = {
            batch: decode_launch(batch, heads, head_dim, longest, tuned_for, shape.kv_itemsize)
            for batch in batches
        }
        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.page_ids = torch.zeros(rows, heads, max_pages, dtype=torch.int32, device=device)
        self.num_selected = torch.zeros(num_layers, rows, dtype=torch.int32, device=device)
        self.verify_lens = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.select_scratch = allocate_select_scratch(rows, heads, max_pages, device)
        # Small batches are split most, so the largest batch is not the one with most parts.
        launches = [*self.decode_launch.items(), *self.dense_launch.items()]
        parts = max(batch * launch.splits for batch, launch in launches)
        self.decode_scratch = allocate_decode_scratch(shape.num_q_heads * parts, head_dim, device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self.page_table, self.page_ids, self.num_selected)
        return sum(
            tensor.nbytes for tensor in (*tensors, *self.select_scratch, *self.decode_scratch)
        )


def buffer_bytes(shape: DecodeShape, rows: int, num_layers: int, device: torch.device) -> int:
    """Memory that `DecodeBuffers` will hold on `device`; nothing is allocated."""
    return DecodeBuffers(shape, rows, num_layers, torch.device("meta"), device).num_bytes
