"""Set-up and checks of a run before it loads weights: tokenizer, prompts, schedules."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.models import (
    EMBEDDED_MODEL_NAME,
    missing_weights,
    model_folder,
    model_problem,
    path_problem,
)
from sparrow_sglang.plugin.arguments.server_args import argument_problem
from sparrow_sglang.plugin.names import LOSSLESS
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.rl.tasks import ChatRender, Task, load_task, require_module
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.run_folder import RUN_FILE, read_starts
from sparrow_sglang.schedules.names import AUTO, load_schedule, schedule_for_model
from sparrow_sglang.schedules.schedule import (
    DENSE,
    DRAFTS,
    PAGE_SIZE,
    BudgetSchedule,
    ScheduleError,
)


@dataclass(frozen=True)
class Setup:
    """`train` and `heldout` hold no prompts that are too long; `heldout` is by set, "" for a single
    one, empty without evaluation. `schedule` is None for dense and lossless rollouts. `engine` has
    "auto" replaced by the schedule's name, and the arguments of lossless decoding. `notes` are
    printed at the start; `fingerprint` is that of the training prompts, `evaluated` that of what
    evaluations measure."""

    model_path: str
    tokenizer: Any
    task: Task
    train: tuple[Prompt, ...]
    heldout: Mapping[str, tuple[Prompt, ...]]
    schedule: BudgetSchedule | None
    engine: EngineConfig
    notes: tuple[str, ...]
    fingerprint: str
    evaluated: str


def check_settings(config: TrainConfig) -> None:
    """Checks within a second, before torch is imported, without a model. Raises as `check`."""
    _check_values(config)
    if config.engine.schedule != AUTO:
        _schedule(config, None)
    if ":" in config.task.name:
        # The user's module may import anything, torch included, so it is only looked for.
        require_module("task.name", config.task.name)
        return
    # Warnings are off, as the task will give them when the run loads it.
    logging.disable(logging.WARNING)
    try:
        load_task(config.task, lambda messages: (0,))
    finally:
        logging.disable(logging.NOTSET)


def _check_values(config: TrainConfig) -> None:
    if config.logging.tensorboard:
        # Where it is missing, the run fails here and not once the weights are loaded.
        import_module("tensorboard")
    if problem := path_problem(config.model.path):
        raise InputError(f'model.path={config.model.path!r}: {problem}, or "{EMBEDDED_MODEL_NAME}"')
    arguments = config.engine.server_args
    quantization = arguments.get("quantization")
    if quantization is not None and arguments.get("load_format") != "flash_rl":
        raise InputError(
            f'engine.server_args.quantization={quantization!r}: expected none, or "fp8" with'
            ' load_format="flash_rl": otherwise SGLang does not quantise updated weights again'
        )
    if problem := argument_problem(config.engine.server_args):
        raise InputError(f"engine.server_args.{problem}")
    # The variable is read as SGLang reads it, whose processes inherit it.
    untempered = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
    if untempered and config.rollout.temperature != 1:
        raise InputError(
            f"rollout.temperature={config.rollout.temperature:g}: expected 1 with"
            " SGLANG_RETURN_ORIGINAL_LOGPROB set, or that variable unset"
        )


def check(config: TrainConfig) -> Setup:
    """Raises `InputError`, `ScheduleError` or `ModelError` on what does not exist or fit."""
    _check_values(config)
    model_path = model_folder(config.model.path)
    tokenizer, model_config = _load_configs(config, model_path)
    schedule = _schedule(config, model_config)
    # A template that prints the date gives a resumed run the prompts of its first day.
    variables = {"strftime_now": _first_day(config).strftime} | config.task.chat_template_kwargs
    task = load_task(config.task, ChatRender(tokenizer, **variables))
    sets = task.heldout if isinstance(task.heldout, Mapping) else {"": task.heldout}
    sets = (sets or {"": ()}) if config.evaluation.every_steps else {}
    train = _short_enough("training", task.train, config)
    heldout = {
        name: _short_enough(f"held-out {name}".strip(), prompts, config)
        for name, prompts in sets.items()
    }
    _check_context(config, model_config)
    folder = Path(model_path)
    if folder.is_dir() and (problem := missing_weights(folder)):
        raise InputError(f"model.path: {problem}")
    _check_model(config, model_path, model_config)
    engine = config.engine
    if engine.lossless:
        drafts = {"speculative_algorithm": LOSSLESS} | engine.server_args
        name = DRAFTS if engine.schedule == AUTO else engine.schedule
        engine = engine.model_copy(update={"schedule": name, "server_args": drafts})
        schedule = None
    if schedule is not None and engine.schedule == AUTO:
        # The engine receives the schedule's name: SPARROW_SCHEDULE in the environment could turn
        # "auto" into another schedule.
        engine = engine.model_copy(update={"schedule": schedule.name})
    notes = []
    left_out = len(task.train) - len(train)
    left_out += sum(len(sets[name]) - len(short) for name, short in heldout.items())
    if left_out:
        limit = config.rollout.max_prompt_tokens
        notes.append(f"{left_out} prompts are longer than {limit} tokens and left out")
    notes += task.notes
    longest = max(len(prompt.input_ids) for prompt in train) + config.rollout.max_new_tokens
    notes += _rollout_notes(engine, schedule, model_config, longest)
    return Setup(
        model_path,
        tokenizer,
        task,
        train,
        heldout,
        schedule,
        engine,
        tuple(notes),
        _fingerprint(train),
        _evaluated(config, heldout),
    )


def _load_configs(config: TrainConfig, model_path: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    from sparrow_sglang.rl.policy.dense_policy import unsupported

    setting = f"model.path={config.model.path!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model_config = AutoConfig.from_pretrained(model_path)
    except Exception as error:  # transformers raises anything on a config that it does not expect
        raise _unusable(config, model_path, error) from None
    if problem := unsupported(model_config):
        raise InputError(f"{setting}: {problem}")
    if tokenizer.chat_template is None:
        raise InputError(
            f"{setting}: its tokenizer has no chat template; expected chat_template.jinja"
        )
    for name in config.task.chat_template_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise InputError(f"task.chat_template_kwargs.{name} is not in the chat template")
    return tokenizer, model_config


def _rollout_notes(
    engine: EngineConfig, schedule: BudgetSchedule | None, model_config: Any, longest: int
) -> Iterator[str]:
    """How rollouts of up to `longest` tokens, prompts included, are decoded."""
    if engine.lossless:
        yield "rollouts are the policy's own: engine.lossless = true"
    elif schedule is None:
        yield "rollouts are dense: engine.schedule = 'dense'"
    else:
        if schedule.is_foreign(model_config):
            yield f"schedule {schedule.name}: {schedule.describe_calibration(model_config)}"
        if longest <= (dense := schedule.first_sparse_length() - 1):
            yield (
                f"nothing will be decoded sparsely: the budgets of {schedule.name} hold sequences"
                f" of up to {dense:,} tokens, and prompts with responses have at most {longest:,}"
            )


def _first_day(config: TrainConfig) -> datetime:
    """When the run to be resumed began; now without a checkpoint."""
    resumable = any((config.run_dir / "checkpoints").glob("step-*"))
    starts = read_starts(config.run_dir / RUN_FILE) if resumable else []
    return datetime.fromisoformat(starts[0]["date"]).astimezone() if starts else datetime.now()


def _unusable(config: TrainConfig, model_path: str, error: Exception) -> InputError:
    reason = model_problem(model_path, error)
    return InputError(f'model.path={config.model.path!r}: {reason}, or "{EMBEDDED_MODEL_NAME}"')


def _short_enough(which: str, prompts: Sequence[Prompt], config: TrainConfig) -> tuple[Prompt, ...]:
    name, limit = config.task.name, config.rollout.max_prompt_tokens
    if not prompts:
        remedy = "" if which == "training" else ", or evaluation.every_steps = 0"
        raise InputError(f"task.name={name!r} has no {which} prompts: expected one or more{remedy}")
    short = tuple(prompt for prompt in prompts if len(prompt.input_ids) <= limit)
    if not short:
        raise InputError(
            f"rollout.max_prompt_tokens={limit}: no {which} prompt of task {name!r} is that short"
        )
    return short


def _fingerprint(prompts: Sequence[Prompt], settings: str = "") -> str:
    digest = hashlib.sha256(settings.encode())
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.task, prompt.input_ids)).encode())
    return digest.hexdigest()


def _evaluated(config: TrainConfig, heldout: Mapping[str, Sequence[Prompt]]) -> str:
    if not heldout:
        return ""
    settings = config.evaluation.model_dump(exclude={"every_steps"})
    count = config.evaluation.prompts or None
    prompts = [one for in_set in heldout.values() for one in in_set[:count]]
    return _fingerprint(prompts, repr((settings, config.evaluation_tokens, list(heldout))))


def _schedule(config: TrainConfig, model_config: Any) -> BudgetSchedule | None:
    schedule, page_size = config.engine.schedule, config.engine.server_args.get("page_size")
    page_size = page_size or PAGE_SIZE
    if schedule == DENSE:
        return None
    if schedule == AUTO and not config.engine.lossless:
        return schedule_for_model(model_config, page_size, "engine.schedule")
    try:
        return load_schedule(DRAFTS if schedule == AUTO else schedule, page_size)
    except ScheduleError as error:
        raise ScheduleError(f"engine.schedule: {error}") from None


def _check_model(config: TrainConfig, model_path: str, model_config: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from sparrow_sglang.rl.distill import require_modules
    from sparrow_sglang.rl.policy.dense_policy import unsupported
    from sparrow_sglang.rl.runs.checkpoint import require_space

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
    except Exception as error:  # torch's own, on sizes that no tensor has
        raise _unusable(config, model_path, error) from None
    if problem := unsupported(model_config, model.get_output_embeddings()):
        raise InputError(f"model.path={config.model.path!r}: {problem}")
    if config.distill.enabled:
        require_modules(model, config.distill.target_modules)
    require_space(config, sum(parameter.numel() for parameter in model.parameters()))


def _check_context(config: TrainConfig, model_config: Any) -> None:
    context = config.engine.server_args.get("context_length") or getattr(
        model_config, "max_position_embeddings", None
    )
    prompt = config.rollout.max_prompt_tokens
    limits = {"": config.rollout.max_new_tokens}
    if config.evaluation.every_steps:
        limits["evaluation."] = config.evaluation_tokens
    for section, tokens in limits.items():
        # SGLang keeps one token of the context to itself.
        if context is not None and prompt + tokens >= context:
            raise InputError(
                f"rollout.max_prompt_tokens={prompt} and {section}max_new_tokens={tokens}:"
                f" expected less together than the model's context of {context}"
            )
