"""Start verl's own SGLang rollout server with sparse decode, and generate with it.

Prints a JSON object a line: the versions and the active schedule, continuations of the text of
`prompt_file` by sparse and by dense decode in one batch, and the dense policy's log-probs of the
sparse tokens. No trainer runs. Without a GPU, Ray is told of one that does not exist.
"""

import asyncio
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass

# verl's `get_rollout_replica_class` is not used: it imports SGLang as for an Intel AMX processor.
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from sparrow_sglang import get_schedule, score_dense
from sparrow_sglang.models import model_folder

FOLDER = Path(__file__).parent
# What verl reserves for one replica with its worker.
CPUS = 3


@hydra.main(config_path=".", config_name="rollout_cpu", version_base=None)
def main(config: DictConfig) -> None:
    gpus = None if torch.cuda.is_available() else 1
    ray.init(num_cpus=max(CPUS, os.cpu_count() or 0), num_gpus=gpus, include_dashboard=False)
    try:
        asyncio.run(rollout(config))
    finally:
        ray.shutdown()


async def rollout(config: DictConfig) -> None:
    settings = config.actor_rollout_ref
    settings.model.path = model_folder(settings.model.path)
    model = omega_conf_to_dataclass(settings.model)
    replica = SGLangReplica(
        replica_rank=0,
        config=settings.rollout,
        model_config=model,
        gpus_per_node=config.trainer.n_gpus_per_node,
    )
    await replica.init_standalone()
    url = f"http://{replica.server_address}"
    versions = {name: version(name) for name in ("verl", "sglang", "sparrow-sglang")}
    print_line(versions | {"schedule": get_schedule(url).name})

    text = (FOLDER / config.prompt_file).read_text(encoding="utf-8")
    prompt = model.tokenizer.encode(text)[-config.data.max_prompt_length :]
    dense = {"custom_params": {"sparrow": {"dense": True}}}
    answers = await asyncio.gather(
        generate(replica, "sparse", prompt, config.new_tokens),
        generate(replica, "dense", prompt, config.new_tokens, **dense),
    )
    for decode, output in zip(("sparse", "dense"), answers, strict=True):
        print_line(
            {
                "decode": decode,
                "prompt_tokens": len(prompt),
                "text": model.tokenizer.decode(output.token_ids),
                "token_ids": list(output.token_ids),
                "log_probs": output.log_probs,
                "stop_reason": output.stop_reason,
            }
        )
    sparse, _ = answers
    [scores] = score_dense(url, [(prompt, list(sparse.token_ids))])
    print_line({"decode": "sparse, scored densely", "log_probs": scores.logprobs.tolist()})


async def generate(
    replica: SGLangReplica, name: str, prompt: list[int], new_tokens: int, **more: Any
) -> Any:
    """verl's `TokenOutput` for greedy sampling; `more` are SGLang's sampling parameters."""
    greedy = {"temperature": 0, "max_new_tokens": new_tokens, "logprobs": True}
    return await replica.server_handle.generate.remote(
        prompt_ids=prompt, sampling_params=greedy | more, request_id=name
    )


def print_line(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
