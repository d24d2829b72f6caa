"""`sparrow bench rollout`: whole rollouts of stock SGLang, dense and sparse. CUDA graphs, radix
cache and overlap scheduler are on. Random weights replay response lengths; a model's own weights
answer prompts to their own ends. Each side runs in a process of its own."""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

from sparrow_sglang.benchmarks import common, device_clock
from sparrow_sglang.calibration.prompts import read_prompts, tokenizer_of
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import at_least, count, table
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder, path_problem
from sparrow_sglang.planning.step_time import Acceptance
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.schedules.names import load_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import DRAFTS, PAGE_SIZE

GROUP = 8
"""Sequences that share one prompt."""
PROMPTS = Path(__file__).with_name("prompts.jsonl")
PROMPT_TOKENS = 256
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
  sparrow bench rollout --model-path M --drafts 8 --sides sparrow stock ngram --sequences 1 16 64
                                              your model, 8 answers to each prompt
"""


class Request(NamedTuple):
    """One sequence: its prompt's token ids, and how many tokens it generates; at most, if it
    `ends` by itself."""

    prompt: list[int]
    new_tokens: int
    ends: bool = False


def synthetic_lengths(count: int, mean: int, longest: int, seed: int = 0) -> list[int]:
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


def make_requests(
    lengths: Sequence[int], prompts: Sequence[list[int]], ends: bool = False
) -> list[Request]:
    """A request per length; each eight consecutive ones share one of `prompts`."""
    return [Request(prompts[i // GROUP], length, ends) for i, length in enumerate(lengths)]


def rollouts(
    options: argparse.Namespace, model: Path, config: Mapping[str, Any]
) -> list[list[list[Request]]]:
    """Requests by row of a result: each row is one size, measured with one or several sets."""
    if options.model_path is None:
        draw, vocabulary = random.Random(0), range(config["vocab_size"])
        groups = -(-max(options.sequences) // GROUP)
        prompts = [draw.choices(vocabulary, k=PROMPT_TOKENS) for _ in range(groups)]
        limits = options.mean_tokens, options.max_tokens
        return [
            [make_requests(synthetic_lengths(size, *limits), prompts)] for size in options.sequences
        ]
    tokenize, context = tokenizer_of(str(model)), config["max_position_embeddings"]
    file = options.prompts or PROMPTS
    read = [list(each.input_ids) for each in read_prompts(file, tokenize, context)]
    rows = []
    for size in options.sequences:
        # A size of 4 is one prompt with four answers.
        groups = -(-size // GROUP)
        sets = min(MOST_SETS, max(1, len(read) // groups))
        cycle = [read[i % len(read)] for i in range(sets * groups)]
        taken = [cycle[i * groups : (i + 1) * groups] for i in range(sets)]
        rows.append([make_requests([options.max_tokens] * size, group, True) for group in taken])
    return rows


def replay(engine: Any, *sets: Sequence[Request]) -> dict[str, Any]:
    """Run the requests of each set together to the last token, one set after the other. Returns
    totals, medians, and when the requests of each set ended. The prefix cache is flushed before
    each. Raises `RuntimeError` if a request ends at another length."""

    async def together(requests: Sequence[Request]) -> list[tuple[float, float, int, int]]:
        start = time.perf_counter()
        return await asyncio.gather(
            *(_follow(engine, *each, start) for each in enumerate(requests))
        )

    followed = []
    for requests in sets:
        connect(engine).flush_cache(60.0)
        followed.append(zip(*engine.loop.run_until_complete(together(requests)), strict=True))
    first_s, finished_s, tokens, rounds = zip(*followed, strict=True)
    output_tokens, all_rounds = sum(map(sum, tokens)), sum(map(sum, rounds))
    seconds = sum(map(max, finished_s))
    ends = [sorted(of_set) for of_set in finished_s]
    return {
        "sequences": len(sets[0]),
        "sets": len(sets),
        "prompt_tokens": sum(len(request.prompt) for requests in sets for request in requests),
        "output_tokens": output_tokens,
        "longest": max(map(max, tokens)),
        "first_token_median_s": median(map(median, first_s)),
        "first_token_last_s": median(map(max, first_s)),
        "seconds": seconds,
        "tokens_per_s": output_tokens / seconds,
        "tokens_per_round": output_tokens / all_rounds if all_rounds else None,
        "finished_s": ends if len(sets) > 1 else ends[0],
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


class Rollouts(NamedTuple):
    """Sets of requests by row of a result, for a model; `acceptance` is that of random weights."""

    model: Path
    acceptance: Acceptance | None
    rows: Sequence[Sequence[Sequence[Request]]]


def engine_defaults(requests: Sequence[Request]) -> dict[str, Any]:
    """Arguments of an engine that has room for these requests together."""
    from torch.cuda import is_available

    # Each part of a stream has only the tokens since the last part.
    arguments = {"max_running_requests": len(requests), "incremental_streaming_output": True}
    if is_available():
        return arguments | {"cuda_graph_max_bs_decode": len(requests)}
    # On a CPU, float32 is the fast path of plain torch. The KV pool has room for all sequences.
    room = sum(len(each.prompt) + each.new_tokens + 2 * PAGE_SIZE for each in requests)
    return arguments | {"dtype": "float32", "max_total_tokens": room}


def run_side(side: common.Side, options: argparse.Namespace, rollouts: Rollouts) -> None:
    model, acceptance, rows = rollouts
    largest = max((sets[0] for sets in rows), key=len)
    defaults = engine_defaults(largest)
    with common.running(side, options, model, acceptance, defaults) as (engine, served):
        replay(engine, make_requests([32] * GROUP, [largest[-1].prompt[::-1]]))
        for sets in rows:
            row = served | _measured(engine, side, sets)
            if side.rounds:
                row["drafts"] = " ".join(map(str, side.rounds))
                row["assumed_rates"] = acceptance and acceptance._asdict()
            common.add_row(options.out, row)
            print(f"{side}, {row['sequences']}: {row['tokens_per_s']:,.0f} tokens/s", flush=True)


def _measured(engine: Any, side: common.Side, sets: Sequence[Sequence[Request]]) -> dict[str, Any]:
    """A replay, with counts of its rounds, or beside it the first steps by both clocks."""
    if side.rounds:
        from sparrow_sglang.benchmarks.given_rounds import take_counts

        take_counts(engine)
        return replay(engine, *sets) | take_counts(engine)
    row = replay(engine, *sets)
    if side.name != common.NGRAM:
        few = [Request(request.prompt, TRACED) for request in sets[0]]
        row["first_steps"] = device_clock.profiled(engine, lambda: replay(engine, few), 1)
    return row


def rollouts_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each side beside the fastest dense one of as many sequences, of which both times are 1.00x;
    those of sets of prompts are medians to the first tokens, and tokens/s to the last ones."""
    dense: dict[int, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["tokens_per_s"])):
        if not row["schedule"] and row["side"] != common.NGRAM:
            dense[row["sequences"]] = row
    heads = ("sequences", "side", "drafts", "accepted", "first tokens s", "tokens/s")
    lines: list[Sequence[str]] = [(*heads, "to the first tokens", "to the last")]
    for row in rows:
        base, accepted = dense.get(row["sequences"], row), row.get("acceptance_rate")
        lines.append(
            (
                str(row["sequences"]),
                row["schedule"] or row["side"],
                row.get("drafts", ""),
                "" if accepted is None else f"{accepted:.3f}",
                f"{row['first_token_last_s']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{base['first_token_last_s'] / row['first_token_last_s']:.2f}x",
                f"{row['tokens_per_s'] / base['tokens_per_s']:.2f}x",
            )
        )
    return table(lines)


def _parser() -> argparse.ArgumentParser:
    parser = common.bench_parser("rollout", DESCRIPTION, EXAMPLES, "rollout.json")
    model, known = parser.add_mutually_exclusive_group(), common.known_models()
    shapes = f"shapes of the model with random weights: {', '.join(known)}"
    model.add_argument("--model", choices=known, default="qwen3-1.7b", metavar="NAME", help=shapes)
    weights = f"folder of a model to load instead, or {EMBEDDED_MODEL_NAME}; works without a GPU"
    model.add_argument("--model-path", help=weights)
    add = parser.add_argument
    schedules = "shipped name, .json file or fixed-<tokens>"
    add("--schedule", help=f"{schedules} (default: the model's for 0.86; drafts with --drafts)")
    answers = "longest answers (default: 32768; with --model-path 1536)"
    add("--max-tokens", type=count, help=answers)
    mean = "mean of the log-normal lengths of random weights (default: 8192)"
    add("--mean-tokens", type=count, help=mean)
    prompts = "JSONL, a prompt, messages or input_ids a line, for --model-path (default: our own)"
    add("--prompts", type=Path, metavar="FILE", help=prompts)
    sizes = f"requests at once, {GROUP} answers to a prompt (default: 64)"
    add("--sequences", type=at_least(1, 2**16), nargs="+", default=[64], help=sizes)
    common.add_side_options(parser)
    return parser


def _acceptance(options: argparse.Namespace) -> Acceptance | None:
    """That of random weights. Sets defaults, and raises a `ValueError` that names an option that
    cannot work."""
    real = options.model_path is not None
    for name in ("mean_tokens", *common.ACCEPTANCE_FIELDS) if real else ("prompts",):
        if (value := getattr(options, name)) is not None:
            kind = "random weights" if real else "--model-path"
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected with {kind} only")
    options.max_tokens = options.max_tokens or (1536 if real else 32768)
    if real:
        return None
    options.mean_tokens = options.mean_tokens or 8192
    return common.random_weights(options)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    acceptance = _acceptance(options)
    path = common.MODELS / options.model
    if options.model_path is not None:
        path = Path(model_folder(options.model_path))
        if problem := path_problem(str(path)):
            raise ValueError(f"--model-path {path}: {problem}")
    fields = read_object(path / "config.json", "a model's config.json")
    config, schedule = text_config(fields), options.schedule or DRAFTS
    if BACKEND in options.sides:
        if not (options.schedule or options.drafts):
            schedule = schedule_for_model(fields, PAGE_SIZE).name
        load_schedule(schedule, PAGE_SIZE).for_model(fields)
    arguments, rows = common.engine_options(options), rollouts(options, path, config)
    context = arguments.get("context_length") or config["max_position_embeddings"]
    each = [request for sets in rows for requests in sets for request in requests]
    longest = max(len(request.prompt) + request.new_tokens for request in each)
    if longest >= context:
        raise ValueError(
            f"sequences of {longest} tokens do not fit into the model's context of {context}"
        )
    if acceptance is not None:
        common.require_cuda()
    common.begin(options)
    measured = Rollouts(path, acceptance, rows)
    sides = [(side, measured) for side in common.sides_of(options, [schedule])]
    ended_well = common.measure_sides(run_side, sides, options)
    print(rollouts_table(common.read_result(options.out)["rows"]))
    return int(not ended_well)
