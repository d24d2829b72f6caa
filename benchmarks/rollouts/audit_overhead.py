"""Cost of the audit: throughput of one GPU server with the audit off and on.

One engine serves the same load in pairs of rounds, one with the audit off and one with it on. The
order alternates between pairs, so that neither side always has the warmer machine. A round ends
when its requests are answered and, with the audit on, its re-scores are done.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from sparrow_sglang.benchmarks.options import (
    MODELS,
    benchmark_parser,
    engine_settings,
    prepare_out,
    require_cuda,
    settings,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import count
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.schedule_names import load_schedule

MEMORY_GB = 40.0
_SETTLE_S = 60.0

DESCRIPTION = """\
Measure the throughput that a server loses to --sparrow-audit-rate, on a GPU. A model of models/ has
random weights and is not downloaded; any other name or path is loaded as SGLang loads it.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.audit_overhead
  python -m sparrow_sglang.benchmarks.rollouts.audit_overhead --model qwen3-4b
"""


def run_round(engine: Any, options: argparse.Namespace, rate: float, seed: int) -> dict[str, Any]:
    """Serve the load once at an audit rate.

    Raises `RuntimeError` if re-scores are not done in time, as they would slow the next round down.
    """
    auditor = engine.tokenizer_manager.sparrow.auditor
    auditor.rate = rate
    before = dict(auditor.report.requests)
    endpoint = connect(engine)
    endpoint.flush_cache(_SETTLE_S)
    draw = random.Random(seed)
    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    requests = [
        {
            "input_ids": [draw.randrange(vocabulary - 1) for _ in range(options.prompt_tokens)],
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": options.new_tokens,
                "ignore_eos": True,
            },
        }
        for _ in range(options.requests)
    ]
    start = time.perf_counter()
    answers = endpoint.generate(requests)
    served_s = time.perf_counter() - start
    if rate:
        endpoint.call_sparrow("audit", wait_s=_SETTLE_S)
    seconds = time.perf_counter() - start
    if seconds - served_s >= _SETTLE_S:
        raise RuntimeError(f"re-scores were not done {_SETTLE_S:.0f} s after the last answer")
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return {
        "rate": rate,
        "seconds": seconds,
        "served_s": served_s,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "requests": {
            outcome: count - before.get(outcome, 0)
            for outcome, count in auditor.report.requests.items()
        },
    }


def measure(options: argparse.Namespace) -> Results:
    """Rows of all rounds, in the order in which they ran; a short warm-up comes first."""
    import sglang

    shapes = MODELS / options.model
    known = shapes.is_dir()
    model = shapes if known else options.model
    arguments = engine_settings(model, not known, "sparrow", options.schedule) | {
        "sparrow_audit_rate": options.rate,
        "max_running_requests": options.concurrency,
        "cuda_graph_max_bs_decode": options.concurrency,
        # Capturing prefill takes minutes, and the load is decode.
        "disable_prefill_cuda_graph": True,
    }
    results = Results(options.out, settings=settings(options))
    with sglang.Engine(**arguments) as engine:
        warm_up = argparse.Namespace(**vars(options) | {"new_tokens": 32})
        run_round(engine, warm_up, 1.0, seed=0)
        for index in range(options.rounds):
            # Off, on, on, off, off, on: over an even number of pairs, each side is first equally
            # often.
            order = [0.0, options.rate] if index % 2 == 0 else [options.rate, 0.0]
            for rate in order:
                # Both rounds of a pair serve the same prompts; which of them the audit picks is
                # random.
                results.add(run_round(engine, options, rate, seed=index + 1) | {"pair": index})
    results.save(lost=losses(results.rows))
    return results


def losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    """For each pair of rounds, the share of throughput that is lost with the audit on."""
    lost = []
    for pair in sorted({row["pair"] for row in rows}):
        speed = {bool(row["rate"]): row["tokens_per_s"] for row in rows if row["pair"] == pair}
        lost.append(1 - speed[True] / speed[False])
    return lost


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(
        "rollouts.audit_overhead", DESCRIPTION, EXAMPLES, "audit_overhead.json"
    )
    add = parser.add_argument
    add("--model", default="qwen3-1.7b", help="folder of models/, name or path")
    add("--schedule", default="fixed-1024", help="as --sparrow-schedule")
    add("--rate", type=float, default=0.01, help="share of requests to audit")
    add("--requests", type=count, default=512, help="per round")
    add("--concurrency", type=count, default=128, help="running at a time")
    add("--prompt-tokens", type=count, default=512)
    add("--new-tokens", type=count, default=1024)
    add("--rounds", type=count, default=2, help="pairs of rounds, off and on")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 2 without usable options or a GPU."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not 0 < options.rate <= 1:
        parser.error(f"--rate {options.rate}: expected a share above 0 and at most 1")
    try:
        load_schedule(options.schedule, PAGE_SIZE)
    except ValueError as error:
        parser.error(str(error))
    require_cuda(parser, MEMORY_GB, "weights and KV cache")
    prepare_out(parser, options.out)
    lost = measure(options).fields["lost"]
    print(
        f"throughput lost to an audit of {options.rate:.1%}: {statistics.mean(lost):.2%}"
        f" (pairs: {', '.join(f'{share:.2%}' for share in lost)})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
