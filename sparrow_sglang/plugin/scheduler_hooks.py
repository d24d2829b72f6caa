"""Hooks of a scheduler: request options, KV in the prefix tree, memory."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.hf_config import num_layers_of
from sparrow_sglang.plugin.exact_acceptance import assign_recordings, record_bytes
from sparrow_sglang.plugin.lossless.refusals import is_lossless
from sparrow_sglang.plugin.refusals import BACKEND, uses_sparrow
from sparrow_sglang.plugin.server_args import resolve_schedule
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.sglang_compat import versions
from sparrow_sglang.sglang_compat.arguments import resolved, rows_of_graphs
from sparrow_sglang.sglang_compat.install import INSTALL

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def remember_options(
    forward_batch: "ForwardBatch",
    cls: type,
    batch: "ScheduleBatch",
    model_runner: "ModelRunner",
    *args: Any,
    **kwargs: Any,
) -> None:
    """AFTER hook: put the options of a prefill's requests on the device, where decode reads them.
    Also announces decode batches to the guard, which refuses those that bypass the backend, and has
    `exact_acceptance` note the requests of a prefill. A step that is replayed from a CUDA graph
    knows of a request only its row in the token table, which is assigned before the first prefill
    pass. `init_new` runs on the stream of its pass."""
    state = PROCESS.scheduler
    if state is None:
        _require_another_backend(model_runner)
    elif forward_batch.forward_mode.is_decode():
        state.guard.announced()
    elif forward_batch.forward_mode.is_extend():
        state.budgets.set_options(
            [versions.kv_of(req).req_pool_idx for req in batch.reqs],
            [state.option(req) for req in batch.reqs],
        )
        if state.record is not None:
            assign_recordings(state, batch)


@functools.cache
def _require_another_backend(model_runner: "ModelRunner") -> None:
    """Raise if our backend is selected but this scheduler never built it; checks only once."""
    if uses_sparrow(model_runner.server_args):
        raise SparrowError(
            f"attention_backend={BACKEND!r}: SGLang serves by"
            f" {type(model_runner.attn_backend).__name__}, densely; {INSTALL}"
        )


def abort_one(original: Callable[..., None], scheduler: "Scheduler", message: "AbortReq") -> None:
    """AROUND hook: abort the request of that id only. SGLang aborts all requests whose ids begin
    with it, also when a client disconnects."""
    others: list[tuple[Req, str]] = []
    if PROCESS.scheduler is not None and not message.abort_all:
        names = ("running_batch", "cur_batch", "last_batch")
        batches = [getattr(scheduler, name, None) for name in names]
        for name in ("running_mbs", "mbs", "last_mbs"):
            batches += getattr(scheduler, name, None) or ()
        known = [req for batch in batches if batch is not None for req in batch.reqs]
        grammars = getattr(scheduler, "grammar_manager", scheduler)
        known += [*scheduler.waiting_queue, *getattr(grammars, "grammar_queue", ())]
        if (chunked := getattr(scheduler, "chunked_req", None)) is not None:
            known.append(chunked)
        others = [(req, req.rid) for req in set(known) if req.rid != message.rid]
    try:
        for req, rid in others:
            # No id begins like this one, as ids from outside begin like `message.rid`.
            req.rid = f"\0{rid}" if rid.startswith(message.rid) else rid
        original(scheduler, message)
    finally:
        for req, rid in others:
            req.rid = rid


def finish_by_token(original: Callable[..., None], req: "Req", new_accepted_len: int = 1) -> None:
    """AROUND hook: end a request where decoding token by token would. SGLang searches the text of a
    whole round for one stop string after the other, and for stop tokens only then, so a later match
    in the round hides an earlier one. In the round that an abort ends it searches nothing."""
    if new_accepted_len <= 1:
        original(req, new_accepted_len)
        return
    aborted, req.to_finish = req.to_finish, None
    if req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs:
        first = len(req.output_ids) - new_accepted_len
        tokens = req.output_ids[first:]
        del req.output_ids[first:]
        for token in tokens:
            req.output_ids.append(token)
            original(req)
            if req.finished():
                break
        req.output_ids.extend(tokens[len(req.output_ids) - first :])
    else:
        original(req, new_accepted_len)
    if aborted and not req.finished():
        req.to_finish = aborted
        original(req)
    if req.finished_len is not None:
        # Counted over the whole round.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def end_turns_at_their_stop(session: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook: a session continues after the returned tokens of its requests; in SGLang, after
    all tokens of their last round."""
    for node in session.req_nodes.values():
        node.req.output_ids = node.req.output_ids_through_stop


def keep_sparse_kv_private(
    req: "Req", tree_cache: "BasePrefixCache", **arguments: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE hook: KV written while decoding sparsely must not become another request's prefix. A
    finished request hands prompt and output to the prefix tree. KV of output tokens was computed
    from only part of the context, so a later request would silently inherit the mismatch. The
    prompt's pages enter the tree after prefill, and stay; if the request ends at its prefill, this
    hook inserts them. Lossless decoding leaves dense KV only, which may enter.

    Other ways into the tree: `cache_unfinished_req` runs after prefill only, over tokens that were
    prefilled (re-prefilled ones of a retracted request included); retraction and aborted chunks
    pass is_insert=False; `strip_thinking_cache` inserts less; streaming sessions, HiCache,
    disaggregation, diffusion models are refused at start-up."""
    without_insertion = versions.without_insertion(arguments)
    if PROCESS.scheduler is None or without_insertion is None or PROCESS.scheduler.lossless:
        return None
    first_sparse_length = PROCESS.scheduler.option(req).first_sparse_length()
    cached_tokens = versions.kv_of(req).kv_committed_len
    decoded = cached_tokens > len(req.origin_input_ids)
    if not decoded or first_sparse_length is None or cached_tokens < first_sparse_length:
        return None
    _cache_prefilled(req, tree_cache)
    return (req, tree_cache), without_insertion


def _cache_prefilled(req: "Req", tree_cache: "BasePrefixCache") -> None:
    """Put the whole pages of what was prefilled into the prefix tree, unless they are in it. SGLang
    does so after prefill unless the request has finished there. Under the overlap scheduler such a
    request counts as decoded, as its first decode step has been launched already."""
    kv, prefilled = versions.kv_of(req), versions.prefilled_tokens(req)
    whole_pages = prefilled // tree_cache.page_size * tree_cache.page_size
    if getattr(kv, "mamba_pool_idx", None) is not None:
        # Together with the prompt, the tree would take the linear-attention state after decode.
        return
    if versions.evicted_tokens(req):
        # The tree would treat sliding-window KV that decode has freed as cached.
        return
    # What `strip_thinking_cache` frees beyond the committed length must not be in the tree.
    if kv.cache_protected_len < whole_pages <= versions.cacheable_tokens(req):
        versions.cache_prefilled(req, tree_cache)


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

    schedule = resolve_schedule(kvc.server_args, kvc.model_config.hf_config)
    layers = set(versions.layer_range(kvc)).difference(schedule.dense_layers)
    heads = kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size)
    of_page = schedule.selection.landmark_bytes(
        schedule.page_size, kvc.model_config.head_dim, landmark_dtype(kvc.kv_cache_dtype).itemsize
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
    hf_config = kvc.model_config.hf_config
    schedule = resolve_schedule(server_args, hf_config)
    draft_tokens = server_args.speculative_num_draft_tokens
    shape = DecodeShape.of_model(
        schedule, kvc.model_config, parallel.attn_tp_size, kvc.kv_cache_dtype, draft_tokens
    )
    meta, device = torch.device("meta"), torch.device("cuda", kvc.gpu_id)
    needed = DecodeBuffers(shape, rows, num_layers_of(hf_config), meta, device).num_bytes
    if is_lossless(server_args):
        # Logits of a round, and as much twice while its probabilities are computed, in fp32.
        needed += 3 * 4 * rows * draft_tokens * kvc.model_config.vocab_size
    return available_bytes - needed - record_bytes(kvc.server_args, kvc.model_config)


def graph_runner_class(original: Callable[..., type], runner: "ModelRunner") -> type:
    """AROUND hook: capture dense decode steps, too, or the verifications of our algorithm."""
    if not uses_sparrow(runner.server_args) or runner.device != "cuda":
        return original(runner)
    if is_lossless(runner.server_args):
        from sparrow_sglang.plugin.lossless.worker import VerifyGraphs

        return VerifyGraphs
    from sparrow_sglang.plugin.dense_steps import DecodeGraphs

    return DecodeGraphs
