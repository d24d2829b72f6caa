"""Common parts of benchmarks that compare a sparse and a dense side: model, sides, resuming.

In: the parsed options. Out: a `Comparison`, or a `ValueError` that names the option; then the rows
of each side, measured in a process of its own.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.options import (
    MODELS,
    known_models,
    prepare_out,
    require_cuda,
    settings,
)
from sparrow_sglang.benchmarks.processes import in_new_process
from sparrow_sglang.benchmarks.result_files import Results, resumed
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, model_folder
from sparrow_sglang.plugin.refusals import BACKEND
from sparrow_sglang.plugin.server_args import engine_arguments
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.schedule_names import load_schedule, schedule_for_model

ENGINE_MEMORY_GB = 40.0


@dataclass(frozen=True)
class Side:
    """An attention backend of SGLang; `schedule` is None for a dense one."""

    backend: str
    schedule: str | None

    @property
    def name(self) -> str:
        return "sparse" if self.schedule else "dense"


@dataclass(frozen=True)
class Comparison:
    """A model in `path`, with random weights unless `has_weights`, and the sides to measure.

    `config` is that of the language model. The sparse side is measured first, so that no time is
    spent on the dense side if the sparse side refuses the settings.
    """

    model: str
    path: Path
    has_weights: bool
    config: Mapping[str, Any]
    sides: tuple[Side, Side]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `comparison` reads."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default="qwen3-1.7b",
        help="model whose shapes random weights get, one of"
        f" {', '.join(known_models())} (default: %(default)s)",
    )
    model.add_argument(
        "--model-path",
        help=f"folder of a model to load instead, or {EMBEDDED_MODEL_NAME}; works without a GPU",
    )
    parser.add_argument(
        "--schedule",
        help="KV budget schedule: shipped name, .json file or fixed-<tokens> (default: the"
        " model's own for target 0.86)",
    )
    parser.add_argument(
        "--dense-backend",
        default="flashinfer",
        help="attention backend of SGLang to compare with (default: %(default)s; torch_native"
        " without a GPU)",
    )


def comparison(options: argparse.Namespace, on_gpu: bool) -> Comparison:
    """The model and sides that the options name. Raises `ValueError`."""
    if options.model_path is None:
        if options.model not in known_models():
            raise ValueError(
                f"--model {options.model!r}: expected one of {', '.join(known_models())}, or"
                " --model-path FOLDER for a model with weights"
            )
        path = MODELS / options.model
    else:
        try:
            path = Path(model_folder(options.model_path))
        except ModelError as error:
            raise ValueError(f"--model-path {options.model_path}: {error}") from None
    config = _read_config(path)
    if options.schedule is not None:
        load_schedule(options.schedule, PAGE_SIZE)
    schedule = options.schedule or schedule_for_model(config, PAGE_SIZE).name
    dense = options.dense_backend
    if not on_gpu and dense == "flashinfer":
        dense = "torch_native"
    if dense == BACKEND:
        raise ValueError(
            f"--dense-backend {dense}: expected a dense backend of SGLang, e.g. flashinfer or fa3"
        )
    return Comparison(
        model=options.model if options.model_path is None else path.name,
        path=path,
        has_weights=options.model_path is not None,
        config=text_config(config),
        sides=(Side(BACKEND, schedule), Side(dense, None)),
    )


def checked_comparison(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    new_tokens: int,
    recorded: Mapping[str, Any],
) -> tuple[Comparison, Results]:
    """The comparison that the options ask for, and the results in `--out` to go on with.

    The longest sequence has `new_tokens` after `--prompt-tokens`; `recorded` holds settings besides
    the options. Bad options end the process with a one-line error before anything is measured.
    """
    import torch

    try:
        compared = comparison(options, torch.cuda.is_available())
        require_context(
            engine_arguments(options.engine_args).get("context_length")
            or compared.config["max_position_embeddings"],
            options.prompt_tokens,
            new_tokens,
        )
    except ValueError as error:
        parser.error(str(error))
    if not compared.has_weights:
        require_cuda(parser, ENGINE_MEMORY_GB, "weights and KV cache")
    prepare_out(parser, options.out)
    try:
        return compared, resumed(options.out, {"settings": {**settings(options), **recorded}})
    except ValueError as error:
        parser.error(str(error))


def measure_missing_sides(
    compared: Comparison,
    results: Results,
    run_side: Callable[[Comparison, Side, argparse.Namespace], list[dict[str, Any]]],
    options: argparse.Namespace,
) -> bool:
    """Add the rows of sides that have none yet, each from a process of its own.

    Stops at the first side that fails; returns whether none has failed.
    """
    for side in missing_sides(compared, results.rows):
        rows = in_new_process(run_side, compared, side, options)
        if rows is None:
            print(f"{compared.model} {side.name}: failed, left out", flush=True)
            return False
        results.add(*rows)
    return True


def missing_sides(compared: Comparison, rows: Sequence[Mapping[str, Any]]) -> list[Side]:
    """Sides that have no row yet."""
    measured = [(row["backend"], row["schedule"]) for row in rows]
    return [side for side in compared.sides if (side.backend, side.schedule) not in measured]


def require_context(context: int, prompt_tokens: int, new_tokens: int) -> None:
    """Raise `ValueError` unless a sequence fits into a context of `context` tokens."""
    if prompt_tokens + new_tokens >= context:
        raise ValueError(
            f"{prompt_tokens} prompt and {new_tokens} new tokens do not fit into the model's"
            f" context of {context}: expected less than that together"
        )


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict) or not {"vocab_size", "max_position_embeddings"} <= set(config):
        raise ValueError(
            f"--model-path {folder}: expected the folder of a Hugging Face model, with a"
            " config.json that gives vocab_size and max_position_embeddings"
        )
    return config
