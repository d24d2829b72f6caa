"""Hooks with which SGLang, when it sizes its KV pool, leaves memory for what a server adds."""

from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.names import uses_sparrow
from sparrow_sglang.plugin.scheduler.exact_acceptance import record_bytes
from sparrow_sglang.plugin.state import require_decoding
from sparrow_sglang.schedules.schedule import landmark_bytes
from sparrow_sglang.sglang_compat import versions
from sparrow_sglang.sglang_compat.arguments import resolved, rows_of_graphs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def reserve_landmarks(
    bytes_per_token: int, configurator: Any, kvc: "KVCacheConfigurator", num_layers: int
) -> int | None:
    """AFTER hook: the bytes of a token in the KV pool, with its share of landmarks."""
    if not uses_sparrow(kvc.server_args):
        return None
    return bytes_per_token + _landmark_bytes(kvc)


def reserve_landmarks_beside_windows(
    _: None, configurator: Any, kvc: "KVCacheConfigurator", *args: Any, **kwargs: Any
) -> None:
    """AFTER hook: as `reserve_landmarks`, where sliding windows have a pool of their own. The pools
    are sized by bytes of a token per layer that keeps the whole KV, and over all layers."""
    if not uses_sparrow(kvc.server_args):
        return
    layers = configurator._full_layers_num
    per_layer = -(-_landmark_bytes(kvc) // max(1, layers))
    configurator._full_per_token += per_layer
    configurator._cell_size += per_layer * layers


def _landmark_bytes(kvc: "KVCacheConfigurator") -> int:
    """A token's share of the landmarks that this process will hold."""
    from sglang.srt.runtime_context import get_parallel

    from sparrow_sglang.attention_backends.landmarks import landmark_dtype

    _, schedule = require_decoding()
    layers = set(versions.layer_range(kvc)).difference(schedule.dense_layers)
    heads = kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size)
    of_page = landmark_bytes(
        schedule.selection,
        schedule.page_size,
        kvc.model_config.head_dim,
        landmark_dtype(kvc.kv_cache_dtype).itemsize,
    )
    return -(-len(layers) * heads * of_page // schedule.page_size)


def reserve_decode_buffers(
    available_bytes: int, kvc: "KVCacheConfigurator", pre_model_load_memory: float
) -> int | None:
    """AFTER hook: the bytes of GPU memory that the KV pool may take, without the decode buffers.
    These are allocated later, and grow with the largest batch times the longest sequence: half a
    GiB for 512 requests of 256K tokens and 8 KV heads."""
    if kvc.device != "cuda" or not uses_sparrow(kvc.server_args):
        return None
    import torch
    from sglang.srt.runtime_context import get_parallel

    from sparrow_sglang.attention_backends.gpu_decode import EAGER_ROWS, DecodeBuffers, DecodeShape

    server_args, parallel = resolved(kvc.server_args), get_parallel()
    graphs = server_args.cuda_graph_config.decode
    rows = EAGER_ROWS if graphs.backend == "disabled" else graphs.max_bs
    if server_args.max_running_requests is not None:
        requests = server_args.max_running_requests // parallel.attn_dp_size
        rows = min(rows, rows_of_graphs(server_args, requests))
    mode, schedule = require_decoding()
    draft_tokens = server_args.speculative_num_draft_tokens
    shape = DecodeShape.of_model(
        schedule, kvc.model_config, parallel.attn_tp_size, kvc.kv_cache_dtype, draft_tokens
    )
    meta, device = torch.device("meta"), torch.device("cuda", kvc.gpu_id)
    needed = DecodeBuffers(shape, rows, meta, device).num_bytes
    needed += mode.round_bytes(rows, server_args, kvc.model_config)
    return available_bytes - needed - record_bytes(kvc.server_args, kvc.model_config)
