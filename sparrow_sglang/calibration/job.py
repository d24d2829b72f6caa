"""What a calibration is about to do, checked before an engine starts.

In: the parsed command line. Out: the model's context, prompts, defaults and the settings that a
work folder belongs to.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.measure import Unit
from sparrow_sglang.calibration.prompts import (
    Prompt,
    builtin_prompts,
    prompts_digest,
    read_prompts,
    tokenizer_of,
)
from sparrow_sglang.calibration.report import MATCHED_FIELDS
from sparrow_sglang.calibration.store import WorkFolder
from sparrow_sglang.mismatch.tail import BIN_TOKENS
from sparrow_sglang.models import model_folder, model_problem
from sparrow_sglang.provenance import provenance
from sparrow_sglang.schedule import BudgetSchedule

# Steps of a half to a third, from what an 8K model needs to what a 40K model needs.
BUDGETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288)
SHORT_CONTEXT = 16384
SHORT_BIN_TOKENS = 1024


@dataclass(frozen=True)
class Job:
    """What is to be measured, checked and complete before an engine starts."""

    model: str
    model_path: str
    hf_config: Any
    context: int
    page_size: int
    prompts: list[Prompt]
    units: list[Unit]
    work: WorkFolder


def find_model(spec: str, engine_args: dict[str, Any]) -> tuple[str, str, Any, int]:
    """Name, path, config and context length of a model."""
    from transformers import AutoConfig

    path = model_folder(spec)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"--model-path {spec}: {model_problem(path, error)}") from None
    context = engine_args.get("context_length") or config.max_position_embeddings
    return Path(spec).name, path, config, int(context)


def load_prompts(
    args: argparse.Namespace,
    model_path: str,
    context: int,
    bin_tokens: int,
    part: Literal["calibration", "check"],
) -> list[Prompt]:
    tokenize = tokenizer_of(model_path)
    if args.prompts is not None:
        return read_prompts(args.prompts, tokenize, context)
    return builtin_prompts(
        tokenize, context, bin_tokens, args.new_tokens, args.prompts_per_bin, part, args.seed
    )


def default_bin_tokens(context: int, page_size: int) -> int:
    tokens = SHORT_BIN_TOKENS if context <= SHORT_CONTEXT else BIN_TOKENS
    return tokens // page_size * page_size


def default_budgets(context: int, page_size: int) -> list[int]:
    least = BudgetSchedule.fixed(context * page_size, page_size)
    kept_pages = least.sink_pages + least.recent_pages
    return [b for b in BUDGETS if kept_pages * page_size < b < context] or [
        (kept_pages + 1) * page_size
    ]


def settings_of(
    args: argparse.Namespace, model_path: str, prompts: Sequence[Prompt], context: int
) -> dict[str, Any]:
    """What the measurements depend on; a work folder belongs to one such set."""
    return {
        "model": Path(model_path).name,
        "page_size": args.page_size,
        "context": context,
        "prompts": str(args.prompts or "built in"),
        "prompts_sha256": prompts_digest(prompts),
        "num_prompts": len(prompts),
        "samples": args.samples,
        "new_tokens": args.new_tokens,
        "temperature": 1.0,
        "seed": args.seed,
        "engine_args": json.loads(args.engine_args),
    }


def origin(job: Job) -> dict[str, Any]:
    """Who measured, where, with what."""
    return {
        "model": job.model,
        "model_match": {
            key: value
            for key in MATCHED_FIELDS
            if (value := getattr(job.hf_config, key, None)) is not None
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
