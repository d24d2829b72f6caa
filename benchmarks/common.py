"""Shared parts of the benchmarks: options, sides and their engines, result files."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.command_line import OneLineParser, new_path, rate
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import quoted, read_object
from sparrow_sglang.planning.rounds import Plan
from sparrow_sglang.planning.step_time import ASSUMED, Acceptance
from sparrow_sglang.plugin.arguments.server_args import engine_arguments
from sparrow_sglang.plugin.names import BACKEND, LOSSLESS, MAX_DRAFT_TOKENS, WEIGHTS_FIELD
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.schedules.schedule import PAGE_SIZE

MODELS = Path(__file__).parent / "models"
"""Folders with the shapes of models, by name."""
STOCK, STOCK_16, NGRAM = "stock", "stock-16", "ngram"
SIDES = (BACKEND, STOCK, STOCK_16)
RESERVED = "model_path attention_backend page_size sparrow_schedule speculative_algorithm".split()
"""Arguments of an engine that the benchmarks set by flags of their own."""
ACCEPTANCE_FIELDS = ("acceptance_rate", "lookup_acceptance")


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        unset = action.default in (None, [], argparse.SUPPRESS)
        shown = unset or "(default" in (action.help or "")
        return f"{action.help}{'' if shown else ' (default: %(default)s)'}"


def bench_parser(verb: str, description: str, examples: str, out: str = "") -> OneLineParser:
    parser = OneLineParser(
        prog=f"sparrow bench {verb}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    if out:
        parser.add_argument("--out", type=new_path, default=Path(out), help="JSON file to write")
    return parser


def known_models() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir())


def parse_round(text: str) -> Plan:
    """An argparse `type`, of the rounds that `str` writes."""
    most = MAX_DRAFT_TOKENS - 1
    match = re.fullmatch(r"(\d{1,3})(?:\+(\d{1,3}))?", text, re.ASCII)
    drafts, lookups = (int(match[1]), int(match[2] or 0)) if match else (0, 0)
    if not 1 <= drafts + lookups <= most:
        raise argparse.ArgumentTypeError(
            f"expected K or K+M, 1 to {most} sparse drafts and looked-up tokens, got {text}"
        )
    return Plan(drafts, lookups, drafts + lookups + 1)


def add_side_options(parser: argparse.ArgumentParser) -> None:
    """Sides to measure, what lossless ones draft, and arguments of all engines."""
    add = parser.add_argument
    sides = (
        f"what to measure: {BACKEND}; {STOCK}, SGLang as it is without flags; {STOCK_16}, with"
        f" pages of {PAGE_SIZE} tokens; {NGRAM}, its lookups on the host, of real weights; or one"
        f" of its attention backends (default: {' '.join(SIDES)})"
    )
    add("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help=sides)
    rounds = "decode losslessly with up to K sparse drafts a round; K+M: and M looked-up tokens"
    add("--drafts", type=parse_round, nargs="+", default=[], metavar="K", help=rounds)
    rates = "chance that {} is accepted, which random weights do not give (default: {})"
    add("--acceptance-rate", type=rate, help=rates.format("a sparse draft", ASSUMED.drafts))
    looked_up = "a looked-up token, after its predecessors,"
    add("--lookup-acceptance", type=rate, help=rates.format(looked_up, ASSUMED.lookups))
    further = 'further arguments of sglang.Engine, e.g. \'{"quantization": "fp8"}\''
    add("--engine-args", default="{}", metavar="JSON", help=further)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The value of --engine-args. Raises `InputError`, also on --sides unknown to SGLang."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    known = dict.fromkeys([*SIDES, NGRAM, *ATTENTION_BACKEND_CHOICES])
    if unknown := [side for side in options.sides if side not in known]:
        raise InputError(f"--sides {' '.join(unknown)}: expected some of {', '.join(known)}")
    return engine_arguments(options.engine_args, RESERVED)


def random_weights(options: argparse.Namespace) -> Acceptance:
    """The acceptance to assume; set in `options`, so that results record it."""
    if NGRAM in options.sides:
        raise ValueError(
            f"--sides {NGRAM}: random weights repeat no text; expected in"
            " `sparrow bench rollout --model-path M`"
        )
    for field, default in zip(ACCEPTANCE_FIELDS, ASSUMED, strict=True):
        if getattr(options, field) is None:
            setattr(options, field, default)
    return Acceptance(options.acceptance_rate, options.lookup_acceptance)


class Side(NamedTuple):
    """What an engine serves: one of `--sides`. Only `BACKEND` has a schedule; with `rounds` it
    decodes losslessly."""

    name: str
    schedule: str | None = None
    rounds: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.schedule, *map(str, self.rounds))))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `sglang.Engine`."""
        # Stock takes its own page size; its NGRAM is not made for all.
        settings: dict[str, Any] = {} if self.name == STOCK else {"page_size": PAGE_SIZE}
        if self.name == NGRAM:
            settings |= {"attention_backend": "fa3", "speculative_algorithm": "NGRAM"}
            settings |= {"speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1}
        elif self.name not in (STOCK, STOCK_16):
            settings["attention_backend"] = self.name
        if self.schedule:
            settings["sparrow_schedule"] = self.schedule
        if self.rounds:
            settings["speculative_algorithm"] = LOSSLESS
            settings["speculative_num_draft_tokens"] = max(each.rows for each in self.rounds)
        return settings


def sides_of(options: argparse.Namespace, schedules: Sequence[str]) -> list[Side]:
    """`--sides`, that of `BACKEND` with each schedule. Options of a side that is not chosen are
    ignored."""
    return [
        Side(name, schedule, tuple(options.drafts)) if name == BACKEND else Side(name)
        for name in dict.fromkeys(options.sides)
        for schedule in (dict.fromkeys(schedules) if name == BACKEND else [""])
    ]


@contextmanager
def running(
    side: Side,
    options: argparse.Namespace,
    model: Path,
    acceptance: Acceptance | None,
    defaults: Mapping[str, Any],
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An engine, and what rows record of it: attention backend and page size as SGLang reports
    them. Weights are random, and drafts accepted at the rates of `acceptance`; None: real ones."""
    import sglang
    from torch.cuda import is_available

    arguments: dict[str, Any] = {
        # What SGLang chooses on a CPU depends on the CPU.
        **({} if is_available() else {"attention_backend": "torch_native"}),
        "model_path": str(model),
        "load_format": "auto" if acceptance is None else "dummy",
        "skip_tokenizer_init": True,
        # Prompts are token ids. For a multimodal model, SGLang would look for an image processor.
        "enable_multimodal": False,
        "log_level": "error",
    }
    arguments |= {**side.settings, **defaults, **engine_options(options)}
    engine_class = sglang.Engine
    if side.rounds:
        from sparrow_sglang.benchmarks import given_rounds

        engine_class = given_rounds.engine_class(acceptance)
    with engine_class(**arguments) as engine:
        info = engine.get_server_info()
        row = {
            "model": model.name,
            "side": side.name,
            "backend": info.get("decode_attention_backend") or info.get("attention_backend"),
            "page_size": info.get("page_size"),
            "schedule": side.schedule,
            "tp": arguments.get("tp_size", 1),
            "ep": arguments.get("ep_size", 1),
            "kv_cache_dtype": arguments.get("kv_cache_dtype", "auto"),
            "quantization": arguments.get("quantization"),
        }
        if side.rounds:
            row["draft_weights"] = arguments.get(WEIGHTS_FIELD, AUTO)
        yield engine, row


def measure_sides(
    measure: Callable[..., None], sides: Sequence[tuple[Side, Any]], options: argparse.Namespace
) -> bool:
    """Call `measure` with each side, the options and what stands beside the side, in a fresh
    process; whether none failed."""
    failed = [side for side, what in sides if not in_fresh_process(measure, side, options, what)]
    for side in failed:
        print(f"{side}: failed, left out", file=sys.stderr, flush=True)
    return not failed


def require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError("no CUDA device found; `sparrow plan` predicts step times without a GPU")


def begin(options: argparse.Namespace) -> None:
    """Write `--out` without rows, so that a wrong path fails before minutes of measuring; then
    `exit_on_sigterm`."""
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "out"
    }
    try:
        write_json(options.out, provenance() | {"settings": settings, "rows": []})
    except OSError as error:
        raise InputError(f"--out {options.out}: cannot be written ({error.strerror})") from None
    exit_on_sigterm()


def read_result(out: Path) -> dict[str, Any]:
    content = read_object(out, expected := "a result of `sparrow bench`")
    if missing := {"command", "commit", "device", "packages", "rows"} - content.keys():
        raise InputError(f"{out}: has no {min(missing)}; expected {expected}")
    rows = content["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{out}: rows={quoted(rows)}: expected the rows of {expected}")
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
