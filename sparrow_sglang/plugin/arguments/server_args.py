"""Our backend, fields and checks in SGLang's `ServerArgs`, and the arguments of an engine.
Frameworks build argument parsers and `ServerArgs` in processes that have only imported SGLang, so
this cannot wait until SGLang loads plugins: `activate` runs it during `import sglang`."""

import functools
import importlib.abc
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparrow_sglang.attention_backends.dense_side import DENSE_BACKENDS, DENSE_FIELD
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import read_object
from sparrow_sglang.plugin.arguments.refusals import (
    device_problems,
    model_problems,
    not_registered,
    rank_problems,
    server_problems,
)
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import (
    BACKEND,
    DRAFT_WEIGHTS,
    LOOKUPS_FIELD,
    WEIGHTS_FIELD,
    refuse,
    uses_sparrow,
)
from sparrow_sglang.plugin.scheduler.adapter_checks import check_config
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.schedules.names import AUTO, load_schedule, schedule_for_model, schedule_spec
from sparrow_sglang.schedules.schedule import PAGE_SIZE, BudgetSchedule
from sparrow_sglang.sglang_compat.arguments import (
    ServerField,
    add_server_fields,
    extend_fields_before_import,
    is_resolved,
    model_config_if_read,
    read_model_config,
    resolution_method,
    resolved,
    server_arguments,
)
from sparrow_sglang.sglang_compat.versions import version_problems
from sparrow_sglang.validation import nearest_first

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

PLUGIN_NAME = "sparrow"
FIELD = "sparrow_schedule"

_MODULE = "sglang.srt.server_args"
_MARK = "_sparrow_installed"
_TAKES_SINKS = "triton"

FIELDS = {
    FIELD: ServerField(
        str | None,
        None,
        "KV budget schedule of the attention backend 'sparrow': a shipped name, a path to a .json"
        " file, or fixed-<tokens>. Default: the shipped schedule that fits the model.",
    ),
    DENSE_FIELD: ServerField(
        str | None,
        None,
        "Attention backend of SGLang for the dense passes of the attention backend 'sparrow' on a"
        f" GPU: {', '.join(DENSE_BACKENDS)}. Default: the one that SGLang itself would choose.",
    ),
    WEIGHTS_FIELD: ServerField(
        str,
        AUTO,
        f"Weights that drafts of lossless decoding use: {', '.join(DRAFT_WEIGHTS)}. fp8: copies,"
        " kept beside the model's own. auto: copies where the GPU computes them much faster.",
    ),
    LOOKUPS_FIELD: ServerField(
        bool,
        False,
        "Have lossless decoding draft by sparse steps alone, and not look tokens up in what the"
        " request and other answers to its prompt have written.",
    ),
    "sparrow_audit_rate": ServerField(
        float,
        0.0,
        "Share of finished requests, 0 to 1, that the attention backend 'sparrow' scores again"
        " densely; with --enable-metrics, which shows what it finds.",
    ),
}

logger = logging.getLogger(__name__)


def resolve_schedule(server_args: "ServerArgs", hf_config: Any) -> BudgetSchedule:
    """The schedule with which a server starts. Raises `ScheduleError`."""
    view = resolved(server_args)
    spec = schedule_spec(getattr(server_args, FIELD), mode_of(view).schedule)
    if spec == AUTO:
        return schedule_for_model(hf_config, view.page_size).for_model(hf_config)
    return load_schedule(spec, view.page_size).for_model(hf_config)


def prepare_model(_: None, runner: "ModelRunner", *args: Any, **kwargs: Any) -> None:
    """AFTER hook of loading a model, before the KV pool is sized: keep how this process decodes."""
    if uses_sparrow(runner.server_args):
        schedule = resolve_schedule(runner.server_args, runner.model_config.hf_config)
        mode = mode_of(runner.server_args)
        PROCESS.decoding = mode, schedule
        mode.prepare_model(runner)


def engine_arguments(text: str, reserved: Sequence[str] = ()) -> dict[str, Any]:
    """The value of --engine-args. Raises `ValueError`, also on `reserved` names, which the command
    sets itself."""
    arguments = None
    with suppress(json.JSONDecodeError):
        arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError(
            f"--engine-args {text}: expected a JSON object, in quotes, e.g. '{{\"tp_size\": 2}}'"
        )
    for name in reserved:
        if name in arguments:
            raise ValueError(f"--engine-args {name}: expected none of {', '.join(reserved)}")
    if problem := argument_problem(arguments):
        raise ValueError(f"--engine-args: {problem}")
    return arguments


def argument_problem(arguments: Mapping[str, Any]) -> str | None:
    """An error message on the first name that `sglang.Engine` does not know, and on the first value
    that is none where it requires a number. Imports SGLang, if there are arguments."""
    for problem in version_problems():
        raise InputError(problem)
    known = server_arguments() if arguments else {}
    for name, value in arguments.items():
        if name not in known:
            near = " or ".join(map(repr, nearest_first(name, sorted(known), cutoff=0.6)[:3]))
            hint = f"did you mean {near}?" if near else "expected a field of its ServerArgs"
            return f"{name} is no argument of SGLang: {hint}"
        kind = known[name]
        numbers = (int, float) if kind is float else int
        wrong = isinstance(value, bool) or not isinstance(value, numbers)
        if kind is not None and value is not None and wrong:
            return f"{name}={value!r}: expected {'a number' if kind is float else 'an integer'}"
    return None


def install() -> None:
    """Add our backend, fields and checks to the `ServerArgs` class; idempotent. Raises
    `RuntimeError` if this SGLang's ServerArgs cannot be extended."""
    from sglang.srt import server_args as module

    cls: Any = module.ServerArgs
    if getattr(cls, _MARK, False):
        return
    module.add_attention_backend_choices([BACKEND])
    add_server_fields(cls, FIELDS)
    _check_around_resolution(cls)
    _check_model_config(cls)
    _check_adapters(cls)
    setattr(cls, _MARK, True)


def install_on_import() -> None:
    """`install` now, or as soon as something imports SGLang's server_args."""
    module = sys.modules.get(_MODULE)
    if hasattr(module, "ServerArgs"):
        _install_or_log()
    elif not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Runs `install` once, right after SGLang's server_args has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    extend_fields_before_import(FIELDS)
                except Exception:
                    # `install` then finds our fields missing, and raises for those who need them.
                    logger.exception("sparrow-sglang could not extend SGLang's ServerArgs")
                execute(module)
                sys.modules[_MODULE] = module
                _install_or_log()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install_or_log() -> None:
    try:
        install()
    except Exception:
        # Whoever does not use the backend must still be able to import SGLang. `register` installs
        # again, and raises for those who do.
        if wrong_version := version_problems():
            logger.warning("sparrow-sglang leaves this SGLang alone: %s", *wrong_version)
        else:
            logger.exception("sparrow-sglang could not add its arguments to SGLang's ServerArgs")


def _check_around_resolution(cls: Any) -> None:
    """Refuse wrong arguments in the process that builds the engine, before anything is loaded."""
    method = resolution_method(cls)
    original = getattr(cls, method)

    @functools.wraps(original)
    def resolve(self: Any) -> None:
        if is_resolved(self):
            original(self)
            return
        sparse = uses_sparrow(self)
        if sparse:
            # A scheduler would not know the backend.
            if PROCESS.error is not None:
                raise not_registered(PROCESS.error) from PROCESS.error
            if problem := plugins_problem():
                raise RuntimeError(problem)
            refuse(server_problems(self))
            if self.page_size is None:
                # SGLang's own default is 1; landmarks need pages.
                self.page_size = PAGE_SIZE
            mode_of(self).set_defaults(self)
        original(self)
        if sparse:
            _check_resolved(self)
        else:
            _refuse_unused_fields(self)

    setattr(cls, method, resolve)


def _check_model_config(cls: Any) -> None:
    """Refuse a model as soon as SGLang has read its config, before SGLang adapts its arguments."""
    original = getattr(cls, "get_model_config", None)
    if original is None:
        from sglang.srt.arg_groups import model_hook
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        _pass_for_one_with_sinks(model_hook, "attention_backends_of")

        @register_resolution_hook("handle_model_specific_adjustments")
        def adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
            if uses_sparrow(server_args):
                refuse(model_problems(read_model_config(server_args)))
            previous(server_args)

        return
    # Until 0.5.15.
    _pass_for_one_with_sinks(cls, "_resolved_attention_backends")

    @functools.wraps(original)
    def get_model_config(self: Any) -> Any:
        first = "model_config" not in vars(self)
        model_config = original(self)
        if first and uses_sparrow(self):
            refuse(model_problems(model_config))
        return model_config

    cls.get_model_config = get_model_config


def _pass_for_one_with_sinks(owner: Any, name: str) -> None:
    """Have `owner`'s function of that name return another name than that of our backend. SGLang
    serves models with attention sinks only with backends that it knows by name."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def backends(view: Any) -> tuple[str, str]:
        prefill, decode = original(view)
        if BACKEND in (prefill, decode) and read_model_config(view).has_attention_sinks:
            prefill, decode = (_TAKES_SINKS if n == BACKEND else n for n in (prefill, decode))
        return prefill, decode

    setattr(owner, name, backends)


def _check_adapters(cls: Any) -> None:
    """Refuse adapters of --lora-paths as the schedulers would, but before they load the model."""
    original = cls.check_server_args

    @functools.wraps(original)
    def check_server_args(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for adapter in (resolved(self).lora_paths or ()) if uses_sparrow(self) else ():
            folder = Path(adapter.lora_path)
            # Others are names on the hub, which SGLang looks up.
            if folder.is_dir() or adapter.lora_path.startswith(("/", ".", "~")):
                try:
                    config = folder / "adapter_config.json"
                    check_config(read_object(config, "an adapter's config"))
                except InputError as error:
                    refuse([f"lora_paths={adapter.lora_name!r}: {error}"])

    cls.check_server_args = check_server_args


def _check_resolved(server_args: "ServerArgs") -> None:
    # SGLang may have replaced the backend for this model, or set other fields.
    view = resolved(server_args)
    refuse(server_problems(view))
    model_config = model_config_if_read(server_args)
    if model_config is not None:
        refuse(rank_problems(view, model_config))
        schedule = resolve_schedule(server_args, model_config.hf_config)
        refuse(device_problems(view, model_config, schedule))


def plugins_problem() -> str | None:
    """An error message if SGLANG_PLUGINS keeps SGLang from loading this plugin, else None."""
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        return (
            f"SGLANG_PLUGINS={allowed!r} leaves out the attention backend {BACKEND!r}: add"
            f" {PLUGIN_NAME} to it, or unset it"
        )
    return None


def _refuse_unused_fields(server_args: "ServerArgs") -> None:
    for name, field in FIELDS.items():
        if (value := getattr(server_args, name)) != field.default:
            raise ValueError(
                f"{name}={value!r} with attention_backend={server_args.attention_backend!r}, which"
                f" decodes densely: expected --attention-backend {BACKEND}"
            )
