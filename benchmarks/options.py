"""Command lines of benchmarks: bad input ends in a one-line error before anything is measured."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from sparrow_sglang.command_line import OneLineParser
from sparrow_sglang.schedule import PAGE_SIZE

MODELS = Path(__file__).parent / "models"
"""Folders with the shapes of models, by name."""


def benchmark_parser(prog: str, description: str, examples: str, out: str) -> OneLineParser:
    """Parser of a benchmark that writes `--out`; example commands follow its options in the help.

    `prog` is a command after `sparrow bench`, or a module of `sparrow_sglang.benchmarks`.
    """
    module = f"python -m sparrow_sglang.benchmarks.{prog}"
    parser = OneLineParser(
        prog=module if "." in prog else f"sparrow bench {prog}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="JSON file to write (default: %(default)s)"
    )
    return parser


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--engine-args`."""
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help="further arguments of sglang.Engine, e.g. '{\"disable_prefill_cuda_graph\": true}'",
    )


def engine_settings(
    model: Path | str, has_weights: bool, backend: str, schedule: str | None
) -> dict[str, Any]:
    """Arguments of `sglang.Engine` in all benchmarks; `schedule` is None for a dense backend."""
    settings: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,
        # Prompts are token ids. For a multimodal model, SGLang would look for an image processor.
        "enable_multimodal": False,
        "attention_backend": backend,
        "page_size": PAGE_SIZE,
        "log_level": "error",
    }
    return settings | ({"sparrow_schedule": schedule} if schedule else {})


def known_models() -> list[str]:
    """Names of the shapes in `MODELS`."""
    return sorted(folder.name for folder in MODELS.iterdir())


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as a result file records them: all but `--out`."""
    return {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key != "out"
    }


def require_cuda(
    parser: argparse.ArgumentParser,
    memory_gb: float,
    purpose: str,
    devices: int = 1,
    option: str = "--tp",
) -> None:
    """End with exit code 2 unless torch finds as many CUDA devices as `option` asks for."""
    import torch

    if not torch.cuda.is_available():
        parser.exit(
            2,
            f"{parser.prog}: error: no CUDA device found; expected an NVIDIA GPU with about"
            f" {memory_gb:.0f} GB of free memory for {purpose}. See whether nvidia-smi lists one;"
            " `sparrow plan` predicts step times without a GPU\n",
        )
    if (found := torch.cuda.device_count()) < devices:
        parser.exit(
            2,
            f"{parser.prog}: error: {found} CUDA device found; expected {devices} for {option}\n",
        )


def exit_on_sigterm() -> None:
    """Make SIGTERM (which `timeout` sends) raise SystemExit, so that child processes are ended."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def prepare_out(parser: argparse.ArgumentParser, out: Path) -> None:
    """Make the folder of `out` now, as minutes of measuring would be lost to a wrong path.

    This also calls `exit_on_sigterm`, so that processes started from now on end on SIGTERM, too.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: cannot make its folder ({error.strerror})")
    if out.is_dir():
        parser.error(f"--out {out}: is a folder; expected a path for a JSON file")
    exit_on_sigterm()
