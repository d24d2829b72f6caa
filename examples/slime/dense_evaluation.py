"""slime's evaluation by dense decode; its rollouts stay sparse. slime loads it by
`--custom-generate-function-path dense_evaluation.generate`. It sends evaluation past the router, as
sglang-router 0.3.2 drops `custom_params`."""

import copy
import random
from typing import Any

from slime.rollout import sglang_rollout
from slime.utils.http_utils import get


async def generate(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """slime's own `generate`, for evaluation on one of the router's servers."""
    if evaluation:
        workers = await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
        url = random.choice(workers["workers"])["url"]
        args = copy.copy(args)
        args.sglang_router_ip, _, args.sglang_router_port = url.removeprefix("http://").rpartition(
            ":"
        )
        custom = sampling_params.get("custom_params", {}) | {"sparrow": {"dense": True}}
        sampling_params = sampling_params | {"custom_params": custom}
    return await sglang_rollout.generate(args, sample, sampling_params)
