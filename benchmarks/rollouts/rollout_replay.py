"""`sparrow bench rollout`: replay a rollout's response lengths, sparse and dense.

Stock SGLang, with CUDA graphs, radix cache and overlap scheduler on, serves the same requests first
on one side and then on the other; each side runs in a process of its own.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from sparrow_sglang.benchmarks.options import (
    add_engine_arguments,
    benchmark_parser,
    engine_settings,
)
from sparrow_sglang.benchmarks.rollouts.lengths import GROUP, add_length_options, request_lengths
from sparrow_sglang.benchmarks.rollouts.requests import Request, make_requests, replay
from sparrow_sglang.benchmarks.steps.comparison import (
    Comparison,
    Side,
    add_model_options,
    checked_comparison,
    measure_missing_sides,
)
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE

DESCRIPTION = """\
Replay a rollout in stock SGLang, sparse and dense: all sequences start together and each generates
exactly as many tokens as its length says, until the last one is done. Reports tokens/s, and the
generated tokens and running sequences at each second. Weights are random (nothing is downloaded)
unless --model-path names a model. Sides that are already in --out are skipped, so that a killed run
resumes when the command is repeated.
"""
EXAMPLES = """\
  sparrow bench rollout                       64 sequences of 8K tokens on average, at most 32K
  sparrow bench rollout --sequences 128 --mean-tokens 10000 --out rollout.json
  sparrow bench rollout --model qwen3-8b --lengths-file lengths.jsonl
"""


def engine_defaults(
    compared: Comparison, side: Side, requests: Sequence[Request], on_gpu: bool
) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for one side: SGLang's defaults except sizes and the backend."""
    arguments = engine_settings(compared.path, compared.has_weights, side.backend, side.schedule)
    arguments |= {"max_running_requests": len(requests), "incremental_streaming_output": True}
    if on_gpu:
        return arguments | {"cuda_graph_max_bs_decode": len(requests)}
    # On a CPU, float32 is the fast path of plain torch. The KV pool has room for all sequences.
    room = sum(len(each.prompt) + each.new_tokens + 2 * PAGE_SIZE for each in requests)
    return arguments | {"dtype": "float32", "max_total_tokens": room}


def run_side(compared: Comparison, side: Side, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start an engine for one side, warm it up, and replay the requests of the options."""
    import sglang
    import torch

    vocab_size = compared.config["vocab_size"]
    lengths = request_lengths(options)
    requests = make_requests(lengths, options.prompt_tokens, vocab_size, options.seed)
    defaults = engine_defaults(compared, side, requests, torch.cuda.is_available())
    with sglang.Engine(**defaults | engine_arguments(options.engine_args)) as engine:
        warm_up = make_requests([32] * GROUP, options.prompt_tokens, vocab_size, options.seed + 1)
        replay(engine, warm_up)
        measured = replay(engine, requests)
    row = {"model": compared.model, "backend": side.backend, "schedule": side.schedule}
    return [row | measured]


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Speed-up of the sparse row over the dense one, in tokens/s; None until both are measured."""
    speed = {"sparse" if row["schedule"] else "dense": row["tokens_per_s"] for row in rows}
    if len(speed) < 2:
        return None
    return {
        "dense_tokens_per_s": speed["dense"],
        "sparse_tokens_per_s": speed["sparse"],
        "speedup": speed["sparse"] / speed["dense"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("rollout", DESCRIPTION, EXAMPLES, "rollout.json")
    add_model_options(parser)
    add_length_options(parser)
    add_engine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print and write; the exit code is 1 if a side failed, 2 on bad options or no GPU."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        lengths = request_lengths(options)
    except ValueError as error:
        parser.error(str(error))
    compared, results = checked_comparison(parser, options, max(lengths), {"lengths": lengths})
    complete = measure_missing_sides(compared, results, run_side, options)
    results.save(compared=compare(results.rows))
    if not complete:
        return 1
    if speed := compare(results.rows):
        print(f"{compared.model}: {speed['speedup']:.2f}x the dense tokens/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
