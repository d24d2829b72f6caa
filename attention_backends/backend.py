"""SGLang attention backend `sparrow`: dense prefill and extend, sparse decode. A pass runs in two
steps, as SGLang's interface has it: `init_forward_metadata*` plans from lengths that the host
knows, then `forward_extend` or `forward_decode` runs once per layer. The stock backend of the
device computes prefill and writes its KV. In models with windows it also decodes the layers that
are not sparse; elsewhere the sparse kernels decode them over all pages."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.attention_backends.decode_guard import DecodeGuard
from sparrow_sglang.attention_backends.dense_side import build_dense_side, kv_scales
from sparrow_sglang.attention_backends.gpu_decode import EAGER_ROWS, DecodeShape, TritonPagedDecode
from sparrow_sglang.attention_backends.kernels.select import NewTokens
from sparrow_sglang.attention_backends.landmarks import allocate_landmarks
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.hf_config import window_layers
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule
from sparrow_sglang.sglang_compat.arguments import resolved

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def _held_layers(pool: "KVCache") -> list[int]:
    # A pool with windows has the first mapping, of all its layers; a pool beside linear attention
    # has the second, of the other layers.
    for mapping in ("layers_mapping", "full_attention_layer_id_mapping"):
        if hasattr(pool, mapping):
            return list(getattr(pool, mapping))
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def sparrow_backend(runner: "ModelRunner") -> "SparrowAttnBackend":
    """The runner's `sparrow` backend, taken out of SGLang's hybrid one beside linear attention."""
    backend = runner.attn_backend
    return cast("SparrowAttnBackend", getattr(backend, "full_attn_backend", backend))


def _verified_tokens(forward_batch: "ForwardBatch") -> int:
    """Of each request of a verification."""
    return int(forward_batch.positions.numel()) // forward_batch.batch_size


def _refuse_arguments(layer: "RadixAttention", arguments: dict[str, Any]) -> None:
    """Raise `ValueError` for arguments of an attention call that the sparse kernels do not take."""
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise ValueError(
            f"attention layer {layer.layer_id}: sparse decode would ignore {', '.join(given)};"
            " choose another --attention-backend for this model"
        )


def _side_by_side(heads: torch.Tensor) -> torch.Tensor:
    """[B, heads, D] with the heads of a row next to each other, as the kernels read them. Most
    models pass a view of such rows, which is not copied; Gemma 3 passes transposed queries."""
    return heads if heads.stride(1) == heads.shape[2] else heads.contiguous()


class SparrowAttnBackend(AttentionBackend):
    """Dense prefill by the device's stock backend, sparse decode under a KV budget. `budgets` holds
    the active schedule and what requests require; hooks write it between passes. `landmarks` of
    each sparse layer are indexed by physical page: a prefix-cache hit has the landmarks of its
    pages in place, and a page that is freed and used again gets new ones before it is scored.
    `stock_layers` are those that the stock backend decodes. `dense_step`: whether the stock backend
    decodes all layers of the step that is planned next; `DecodeGraphs` writes it for captured
    steps. `dense_override`: whether decode steps are dense, whatever their lengths; None to go by
    them, as only captured steps do."""

    dense_step = False
    dense_override: bool | None = None
    _graph_tokens = 0

    def __init__(self, model_runner: "ModelRunner", schedule: BudgetSchedule) -> None:
        super().__init__()
        both_pools = model_runner.token_to_kv_pool
        # Windows may have a pool of their own, and the states of linear attention lie beside it.
        pool: MHATokenToKVPool = getattr(both_pools, "full_kv_pool", both_pools)
        self.token_to_kv_pool = both_pools
        self.req_to_token_pool = model_runner.req_to_token_pool
        num_pages = pool.k_buffer[0].shape[0] // schedule.page_size
        held = _held_layers(both_pools)
        # Released and resumed together with the KV cache.
        with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.landmarks = {
                layer_id: allocate_landmarks(
                    num_pages,
                    schedule.page_size,
                    pool.head_num,
                    pool.head_dim,
                    pool.dtype,
                    pool.device,
                    int4=schedule.selection == INT4,
                )
                for layer_id in held
                if layer_id not in schedule.dense_layers
            }
        self._last_sparse = max(self.landmarks, default=-1)
        self._keys = {layer: both_pools.get_key_buffer(layer) for layer in self.landmarks}
        on_cuda = model_runner.device == "cuda"
        self.dense, self._planning = build_dense_side(model_runner)
        self._narrow: dict[int, tuple[AttentionBackend, AbstractContextManager[object]]] = {}
        self._side = self.dense
        # Whether SGLang has to wait for the lengths of the previous round of lossless decoding.
        self.needs_cpu_seq_lens = not on_cuda or getattr(self.dense, "needs_cpu_seq_lens", True)
        hf_config = model_runner.model_config.hf_config
        not_sparse = [layer_id for layer_id in held if layer_id not in self.landmarks]
        self.stock_layers = frozenset(not_sparse if window_layers(hf_config) else ())
        # SGLang would copy keys and values of this dtype unchanged, so selection can store them. To
        # pools beside those of windows SGLang writes itself.
        self._copied_dtype = pool.dtype if on_cuda and not self.stock_layers else None
        self.decode_guard = DecodeGuard()
        req_to_token = model_runner.req_to_token_pool.req_to_token
        self.budgets = BudgetTable(schedule, req_to_token.shape[0], req_to_token.device)
        self.sparse: TorchPagedDecode | TritonPagedDecode
        if on_cuda:
            decode_shape = DecodeShape.of_model(
                schedule,
                model_runner.model_config,
                get_parallel().attn_tp_size,
                pool.dtype,
                resolved(model_runner.server_args).speculative_num_draft_tokens,
            )
            step = TritonPagedDecode(self.budgets, req_to_token, decode_shape)
            if self.landmarks:
                step.compile_prefill(self._keys, self.landmarks)
            self.sparse = step
            if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
                self.sparse.reserve(min(EAGER_ROWS, model_runner.req_to_token_pool.size))
        else:
            self.sparse = TorchPagedDecode(self.budgets, req_to_token)

    @property
    def schedule(self) -> BudgetSchedule:
        return self.budgets.schedule

    def support_triton(self) -> bool:
        return self.dense.support_triton()

    def add_verification(self, model_runner: "ModelRunner", width: int) -> None:
        """Serve verifications of `width` tokens, too, fewer than the server's arguments have. The
        dense side keeps tables for one width, so each has its own."""
        side, planning = build_dense_side(model_runner)
        # The name of FlashAttention's, and that of Triton's. FlashInfer goes by the batch.
        side.speculative_num_draft_tokens = side.num_draft_tokens = width  # type: ignore[attr-defined]
        self._narrow[width] = side, planning

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        narrow = self._narrow.get(max_num_tokens // max_bs)
        # With lossless decoding SGLang calls this for verifications, then for drafts, for which the
        # dense side would allocate anew what captured graphs read.
        if narrow is not None:
            narrow[0].init_cuda_graph_state(max_bs, max_num_tokens)
        elif max_num_tokens > self._graph_tokens:
            self.dense.init_cuda_graph_state(max_bs, max_num_tokens)
            self._graph_tokens = max_num_tokens
        # SGLang may round batches up past the number of requests that it admits.
        self.sparse.reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.dense.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        if forward_batch.forward_mode.is_idle():
            return
        side, planning = self._choose_side(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            with planning:
                side.init_forward_metadata(forward_batch)
            self._plan_verify(forward_batch, captured=False)
            return
        decode = forward_batch.forward_mode.is_decode()
        self.dense_step = decode and bool(self.dense_override)
        if self.stock_layers or self.dense_step or not decode:
            with self._planning:
                self.dense.init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens, forward_batch.seq_lens_cpu
        if decode:
            self.decode_guard.planned()
            self.sparse.plan_decode(forward_batch.req_pool_indices, *lengths)
        else:
            new_tokens = max(forward_batch.extend_seq_lens_cpu)
            self.sparse.plan_extend(forward_batch.req_pool_indices, *lengths, new_tokens)

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        verifies = forward_batch.forward_mode.is_target_verify()
        if not verifies:
            self.decode_guard.planned(captured=True)
            if not in_capture:
                self.decode_guard.replayed()
        side, planning = self._choose_side(forward_batch)
        if verifies or self.stock_layers or self.dense_step:
            with planning:
                side.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        # Small steps wait for the host, so the graph contains all of our plan.
        verifies, batch = forward_batch.forward_mode.is_target_verify(), forward_batch.batch_size
        if verifies:
            self._plan_verify(forward_batch, captured=True)
        else:
            self.sparse.plan_decode(
                forward_batch.req_pool_indices[:batch],
                forward_batch.seq_lens[:batch],
                forward_batch.seq_lens_cpu,
                captured=True,
            )
        if verifies or self.stock_layers or self.dense_step:
            self._side.init_forward_metadata_in_graph(forward_batch)

    def _choose_side(
        self, forward_batch: "ForwardBatch"
    ) -> tuple[AttentionBackend, AbstractContextManager[object]]:
        """The dense side of the pass that is planned, and a context to plan it in."""
        verifies = forward_batch.forward_mode.is_target_verify()
        width = _verified_tokens(forward_batch) if verifies else 1
        self._side, planning = self._narrow.get(width, (self.dense, self._planning))
        return self._side, planning

    def _plan_verify(self, forward_batch: "ForwardBatch", captured: bool) -> None:
        batch = forward_batch.batch_size
        self.sparse.plan_verify(
            forward_batch.req_pool_indices[:batch],
            forward_batch.seq_lens[:batch],
            _verified_tokens(forward_batch),
            captured,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        out = self._side.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self._end_dense(layer)
        return out

    def _end_dense(self, layer: "RadixAttention") -> None:
        """A layer of a dense pass is computed: after the last, write the landmarks of all."""
        if layer.layer_id == self._last_sparse:
            self.sparse.update_landmarks(self._keys, self.landmarks)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        self.decode_guard.served()
        if self.dense_step or layer.layer_id in self.stock_layers:
            out = self.dense.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if self.dense_step:
                self._end_dense(layer)
            return out
        arguments: dict[str, Any] = {"sinks": kwargs.pop("sinks", None)}
        _refuse_arguments(layer, kwargs)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            if k.dtype == v.dtype == self._copied_dtype and layer.layer_id in self.landmarks:
                heads = (-1, layer.tp_k_head_num, layer.head_dim)
                new = _side_by_side(k.view(heads)), _side_by_side(v.view(heads))
                arguments["new_tokens"] = NewTokens(*new, forward_batch.out_cache_loc)
            else:
                location = KVWriteLoc(forward_batch.out_cache_loc)
                pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
        k_scale, v_scale = kv_scales(layer)
        out = self.sparse.decode(
            _side_by_side(q.view(-1, layer.tp_q_head_num, layer.head_dim)),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.landmarks.get(layer.layer_id),
            layer.scaling * k_scale,
            v_scale,
            **arguments,
        )
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)
