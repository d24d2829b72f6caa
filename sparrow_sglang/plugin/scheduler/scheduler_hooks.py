"""Hooks of a scheduler: request options, aborts, KV in the prefix tree, graphs."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.plugin.names import BACKEND, uses_sparrow
from sparrow_sglang.plugin.scheduler.exact_acceptance import assign_recordings
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.schedules.options import RETRACTED
from sparrow_sglang.sglang_compat import versions
from sparrow_sglang.sglang_compat.versions import INSTALL

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
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


def note_retraction(_: None, req: "Req", *args: Any, **kwargs: Any) -> None:
    """AFTER hook: for a report, send the length of the response at a retraction. The next token
    comes out of a prefill, and takes the entry along, as SGLang sends an entry for each token."""
    if PROCESS.scheduler is None or not PROCESS.scheduler.option(req).report:
        return
    req.customized_info = req.customized_info or {}
    entries, tokens = req.customized_info.setdefault(RETRACTED, []), len(req.output_ids)
    entries += [*[None] * (tokens - len(entries)), tokens]


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
    if PROCESS.scheduler is None or without_insertion is None or PROCESS.scheduler.mode.is_dense:
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


def graph_runner_class(original: Callable[..., type], runner: "ModelRunner") -> type:
    """AROUND hook: capture what the mode replays."""
    # Known since the model was loaded: the backend may not be built when SGLang first calls this.
    if PROCESS.decoding is None or runner.device != "cuda":
        return original(runner)
    mode, _ = PROCESS.decoding
    return mode.graph_runner()
