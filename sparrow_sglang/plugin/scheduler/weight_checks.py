"""Updates of weights: checked before any is loaded. SGLang skips names that the model does not
have, and at shapes or bytes that do not fit, its scheduler ends."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from sparrow_sglang.json_values import cut, quoted
from sparrow_sglang.models import stored_shapes
from sparrow_sglang.plugin.scheduler.checkpoint import Checkpoint, local_folder
from sparrow_sglang.plugin.scheduler_calls import ControlError, scheduler_rpc
from sparrow_sglang.plugin.state import PROCESS, require_scheduler_state
from sparrow_sglang.sglang_compat.versions import update_groups, updated_model

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

CHECK_FOLDER = "check_folder"
PARTIAL = "Partial weight update: "
REFUSED = "the weights were not updated: "
"""How an answer begins if nothing has been loaded."""
_FAILED = "SGLang could not load the weights ({}), maybe some: load all again"
# Broadcasts of refused weights, and where their data goes.
_dropped: list[tuple[Any, torch.Tensor]] = []


class WeightsError(ControlError):
    """Weights do not fit the model; none of them has been loaded."""


def _summary(problems: Iterable[str | None]) -> str:
    """The first of `problems`, and how many there are; empty if there are none."""
    found = list(filter(None, problems))
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + others if found else ""


@scheduler_rpc(CHECK_FOLDER)
def _check_folder(scheduler: "Scheduler", fields: dict[str, Any]) -> dict[str, Any]:
    """Refuse weights in a folder that do not fit."""
    state, folder = require_scheduler_state(), local_folder(fields["path"])
    checkpoint = state.checkpoint
    assert checkpoint is not None
    # SGLang downloads what is not here, or answers that it cannot.
    stored = {} if folder is None else stored_shapes(folder)
    problem = _summary(
        f"{folder}/{file}: {found}"
        for name, (file, shape) in stored.items()
        if (found := checkpoint.problem(name, shape))
    )
    if problem:
        raise WeightsError(problem)
    state.updated = set(stored or checkpoint.whole)
    return {}


def guard_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """AROUND hook of a scheduler's updates of weights: answer with a failure where SGLang would end
    it, and say what a successful update has left as it was."""
    state = PROCESS.scheduler
    if state is None or state.checkpoint is None:
        return original(updater, request)
    from sglang.srt.managers import io_struct

    # From disk, or where a session ends. Up to 0.5.20 each call is an update of its own.
    ends = not (hasattr(request, "names") or hasattr(request, "serialized_named_tensors"))
    if not ends and getattr(updater, "_session", None) is None:
        state.updated = set()
    try:
        if hasattr(request, "names"):
            _check_broadcast(state.checkpoint, updater, request)
        answer = original(updater, request)
        if answer.success:
            state.updated.update(getattr(request, "names", ()))
            if note := state.checkpoint.note(state.updated):
                # Weights may also come past SGLang's calls, by RDMA.
                partial = PARTIAL if ends and state.updated else "So far, "
                answer.message = f"{answer.message.rstrip('.')}. {partial}{note}."
            if ends:
                state.updated = set()
        return answer
    except WeightsError as error:
        message = f"{REFUSED}{error}"
    except Exception as error:
        message = _FAILED.format(cut(str(error)))
        if hasattr(request, "serialized_named_tensors"):
            # The other ranks have read their tensors, and wait for this one in `check_tensors`.
            problem = f"serialized_named_tensors cannot be read ({cut(str(error))})"
            message = REFUSED + _of_all_ranks(problem)
    output = getattr(io_struct, type(request).__name__.replace("Input", "Output"))
    return output(success=False, message=message)


def check_tensors(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """AROUND hook, once a scheduler has received tensors: raise `WeightsError` on all ranks if
    those of one do not fit."""
    state, problem = PROCESS.scheduler, ""
    if state is None or state.checkpoint is None:
        return original(updater, named_tensors, load_format)
    try:
        if load_format == "flattened_bucket":
            tensors, load_format = _tensors_of(named_tensors), None
        else:
            tensors = [(name, _of_this_rank(tensor)) for name, tensor in named_tensors]
        shapes = [(name, tensor.shape) for name, tensor in tensors]
        known = state.checkpoint
        if load_format == "direct":
            own = {name: each.shape for name, each in updated_model(updater).named_parameters()}
            known = Checkpoint(own, None)
        if load_format in (None, "direct"):
            problem = _summary(known.problem(*each) for each in shapes)
    except Exception as error:
        problem = f"the tensors cannot be read ({cut(str(error))})"
    if problem := _of_all_ranks(problem):
        raise WeightsError(problem)
    try:
        answer = original(updater, tensors, load_format)
    except Exception as error:
        return False, _FAILED.format(cut(str(error)))
    state.updated |= dict(shapes).keys()
    return answer


def _tensors_of(bucket: Any) -> list[tuple[str, torch.Tensor]]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(
        flattened_tensor=bucket["flattened_tensor"], metadata=bucket["metadata"]
    )
    tensors: list[tuple[str, torch.Tensor]] = flat.reconstruct_tensors()
    return tensors


def _of_this_rank(tensor: Any) -> torch.Tensor:
    """SGLang's `LocalSerializedTensor` has one for each rank, and each can be read only once."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return tensor if torch.is_tensor(tensor) else tensor.get(get_tp_group().rank_in_group)


def _of_all_ranks(problem: str) -> str:
    """The first problem of the tensor-parallel ranks, all of which call this; empty if none has."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    problems: list[Any] = [problem] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next(filter(None, problems), "")


def _check_broadcast(checkpoint: Checkpoint, updater: Any, request: Any) -> None:
    """Raise `WeightsError` if the tensors that the other side broadcasts do not fit."""
    _dropped[:] = [each for each in _dropped if not each[0].is_completed()]
    counts = [len(each) for each in (request.names, request.dtypes, request.shapes)]
    if len(set(counts)) > 1:
        raise WeightsError(
            f"{counts[0]} names, {counts[1]} dtypes, {counts[2]} shapes: expected as many of each"
        )
    for name in request.dtypes:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise WeightsError(f"dtypes: {quoted(name)}: expected such as 'bfloat16'")
    if problem := _summary(map(checkpoint.problem, request.names, request.shapes)):
        runner = updater.tp_worker.model_runner
        group = update_groups(runner).get(request.group_name)
        if group is not None:
            _drop_broadcast(request, group, runner.device)
        raise WeightsError(problem)


def _drop_broadcast(request: Any, group: Any, device: Any) -> None:
    """Receive what is sent meanwhile, without waiting for it: it must not be taken for the group's
    next broadcast."""
    shapes, dtypes = map(torch.Size, request.shapes), (getattr(torch, d) for d in request.dtypes)
    sizes = list(zip(shapes, dtypes, strict=True))
    if request.load_format == "flattened_bucket":
        total = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
        sizes = [(torch.Size([total]), torch.uint8)]
    # Shapes may be negative, or larger than the memory.
    with suppress(RuntimeError):
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]
        for tensor in tensors:
            work = torch.distributed.broadcast(tensor, src=0, group=group, async_op=True)
            _dropped.append((work, tensor))
