"""Shared parts of the benchmarks: options and checks, models, result files, fresh processes."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.rounds import (
    ACCEPTANCE,
    LOOKUP_ACCEPTANCE,
    Rates,
    Round,
    parse_round,
)
from sparrow_sglang.command_line import OneLineParser, new_path
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.names import BACKEND, DRAFT_WEIGHTS, LOSSLESS, WEIGHTS_FIELD
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.schedules.schedule import PAGE_SIZE

MODELS = Path(__file__).parent / "models"
"""Folders with the shapes of models, by name."""
STOCK, STOCK_16, NGRAM = "stock", "stock-16", "ngram"
SIDES = (BACKEND, STOCK, STOCK_16)
NGRAM_SETTINGS = {
    "attention_backend": "fa3",
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}
RESERVED = (
    *("model_path", "attention_backend", "page_size"),
    *("sparrow_schedule", "speculative_algorithm"),
)
"""Arguments of an engine that the benchmarks set by flags of their own."""


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        unset = action.default in (None, [], argparse.SUPPRESS)
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


def add_side_options(parser: argparse.ArgumentParser, several: bool) -> None:
    """Sides to measure, and what lossless ones draft."""
    add = parser.add_argument
    add(
        "--sides",
        nargs="+",
        default=list(SIDES),
        metavar="SIDE",
        help=f"what to measure: {BACKEND}; {STOCK}, SGLang as it is without flags; {STOCK_16}, with"
        f" pages of {PAGE_SIZE} tokens; {NGRAM}, its lookups on the host; or one of its attention"
        f" backends (default: {' '.join(SIDES)})",
    )
    add(
        "--drafts",
        type=parse_round,
        nargs="+" if several else None,
        default=[] if several else None,
        metavar="K",
        help="measure lossless decoding with up to K drafts a round; K+M: and M looked-up tokens",
    )
    add(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        nargs="+",
        default=[AUTO],
        help="weights that drafts use; each of several is measured (default: auto)",
    )
    add(
        "--acceptance-rate",
        type=rate,
        help="chance that a sparse draft is accepted, which random weights do not give"
        f" (default: {ACCEPTANCE})",
    )
    add(
        "--lookup-acceptance",
        type=rate,
        help="the same of a looked-up token, after its predecessors (default:"
        f" {LOOKUP_ACCEPTANCE}: 0.40 to 0.50 of them follow in recorded long reasoning)",
    )


def set_rates(options: argparse.Namespace, applies: bool) -> Rates | None:
    """The rates to assume, set in `options`, where they apply; raises `ValueError` elsewhere."""
    fields = {"acceptance_rate": ACCEPTANCE, "lookup_acceptance": LOOKUP_ACCEPTANCE}
    for field, default in fields.items():
        if (value := getattr(options, field)) is None:
            setattr(options, field, default if applies else None)
        elif not applies:
            flag = f"--{field.replace('_', '-')}"
            raise ValueError(f"{flag} {value}: expected random weights and --drafts")
    return Rates(*(getattr(options, field) for field in fields)) if applies else None


def known_models() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir())


class Side(NamedTuple):
    """What an engine serves: one of `--sides`. Only `BACKEND` has a schedule; with `rounds`, of
    which each is measured, it decodes losslessly, and `weights` are those of the drafts."""

    name: str
    schedule: str | None = None
    rounds: tuple[Round, ...] = ()
    weights: str | None = None

    def __str__(self) -> str:
        rounds = " ".join(map(str, self.rounds))
        return " ".join(filter(None, (self.name, self.schedule, rounds, self.weights)))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `sglang.Engine`."""
        # Stock takes its own page size; its NGRAM is not made for all.
        pages: dict[str, Any] = {} if self.name == STOCK else {"page_size": PAGE_SIZE}
        if self.name in (STOCK, STOCK_16):
            return pages
        if self.name == NGRAM:
            return pages | NGRAM_SETTINGS
        settings = pages | {"attention_backend": self.name}
        if self.schedule:
            settings["sparrow_schedule"] = self.schedule
        if self.rounds:
            settings |= {"speculative_algorithm": LOSSLESS, WEIGHTS_FIELD: self.weights}
            settings["speculative_num_draft_tokens"] = max(each.total for each in self.rounds) + 1
        return settings


def sides_of(
    options: argparse.Namespace, schedules: Sequence[str], rounds: Sequence[Round]
) -> Iterator[Side]:
    """`--sides`, that of `BACKEND` with each schedule and each of `--draft-weights`."""
    for name in options.sides:
        for schedule in schedules if name == BACKEND else [None]:
            drafts = tuple(rounds) if schedule else ()
            for weights in options.draft_weights if drafts else [None]:
                yield Side(name, schedule, drafts, weights)


def engine_settings(model: Path | str, has_weights: bool, side: Side) -> dict[str, Any]:
    """Arguments of `sglang.Engine` in all benchmarks."""
    from torch.cuda import is_available

    # What SGLang chooses on a CPU depends on the CPU.
    backend = {} if is_available() else {"attention_backend": "torch_native"}
    return {
        **backend,
        "model_path": str(model),
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,
        # Prompts are token ids. For a multimodal model, SGLang would look for an image processor.
        "enable_multimodal": False,
        "log_level": "error",
    } | side.settings


@contextmanager
def running(
    side: Side, arguments: Mapping[str, Any], rates: Rates | None, round_: Round | None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An engine, and what rows record of it: the side, attention backend and page size as SGLang
    reports them. `rates` and `round_` are those of `given_rounds`, for lossless decoding."""
    import sglang

    engine_class = sglang.Engine
    if side.rounds:
        from sparrow_sglang.benchmarks import given_rounds

        engine_class = given_rounds.engine_class(given_rounds.Given(rates, round_))
    with engine_class(**arguments) as engine:
        info = engine.get_server_info()
        backend = info.get("decode_attention_backend") or info.get("attention_backend")
        row = {"side": side.name, "backend": backend, "page_size": info.get("page_size")}
        yield engine, row | {"schedule": side.schedule}


def measure_sides(measurements: Iterable[tuple[Side, tuple[Any, ...]]], measure: Any) -> bool:
    """Call `measure` with a side and arguments, each in a fresh process; whether none failed."""
    ended_well = True
    for side, arguments in measurements:
        if not in_fresh_process(measure, side, *arguments):
            print(f"{side}: failed, left out", file=sys.stderr, flush=True)
            ended_well = False
    return ended_well


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
