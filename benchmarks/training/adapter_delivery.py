"""Costs of an adapter: its training step, and its two deliveries to rollouts (merged, unmerged).

In: a trained adapter and responses. Out: decode speed of an engine, the acceptance rate between
the distributions of both deliveries, and seconds of an adapter step and of a dense update.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparrow_sglang.benchmarks.gpu_times import seconds_of
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.rl.acceptance import tail_percentile
from sparrow_sglang.rl.batch import TokenSequence
from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.policy.chunked_logprobs import acceptance_between
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.sparse_policy import SparseRule
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.schedule import BudgetSchedule

REPEATS = 3


@dataclass(frozen=True)
class Learner:
    """A policy and the adapter that it carries."""

    policy: DensePolicy
    adapter: SparseAdapter


def decode_speed(
    engine: LocalEngine, prompts: Sequence[Prompt], new_tokens: int, adapter: str | None = None
) -> dict[str, Any]:
    """Tokens per second of one response of `new_tokens` to each prompt, all at once; medians.

    `tokens_per_s` is end to end, prefill included. `step_ms` is the time that a decode step adds:
    the time of `new_tokens` minus that of one token, over the number of steps between.
    """
    endpoint = connect(engine.engine)

    def seconds(tokens: int) -> float:
        endpoint.flush_cache(60.0)
        parameters = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        common = {"sampling_params": parameters} | ({"lora_path": adapter} if adapter else {})
        requests = [{"input_ids": list(prompt.input_ids)} | common for prompt in prompts]
        return seconds_of(lambda: endpoint.generate(requests))

    seconds(new_tokens)
    whole = [seconds(new_tokens) for _ in range(REPEATS)]
    prefill = statistics.median(seconds(1) for _ in range(REPEATS))
    generated = len(prompts) * new_tokens
    return {
        "requests": len(prompts),
        "new_tokens": new_tokens,
        "tokens_per_s": generated / statistics.median(whole),
        "tokens_per_s_all": [generated / each for each in whole],
        "step_ms": (statistics.median(whole) - prefill) / max(1, new_tokens - 1) * 1e3,
    }


@torch.no_grad()
def agreement(
    learner: Learner, model_path: str, sequences: Sequence[TokenSequence], schedule: BudgetSchedule
) -> dict[str, dict[str, float]]:
    """Exact acceptance rates between the sparse distribution with the unmerged adapter and others.

    "merged" is the distribution of the merged weights, summed in fp32 and rounded to bf16 once, as
    an engine loads them. "base" is the distribution without the adapter; it shows how large the
    adapter's effect is. The learner's base weights must be those of the checkpoint in `model_path`.
    """
    policy, adapter = learner.policy, learner.adapter
    merged = DensePolicy.load(ModelConfig(path=model_path), OptimizerConfig(), policy.device)
    weights = dict(merged.named_weights())
    for name, weight in adapter.merged_weights():
        weights[name].copy_(weight.bfloat16())
    rates: dict[str, list[torch.Tensor]] = {"merged": [], "base": []}
    for model in (policy.model, merged.model):
        model.eval()
    for packed in policy.micro_batches(sequences):
        rule = SparseRule(schedule, packed.prompt_lengths)
        with adapter.enabled():
            beside = policy.hidden(packed, rule)
        for name, other in (("merged", merged), ("base", policy)):
            alpha = acceptance_between(other.hidden(packed, rule), beside, policy.head)
            rates[name].append(alpha.cpu())
    return {name: _summary(torch.cat(parts)) for name, parts in rates.items()}


def adapter_cost(
    learner: Learner, sequences: Sequence[TokenSequence], schedule: BudgetSchedule
) -> dict[str, Any]:
    """Seconds of an adapter step and of a dense policy update on the same responses; medians.

    The adapter step includes the dense forward that gives its target. Both steps change the
    learner's weights, so it must not be used afterwards. Peak memory is given on a GPU.
    """
    policy, adapter = learner.policy, learner.adapter
    step_s, step_gib = _timed(lambda: adapter.step(sequences, schedule))
    update_s, update_gib = _timed(
        lambda: policy.loss_step(sequences, lambda logprobs, _: -logprobs.mean())
    )
    return {
        "responses": len(sequences),
        "tokens": sum(len(response) for _, response in sequences),
        "longest": max(len(prompt) + len(response) for prompt, response in sequences),
        "adapter_step_s": step_s,
        "adapter_step_peak_gib": step_gib,
        "dense_update_s": update_s,
        "dense_update_peak_gib": update_gib,
        "share_of_dense_update": step_s / update_s,
    }


def _timed(step: Callable[[], object]) -> tuple[float, float | None]:
    """Median seconds of a step after one warm-up step, and its peak GiB on a GPU."""
    on_gpu = torch.cuda.is_available()
    seconds_of(step)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds_of(step) for _ in range(REPEATS))
    return median, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


def _summary(alpha: torch.Tensor) -> dict[str, float]:
    values = alpha.double().numpy()
    return {
        "tokens": len(values),
        "mean": float(values.mean()),
        "tail": tail_percentile(values),
        "min": float(values.min()),
    }
