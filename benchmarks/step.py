"""`sparrow bench step`: prefill and one decode step of stock SGLang, dense and sparse. Each model
and side runs in a process of its own with CUDA graphs and the overlap scheduler on. Two generations
of different lengths share their prompts through the prefix cache. A step's time is the difference
of their times over the difference of their lengths, so that prefill and request handling cancel; a
third is traced by `device_clock`. Prefill is timed with an empty prefix cache, to the last
sequence's first token."""

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
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
    rate,
    read_result,
    require_cuda,
    running,
    set_rates,
    sides_of,
)
from sparrow_sglang.benchmarks.rounds import Rates, Round
from sparrow_sglang.client.control import get_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import at_least, count, table
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.plugin.arguments.server_args import engine_arguments
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.plugin.state import require_server_state
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import PAGE_SIZE

SHORT, TRACED, LONG = 16, 64, 144
CONTEXT, LONGEST = 40960, 131072
RATES = (0.96, 0.94, 0.9, 0.85)
"""Acceptance rates of drafts in `steps_table`."""

DESCRIPTION = """\
Time prefill and one decode step of stock SGLang, dense and with sparrow, in the shapes of real
models with random weights (nothing is downloaded), by the wall clock and by the device's. Stock
runs as it is without flags and with pages of 16 tokens; compare with the faster. A side whose
engine fails is left out; the exit code is then 1.
"""
EXAMPLES = """\
  sparrow bench step                                       Qwen3-1.7B, 16 sequences of 32K tokens
  sparrow bench step --cases 16x32768 16x16384 1x32768 --sides sparrow fa3 flashinfer
  sparrow bench step --schedules fixed-1024 --cases 16x32768 8x32768
  sparrow bench step --models qwen3-4b,qwen3-8b --out larger.json
  sparrow bench step --models qwen3-30b-a3b --tp 2 --ep 2 --schedules fixed-1024
  sparrow bench step --engine-args '{"kv_cache_dtype": "fp8_e4m3"}'
  sparrow bench step --engine-args '{"quantization": "fp8"}'
  sparrow bench step --schedules drafts --drafts 8 6+2 0+3 lossless decoding: 8 sparse drafts a
                                                           round, 6 and 2 tokens looked up, or 3
"""


def batch_and_length(case: str) -> tuple[int, int]:
    """The numbers of a case `BATCHxLENGTH`. Raises `ValueError` on another form, and on a length at
    which a step cannot be timed."""
    match = re.fullmatch(r"([1-9]\d*)x(\d+)", case, re.ASCII)
    if match is None:
        raise ValueError(f"case {case!r}: expected BATCHxLENGTH")
    batch, length = map(int, match.groups())
    # The last LONG tokens of a length are generated.
    if not LONG < length <= LONGEST:
        raise ValueError(f"case {case!r}: expected a length of {LONG + 1} to {LONGEST} tokens")
    return batch, length


def model_config(model: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((MODELS / model / "config.json").read_text())
    return fields


def random_prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(1)
    # Special tokens are at the end of vocabularies.
    return [draw.choices(range(vocab_size // 2), k=length - LONG) for _ in range(batch)]


def _generate(engine: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
    """Seconds, and decode steps or rounds."""
    start = time.perf_counter()
    answers = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0},
    )
    seconds = time.perf_counter() - start
    latencies = [answer["meta_info"]["e2e_latency"] for answer in answers]
    # If some waited for others to end, the timed steps were of smaller batches.
    if new_tokens == LONG and max(latencies) - min(latencies) > seconds / 5:
        raise RuntimeError(
            f"{len(latencies)} sequences did not decode together: {min(latencies):.2f} to"
            f" {max(latencies):.2f} s, expected about the same"
        )
    return seconds, answers[0]["meta_info"].get("spec_verify_ct", new_tokens)


def time_prefills(engine: Any, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """Seconds of prefills, the median of `repeats`; the first one, in which kernels may be
    compiled, is recorded as `first_prefill_s` and does not count. The prompts are cached then."""

    def prefill() -> float:
        connect(engine).flush_cache(60.0)
        return _generate(engine, prompts, 1)[0]

    row: dict[str, Any] = {"first_prefill_s": prefill()}
    if prefills_s := [prefill() for _ in range(repeats)]:
        row |= {"prefill_s": statistics.median(prefills_s), "prefill_s_all": prefills_s}
    return row


def time_steps(engine: Any, prompts: list[list[int]], repeats: int) -> dict[str, Any]:
    """Milliseconds of a decode step of cached prompts, the median of `repeats`. With lossless
    decoding a step is a round."""

    def step_ms() -> float:
        (longer, many), (shorter, few) = (_generate(engine, prompts, n) for n in (LONG, SHORT))
        return (longer - shorter) / (many - few) * 1e3

    _generate(engine, prompts, SHORT)
    steps_ms = [step_ms() for _ in range(repeats)]
    return {"step_ms": statistics.median(steps_ms), "step_ms_all": steps_ms}


def engine_defaults(options: argparse.Namespace, model: str, side: Side) -> dict[str, Any]:
    batches, lengths = zip(*map(batch_and_length, options.cases), strict=True)
    # SGLang does not use the last positions of a context for requests.
    context = max(CONTEXT, max(lengths) + SHORT)
    arguments = engine_settings(MODELS / model, False, side)
    arguments |= {
        "context_length": context,
        "mem_fraction_static": options.memory_fraction,
        # Capturing a graph takes seconds, and no other batch size is timed.
        "cuda_graph_bs_decode": sorted(set(batches)),
        "max_running_requests": max(batches),
        "tp_size": options.tp,
        "ep_size": options.ep,
    }
    if context > text_config(model_config(model))["max_position_embeddings"]:
        # With random weights positions mean nothing, so a step takes as long as in a model that
        # was made for this context.
        longer = {"max_position_embeddings": context}
        arguments["json_model_override_args"] = json.dumps(longer)
    return arguments


def measure(side: Side, options: argparse.Namespace, model: str) -> None:
    vocab_size = text_config(model_config(model))["vocab_size"]
    schedule = None
    if side.schedule:
        schedule = load_schedule(side.schedule, PAGE_SIZE).for_model(model_config(model))
    arguments = engine_arguments(options.engine_args)
    arguments = engine_defaults(options, model, side) | arguments
    # A round takes as long whatever it accepts, and is timed where it accepts everything.
    everything = Rates(1.0, 1.0)
    with running(side, arguments, everything, next(iter(side.rounds), None)) as (engine, served):
        if side.rounds:
            # The choice of drafts is given.
            require_server_state(engine.tokenizer_manager).measures_dense = False
        elif schedule is not None:
            # With the lengths up to which the engine decodes densely.
            schedule = get_schedule(engine)
        pool = engine.get_server_info()["max_total_num_tokens"]
        for case in options.cases:
            batch, length = batch_and_length(case)
            if batch * length > pool:
                # Some sequences would have to wait, and the timed steps would not contain them.
                print(f"{model} {side} {case}: left out, the KV pool holds {pool:,} tokens")
                continue
            prompts = random_prompts(batch, length, vocab_size)
            row = {"model": model} | served
            row |= {
                "dense_tokens": 0 if schedule is None else schedule.dense_tokens,
                "case": case,
                "batch": batch,
                "cached_tokens": batch * length,
                "tp": options.tp,
                "ep": options.ep,
                "kv_cache_dtype": arguments.get("kv_cache_dtype", "auto"),
                "quantization": arguments.get("quantization"),
                "pool_tokens": pool,
            }
            row |= time_prefills(engine, prompts, options.prefills)
            for timed in _timed(engine, side, prompts, options):
                timed["tokens_per_s"] = batch / timed["step_ms"] * 1e3
                add_row(options.out, row | timed)
                print(f"{model} {side} {case}: {summary(row | timed)}", flush=True)
            connect(engine).flush_cache(60.0)


def _timed(
    engine: Any, side: Side, prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A dense or sparse step, or each of the rounds, of cached prompts."""
    for round_ in side.rounds or (None,):
        if round_ is not None:
            from sparrow_sglang.benchmarks.given_rounds import set_round

            set_round(engine, round_)
        timed = time_steps(engine, prompts, options.repeats)
        launches = 1 if round_ is None else round_.drafts + 1
        trace = lambda: _generate(engine, prompts, TRACED)  # noqa: E731
        timed |= device_clock.profiled(engine, trace, launches)
        if round_ is not None:
            tokens = round_.tokens(Rates(options.acceptance_rate, options.lookup_acceptance))
            timed |= {
                "drafts": round_.drafts,
                "lookups": round_.lookups,
                "draft_weights": side.weights,
                "acceptance_rate": options.acceptance_rate,
                "lookup_acceptance": options.lookup_acceptance,
                "tokens_per_round": tokens,
                "round_ms": timed["step_ms"],
                "step_ms": timed["step_ms"] / tokens,
            }
        yield timed


def summary(row: Mapping[str, Any]) -> str:
    took = f"step {row['step_ms']:.2f} ms"
    if "drafts" in row:
        took = (
            f"round of {_round_of(row)} drafts ({row['draft_weights']}) {row['round_ms']:.2f} ms,"
            f" {row['step_ms']:.2f} ms a token at {row['tokens_per_round']:.1f} tokens a round"
        )
    if "device_ms" in row:
        took += f", device {row['device_ms']:.2f} ms"
    return f"{took}, prefill {row.get('prefill_s', row['first_prefill_s']):.3f} s"


def _round_of(row: Mapping[str, Any]) -> Round:
    return Round(row["drafts"], row.get("lookups", 0))


def steps_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each sparse step or round beside the shortest dense step of its model and case. Speed-ups of
    rounds are at the acceptance rates of the heads: a round takes as long whatever it accepts."""
    dense: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["step_ms"]):
        if not row["schedule"]:
            dense[row["model"], row["case"]] = row
    heads = ("model", "case", "dense ms", "schedule", "drafts", "ms", "speed-up")
    lines: list[Sequence[str]] = [(*heads, *(f"at {rate}" for rate in RATES))]
    foreign = False
    for row in rows:
        if not row["schedule"] or (base := dense.get((row["model"], row["case"]))) is None:
            continue
        is_round, ms = "drafts" in row, row.get("round_ms", row["step_ms"])
        apart = base.get("file") != row.get("file")
        foreign |= apart
        gains, drafts = [base["step_ms"] / row["step_ms"]], ""
        if is_round:
            behind = row.get("lookup_acceptance") or 0.0
            rates = [Rates(of_drafts, behind) for of_drafts in RATES]
            gains += [base["step_ms"] * _round_of(row).tokens(each) / ms for each in rates]
            drafts = f"{_round_of(row)} {row.get('draft_weights') or ''}".strip()
        cells = [row["model"], row["case"], f"{base['step_ms']:.2f}{'*' * apart}", row["schedule"]]
        cells += [drafts, f"{ms:.2f}", *(f"{gain:.2f}x" for gain in gains)]
        lines.append(cells + [""] * (len(lines[0]) - len(cells)))
    notes = "drafts: ms is a round's; at: speed-up where sparse drafts are accepted at this rate"
    return f"{table(lines)}\n\n{notes}" + "\n*: of another run" * foreign + _clocks(rows)


def _clocks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each step and round by both clocks, where both were read."""
    lines = [("model", "case", "side", "page", "drafts", "ms", "device ms")]
    for row in rows:
        if "device_ms" in row:
            names = (row["model"], row["case"], row["side"], str(row["page_size"]))
            drafts = str(_round_of(row)) if "drafts" in row else ""
            ms = row.get("round_ms", row["step_ms"])
            lines.append((*names, drafts, f"{ms:.2f}", f"{row['device_ms']:.2f}"))
    return f"\n\n{table(lines)}" if lines[1:] else ""


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("step", DESCRIPTION, EXAMPLES, "decode_step.json")
    add = parser.add_argument
    add(
        "--models",
        default="qwen3-1.7b",
        help=f"comma-separated names out of {', '.join(known_models())}",
    )
    add(
        "--cases",
        nargs="+",
        default=["16x32768"],
        metavar="BATCHxLENGTH",
        help="sequences of LENGTH cached tokens each",
    )
    add(
        "--schedules",
        nargs="+",
        default=["{model}-0.86"],
        metavar="SCHEDULE",
        help="schedules of the side sparrow: shipped names, .json files or fixed-<tokens>;"
        " {model} stands for the model's name (default: {model}-0.86)",
    )
    add("--tp", type=count, default=1, help="GPUs for tensor parallelism")
    add("--ep", type=count, default=1, help="expert parallelism: 1, or the number of --tp")
    add("--repeats", type=count, default=3, help="times a step is timed; the median counts")
    add("--prefills", type=at_least(0), default=3, help="the same of a prefill; 0: once, cold")
    add_side_options(parser, several=True)
    add("--memory-fraction", type=rate, default=0.88, help="SGLang's mem_fraction_static")
    add_engine_arguments(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise a `ValueError` that names an option that cannot work."""
    set_rates(options, bool(options.drafts))
    for case in options.cases:
        batch_and_length(case)
    by_flags = ("tp_size", "ep_size", "mem_fraction_static")
    engine_arguments(options.engine_args, (*RESERVED, *by_flags))
    if NGRAM in options.sides:
        raise ValueError(
            f"--sides {NGRAM}: random weights repeat no text; expected in"
            " `sparrow bench rollout --model-path M`"
        )
    if BACKEND not in options.sides:
        for name in ("schedules", "drafts", "draft_weights"):
            if (value := getattr(options, name)) != _parser().get_default(name):
                raise ValueError(f"--{name} {value}: expected {BACKEND} in --sides")
        options.schedules = []
    if options.ep not in (1, options.tp):
        raise ValueError(f"--ep {options.ep}: expected 1, or the GPUs of --tp {options.tp}")
    for model in options.models.split(","):
        if model not in known_models():
            raise ValueError(f"--models {model!r}: expected some of {', '.join(known_models())}")
        for schedule in options.schedules:
            load_schedule(schedule.replace("{model}", model), PAGE_SIZE)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    require_cuda(options.tp)
    begin(options)
    measurements = [
        (side, (options, model))
        for model in options.models.split(",")
        for side in sides_of(
            options, [name.replace("{model}", model) for name in options.schedules], options.drafts
        )
    ]
    ended_well = measure_sides(measurements, measure)
    print(f"\n{steps_table(read_result(options.out)['rows'])}")
    return int(not ended_well)
