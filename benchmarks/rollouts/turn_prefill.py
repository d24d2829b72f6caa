"""Cost of prefilling a conversation's next turn, under sparse and under dense decode.

`python -m sparrow_sglang.benchmarks.rollouts.turn_prefill` runs it.

KV written by sparse decode is not reused as the prefix of a later request, so the next turn
prefills the model's own last turn again, besides the message; a dense engine prefills the message
only.
"""

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from sparrow_sglang.benchmarks.options import (
    add_engine_arguments,
    benchmark_parser,
    engine_settings,
)
from sparrow_sglang.benchmarks.steps.comparison import (
    Comparison,
    Side,
    add_model_options,
    checked_comparison,
    measure_missing_sides,
)
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import count
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE

DESCRIPTION = """\
Time two turns of a batch of conversations in stock SGLang, sparse and dense: all generate a turn of
so many tokens, then all prefill the next context, which is the last one, that turn and a message.
Weights are random (nothing is downloaded) unless --model-path names a model. Sides that --out has
already are left out, so that a killed run goes on when the command is repeated.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.turn_prefill --dense-backend fa3
  python -m sparrow_sglang.benchmarks.rollouts.turn_prefill --turn-tokens 512 8192 --sequences 8
"""


def two_turns(
    engine: Any, prompts: Sequence[list[int]], turn_tokens: int, message: list[int]
) -> dict[str, Any]:
    """Time generation of a turn by all conversations, then prefill of all their next contexts.

    The prefill's seconds include the first token after it. The token counts are means over the
    conversations.
    """
    connect(engine).flush_cache(60.0)
    turns, generate_s = _timed(engine, prompts, turn_tokens)
    contexts = [
        prompt + turn["output_ids"] + message for prompt, turn in zip(prompts, turns, strict=True)
    ]
    answers, prefill_s = _timed(engine, contexts, 1)
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    return {
        "generate_s": generate_s,
        "prefill_s": prefill_s,
        "cached_tokens": sum(cached) / len(cached),
        "prefilled_tokens": (sum(map(len, contexts)) - sum(cached)) / len(cached),
    }


def _timed(
    engine: Any, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[dict[str, Any]], float]:
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}
    start = time.perf_counter()
    answers = engine.generate(input_ids=list(prompts), sampling_params=sampling)
    return answers, time.perf_counter() - start


def run_side(compared: Comparison, side: Side, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start an engine for one side and measure a row for each length of a turn.

    Raises `ValueError` if its KV pool does not hold all conversations: some would wait or lose
    their cached prefix, and the measured seconds would include that.
    """
    import sglang

    defaults = engine_settings(compared.path, compared.has_weights, side.backend, side.schedule)
    defaults |= {"max_running_requests": options.sequences}
    draw = random.Random(options.seed)

    def tokens(number: int) -> list[int]:
        return draw.choices(range(compared.config["vocab_size"]), k=number)

    rows = []
    longest = options.prompt_tokens + max(options.turn_tokens) + options.message_tokens
    needed = options.sequences * (longest + 2 * PAGE_SIZE)
    with sglang.Engine(**defaults | engine_arguments(options.engine_args)) as engine:
        pool = engine.get_server_info()["max_total_num_tokens"]
        if pool < needed:
            raise ValueError(f"the KV pool holds {pool:,} tokens: expected {needed:,} or more")
        for turn_tokens in options.turn_tokens:
            measured = [
                two_turns(
                    engine,
                    [tokens(options.prompt_tokens) for _ in range(options.sequences)],
                    turn_tokens,
                    tokens(options.message_tokens),
                )
                # The first one is a warm-up and is dropped.
                for _ in range(1 + options.repeats)
            ][1:]
            fastest = min(measured, key=lambda each: each["prefill_s"])
            rows.append(
                {
                    "model": compared.model,
                    "backend": side.backend,
                    "schedule": side.schedule,
                    "pool_tokens": pool,
                    "turn_tokens": turn_tokens,
                    **fastest,
                    "prefill_s_all": [each["prefill_s"] for each in measured],
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 1 if a side failed, 2 on bad options or no GPU."""
    parser = benchmark_parser("rollouts.turn_prefill", DESCRIPTION, EXAMPLES, "turn-prefill.json")
    add_model_options(parser)
    parser.add_argument("--sequences", type=count, default=16, help="(default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=count, default=512, help="per conversation (default: %(default)s)"
    )
    parser.add_argument(
        "--turn-tokens",
        type=count,
        nargs="+",
        default=[1024, 4096],
        help="lengths of the model's turn (default: 1024 4096)",
    )
    parser.add_argument(
        "--message-tokens", type=count, default=64, help="that follow it (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=count, default=2, help="the fastest prefill counts (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts (default: %(default)s)")
    add_engine_arguments(parser)
    options = parser.parse_args(argv)
    new_tokens = max(options.turn_tokens) + options.message_tokens
    compared, results = checked_comparison(parser, options, new_tokens, {})
    return int(not measure_missing_sides(compared, results, run_side, options))


if __name__ == "__main__":
    raise SystemExit(main())
