"""Natural text to decode along, as prompts with a response for `sparrow calibrate --check`.

`python -m sparrow_sglang.benchmarks.rollouts.given_texts --out texts.jsonl` writes slices of the
docstrings of SciPy, which no calibration prompt contains. Each slice is a prompt and the tokens
that follow it; prompt lengths are evenly spread over the model's context.
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import replacing
from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out
from sparrow_sglang.calibration.job import find_model
from sparrow_sglang.calibration.prompts import NEEDED_ROOM, UNSCORED, tokenizer_of
from sparrow_sglang.command_line import at_least, count
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder

MODULES = ("fft", "integrate", "interpolate", "linalg", "optimize", "signal", "spatial", "stats")

DESCRIPTION = "Write natural text, slices of SciPy's docstrings, as prompts with given responses."
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.given_texts --out texts.jsonl
  sparrow calibrate --check m-0.86.json --prompts texts.jsonl
"""


def corpus() -> str:
    """Docstrings of public names of SciPy, each once, in the order of their names."""
    texts: dict[str, None] = {}
    for module in (importlib.import_module(f"scipy.{name}") for name in MODULES):
        members = (getattr(module, name) for name in sorted(module.__all__))
        texts |= dict.fromkeys(inspect.getdoc(member) or "" for member in members)
    return "\n\n".join(texts)


def given_texts(
    tokenize: Callable[[str], list[int]], context: int, texts: int, response: int, seed: int
) -> list[dict[str, Any]]:
    """`texts` rows of `input_ids` and `response` [response]; no row is longer than the context."""
    tokens = tokenize(corpus())
    draw = random.Random(seed)
    longest = context - NEEDED_ROOM - UNSCORED - response
    rows = []
    for i in range(texts):
        length = max(1, longest * (i + 1) // texts)
        start = draw.randrange(len(tokens) - length - response)
        ids = tokens[start : start + length + response]
        rows.append({"input_ids": ids[:length], "response": ids[length:]})
    return rows


def write_texts(out: Path, model: str, context: int, texts: int, response: int, seed: int) -> None:
    """Write the rows of `given_texts` as JSONL, tokenized for `model` (a path or name)."""
    rows = given_texts(tokenizer_of(model_folder(model)), context, texts, response, seed)
    with replacing(out) as draft:
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; the exit code is 2 without usable options."""
    parser = benchmark_parser("rollouts.given_texts", DESCRIPTION, EXAMPLES, "texts.jsonl")
    parser.add_argument("--model-path", default=EMBEDDED_MODEL_NAME, help="default: %(default)s")
    parser.add_argument("--texts", type=count, default=192, help="default: %(default)s")
    parser.add_argument("--response", type=at_least(2), default=128, help="tokens of each")
    parser.add_argument("--seed", type=int, default=0)
    options: argparse.Namespace = parser.parse_args(argv)
    prepare_out(parser, options.out)
    _, _, _, context = find_model(options.model_path, {})
    if options.response + NEEDED_ROOM + UNSCORED >= context:
        parser.error(f"--response {options.response}: expected fewer than the context of {context}")
    write_texts(
        options.out, options.model_path, context, options.texts, options.response, options.seed
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
