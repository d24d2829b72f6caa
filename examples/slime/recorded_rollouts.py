"""Exact acceptance rates of slime's own rollouts, before the weights change.

slime loads it by `--custom-generate-function-path recorded_rollouts.generate`; evaluation is dense,
as in dense_evaluation.py. While a server has a free slot, a rollout is sent to it past the router,
and its rates go to the sample's `metadata["sparrow_acceptance"]`, see `exact_rates`. Settings that
it reads from slime's `--custom-config-path`:

    sparrow_slots: 8                      per server; servers need SPARROW_RECORD=<slots>x<tokens>
    sparrow_sampling: {ignore_eos: true}  further sampling parameters of SGLang for all requests
"""

import copy
from collections import defaultdict
from typing import Any

from dense_evaluation import generate as evaluate
from slime.rollout import sglang_rollout
from slime.utils.http_utils import get, post

from sparrow_sglang.mismatch.exact_rates import comparing_request, exact_rates, record_into

RATES = "sparrow_acceptance"
_in_use: dict[str, set[int]] = defaultdict(set)


async def generate(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """slime's own `generate`; where a slot is free, the sample gets acceptance rates."""
    sampling_params = sampling_params | getattr(args, "sparrow_sampling", {})
    if evaluation:
        return await evaluate(args, sample, sampling_params, evaluation=True)
    # Older weights have sampled a part of a response that goes on, so it gets no rates. They are of
    # distributions at temperature 1.
    recorded = not sample.response_length and sampling_params["temperature"] == 1
    place = await _free_slot(args) if recorded else None
    if place is None:
        return await sglang_rollout.generate(args, sample, sampling_params)
    url, slot = place
    try:
        return await _recorded(args, sample, sampling_params, url, slot)
    finally:
        _in_use[url].discard(slot)


async def _recorded(
    args: Any, sample: Any, sampling_params: dict[str, Any], url: str, slot: int
) -> Any:
    state = sglang_rollout.GenerateState(args)
    prompt = sglang_rollout._prepare_prompt_ids(sample, state.tokenizer, state.processor)
    server = copy.copy(args)
    server.sglang_router_ip, _, server.sglang_router_port = url.removeprefix("http://").rpartition(
        ":"
    )
    own = sampling_params.get("custom_params") or {}
    params = {"custom_params": own | record_into(slot, len(prompt))}
    sample = await sglang_rollout.generate(server, sample, sampling_params | params)
    response = sample.tokens[len(prompt) :]
    if sample.status != sample.Status.ABORTED and len(response) > 1:
        request = comparing_request(slot, prompt, response)
        answer = await post(f"{url}/generate", request)
        if answer["meta_info"]["finish_reason"]["type"] != "abort":
            sample.metadata = (sample.metadata or {}) | {RATES: exact_rates(answer).tolist()}
    return sample


async def _free_slot(args: Any) -> tuple[str, int] | None:
    """Reserve a slot of the server that has the most free slots; None if it has none."""
    workers = await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
    urls = [worker["url"] for worker in workers["workers"]]
    url = min(urls, key=lambda url: len(_in_use[url]))
    free = set(range(args.sparrow_slots)) - _in_use[url]
    if not free:
        return None
    slot = min(free)
    _in_use[url].add(slot)
    return url, slot
