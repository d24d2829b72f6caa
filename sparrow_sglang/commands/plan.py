"""`sparrow plan`: where the time of a decode step goes, and what a schedule is expected to save.

In: a model's config.json, a schedule, lengths, a GPU or its intensity. Out: a few tables as text.
Needs no GPU and imports neither torch nor SGLang.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparrow_sglang.command_line import count
from sparrow_sglang.config import AUTO
from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import text_config
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import model_folder, model_problem
from sparrow_sglang.planning.cost_model import GPUS, Hardware
from sparrow_sglang.planning.model_shape import KV_ITEMSIZES, ModelShape
from sparrow_sglang.planning.tables import DEFAULT_LENGTHS, Plan, render
from sparrow_sglang.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule, schedule_for_model

_HUB_TIMEOUT_S = 10.0
_MAX_LENGTH = 10_000_000  # every step up to it is computed, in some seconds


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `plan` to the subparsers of `sparrow`; `run` handles what it parses."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        description="Predict from a model's shapes where the time of a decode step goes and how"
        " much faster rollouts become under a schedule. Answers at once and needs no GPU.",
    )
    parser.add_argument(
        "--model-path",
        required=True,
        help="folder with a config.json, smollm2-135m, or a name on the hub",
    )
    parser.add_argument(
        "--schedule",
        default=AUTO,
        help="shipped name, path to a .json file, fixed-<tokens>, or auto for the model's own"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--page-size",
        type=int,
        default=PAGE_SIZE,
        help="tokens per page of named and fixed schedules (default: %(default)s)",
    )
    parser.add_argument(
        "--length", type=count, nargs="+", help="generated tokens; each length gets a row"
    )
    parser.add_argument(
        "--prompt-tokens", type=count, default=512, help="tokens per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=8,
        help="generations per prompt, which share the prompt's KV in the paper's formula"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=count,
        default=16,
        help="sequences that decode together on one GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_ITEMSIZES,
        default="auto",
        help="KV cache dtype of the server; the paper's formula always counts 2 bytes per value"
        " (default: %(default)s)",
    )
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument(
        "--gpu",
        choices=sorted(GPUS),
        default="h200",
        help="GPU whose data sheet is used (default: %(default)s)",
    )
    hardware.add_argument(
        "--intensity", type=float, help="FLOPs per byte of another device, instead"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises `InputError`, `ModelError` or `ScheduleError`."""
    print(render(make_plan(args)))
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Read and check everything that the parsed options name."""
    if args.intensity is not None and not 0 < args.intensity < float("inf"):
        raise InputError(f"--intensity={args.intensity}: expected FLOPs per byte, e.g. 206 (H200)")
    model, config = _read_config(args.model_path)
    shape = ModelShape.from_config(config)
    shape = dataclasses.replace(shape, kv_itemsize=KV_ITEMSIZES[args.kv_cache_dtype])
    context = text_config(config).get("max_position_embeddings") or 2**30
    room = context - args.prompt_tokens
    fitting = [length for length in DEFAULT_LENGTHS if length <= room]
    lengths = sorted(args.length or fitting or [max(1, room)])
    if args.prompt_tokens + lengths[-1] > _MAX_LENGTH:
        raise InputError(
            f"a prompt of {args.prompt_tokens} and a response of {lengths[-1]} tokens: expected"
            f" --prompt-tokens and the longest length to be at most {_MAX_LENGTH} together"
        )
    schedule = _read_schedule(args.schedule, config, args.page_size).for_model(config)
    return Plan(
        model=model,
        shape=shape,
        schedule=schedule,
        calibration=schedule.calibration(config),
        hardware=GPUS[args.gpu] if args.intensity is None else Hardware("", args.intensity, 1.0),
        lengths=tuple(lengths),
        prompt_tokens=args.prompt_tokens,
        samples=args.samples,
        batch=args.batch,
    )


def _read_config(model_path: str) -> tuple[str, Mapping[str, Any]]:
    """A short name of the model and the fields of its config.json."""
    path, folder = Path(model_path), model_folder(model_path)
    if folder != model_path:
        name, path = model_path, Path(folder) / "config.json"
    elif path.is_dir():
        name, path = path.resolve().name, path / "config.json"
    elif path.exists():
        name = path.resolve().parent.name
    else:
        name, path = path.name, _shipped_config(path.name) or _hub_config(model_path)
    return name, read_object(path, "a model's config.json for --model-path")


def _shipped_config(name: str) -> Path | None:
    """config.json of a model of that name, if its shape is shipped for the benchmarks."""
    path = Path(str(files("sparrow_sglang.benchmarks"))) / "models" / name.lower() / "config.json"
    return path if path.exists() else None


def _hub_config(model: str) -> Path:
    """config.json of a Hugging Face model, from the local cache or else from the hub."""
    import httpx
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        # Test the connection first, as hf_hub_download retries for half a minute without one.
        httpx.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
        return Path(hf_hub_download(model, "config.json"))
    except (HFValidationError, HfHubHTTPError, OSError, httpx.TransportError) as error:
        raise InputError(f"--model-path {model}: {model_problem(model, error)}") from None


def _read_schedule(spec: str, config: Mapping[str, Any], page_size: int) -> BudgetSchedule:
    if spec == AUTO:
        return schedule_for_model(config, page_size, "--schedule")
    # A file has its own page size, and there is no server yet whose page size could differ.
    if spec.endswith(".json"):
        return BudgetSchedule.from_json(spec)
    return load_schedule(spec, page_size)
