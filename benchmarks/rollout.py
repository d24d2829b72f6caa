"""`sparrow bench rollout`: replay a rollout's response lengths, sparse and dense.

Stock SGLang, with CUDA graphs, radix cache and overlap scheduler on, serves the same requests first
on one side and then on the other; each side runs in a process of its own.
"""

import argparse
import asyncio
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.common import (
    ENGINE_MEMORY_GB,
    STOCK,
    Comparison,
    Side,
    add_draft_options,
    add_engine_arguments,
    add_model_options,
    add_row,
    backend_of,
    begin,
    bench_parser,
    comparison,
    engine_settings,
    measure_sides,
    read_result,
    require_cuda,
)
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import count
from sparrow_sglang.environment import exported
from sparrow_sglang.plugin.lossless.refusals import FORCED_ACCEPTANCE
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE

GROUP = 8
"""Sequences that share one prompt."""
SIGMA = 0.8
"""Standard deviation of the logarithm of lengths: those of a reasoning model span an order of
magnitude."""
SAMPLE_S = 1.0
# One message per 16 tokens of a request is fine enough for the curve, and a small load on the host.
STREAM_INTERVAL = 16

DESCRIPTION = """\
Replay a rollout in stock SGLang, sparse and dense: all sequences start together and each generates
exactly as many tokens as its length says, until the last one is done. Reports seconds to the first
token and to the last one, tokens/s, and the generated tokens and running sequences at each second.
Weights are random (nothing is downloaded) unless --model-path names a model.
"""
EXAMPLES = """\
  sparrow bench rollout                       64 sequences of 8K tokens on average, at most 32K
  sparrow bench rollout --sequences 128 --mean-tokens 10000 --out rollout.json
  sparrow bench rollout --drafts 8            lossless decoding
  sparrow bench rollout --model qwen3-8b --sequences 32
"""


@dataclass(frozen=True)
class Request:
    """One sequence: its prompt's token ids, and how many tokens it generates."""

    prompt: list[int]
    new_tokens: int


@dataclass
class Progress:
    """What has been seen of each request, in seconds since the start.

    `ended_s` is None while it runs. `first_token_s` are the times of first tokens, in their order.
    """

    tokens: list[int]
    ended_s: list[float | None]
    first_token_s: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def sample(self, seconds: float) -> None:
        """Append a point to the curve; its `tokens_per_s` covers the time since the last point."""
        last = self.curve[-1] if self.curve else {"s": 0.0, "tokens": 0}
        running = [n for n, end in zip(self.tokens, self.ended_s, strict=True) if end is None]
        total = sum(self.tokens)
        self.curve.append(
            {
                "s": seconds,
                "tokens": total,
                # Without a token yet, a request is still waiting or in prefill.
                "running": sum(1 for tokens in running if tokens),
                "unfinished": len(running),
                "tokens_per_s": (total - last["tokens"]) / max(seconds - last["s"], 1e-9),
            }
        )


def synthetic_lengths(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """`count` lengths whose mean is `mean`, log-normal and cut off at `longest`, in random order.

    The lengths are quantiles of the distribution rather than draws, so that even a few sequences
    have its mean and its tail. As in a rollout with a token limit, longer ones become `longest`.

    Raises `ValueError` unless 1 <= mean < longest.
    """
    if not 1 <= mean < longest:
        raise ValueError(
            f"--mean-tokens {mean}: expected 1 or more, and less than --max-tokens {longest}"
        )
    scores = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]

    def lengths(mu: float) -> list[float]:
        return [min(max(math.exp(mu + SIGMA * score), 1.0), longest) for score in scores]

    widest = SIGMA * scores[-1]
    low, high = -1 - widest, math.log(longest) + 1 + widest
    # The mean grows with mu; after 60 halvings the interval is as narrow as floats are.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    whole = [round(length) for length in lengths(high)]
    random.Random(seed).shuffle(whole)
    return whole


def request_lengths(options: argparse.Namespace) -> list[int]:
    """Response lengths in tokens, cut off at --max-tokens; raises `ValueError`."""
    if options.sequences % GROUP:
        raise ValueError(f"--sequences {options.sequences}: expected a multiple of {GROUP}")
    return synthetic_lengths(
        options.sequences, options.mean_tokens, options.max_tokens, options.seed
    )


def make_requests(
    lengths: Sequence[int], prompt_tokens: int, vocab_size: int, seed: int
) -> list[Request]:
    """A request per length; each eight consecutive ones share a random prompt."""
    draw = random.Random(seed)
    requests: list[Request] = []
    for start in range(0, len(lengths), GROUP):
        prompt = draw.choices(range(vocab_size), k=prompt_tokens)
        requests += [Request(prompt, length) for length in lengths[start : start + GROUP]]
    return requests


def replay(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Run all requests at once to the last token; return the totals and the curve over time.

    The prefix cache is flushed first. Raises `RuntimeError` if a request ends at another length.
    """
    connect(engine).flush_cache(60.0)
    number = len(requests)
    progress = Progress([0] * number, [None] * number)
    seconds: float = engine.loop.run_until_complete(_replay(engine, requests, progress))
    output_tokens = sum(progress.tokens)
    return {
        "sequences": number,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output_tokens,
        "longest": max(progress.tokens),
        "first_token_median_s": median(progress.first_token_s),
        "first_token_last_s": max(progress.first_token_s),
        "seconds": seconds,
        "tokens_per_s": output_tokens / seconds,
        "ended_s": progress.ended_s,
        "curve": progress.curve,
    }


async def _replay(engine: Any, requests: Sequence[Request], progress: Progress) -> float:
    start = time.perf_counter()

    async def watch() -> None:
        for number in itertools.count(1):
            await asyncio.sleep(start + number * SAMPLE_S - time.perf_counter())
            progress.sample(time.perf_counter() - start)

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.gather(
            *(_follow(engine, *each, start, progress) for each in enumerate(requests))
        )
    finally:
        watcher.cancel()
    seconds = time.perf_counter() - start
    progress.sample(seconds)
    return seconds


async def _follow(
    engine: Any, index: int, request: Request, start: float, progress: Progress
) -> None:
    parts = await engine.async_generate(
        input_ids=request.prompt,
        sampling_params={
            "max_new_tokens": request.new_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream_interval": STREAM_INTERVAL,
        },
        stream=True,
    )
    reason = None
    async for part in parts:
        if not progress.tokens[index]:
            progress.first_token_s.append(time.perf_counter() - start)
        progress.tokens[index] += len(part["output_ids"])
        reason = part["meta_info"]["finish_reason"]
    if (tokens := progress.tokens[index]) != request.new_tokens:
        raise RuntimeError(
            f"sequence {index} ended with {tokens} tokens instead of {request.new_tokens}: {reason}"
        )
    progress.ended_s[index] = time.perf_counter() - start


def engine_defaults(
    compared: Comparison, side: Side, requests: Sequence[Request], on_gpu: bool
) -> dict[str, Any]:
    arguments = engine_settings(
        compared.path, compared.has_weights, side.backend, side.schedule, side.drafts
    )
    # Each part of a stream has only the tokens since the last part.
    arguments |= {"max_running_requests": len(requests), "incremental_streaming_output": True}
    if on_gpu:
        return arguments | {"cuda_graph_max_bs_decode": len(requests)}
    # On a CPU, float32 is the fast path of plain torch. The KV pool has room for all sequences.
    room = sum(len(each.prompt) + each.new_tokens + 2 * PAGE_SIZE for each in requests)
    return arguments | {"dtype": "float32", "max_total_tokens": room}


def run_side(compared: Comparison, side: Side, options: argparse.Namespace) -> None:
    import sglang
    import torch

    prompt_tokens, vocab_size = options.prompt_tokens, compared.config["vocab_size"]
    requests = make_requests(request_lengths(options), prompt_tokens, vocab_size, options.seed)
    defaults = engine_defaults(compared, side, requests, torch.cuda.is_available())
    forced: AbstractContextManager[None] = nullcontext()
    if side.drafts and not compared.has_weights:
        forced = exported(FORCED_ACCEPTANCE, str(options.acceptance_rate))
    with forced, sglang.Engine(**defaults | engine_arguments(options.engine_args)) as engine:
        served = backend_of(engine) if side.backend == STOCK else side.backend
        replay(engine, make_requests([32] * GROUP, prompt_tokens, vocab_size, options.seed + 1))
        measured = replay(engine, requests)
    row = {"model": compared.model, "backend": served, "schedule": side.schedule} | measured
    if side.drafts:
        row["drafts"] = side.drafts
    add_row(options.out, row)
    print(f"{compared.model} {side.name} ({side.schedule or served}): {summary(row)}", flush=True)


def summary(row: Mapping[str, Any]) -> str:
    return (
        f"first token {row['first_token_median_s']:.2f} s (median),"
        f" {row['first_token_last_s']:.2f} s (last sequence); last token {row['seconds']:.1f} s;"
        f" {row['tokens_per_s']:,.0f} tokens/s"
    )


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Dense over sparse seconds to the first token of all sequences and to the last token; above 1
    where sparse is faster. None until both are measured."""
    sides = {"sparse" if row["schedule"] else "dense": row for row in rows}
    if len(sides) < 2:
        return None
    dense, sparse = sides["dense"], sides["sparse"]
    return {
        "first_token_speedup": dense["first_token_last_s"] / sparse["first_token_last_s"],
        "speedup": sparse["tokens_per_s"] / dense["tokens_per_s"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("rollout", DESCRIPTION, EXAMPLES, "rollout.json")
    add_model_options(parser)
    add = parser.add_argument
    add("--sequences", type=count, default=64, help=f"a multiple of {GROUP}")
    add("--mean-tokens", type=count, default=8192, help="mean of the log-normal lengths")
    add("--max-tokens", type=count, default=32768, help="longer lengths are cut off there")
    add("--prompt-tokens", type=count, default=256, help="tokens per prompt")
    add("--seed", type=int, default=0, help="seed of prompts and order")
    add_draft_options(parser, several=False)
    add_engine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        lengths = request_lengths(options)
        compared = comparison(options)
        arguments, positions = engine_arguments(options.engine_args), "max_position_embeddings"
        context = arguments.get("context_length") or compared.config[positions]
        longest = options.prompt_tokens + max(lengths)
        if longest >= context:
            raise ValueError(
                f"sequences of {longest} tokens do not fit into the model's context of {context}"
            )
    except ValueError as error:
        parser.error(str(error))
    if not compared.has_weights:
        require_cuda(parser, ENGINE_MEMORY_GB, "weights and KV cache")
    begin(parser, options, lengths=lengths)
    rows = measure_sides(compared, options, run_side)
    speed = compare(rows)
    write_json(options.out, read_result(options.out) | {"compared": speed})
    if not speed:
        return 1
    print(
        f"{compared.model}: sparse is {speed['first_token_speedup']:.2f}x as fast as dense to the"
        f" first tokens, {speed['speedup']:.2f}x to the last one"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
