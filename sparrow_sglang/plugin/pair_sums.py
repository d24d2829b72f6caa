"""The call with which calibration measures rotary pairs over the prefill passes of a server."""

from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow_sglang.plugin.scheduler_calls import (
    ControlError,
    call_schedulers,
    gather_tp,
    scheduler_rpc,
)

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_PAIRS = "pairs"


async def pairs(manager: "TokenizerManager", landmark_tokens: int | None = None) -> dict[str, Any]:
    """Start measuring with landmarks of `landmark_tokens`; None ends it and returns the sums, in
    `layers` rows [KV heads][D/2] for each layer that keeps landmarks, see `PairVariances`. Raises
    `ControlError` if no measurement was started."""
    fields = {} if landmark_tokens is None else {"landmark_tokens": landmark_tokens}
    replicas = [a["layers"] for a in (await call_schedulers(manager, _PAIRS, fields)).values()]
    return {
        "layers": {
            layer: np.sum([replica[layer] for replica in replicas], 0).tolist()
            for layer in replicas[0]
        }
    }


@scheduler_rpc(_PAIRS)
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
        raise ControlError("landmark_tokens=None: expected a number first, to start a measurement")
    if req_to_token.is_cuda:
        # The last forward pass may still run, on another stream.
        torch.cuda.synchronize(req_to_token.device)
    local = {layer: sums.cpu().numpy() for layer, sums in sorted(measured.sums.items())}
    gathered = gather_tp(scheduler, (backend.kv_heads, local))
    # A KV head's query heads may lie on several ranks.
    num_heads = max(heads.stop for heads, _ in gathered)
    layers = {}
    for layer, rows in local.items():
        total = np.zeros((num_heads, rows.shape[1]))
        for heads, sums in gathered:
            total[heads.start : heads.stop] += sums[layer]
        layers[str(layer)] = total.tolist()
    return {"layers": layers}
