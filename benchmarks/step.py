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

from sparrow_sglang.benchmarks import common, device_clock
from sparrow_sglang.client.control import get_schedule
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import at_least, count, table
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.planning.rounds import DENSE, Plan, expected_tokens
from sparrow_sglang.planning.step_time import Acceptance
from sparrow_sglang.plugin.state import require_server_state
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import PAGE_SIZE

SHORT, TRACED, LONG = 16, 64, 144
CONTEXT, LONGEST = 40960, 131072
CASES = [(16, 32768)]
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
  sparrow bench step --models qwen3-4b,qwen3-8b --schedules fixed-1024 --out larger.json
  sparrow bench step --models qwen3-30b-a3b --engine-args '{"tp_size": 2, "ep_size": 2}'
  sparrow bench step --schedules drafts --drafts 8 6+2 0+3 lossless decoding: 8 sparse drafts a
                                                           round, 6 and 2 tokens looked up, or 3
"""


def batch_and_length(case: str) -> tuple[int, int]:
    """An argparse `type` of `BATCHxLENGTH`, of lengths at which a step can be timed."""
    match = re.fullmatch(r"([1-9]\d{0,8})x(\d{1,9})", case, re.ASCII)
    batch, length = map(int, match.groups()) if match else (0, 0)
    # The last LONG tokens of a length are generated.
    if not LONG < length <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"{case}: expected BATCHxLENGTH, with a length of {LONG + 1} to {LONGEST} tokens"
        )
    return batch, length


def model_config(model: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((common.MODELS / model / "config.json").read_text())
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
    # Of two, the shorter: a kernel may have been compiled in the other.
    return {"step_ms": statistics.median_low(steps_ms), "step_ms_all": steps_ms}


def engine_defaults(cases: Sequence[tuple[int, int]], config: dict[str, Any]) -> dict[str, Any]:
    batches, lengths = zip(*cases, strict=True)
    # SGLang does not use the last positions of a context for requests.
    context = max(CONTEXT, max(lengths) + SHORT)
    arguments = {
        "context_length": context,
        "mem_fraction_static": 0.88,
        # Capturing a graph takes seconds, and no other batch size is timed.
        "cuda_graph_bs_decode": sorted(set(batches)),
        "max_running_requests": max(batches),
    }
    if context > text_config(config)["max_position_embeddings"]:
        # With random weights positions mean nothing, so a step takes as long as in a model that
        # was made for this context.
        longer = {"max_position_embeddings": context}
        arguments["json_model_override_args"] = json.dumps(longer)
    return arguments


def measure(side: common.Side, options: argparse.Namespace, model: str) -> None:
    config, path = model_config(model), common.MODELS / model
    defaults = engine_defaults(options.cases, config)
    # A round takes as long whatever it accepts, and is timed where it accepts everything.
    with common.running(side, options, path, Acceptance(1.0, 1.0), defaults) as (engine, served):
        served["dense_tokens"] = 0
        if side.rounds:
            # The choice of drafts is given.
            require_server_state(engine.tokenizer_manager).measures_dense = False
        elif side.schedule:
            # Up to which length the engine decodes densely.
            served["dense_tokens"] = get_schedule(engine).dense_tokens
        pool = engine.get_server_info()["max_total_num_tokens"]
        for batch, length in options.cases:
            case = f"{batch}x{length}"
            if batch * length > pool:
                # Some sequences would have to wait, and the timed steps would not contain them.
                print(f"{model} {side} {case}: left out, the KV pool holds {pool:,} tokens")
                continue
            prompts = random_prompts(batch, length, text_config(config)["vocab_size"])
            row = served | {"case": case, "batch": batch, "cached_tokens": batch * length}
            row |= {"pool_tokens": pool} | time_prefills(engine, prompts, options.prefills)
            for timed in _timed(engine, side, prompts, options):
                timed["tokens_per_s"] = batch / timed["step_ms"] * 1e3
                common.add_row(options.out, row | timed)
                drafts = f"{timed.get('drafts', '')} {timed.get('lookups', '')}".strip()
                print(f"{model} {side} {case} {drafts}: {timed['step_ms']:.2f} ms", flush=True)
            connect(engine).flush_cache(60.0)


def _timed(
    engine: Any, side: common.Side, prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A dense or sparse step, or each of the rounds, of cached prompts."""
    for plan in side.rounds or (DENSE,):
        if side.rounds:
            from sparrow_sglang.benchmarks.given_rounds import set_round

            set_round(engine, plan)
        timed = time_steps(engine, prompts, options.repeats)
        trace = lambda: _generate(engine, prompts, TRACED)  # noqa: E731
        timed |= device_clock.profiled(engine, trace, plan.drafts + 1)
        if side.rounds:
            rates = {name: getattr(options, name) for name in common.ACCEPTANCE_FIELDS}
            tokens = expected_tokens(
                plan, options.acceptance_rate, [options.lookup_acceptance] * plan.lookups
            )
            timed |= rates | {"drafts": plan.drafts, "lookups": plan.lookups}
            timed |= {"tokens_per_round": tokens, "round_ms": timed["step_ms"]}
            timed["step_ms"] /= tokens
        yield timed


def steps_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each step or round beside the shortest dense step of its model and case. Speed-ups of rounds
    are at the acceptance rates of the heads: a round takes as long whatever it accepts."""
    dense: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["step_ms"]):
        if not row["schedule"]:
            dense[row["model"], row["case"]] = row
    heads = ("model", "case", "dense ms", "side", "drafts", "ms", "speed-up")
    lines: list[Sequence[str]] = [(*heads, *(f"at {rate}" for rate in RATES), "device ms")]
    foreign = False
    for row in rows:
        ms, per_token, drafts = row.get("round_ms", row["step_ms"]), [row["step_ms"]], ""
        if "drafts" in row:
            drafted, looked_up = row["drafts"], row.get("lookups", 0)
            plan = Plan(drafted, looked_up, drafted + looked_up + 1)
            behind = [row.get("lookup_acceptance") or 0.0] * plan.lookups
            per_token += [ms / expected_tokens(plan, rate, behind) for rate in RATES]
            drafts = f"{plan} {row.get('draft_weights') or ''}".strip()
        dense_ms, shown = "none", []
        if base := dense.get((row["model"], row["case"])):
            apart = base.get("file") != row.get("file")
            foreign |= apart
            dense_ms = f"{base['step_ms']:.2f}{'*' * apart}"
            shown = [f"{base['step_ms'] / each:.2f}x" for each in per_token]
        shown += [""] * (1 + len(RATES) - len(shown))
        side = row["schedule"] or row.get("side", row["backend"])
        cells = [row["model"], row["case"], dense_ms, side, drafts]
        device = f"{row['device_ms']:.2f}" if "device_ms" in row else ""
        lines.append([*cells, f"{ms:.2f}", *shown, device])
    notes = "drafts: ms is a round's; at: speed-up where sparse drafts are accepted at this rate"
    return f"{table(lines)}\n\n{notes}" + "\n*: of another run" * foreign


def _parser() -> argparse.ArgumentParser:
    parser = common.bench_parser("step", DESCRIPTION, EXAMPLES, "decode_step.json")
    add = parser.add_argument
    models = f"comma-separated names out of {', '.join(common.known_models())}"
    models += " (default: qwen3-1.7b)"
    add("--models", type=lambda text: text.split(","), default=["qwen3-1.7b"], help=models)
    cases = "sequences of LENGTH cached tokens each (default: 16x32768)"
    shown = "BATCHxLENGTH"
    add("--cases", type=batch_and_length, nargs="+", default=CASES, metavar=shown, help=cases)
    schedules = (
        "schedules of the side sparrow: shipped names, .json files or fixed-<tokens>; {model}"
        " stands for the model's name"
    )
    add("--schedules", nargs="+", default=["{model}-0.86"], metavar="SCHEDULE", help=schedules)
    add("--repeats", type=count, default=3, help="times a step is timed; the median counts")
    add("--prefills", type=at_least(0), default=3, help="the same of a prefill; 0: once, cold")
    common.add_side_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    for model in options.models:
        if model not in (known := common.known_models()):
            raise ValueError(f"--models {model!r}: expected some of {', '.join(known)}")
    common.engine_options(options)
    common.random_weights(options)
    sides = [
        (side, model)
        for model in options.models
        for side in common.sides_of(
            options, [s.replace("{model}", model) for s in options.schedules]
        )
    ]
    for side, _ in sides:
        if side.schedule:
            load_schedule(side.schedule, PAGE_SIZE)
    common.require_cuda()
    common.begin(options)
    ended_well = common.measure_sides(measure, sides, options)
    print(f"\n{steps_table(common.read_result(options.out)['rows'])}")
    return int(not ended_well)
