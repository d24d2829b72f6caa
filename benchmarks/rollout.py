"""`sparrow bench rollout`: whole rollouts of stock SGLang, dense and sparse. CUDA graphs, radix
cache and overlap scheduler are on. Random weights replay response lengths; a model's own weights
answer prompts to their own ends. Each side runs in a process of its own."""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

from sparrow_sglang.benchmarks import device_clock
from sparrow_sglang.benchmarks.common import (
    MODELS,
    NGRAM,
    RESERVED,
    Side,
    add_engine_arguments,
    add_row,
    add_side_options,
    begin,
    bench_parser,
    engine_settings,
    known_models,
    measure_sides,
    read_result,
    require_cuda,
    running,
    set_rates,
    sides_of,
)
from sparrow_sglang.benchmarks.prompts import prompt_messages
from sparrow_sglang.benchmarks.rounds import Rates, measured_rounds
from sparrow_sglang.calibration.prompts import read_prompts, tokenizer_of
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder, path_problem
from sparrow_sglang.plugin.arguments.server_args import engine_arguments
from sparrow_sglang.schedules.names import load_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import DRAFTS, PAGE_SIZE

GROUP = 8
"""Sequences that share one prompt."""
MOST_SETS = 5
"""Rollouts of one size with real weights, whose prompts differ."""
TRACED = 64
"""Tokens of the traced steps."""
SIGMA = 0.8
"""Standard deviation of the logarithm of lengths: those of a reasoning model span an order of
magnitude."""
# The first token is streamed immediately; afterwards, few messages keep the host's load small.
STREAM_INTERVAL = 16

DESCRIPTION = """\
Measure rollouts in stock SGLang, dense and sparse: seconds to the first token and to the last one,
tokens/s, and when each sequence ended. Compare with the faster of stock's sides.
Random weights (nothing is downloaded) replay lengths: all sequences start together, and each
generates exactly as many tokens as its length. With --model-path a model answers prompts at
temperature 1 to its own ends; its sides differ in lengths, so compare tokens/s.
"""
EXAMPLES = """\
  sparrow bench rollout                       64 sequences of 8K tokens on average, at most 32K
  sparrow bench rollout --model qwen3-8b --mean-tokens 3072 --max-tokens 8192 --drafts 8
                                              lossless decoding
  sparrow bench rollout --model-path M --drafts 8 --sides sparrow stock ngram --sizes 1 16 64
                                              your model, 8 answers to each prompt
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
    """One sequence: its prompt's token ids, and how many tokens it generates; at most, if it
    `ends` by itself."""

    prompt: list[int]
    new_tokens: int
    ends: bool = False


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


def make_requests(
    lengths: Sequence[int], prompts: Sequence[list[int]], ends: bool = False
) -> list[Request]:
    """A request per length; each eight consecutive ones share one of `prompts`."""
    return [Request(prompts[i // GROUP], length, ends) for i, length in enumerate(lengths)]


def replay(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Run all requests together to the last token; return totals and when requests ended. The
    prefix cache is flushed first. Raises `RuntimeError` if a request ends at another length."""
    connect(engine).flush_cache(60.0)

    async def together() -> list[tuple[float, float, int, int]]:
        start = time.perf_counter()
        return await asyncio.gather(
            *(_follow(engine, *each, start) for each in enumerate(requests))
        )

    followed = engine.loop.run_until_complete(together())
    first_token_s, finished_s, tokens, rounds = zip(*followed, strict=True)
    return {
        "sequences": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(tokens),
        "longest": max(tokens),
        "first_token_median_s": median(first_token_s),
        "first_token_last_s": max(first_token_s),
        "seconds": max(finished_s),
        "tokens_per_s": sum(tokens) / max(finished_s),
        "tokens_per_round": sum(tokens) / sum(rounds) if sum(rounds) else None,
        "finished_s": sorted(finished_s),
    }


async def _follow(
    engine: Any, index: int, request: Request, start: float
) -> tuple[float, float, int, int]:
    """Seconds from `start` to the request's first token, and to its last one; tokens, rounds."""
    parts = await engine.async_generate(
        input_ids=request.prompt,
        sampling_params={
            "max_new_tokens": request.new_tokens,
            "ignore_eos": not request.ends,
            "temperature": 1.0,
            "stream_interval": STREAM_INTERVAL,
        },
        stream=True,
    )
    meta = (await anext(parts))["meta_info"]
    first_token_s = time.perf_counter() - start
    async for part in parts:
        meta = part["meta_info"]
    tokens = meta["completion_tokens"]
    if tokens != request.new_tokens and not request.ends:
        raise RuntimeError(
            f"sequence {index} ended with {tokens} tokens instead of {request.new_tokens}:"
            f" {meta['finish_reason']}"
        )
    return first_token_s, time.perf_counter() - start, tokens, meta.get("spec_verify_ct", 0)


def engine_defaults(
    model: Model, side: Side, requests: Sequence[Request], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of an engine that has room for these requests together."""
    arguments = engine_settings(model.path, model.has_weights, side)
    # Each part of a stream has only the tokens since the last part.
    arguments |= {"max_running_requests": len(requests), "incremental_streaming_output": True}
    if on_gpu:
        return arguments | {"cuda_graph_max_bs_decode": len(requests)}
    # On a CPU, float32 is the fast path of plain torch. The KV pool has room for all sequences.
    room = sum(len(each.prompt) + each.new_tokens + 2 * PAGE_SIZE for each in requests)
    return arguments | {"dtype": "float32", "max_total_tokens": room}


def rollouts(model: Model, options: argparse.Namespace) -> list[list[list[Request]]]:
    """Requests by row of a result: each row is one size, measured with one or several sets."""
    if not model.has_weights:
        draw, count = random.Random(options.seed), options.sequences // GROUP
        vocabulary, tokens = range(model.config["vocab_size"]), options.prompt_tokens
        prompts = [draw.choices(vocabulary, k=tokens) for _ in range(count)]
        return [[make_requests(request_lengths(options), prompts)]]
    prompts = _prompts(model, options)
    rows = []
    for size in options.sizes:
        # A size of 4 is one prompt with four answers.
        groups = -(-size // GROUP)
        sets = min(MOST_SETS, max(1, len(prompts) // groups))
        taken = [
            [prompts[(i * groups + j) % len(prompts)] for j in range(groups)] for i in range(sets)
        ]
        rows.append([make_requests([options.max_tokens] * size, group, True) for group in taken])
    return rows


def _prompts(model: Model, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of --prompts, or of the prompts of `prompts.py`."""
    tokenize = tokenizer_of(str(model.path))
    if options.prompts is None:
        return [tokenize(messages) for messages in prompt_messages()]
    read = read_prompts(options.prompts, tokenize, model.config["max_position_embeddings"])
    return [list(prompt.input_ids) for prompt in read]


def run_side(
    side: Side,
    options: argparse.Namespace,
    model: Model,
    rates: Rates | None,
    rows: Sequence[Sequence[Sequence[Request]]],
) -> None:
    import torch

    largest = max((sets[0] for sets in rows), key=len)
    arguments = engine_defaults(model, side, largest, torch.cuda.is_available())
    arguments |= engine_arguments(options.engine_args)
    round_ = options.drafts if options.always_draft else None
    with running(side, arguments, rates, round_) as (engine, served):
        replay(engine, make_requests([32] * GROUP, [largest[-1].prompt[::-1]]))
        for sets in rows:
            row = {"model": model.name} | served | _measured(engine, side, sets)
            if side.rounds:
                row |= {
                    "drafts": str(side.rounds[0]),
                    "draft_weights": side.weights,
                    "always_draft": options.always_draft,
                    "assumed_rates": rates and rates._asdict(),
                }
            elif side.name != NGRAM:
                row |= _traced(engine, sets[0])
            add_row(options.out, row)
            print(f"{model.name} ({side}): {summary(row)}", flush=True)


def _measured(engine: Any, side: Side, sets: Sequence[Sequence[Request]]) -> dict[str, Any]:
    """The replays of sets one after the other: totals, medians, and each one's `finished_s`."""
    if side.rounds:
        from sparrow_sglang.benchmarks.given_rounds import take_counts

        take_counts(engine)
    replays = [replay(engine, requests) for requests in sets]
    counts = measured_rounds(take_counts(engine)) if side.rounds else {}
    if len(replays) == 1:
        return replays[0] | counts
    row = {name: [each[name] for each in replays] for name in replays[0]}
    total = {name: sum(row[name]) for name in ("prompt_tokens", "output_tokens", "seconds")}
    rounds = [each["output_tokens"] / (each["tokens_per_round"] or 1.0) for each in replays]
    has_rounds = replays[0]["tokens_per_round"] is not None
    return (
        total
        | {
            "sequences": len(sets[0]),
            "sets": len(sets),
            "longest": max(row["longest"]),
            "first_token_median_s": median(row["first_token_median_s"]),
            "first_token_last_s": median(row["first_token_last_s"]),
            "tokens_per_s": total["output_tokens"] / total["seconds"],
            "tokens_per_round": total["output_tokens"] / sum(rounds) if has_rounds else None,
            "finished_s": row["finished_s"],
        }
        | counts
    )


def _traced(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """The first steps of a rollout of these requests, by the clocks of host and device."""
    few = [Request(request.prompt, TRACED) for request in requests]
    replay(engine, few)
    times = device_clock.profiled(engine, lambda: replay(engine, few), 1)
    return {"first_steps": times} if times else {}


def summary(row: Mapping[str, Any]) -> str:
    rounds = f", {row['tokens_per_round']:.2f} a round" if row["tokens_per_round"] else ""
    for name, what in (("acceptance_rate", "drafts"), ("lookup_acceptance", "lookups")):
        if row.get(name):
            rounds += f", {row[name]:.3f} of the {what} accepted"
    return (
        f"{row['sequences']} sequences, first token {row['first_token_median_s']:.2f} s (median),"
        f" {row['first_token_last_s']:.2f} s (last sequence); last token {row['seconds']:.1f} s;"
        f" {row['tokens_per_s']:,.0f} tokens/s{rounds}"
    )


def speed_ups(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each side with a schedule, and for NGRAM: seconds to the first token of all
    sequences and tokens/s, over those of the fastest dense side of as many sequences. Empty until
    a dense side is measured."""
    dense: dict[int, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["tokens_per_s"])):
        if not row["schedule"] and row["side"] != NGRAM:
            dense[row["sequences"]] = row
    lines = []
    for row in rows:
        base = dense.get(row["sequences"])
        if base is None or not (row["schedule"] or row["side"] == NGRAM):
            continue
        words = (row["side"], row["schedule"], row.get("drafts"), row.get("draft_weights"))
        lines.append(
            f"{row['model']}, {row['sequences']} sequences: {' '.join(filter(None, words))} is"
            f" {base['first_token_last_s'] / row['first_token_last_s']:.2f}x as fast as"
            f" {base['side']} to the first tokens,"
            f" {row['tokens_per_s'] / base['tokens_per_s']:.2f}x to the last one"
        )
    return lines


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
        help="shipped name, .json file or fixed-<tokens> (default: the model's for target 0.86;"
        " drafts with --drafts)",
    )
    add(
        "--max-tokens",
        type=count,
        help="longest answers (default: 32768; with --model-path 1536)",
    )
    lengths = parser.add_argument_group("random weights")
    lengths.add_argument(
        "--sequences", type=at_least(1, 2**16), default=64, help=f"a multiple of {GROUP}"
    )
    lengths.add_argument(
        "--mean-tokens", type=count, default=8192, help="mean of the log-normal lengths"
    )
    lengths.add_argument("--prompt-tokens", type=count, default=256, help="tokens per prompt")
    lengths.add_argument("--seed", type=int, default=0, help="seed of prompts and order")
    texts = parser.add_argument_group("with --model-path")
    texts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSONL, a prompt, messages or input_ids a line (default: problems and programs)",
    )
    texts.add_argument(
        "--sizes",
        type=at_least(1, 2**16),
        nargs="+",
        default=[1, 16, 64],
        help=f"requests at once, {GROUP} answers to a prompt",
    )
    add_side_options(parser, several=False)
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


def _check(options: argparse.Namespace) -> Rates | None:
    """The rates to assume. Raises a `ValueError` that names an option that cannot work."""
    real = options.model_path is not None
    unused = ("sequences", "mean_tokens", "prompt_tokens", "seed") if real else ("prompts", "sizes")
    for name in unused:
        if (value := getattr(options, name)) != _parser().get_default(name):
            kind = "random weights" if real else "--model-path"
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected with {kind} only")
    if options.max_tokens is None:
        options.max_tokens = 1536 if real else 32768
    if options.always_draft and options.drafts is None:
        raise ValueError("--always-draft: expected with --drafts only")
    if NGRAM in options.sides and not real:
        raise ValueError(f"--sides {NGRAM}: random weights repeat no text; expected --model-path")
    if not real:
        request_lengths(options)
    return set_rates(options, options.drafts is not None and not real)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    rates = _check(options)
    model = _model(options)
    arguments = engine_arguments(options.engine_args, RESERVED)
    rows = rollouts(model, options)
    context = arguments.get("context_length") or model.config["max_position_embeddings"]
    each = [request for sets in rows for requests in sets for request in requests]
    longest = max(len(request.prompt) + request.new_tokens for request in each)
    if longest >= context:
        raise ValueError(
            f"sequences of {longest} tokens do not fit into the model's context of {context}"
        )
    if not model.has_weights:
        require_cuda()
    begin(options)
    rounds = [options.drafts] if options.drafts else []
    sides = sides_of(options, [model.schedule], rounds)
    ended_well = measure_sides(((side, (options, model, rates, rows)) for side in sides), run_side)
    print(*speed_ups(read_result(options.out)["rows"]), sep="\n")
    return int(not ended_well)
