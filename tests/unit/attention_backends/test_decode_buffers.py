"""Buffers of the decode step: as many rows as SGLang captures, and counted before the KV pool."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from configs import kv_configurator
from pools import Pool, make_schedule

from sparrow_sglang.attention_backends import gpu_decode
from sparrow_sglang.attention_backends.backend import SparrowAttnBackend
from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.decode_guard import DecodeGuard
from sparrow_sglang.attention_backends.gpu_decode import (
    DecodeBuffers,
    DecodeShape,
    TritonPagedDecode,
)
from sparrow_sglang.errors import SparrowError
from sparrow_sglang.plugin.arguments.server_args import prepare_model
from sparrow_sglang.plugin.scheduler import memory

SCHEDULE = make_schedule(16, 40, [16, 24])
HEADS, DIM, CONTEXT = (8, 2), 64, 4096
# The number of requests that SGLang admits: not a multiple of the ranks that share a batch.
ADMITTED = 17


class Dense:
    """The methods of the stock backend that ours calls in these tests."""

    reserved = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.reserved = max_bs

    def init_forward_metadata_out_graph(self, batch: object, in_capture: bool) -> None:
        pass

    def init_forward_metadata_in_graph(self, batch: object) -> None:
        pass


@pytest.fixture
def planned(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Page tables and counts passed to the snapshot kernel, which needs a GPU and is replaced."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        gpu_decode.page_table,
        "snapshot_page_table",
        lambda *args, num_selected=None, **_: found.append((args[3], num_selected)),
    )
    return found


@pytest.fixture
def backend() -> SparrowAttnBackend:
    pool = Pool([50] * ADMITTED, HEADS, DIM, 16, seed=0)
    budgets = BudgetTable(SCHEDULE, len(pool.req_to_token), "cpu")
    shape = DecodeShape(SCHEDULE, *HEADS, DIM, CONTEXT)
    backend = object.__new__(SparrowAttnBackend)
    backend.dense = Dense()
    backend.sparse = TritonPagedDecode(budgets, pool.req_to_token, shape)
    backend._planning, backend._narrow, backend.stock_layers = nullcontext(), {}, frozenset([0])
    backend._side = backend.dense
    backend.decode_guard = DecodeGuard()
    backend.decode_guard.served()
    return backend


def test_a_graph_that_was_captured_without_the_backend_is_not_replayed(backend, planned):
    """SGLang would have captured layers that decode densely."""
    backend.decode_guard = DecodeGuard()
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_out_graph(batch_of(2), in_capture=True)
    with pytest.raises(SparrowError, match="sparrow"):
        backend.init_forward_metadata_out_graph(batch_of(2))
    backend.decode_guard.served()
    backend.init_forward_metadata_out_graph(batch_of(2))


def batch_of(size: int) -> SimpleNamespace:
    rows = torch.zeros(size, dtype=torch.int64)
    ones = torch.ones_like(rows)
    return SimpleNamespace(
        batch_size=size,
        req_pool_indices=rows,
        seq_lens=ones,
        seq_lens_cpu=ones,
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )


def test_every_captured_batch_lies_in_buffers_that_stay(backend, planned):
    """With DP attention over four ranks of one attention group SGLang captures multiples of four,
    and rounds the number of admitted requests up to one."""
    sizes = (20, 16, 8, 4)
    backend.init_cuda_graph_state(20, 20)
    for size in sizes:
        backend.init_forward_metadata_in_graph(batch_of(size))
    for size, (table, counts) in zip(sizes, planned, strict=True):
        assert len(table) == len(counts) == size
        assert table.data_ptr() == planned[0][0].data_ptr()
        assert counts.data_ptr() == planned[0][1].data_ptr()


def test_a_captured_batch_that_does_not_fit_is_refused(backend, planned):
    backend.init_cuda_graph_state(16, 16)
    with pytest.raises(AssertionError, match="20 requests"):
        backend.init_forward_metadata_in_graph(batch_of(20))
    backend.init_forward_metadata_in_graph(batch_of(16))
    with pytest.raises(AssertionError, match="20 requests"):
        backend.init_cuda_graph_state(20, 20)


class TestMemory:
    @pytest.fixture
    def left(self, monkeypatch):
        from sglang.srt import runtime_context

        from sparrow_sglang.attention_backends.kernels import decode, select

        monkeypatch.setattr(
            runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2, attn_dp_size=1)
        )
        for module in (decode, select):
            monkeypatch.setattr(module, "sm_count", lambda _: 132)
        monkeypatch.setattr(
            "sglang.srt.utils.common.get_cuda_graph_max_batch_size", lambda size: -(-size // 4) * 4
        )

        def bytes_left(
            available: int, device="cuda", kv_dtype=torch.bfloat16, **server
        ) -> int | None:
            model = {
                "hf_config": {"num_hidden_layers": 64},
                "head_dim": 128,
                "hidden_size": 5120,
                "num_attention_heads": 64,
                "context_len": 262_144,
                "get_num_kv_heads": lambda tp_size: 16 // tp_size,
            }
            kvc = kv_configurator(server, model, device=device, kv_cache_dtype=kv_dtype)
            prepare_model(None, kvc)
            return memory.reserve_decode_buffers(available, kvc, 80.0)

        return bytes_left

    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_it_is_what_the_step_allocates(self, left, kv_dtype):
        from sparrow_sglang.schedules.names import load_schedule

        schedule = load_schedule("fixed-512", 16)
        shape = DecodeShape(schedule, 32, 8, 128, 262_144, kv_dtype.itemsize)
        held = DecodeBuffers(shape, 20, torch.device("cpu")).num_bytes
        assert 10**10 - left(10**10, kv_dtype=kv_dtype, max_running_requests=17) == held

    def test_others_leave_everything(self, left):
        assert left(100, attention_backend="flashinfer") is None
        assert left(100, device="cpu") is None
