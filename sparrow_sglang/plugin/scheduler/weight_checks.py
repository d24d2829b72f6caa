"""Updates of weights, compared with names and shapes of the weights that a server started with,
before any is loaded. SGLang skips names that the model does not have, and at shapes or bytes that
do not fit, its scheduler ends."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import model_value, text_config
from sparrow_sglang.json_values import cut
from sparrow_sglang.models import path_problem, stored_shapes
from sparrow_sglang.plugin.scheduler.adapter_checks import empty_model
from sparrow_sglang.plugin.scheduler_calls import ControlError, scheduler_rpc
from sparrow_sglang.plugin.state import PROCESS, SchedulerState, require_scheduler_state

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

CHECK_FOLDER = "check_folder"
PARTIAL = "Partial weight update: "
REFUSED = "the weights were not updated: "
"""How an answer begins if nothing has been loaded."""
_FAILED = "SGLang could not load the weights ({}), maybe some: load all again"
_EXPERTS = ".experts."
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# Some checkpoints have them, and no model loads them: rotary angles, and the layers that predict
# more than the next token.
_IGNORED = ("rotary_emb.", "mtp.")
# Parts of names that differ between a multimodal model's checkpoint and its modules.
_WRAPPERS = ("model", "language_model")


@dataclass(frozen=True)
class Checkpoint:
    """What a model can load.

    Attributes:
        stored: shapes by name, from the files that a server was started with; empty if unreadable.
        hf_config: of the model, which tells names and shapes where the files do not.
    """

    stored: Mapping[str, Sequence[int]]
    hf_config: Any

    @classmethod
    def of_model(cls, model_config: Any) -> "Checkpoint":
        """That of SGLang's `ModelConfig`."""
        stored: dict[str, Sequence[int]] = {}
        folder = _local_folder(model_config.model_path, model_config.revision)
        # With load_format="dummy" there need not be any.
        with suppress(InputError):
            found = {} if folder is None else stored_shapes(folder)
            stored = {name: shape for name, (_, shape) in found.items()}
        return cls(stored, model_config.hf_config)

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each tensor that the model takes; empty if unknown."""
        shapes = self.stored
        if not shapes:
            # Configs of SGLang's own lack what transformers reads.
            with suppress(Exception):
                weights = empty_model(self.hf_config).state_dict()
                shapes = {name: tensor.shape for name, tensor in weights.items()}
        known = {self._key(name): list(shape) for name, shape in shapes.items()}
        if self._is_tied and (embeddings := self._key(_EMBEDDINGS)) in known:
            known[_HEAD] = known[embeddings]
        return known

    @cached_property
    def whole(self) -> set[str]:
        """What an update of all weights brings, besides experts."""
        skipped = (*_IGNORED, _EXPERTS, *([_HEAD] if self._is_tied else ()))
        return {key for key in self.shapes if not any(part in key for part in skipped)}

    @property
    def _is_tied(self) -> bool:
        return bool(model_value(self.hf_config, "tie_word_embeddings"))

    def _key(self, name: str) -> str:
        if text_config(self.hf_config) is self.hf_config:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    def problem(self, name: str, shape: Sequence[int]) -> str | None:
        """Why the model cannot load this tensor; None if it can, or if that is unknown."""
        shape, expected = list(shape), self.shapes.get(self._key(name))
        if not self.shapes or any(part in name for part in _IGNORED):
            return None
        if expected is None:
            # Experts are stored one by one or stacked; SGLang takes both.
            if _EXPERTS in name and any(_EXPERTS in key for key in self.shapes):
                return None
            return f"{cut(name)} {shape}: the model has no tensor of that name"
        if shape == expected or math.prod(shape) == math.prod(expected) == 1:
            return None
        return f"{cut(name)} is {shape}: expected {expected}"

    def note(self, names: Iterable[str]) -> str:
        """What an update with these names leaves as it was; empty if nothing, or if unknown."""
        absent = sorted(self.whole - {self._key(name) for name in names})
        if not absent:
            return ""
        updated = len(self.whole) - len(absent)
        return f"{updated} of {len(self.whole)} tensors were updated, not {absent[0]}"


def _local_folder(path: str, revision: str | None = None) -> Path | None:
    """A model's folder, also of a hub id in the local cache; None if there is none, as of the URLs
    and files that only SGLang can read."""
    if (folder := Path(path)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    # What is not in the cache, and what is no hub id.
    with suppress(OSError, ValueError):
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    return None


def _summary(problems: Iterable[str | None]) -> str:
    """The first of `problems`, and how many there are; empty if there are none."""
    found = list(filter(None, problems))
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + others if found else ""


@scheduler_rpc(CHECK_FOLDER)
def _check_folder(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    """Refuse weights in a folder that do not fit."""
    state, folder = require_scheduler_state(), _local_folder(fields["path"])
    checkpoint = state.checkpoint
    assert checkpoint is not None
    # SGLang downloads what may be on the hub, and every request waits meanwhile.
    if folder is None and (wrong := path_problem(fields["path"])):
        raise ControlError(f"model_path {cut(fields['path'])}: {wrong}")
    stored = {} if folder is None else stored_shapes(folder)
    problem = _summary(
        f"{folder}/{file}: {found}"
        for name, (file, shape) in stored.items()
        if (found := checkpoint.problem(name, shape))
    )
    if problem:
        raise ControlError(problem)
    state.updated = set(stored or checkpoint.whole)
    return {}


def guard_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """AROUND hook of a scheduler's updates of weights: check received ones before they are loaded,
    answer with a failure where SGLang would end the scheduler, and say what a successful update has
    left as it was."""
    state = PROCESS.scheduler
    if state is None or state.checkpoint is None:
        return original(updater, request)
    from sglang.srt.managers import io_struct

    # Others come from disk, or end a session. Up to 0.5.20 each call is an update of its own.
    by_tensor = hasattr(request, "serialized_named_tensors")
    is_part = by_tensor or hasattr(request, "names")
    if is_part and getattr(updater, "_session", None) is None:
        state.updated = set()
    model = updater.tp_worker.model_runner.model
    problems: list[str] = []
    if is_part:
        model.load_weights = partial(_load, model.load_weights, state, problems)
    try:
        answer = original(updater, request)
    except Exception as error:
        if not problems:
            problems.append(_FAILED.format(cut(f"{type(error).__name__}: {error}")))
            if by_tensor:
                # The other ranks have read their tensors, and wait for this one in `_load`.
                _of_all_ranks(problems[0])
        answer = getattr(io_struct, type(request).__name__.replace("Input", "Output"))
        return answer(success=False, message=problems[0])
    finally:
        vars(model).pop("load_weights", None)
    if problems:
        answer.success, answer.message = False, problems[0]
    if answer.success:
        if note := state.checkpoint.note(state.updated):
            # Weights may also come past SGLang's calls, by RDMA.
            partly = "So far, " if is_part or not state.updated else PARTIAL
            answer.message = f"{answer.message.rstrip('.')}. {partly}{note}."
        if not is_part:
            state.updated = set()
    return answer


def _load(
    original: Callable[[Any], Any],
    state: SchedulerState,
    problems: list[str],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """A model's `load_weights`. Raises `ControlError` on all ranks if the weights of one do not
    fit; of weights that SGLang then cannot load only `problems` tell, as ranks wait for each
    other after it."""
    checkpoint, weights = state.checkpoint, list(weights)
    assert checkpoint is not None
    if problem := _of_all_ranks(_summary(checkpoint.problem(n, of.shape) for n, of in weights)):
        problems.append(REFUSED + problem)
        raise ControlError(problem)
    try:
        original(weights)
        state.updated.update(name for name, _ in weights)
    except Exception as error:
        problems.append(_FAILED.format(cut(str(error))))


def _of_all_ranks(problem: str) -> str:
    """The first problem of the tensor-parallel ranks, all of which call this; empty if none has."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    problems: list[Any] = [problem] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next(filter(None, problems), "")
