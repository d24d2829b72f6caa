"""Shared parts of the benchmarks: options and checks, models, result files, fresh processes."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.command_line import OneLineParser, at_least, new_path
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.names import DRAFT_WEIGHTS, LOSSLESS, MAX_DRAFT_TOKENS, WEIGHTS_FIELD
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.schedules.schedule import PAGE_SIZE

MODELS = Path(__file__).parent / "models"
"""Folders with the shapes of models, by name."""
STOCK = "stock"
"""Instead of a backend's name: the one that SGLang itself chooses for model, GPU and version."""
RESERVED = ("model_path", "attention_backend", "sparrow_schedule", "speculative_algorithm")
"""Arguments of an engine that the benchmarks set by flags of their own."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        unset = action.default in (None, [None], argparse.SUPPRESS)
        shown = unset or "(default" in (action.help or "")
        return f"{action.help}{'' if shown else ' (default: %(default)s)'}"


def bench_parser(verb: str, description: str, examples: str, out: str) -> OneLineParser:
    parser = OneLineParser(
        prog=f"sparrow bench {verb}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=new_path, default=Path(out), help="JSON file to write")
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help='further arguments of sglang.Engine, e.g. \'{"quantization": "fp8"}\'',
    )


def rate(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to 1")
    return number


def add_draft_options(parser: argparse.ArgumentParser, several: bool) -> None:
    parser.add_argument(
        "--drafts",
        type=at_least(1, MAX_DRAFT_TOKENS - 1),
        nargs="+" if several else None,
        default=[None] if several else None,
        metavar="K",
        help="measure lossless decoding with K drafts a round",
    )
    parser.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        nargs="+",
        default=[AUTO],
        help="weights that drafts use; each of several is measured (default: auto)",
    )
    parser.add_argument(
        "--acceptance-rate",
        type=rate,
        help="chance that a draft is accepted, which random weights do not give (default: 0.96)",
    )


def set_acceptance_rate(options: argparse.Namespace, applies: bool) -> None:
    """Set the default of --acceptance-rate where it applies; raises `ValueError` elsewhere."""
    if options.acceptance_rate is None:
        options.acceptance_rate = 0.96 if applies else None
    elif not applies:
        raise ValueError(
            f"--acceptance-rate {options.acceptance_rate}: expected random weights and --drafts"
        )


def tokens_per_round(drafts: int, acceptance_rate: float) -> float:
    """Mean tokens of a round, the bonus token included."""
    return sum(acceptance_rate**accepted for accepted in range(drafts + 1))


def known_models() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir())


class Side(NamedTuple):
    """What an engine serves; a dense backend has neither schedule nor drafts nor their weights."""

    backend: str
    schedule: str | None = None
    drafts: int | None = None
    weights: str | None = None


def engine_settings(model: Path | str, has_weights: bool, side: Side) -> dict[str, Any]:
    """Arguments of `sglang.Engine` in all benchmarks."""
    settings: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,
        # Prompts are token ids. For a multimodal model, SGLang would look for an image processor.
        "enable_multimodal": False,
        "page_size": PAGE_SIZE,
        "log_level": "error",
    }
    settings |= {} if side.backend == STOCK else {"attention_backend": side.backend}
    if side.drafts:
        settings |= {"speculative_algorithm": LOSSLESS, WEIGHTS_FIELD: side.weights}
        settings["speculative_num_draft_tokens"] = side.drafts + 1
    return settings | ({"sparrow_schedule": side.schedule} if side.schedule else {})


@contextmanager
def running(
    side: Side, arguments: Mapping[str, Any], rate: float | None, always_draft: bool
) -> Iterator[tuple[Any, str]]:
    """An engine, and the attention backend that it decodes with, as SGLang reports it. `rate` and
    `always_draft` are those of `given_rounds`, for drafts."""
    import sglang

    engine_class = sglang.Engine
    if side.drafts:
        from sparrow_sglang.benchmarks import given_rounds

        engine_class = given_rounds.engine_class(rate, always_draft)
    with engine_class(**arguments) as engine:
        info = engine.get_server_info() if side.backend == STOCK else {}
        served = info.get("decode_attention_backend") or info.get("attention_backend")
        yield engine, str(served or side.backend)


def require_cuda(devices: int = 1) -> None:
    import torch

    if (count := torch.cuda.device_count()) < devices:
        raise InputError(
            f"{count or 'no'} CUDA device found; expected {devices}; `sparrow plan` predicts step"
            " times without a GPU"
        )


def begin(options: argparse.Namespace, **fields: Any) -> None:
    """Write `--out` without rows, so that a wrong path fails before minutes of measuring; then
    `exit_on_sigterm`."""
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "out"
    }
    try:
        write_json(options.out, provenance() | {"settings": settings, **fields, "rows": []})
    except OSError as error:
        raise InputError(f"--out {options.out}: cannot be written ({error.strerror})") from None
    exit_on_sigterm()


def read_result(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return content


def add_row(out: Path, row: Mapping[str, Any]) -> None:
    content = read_result(out)
    content["rows"].append(row)
    write_json(out, content)


def in_fresh_process(function: Callable[..., None], *arguments: Any) -> bool:
    """Call a module-level function in a fresh Python process; whether it ended without an error. An
    engine leaves memory and signal handlers behind, and may take its process down with it."""
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    return process.exitcode == 0
