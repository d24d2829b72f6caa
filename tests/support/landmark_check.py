"""A call that recomputes the landmarks in use and compares them with those that are stored. If this
module is imported before engines and servers start, they answer it."""

from typing import TYPE_CHECKING, Any

import torch
from step_cases import rounding

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks
from sparrow_sglang.plugin.launcher import routes
from sparrow_sglang.plugin.scheduler_calls import call_schedulers, requests_blocked, scheduler_rpc
from sparrow_sglang.sglang_compat.versions import kv_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


_CALL = "landmarks"


async def landmarks(manager: "TokenizerManager", timeout_s: float = 10.0) -> dict[str, Any]:
    """Check while no request runs. New requests wait meanwhile, and the check at most `timeout_s`
    for the running ones. Returns `pages`, the number of pages whose landmarks are right. Raises
    `ControlError` on the first wrong landmark, or if requests still run."""
    async with requests_blocked(manager, "a check of landmarks", timeout_s):
        by_rank = await call_schedulers(manager, _CALL, {})
    return {"pages": sum(answer["pages"] for answer in by_rank.values())}


@scheduler_rpc(_CALL)
def _check(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    check_landmarks(scheduler)
    return {"pages": len(live_pages(scheduler))}


routes.CALLS[_CALL] = landmarks, ["POST"]


def is_empty(tree_cache: Any) -> bool:
    """Whether a prefix tree has no nodes; in 0.5.23 its nodes need not be Python objects."""
    if hasattr(tree_cache, "tree_core"):
        return tree_cache.all_values_flatten().numel() == 0
    return not tree_cache.root_node.children


def live_pages(scheduler: "Scheduler") -> torch.Tensor:
    """Physical pages that a later decode step may score, [pages]: full, and owned by someone. Those
    are the pages of the prefix tree, and the full pages of running requests."""
    page_size = scheduler.page_size
    req_to_token = scheduler.req_to_token_pool.req_to_token
    slots = [req_to_token.new_empty(0)]
    if not is_empty(scheduler.tree_cache):
        slots.append(scheduler.tree_cache.all_values_flatten())
    for req in scheduler.running_batch.reqs:
        if kv_of(req).req_pool_idx is not None and not req.finished():
            full = kv_of(req).kv_committed_len // page_size * page_size
            slots.append(req_to_token[kv_of(req).req_pool_idx, :full])
    all_slots = torch.cat([tensor.long() for tensor in slots])
    return all_slots.div(page_size, rounding_mode="floor").unique()


def check_landmarks(scheduler: "Scheduler") -> None:
    """Raise RuntimeError naming the first page whose landmarks are not those of its keys."""
    from sparrow_sglang.attention_backends.backend import sparrow_backend

    backend = sparrow_backend(scheduler.tp_worker.model_runner)
    pages = live_pages(scheduler)
    if pages.is_cuda:
        # The last step may still run, on another stream.
        torch.cuda.synchronize(pages.device)
    for layer_id, landmarks in sorted(backend.landmarks.items()):
        keys = backend.token_to_kv_pool.get_key_buffer(layer_id)
        k_pages = keys.view(-1, backend.schedule.page_size, *keys.shape[1:])[pages]
        stored = landmarks.at(pages)
        expected = reference.page_landmarks(k_pages, isinstance(stored, Int4Landmarks))
        error = (stored.values() - expected.values()).abs()
        wrong = error > rounding(expected)
        if wrong.any():
            index = int(wrong.flatten(1).any(1).nonzero()[0])
            heads = int(wrong.flatten(2).any(2).sum())
            raise RuntimeError(
                f"stale landmark in layer {layer_id}, page {int(pages[index])}: off by"
                f" {float(error[index].max()):.3g}; {heads} of {len(pages)} pages x KV heads wrong"
            )
