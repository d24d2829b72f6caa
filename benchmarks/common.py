"""What the benchmarks share: options and their checks, models, result files, fresh processes."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.command_line import OneLineParser, count, exit_on_sigterm
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, model_folder, path_problem
from sparrow_sglang.plugin.lossless.refusals import LOSSLESS
from sparrow_sglang.plugin.refusals import BACKEND
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedule import DRAFTS, PAGE_SIZE
from sparrow_sglang.schedule_names import load_schedule, schedule_for_model

MODELS = Path(__file__).parent / "models"
"""Folders with the shapes of models, by name."""
STOCK = "stock"
"""Instead of a backend's name: the one that SGLang itself chooses for model, GPU and version."""
ENGINE_MEMORY_GB = 40.0


@dataclass(frozen=True)
class Side:
    """An attention backend of SGLang; `schedule` is None for a dense one.

    With `drafts`, lossless decoding of so many a round.
    """

    backend: str
    schedule: str | None
    drafts: int | None = None

    @property
    def name(self) -> str:
        return "lossless" if self.drafts else "sparse" if self.schedule else "dense"


@dataclass(frozen=True)
class Comparison:
    """A model in `path`, with random weights unless `has_weights`, and the sides to measure.

    `config` is that of the language model. The sparse side comes first, so that no time is spent
    on the dense side if the sparse side refuses the settings.
    """

    model: str
    path: Path
    has_weights: bool
    config: Mapping[str, Any]
    sides: tuple[Side, Side]


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.default in (None, argparse.SUPPRESS) or "(default" in (action.help or "")
        return f"{action.help}{'' if shown else ' (default: %(default)s)'}"


def bench_parser(verb: str, description: str, examples: str, out: str) -> OneLineParser:
    parser = OneLineParser(
        prog=f"sparrow bench {verb}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="JSON file to write")
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help='further arguments of sglang.Engine, e.g. \'{"quantization": "fp8"}\'',
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--schedule",
        help="shipped name, .json file or fixed-<tokens> (default: the model's for target 0.86)",
    )
    parser.add_argument(
        "--dense-backend",
        default=STOCK,
        help="attention backend of SGLang to compare with (default: SGLang's own choice;"
        " torch_native without a GPU)",
    )


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to 1")
    return rate


def add_draft_options(parser: argparse.ArgumentParser, several: bool) -> None:
    parser.add_argument(
        "--drafts",
        type=count,
        nargs="+" if several else None,
        default=[None] if several else None,
        metavar="K",
        help="measure lossless decoding with K drafts a round",
    )
    parser.add_argument(
        "--acceptance-rate",
        type=_rate,
        default=0.96,
        help="chance that a draft is accepted, which random weights do not give",
    )


def tokens_per_round(drafts: int, acceptance_rate: float) -> float:
    """Mean tokens of a round, the bonus token included."""
    return sum(acceptance_rate**accepted for accepted in range(drafts + 1))


def known_models() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir())


def comparison(options: argparse.Namespace) -> Comparison:
    """The model and sides that the options name. Raises `ValueError`, before torch is imported."""
    if options.model_path is None:
        if options.model not in known_models():
            raise ValueError(f"--model {options.model!r}: expected {', '.join(known_models())}")
        path = MODELS / options.model
    else:
        try:
            path = Path(model_folder(options.model_path))
        except ModelError as error:
            raise ValueError(f"--model-path {options.model_path}: {error}") from None
        if problem := path_problem(str(path)):
            raise ValueError(f"--model-path {path}: {problem}")
    config = read_object(path / "config.json", "a model's config.json")
    if options.schedule is not None:
        load_schedule(options.schedule, PAGE_SIZE).for_model(config)
    schedule = options.schedule or (
        DRAFTS if options.drafts else schedule_for_model(config, PAGE_SIZE).name
    )
    dense = options.dense_backend
    if dense == BACKEND:
        raise ValueError(f"--dense-backend {dense}: expected a dense backend, such as fa3")
    from torch.cuda import is_available

    if dense == STOCK and not is_available():
        dense = "torch_native"
    return Comparison(
        model=options.model if options.model_path is None else path.name,
        path=path,
        has_weights=options.model_path is not None,
        config=text_config(config),
        sides=(Side(BACKEND, schedule, options.drafts), Side(dense, None)),
    )


def engine_settings(
    model: Path | str,
    has_weights: bool,
    backend: str,
    schedule: str | None,
    drafts: int | None = None,
) -> dict[str, Any]:
    """Arguments of `sglang.Engine` in all benchmarks; `schedule` is None for a dense backend."""
    settings: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,
        # Prompts are token ids. For a multimodal model, SGLang would look for an image processor.
        "enable_multimodal": False,
        "page_size": PAGE_SIZE,
        "log_level": "error",
    }
    settings |= {} if backend == STOCK else {"attention_backend": backend}
    if drafts:
        settings |= {"speculative_algorithm": LOSSLESS, "speculative_num_draft_tokens": drafts + 1}
    return settings | ({"sparrow_schedule": schedule} if schedule else {})


def backend_of(engine: Any) -> str:
    """The attention backend that an engine decodes with, as SGLang reports it, else `STOCK`."""
    info = engine.get_server_info()
    return str(info.get("decode_attention_backend") or info.get("attention_backend") or STOCK)


def require_cuda(
    parser: argparse.ArgumentParser, memory_gb: float, purpose: str, devices: int = 1
) -> None:
    import torch

    if (found := torch.cuda.device_count()) < devices:
        parser.exit(
            2,
            f"{parser.prog}: error: {found or 'no'} CUDA device found; expected {devices} with"
            f" about {memory_gb:.0f} GB of free memory for {purpose}; `sparrow plan` predicts step"
            " times without a GPU\n",
        )


def begin(
    parser: argparse.ArgumentParser, options: argparse.Namespace, **fields: Any
) -> dict[str, Any]:
    """Write `--out` without rows yet, as minutes of measuring would be lost to a wrong path.

    From now on SIGTERM (which `timeout` sends) raises SystemExit, so that child processes are
    ended. Returns the file's content.
    """
    settings = {
        # JSON has no infinity.
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in vars(options).items()
        if name != "out"
    }
    content = provenance() | {"settings": settings, **fields, "rows": []}
    try:
        write_json(options.out, content)
    except OSError as error:
        parser.error(f"--out {options.out}: cannot be written ({error.strerror})")
    exit_on_sigterm()
    return content


def read_result(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return content


def add_row(out: Path, row: Mapping[str, Any]) -> None:
    content = read_result(out)
    content["rows"].append(row)
    write_json(out, content)


def in_fresh_process(function: Callable[..., None], *arguments: Any) -> bool:
    """Call a module-level function in a fresh Python process; whether it ended without an error.

    An engine leaves memory and signal handlers behind, and may take its process down with it.
    """
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    return process.exitcode == 0


def measure_sides(
    compared: Comparison,
    options: argparse.Namespace,
    run_side: Callable[[Comparison, Side, argparse.Namespace], None],
) -> Sequence[Mapping[str, Any]]:
    """Have `run_side` add each side's row to `--out`; returns the rows, up to a side that fails."""
    for side in compared.sides:
        if not in_fresh_process(run_side, compared, side, options):
            print(f"{compared.model} {side.name}: failed", file=sys.stderr, flush=True)
            break
    rows: Sequence[Mapping[str, Any]] = read_result(options.out)["rows"]
    return rows
