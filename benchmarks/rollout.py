"""`sparrow bench rollout`: replay a rollout's response lengths, sparse and dense. Stock SGLang,
with CUDA graphs, radix cache and overlap scheduler on, serves the same requests first on one side
and then on the other; each side runs in a process of its own."""

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

from sparrow_sglang.benchmarks.common import (
    MODELS,
    RESERVED,
    STOCK,
    Side,
    add_draft_options,
    add_engine_arguments,
    add_row,
    begin,
    bench_parser,
    engine_settings,
    in_fresh_process,
    known_models,
    read_result,
    require_cuda,
    running,
    set_acceptance_rate,
)
from sparrow_sglang.calibration.prompts import builtin_prompts, tokenizer_of
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder, path_problem
from sparrow_sglang.plugin.arguments.server_args import engine_arguments
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.schedules.names import load_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import DRAFTS, PAGE_SIZE

GROUP = 8
"""Sequences that share one prompt."""
SIGMA = 0.8
"""Standard deviation of the logarithm of lengths: those of a reasoning model span an order of
magnitude."""
# The first token is streamed immediately; afterwards, few messages keep the host's load small.
STREAM_INTERVAL = 16

DESCRIPTION = """\
Replay a rollout in stock SGLang, sparse and dense: all sequences start together and each generates
exactly as many tokens as its length says, until the last one is done. Reports seconds to the first
token and to the last one, tokens/s, and when each sequence ended.
Weights are random (nothing is downloaded) unless --model-path names a model.
"""
EXAMPLES = """\
  sparrow bench rollout                       64 sequences of 8K tokens on average, at most 32K
  sparrow bench rollout --sequences 128 --mean-tokens 10000 --out rollout.json
  sparrow bench rollout --drafts 8            lossless decoding
  sparrow bench rollout --model qwen3-8b --sequences 32
"""


@dataclass(frozen=True)
class Model:
    """A model in `path`, with random weights unless `has_weights`, and its schedule. `config` is
    that of the language model."""

    name: str
    path: Path
    has_weights: bool
    config: Mapping[str, Any]
    schedule: str


@dataclass(frozen=True)
class Request:
    """One sequence: its prompt's token ids, and how many tokens it generates."""

    prompt: list[int]
    new_tokens: int


def synthetic_lengths(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """`count` lengths whose mean is `mean`, log-normal and cut off at `longest`, in random order.
    The lengths are quantiles of the distribution rather than draws, so that even a few sequences
    have its mean and its tail. As in a rollout with a token limit, longer ones become `longest`.
    Raises `ValueError` unless 1 <= mean < longest."""
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


def make_requests(lengths: Sequence[int], prompts: Sequence[list[int]]) -> list[Request]:
    """A request per length; each eight consecutive ones share one of `prompts`."""
    return [Request(prompts[i // GROUP], length) for i, length in enumerate(lengths)]


def replay(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Run all requests together to the last token; return totals and when each request ended. The
    prefix cache is flushed first. Raises `RuntimeError` if a request ends at another length."""
    connect(engine).flush_cache(60.0)

    async def together() -> list[tuple[float, float, int]]:
        start = time.perf_counter()
        return await asyncio.gather(
            *(_follow(engine, *each, start) for each in enumerate(requests))
        )

    followed = engine.loop.run_until_complete(together())
    first_token_s, ended_s, rounds = zip(*followed, strict=True)
    output_tokens, seconds = sum(request.new_tokens for request in requests), max(ended_s)
    return {
        "sequences": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output_tokens,
        "longest": max(request.new_tokens for request in requests),
        "first_token_median_s": median(first_token_s),
        "first_token_last_s": max(first_token_s),
        "seconds": seconds,
        "tokens_per_s": output_tokens / seconds,
        "tokens_per_round": output_tokens / sum(rounds) if sum(rounds) else None,
        "ended_s": ended_s,
    }


async def _follow(
    engine: Any, index: int, request: Request, start: float
) -> tuple[float, float, int]:
    """Seconds from `start` to the request's first token, and to its last one; rounds."""
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
    meta = (await anext(parts))["meta_info"]
    first_token_s = time.perf_counter() - start
    async for part in parts:
        meta = part["meta_info"]
    if (tokens := meta["completion_tokens"]) != request.new_tokens:
        raise RuntimeError(
            f"sequence {index} ended with {tokens} tokens instead of {request.new_tokens}:"
            f" {meta['finish_reason']}"
        )
    return first_token_s, time.perf_counter() - start, meta.get("spec_verify_ct", 0)


def engine_defaults(
    model: Model, side: Side, requests: Sequence[Request], on_gpu: bool
) -> dict[str, Any]:
    arguments = engine_settings(model.path, model.has_weights, side)
    # Each part of a stream has only the tokens since the last part.
    arguments |= {"max_running_requests": len(requests), "incremental_streaming_output": True}
    if side.drafts:
        arguments["enable_metrics"] = True
    if on_gpu:
        return arguments | {"cuda_graph_max_bs_decode": len(requests)}
    # On a CPU, float32 is the fast path of plain torch. The KV pool has room for all sequences.
    room = sum(len(each.prompt) + each.new_tokens + 2 * PAGE_SIZE for each in requests)
    return arguments | {"dtype": "float32", "max_total_tokens": room}


def run_side(model: Model, side: Side, options: Any) -> None:
    import torch

    requests = make_requests(request_lengths(options), _prompts(model, options))
    defaults = engine_defaults(model, side, requests, torch.cuda.is_available())
    arguments = defaults | engine_arguments(options.engine_args)
    rate = options.acceptance_rate
    with running(side, arguments, rate, options.always_draft) as (engine, served):
        replay(engine, make_requests([32] * GROUP, [requests[-1].prompt[::-1]]))
        before = _drafts_judged() if side.drafts else ()
        measured = replay(engine, requests)
        judged = _drafts_judged() if side.drafts else ()
    row = {"model": model.name, "backend": served, "schedule": side.schedule} | measured
    if side.drafts:
        proposed, accepted = (now - then for now, then in zip(judged, before, strict=True))
        row |= {"drafts": side.drafts, "draft_weights": side.weights}
        row |= {"always_draft": options.always_draft}
        row["acceptance_rate"] = accepted / proposed if proposed else None
    add_row(options.out, row)
    name = " ".join(filter(None, (served, side.schedule, side.weights)))
    print(f"{model.name} ({name}): {summary(row)}", flush=True)


def _drafts_judged() -> tuple[float, float]:
    """Drafts whose predecessors were all accepted, and those accepted of them, of all servers that
    this process has started."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    names = ("sparrow:drafts_total", "sparrow:accepted_drafts_total")
    proposed, accepted = (sum(one.value for one in samples if one.name == name) for name in names)
    return proposed, accepted


def _prompts(model: Model, options: argparse.Namespace) -> list[list[int]]:
    """A prompt for each group: random tokens, or with real weights questions about Python's
    reference, of up to a quarter more tokens."""
    tokens, count = options.prompt_tokens, options.sequences // GROUP
    if not model.has_weights:
        draw = random.Random(options.seed)
        return [draw.choices(range(model.config["vocab_size"]), k=tokens) for _ in range(count)]
    tokenize, room = tokenizer_of(str(model.path)), tokens + tokens // 4
    questions = builtin_prompts(tokenize, room, tokens, 0, count, "check", options.seed)
    return [list(prompt.input_ids) for prompt in questions[-count:]]


def summary(row: Mapping[str, Any]) -> str:
    rounds = f", {row['tokens_per_round']:.2f} a round" if row["tokens_per_round"] else ""
    if row.get("acceptance_rate"):
        rounds += f", {row['acceptance_rate']:.3f} of the drafts accepted"
    return (
        f"first token {row['first_token_median_s']:.2f} s (median),"
        f" {row['first_token_last_s']:.2f} s (last sequence); last token {row['seconds']:.1f} s;"
        f" {row['tokens_per_s']:,.0f} tokens/s{rounds}"
    )


def speed_ups(rows: Sequence[Mapping[str, Any]], mode: str) -> list[str]:
    """A line for each sparse side: dense over sparse seconds to the first token of all sequences
    and to the last token. Empty until the dense side is measured."""
    dense = next((row for row in rows if not row["schedule"]), None)
    return [
        f"{row['model']}: {' '.join(filter(None, (mode, row.get('draft_weights'))))} is"
        f" {dense['first_token_last_s'] / row['first_token_last_s']:.2f}x as fast as dense to the"
        f" first tokens, {row['tokens_per_s'] / dense['tokens_per_s']:.2f}x to the last one"
        for row in rows
        if dense and row["schedule"]
    ]


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("rollout", DESCRIPTION, EXAMPLES, "rollout.json")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default="qwen3-1.7b",
        help=f"shapes of the model with random weights: {', '.join(known_models())}",
    )
    model.add_argument(
        "--model-path",
        help=f"folder of a model to load instead, or {EMBEDDED_MODEL_NAME}; works without a GPU",
    )
    add = parser.add_argument
    add(
        "--schedule",
        help="shipped name, .json file or fixed-<tokens> (default: the model's for target 0.86)",
    )
    add(
        "--dense-backend",
        default=STOCK,
        help="attention backend of SGLang to compare with (default: SGLang's own choice;"
        " torch_native without a GPU)",
    )
    add("--sequences", type=at_least(1, 2**16), default=64, help=f"a multiple of {GROUP}")
    add("--mean-tokens", type=count, default=8192, help="mean of the log-normal lengths")
    add("--max-tokens", type=count, default=32768, help="longer lengths are cut off there")
    add("--prompt-tokens", type=count, default=256, help="tokens per prompt")
    add("--seed", type=int, default=0, help="seed of prompts and order")
    add_draft_options(parser, several=False)
    add(
        "--always-draft",
        action="store_true",
        help="draft K tokens in each round, also where fewer are faster",
    )
    add_engine_arguments(parser)
    return parser


def _model(options: argparse.Namespace) -> Model:
    """The model that the options name. Raises `ValueError`, before torch is imported."""
    if options.model_path is None:
        if options.model not in known_models():
            raise ValueError(f"--model {options.model!r}: expected {', '.join(known_models())}")
        path = MODELS / options.model
    else:
        path = Path(model_folder(options.model_path))
        if problem := path_problem(str(path)):
            raise ValueError(f"--model-path {path}: {problem}")
    config = read_object(path / "config.json", "a model's config.json")
    if options.schedule is not None:
        load_schedule(options.schedule, PAGE_SIZE).for_model(config)
    schedule = options.schedule or (
        DRAFTS if options.drafts else schedule_for_model(config, PAGE_SIZE).name
    )
    has_weights = options.model_path is not None
    name = path.name if has_weights else options.model
    return Model(name, path, has_weights, text_config(config), schedule)


def _dense_backend(options: argparse.Namespace) -> str:
    name: str = options.dense_backend
    if name == BACKEND:
        raise ValueError(f"--dense-backend {name}: expected a dense backend, such as fa3")
    from torch.cuda import is_available

    return "torch_native" if name == STOCK and not is_available() else name


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    set_acceptance_rate(options, bool(options.drafts) and options.model_path is None)
    lengths = request_lengths(options)
    model, dense_backend = _model(options), _dense_backend(options)
    arguments = engine_arguments(options.engine_args, RESERVED)
    context = arguments.get("context_length") or model.config["max_position_embeddings"]
    longest = options.prompt_tokens * (5 if model.has_weights else 4) // 4 + max(lengths)
    if longest >= context:
        raise ValueError(
            f"sequences of {longest} tokens do not fit into the model's context of {context}"
        )
    if not model.has_weights:
        require_cuda()
    begin(options, lengths=lengths)
    # Sparse first: no time is spent on the dense side if the sparse side refuses the settings.
    of_drafts = options.draft_weights if options.drafts else [None]
    sides = [Side(BACKEND, model.schedule, options.drafts, weights) for weights in of_drafts]
    for side in (*sides, Side(dense_backend)):
        if not in_fresh_process(run_side, model, side, options):
            print(f"{model.name} {side.backend}: failed", file=sys.stderr, flush=True)
            break
    lines = speed_ups(read_result(options.out)["rows"], "lossless" if options.drafts else "sparse")
    print(*lines, sep="\n")
    return 0 if len(lines) == len(sides) else 1
