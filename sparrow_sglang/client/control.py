"""Switch the KV budget schedule of a running engine or server, and push LoRA adapters to it. Over
HTTP this is GET and POST /sparrow/schedule, and POST /sparrow/adapter."""

import base64
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.json_values import read_object
from sparrow_sglang.schedules.schedule import BudgetSchedule

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def get_schedule(target: Any, *, api_key: str | None = None) -> BudgetSchedule:
    """The active schedule of `target`, an `sglang.Engine` or a server's base URL.

    `api_key` is the server's --admin-api-key, or else --api-key, if it has one. Raises
    `EndpointError` if the server is down, or serves without this backend.
    """
    answer = connect(target, api_key).call_sparrow("schedule")
    return BudgetSchedule(**answer["schedule"])


def set_schedule(
    target: Any,
    schedule: BudgetSchedule | str,
    *,
    api_key: str | None = None,
    timeout_s: float | None = None,
) -> BudgetSchedule:
    """Make another schedule active, without a restart, and return the previous one.

    The server holds new requests back and waits for the running ones. The prefix cache is kept, as
    it holds dense KV only.

    Args:
        target: as in `get_schedule`, as is `api_key`.
        schedule: a schedule; or the name of a shipped one or of that with which the server was
            started, fixed-<tokens> for one budget by the rule and dense layers of that, "dense" for
            dense decode, or the path of a .json file on this machine. Page size, sinks, recent
            pages and landmarks must be those of the schedule with which the server was started, and
            its dense layers must be dense.
        timeout_s: how long to wait for the running requests; without it, until the last one ends.

    Raises `ScheduleError` if the file holds no schedule, `EndpointError` if the server refused or
    is down. Warns if the schedule was calibrated for another model.
    """
    if isinstance(schedule, str) and (schedule.endswith(".json") or os.sep in schedule):
        schedule = BudgetSchedule.from_json(schedule)
    value = schedule if isinstance(schedule, str) else schedule.model_dump(mode="json")
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    answer = connect(target, api_key).call_sparrow("schedule", schedule=value, **limit)
    if answer["warning"]:
        warnings.warn(answer["warning"], stacklevel=2)
    return BudgetSchedule(**answer["previous"])


def push_adapter(
    target: Any,
    name: str,
    adapter: "Mapping[str, torch.Tensor] | str | os.PathLike[str]",
    config: Mapping[str, Any] | None = None,
    *,
    api_key: str | None = None,
) -> None:
    """Load a LoRA adapter, in place of the loaded one of that name if there is one.

    The server holds new requests back and waits for the running ones; then it empties the prefix
    cache. Requests use the adapter by its name: `lora_path` of `Engine.generate` and of /generate,
    `model="<served model>:<name>"` in the OpenAI routes. The server must be started with
    --enable-lora, --max-lora-rank and --lora-target-modules.

    Args:
        target: as in `get_schedule`, as is `api_key`.
        adapter: a folder on this machine as PEFT's `save_pretrained` writes it; or lora_A [r, in]
            and lora_B [out, r] of each module, floating-point, under PEFT's names.
        config: the fields of adapter_config.json; needed with tensors, not allowed with a folder.

    Raises `ValueError` or `OSError` if the folder cannot be read, `ValueError` if `config` is
    missing or given beside one; `EndpointError` if the server refused, before it touches a former
    adapter, or is down.
    """
    from safetensors.torch import save

    if isinstance(adapter, Mapping) != (config is not None):
        raise ValueError(f"config: expected the fields of {CONFIG_FILE} beside tensors only")
    if isinstance(adapter, Mapping):
        # Copies, because safetensors refuses tensors that share memory.
        copies = {key: value.detach().contiguous().clone() for key, value in adapter.items()}
        # PEFT's config in memory holds sets.
        fields, weights = json.loads(json.dumps(dict(config or {}), default=sorted)), save(copies)
    else:
        fields = read_object(Path(adapter, CONFIG_FILE), "PEFT's config of an adapter")
        weights = Path(adapter, WEIGHTS_FILE).read_bytes()
    connect(target, api_key).call_sparrow(
        "adapter", name=name, config=fields, tensors=base64.b64encode(weights).decode("ascii")
    )
