"""Measure in a running server which rotary pairs rank the model's pages, for a calibration.

In: a call to start, prompts, a call to read. Out: the sums of `PairVariances` of all KV heads.
"""

from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.scheduler_calls import ControlError, call_schedulers, scheduler_rpc
from sparrow_sglang.sglang_versions import ranks

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


_CALL = "pairs"
_Rows = list[list[float]]


async def pairs(manager: "TokenizerManager", landmark_tokens: int | None = None) -> dict[str, Any]:
    """Start measuring with landmarks of `landmark_tokens`; if None, end it and return the sums.

    Returns:
        `layers`: rows [KV heads][D/2] for each layer that keeps landmarks, see `PairVariances`;
        empty from the call that starts.

    Raises:
        ControlError: there is nothing to read, as no measurement was started.
    """
    fields = {} if landmark_tokens is None else {"landmark_tokens": landmark_tokens}
    replicas = await call_schedulers(manager, _CALL, fields)
    total: dict[str, _Rows] = {}
    for answer in replicas.values():
        for layer, rows in answer["layers"].items():
            total[layer] = _sum(total[layer], rows) if layer in total else rows
    return {"layers": total}


@scheduler_rpc(_CALL)
def _pairs(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    import torch

    from sparrow_sglang.attention_backends.backend import sparrow_backend
    from sparrow_sglang.attention_backends.pair_variance import PairVariances

    backend = sparrow_backend(scheduler.tp_worker.model_runner)
    req_to_token = scheduler.req_to_token_pool.req_to_token
    if fields:
        backend.pair_variances = PairVariances(fields["landmark_tokens"], req_to_token)
        return {"layers": {}}
    measured, backend.pair_variances = backend.pair_variances, None
    if measured is None:
        raise ControlError("rotary pairs are not measured: expected a call with landmark_tokens")
    if req_to_token.is_cuda:
        # The last forward pass may still run, on another stream.
        torch.cuda.synchronize(req_to_token.device)
    local = {str(layer): sums.tolist() for layer, sums in sorted(measured.sums.items())}
    return {"layers": _of_all_ranks(scheduler, backend.kv_heads, local)}


def _of_all_ranks(
    scheduler: "Scheduler", heads: range, local: dict[str, _Rows]
) -> dict[str, _Rows]:
    """Rows of all KV heads by layer, summed where a KV head's query heads lie on several ranks."""
    ps = ranks(scheduler)
    gathered: list[Any] = [(heads, local)]
    if ps.attn_tp_size > 1:
        import torch

        gathered = [None] * ps.attn_tp_size
        group = scheduler.attn_tp_cpu_group
        torch.distributed.all_gather_object(gathered, (heads, local), group=group)
    total = max(of_rank.stop for of_rank, _ in gathered)
    layers = {}
    for layer, rows in local.items():
        whole = [[0.0] * len(rows[0])] * total
        for of_rank, found in gathered:
            part = slice(of_rank.start, of_rank.stop)
            whole[part] = _sum(whole[part], found[layer])
        layers[layer] = whole
    return layers


def _sum(one: _Rows, other: _Rows) -> _Rows:
    return [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
