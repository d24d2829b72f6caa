"""Server side of pushing an adapter: check it, then replace the adapter of the same name."""

import asyncio
import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparrow_sglang.json_values import cut, quoted
from sparrow_sglang.plugin.scheduler.adapter_checks import (
    FACTOR,
    FUSED,
    check_config,
    check_factors,
    module_shapes,
)
from sparrow_sglang.plugin.scheduler_calls import (
    ControlError,
    call_schedulers,
    flush,
    idle,
    scheduler_rpc,
)
from sparrow_sglang.plugin.state import ServerState, require_server_state
from sparrow_sglang.sglang_compat.arguments import resolved
from sparrow_sglang.sglang_compat.versions import adapter_request

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_ROOM = "adapter_room"
# The characters of schedule names, and the slash of Hugging Face Hub names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")


async def adapter(
    manager: "TokenizerManager", name: str, config: Mapping[str, Any], tensors: str
) -> dict[str, Any]:
    """As `load_adapter`, with the factors as a safetensors file in base64; returns the name."""
    from safetensors.torch import load

    try:
        factors = await asyncio.to_thread(lambda: load(base64.b64decode(tensors, validate=True)))
    except Exception as error:
        raise ControlError(
            f"tensors cannot be read ({cut(str(error))}): expected a safetensors file in base64,"
            " of BF16 or F32"
        ) from None
    await load_adapter(manager, name, config, factors)
    return {"name": name}


async def load_adapter(
    manager: "TokenizerManager",
    name: str,
    config: Mapping[str, Any],
    tensors: "Mapping[str, torch.Tensor]",
) -> None:
    """Load a LoRA adapter in place of the one of that name, while no request runs. `config` is
    PEFT's adapter_config.json, `tensors` lora_A [r, in] and lora_B [out, r] of each module under
    PEFT's names. Raises `ControlError` if LoRA is off, an argument does not fit this server, or
    requests are paused; the adapter of that name is then unchanged. Also if SGLang refuses."""
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    if problem := _problem(manager, require_server_state(manager), name):
        raise ControlError(problem)
    rank = check_config(config)
    shapes = await asyncio.to_thread(module_shapes, manager.model_config.hf_config)
    if not shapes:
        raise ControlError(
            "adapters of this model cannot be checked, as transformers cannot make it: expected"
            " them merged into the weights, or in --lora-paths"
        )
    modules = await asyncio.to_thread(check_factors, tensors, rank, shapes)
    targets = config["target_modules"]
    needed = modules if isinstance(targets, str) else modules.union(targets)
    room = {"r": rank, "lora_alpha": config["lora_alpha"], "target_modules": sorted(needed)}
    await call_schedulers(manager, _ROOM, room)
    async with idle(manager, f"loading adapter {name!r}"):
        await flush(manager)
        former = name in manager.lora_registry.get_all_adapters()
        if former:
            # SGLang refuses to load an adapter under a name that is in use.
            unload = UnloadLoRAAdapterReqInput(lora_name=name)
            unloaded = await manager.unload_lora_adapter(unload, None)
            if not unloaded.success:
                raise ControlError(f"adapter {name!r} was not replaced: {unloaded.error_message}")
        # SGLang keeps the tensors, and the next optimizer step would change them in place.
        completed = _completed(tensors, shapes)
        payload = {key: tensor.detach().clone() for key, tensor in completed.items()}
        # SGLang fails without the type, which PEFT always writes.
        fields = {"peft_type": "LORA", **config}
        request = adapter_request(name, fields, payload, manager.server_args.tp_size)
        loaded = await manager.load_lora_adapter_from_tensors(request, None)
        if not loaded.success:
            lost = "; the former one is unloaded" if former else ""
            raise ControlError(
                f"SGLang did not take adapter {name!r}{lost}: {loaded.error_message}"
            )


def _problem(manager: Any, state: ServerState, name: Any) -> str | None:
    arguments = manager.server_args
    if state.mode.adapter_problem:
        return state.mode.adapter_problem
    if not resolved(arguments).enable_lora:
        return "LoRA is off: start the server with --enable-lora"
    if arguments.dp_size > 1 and not arguments.enable_dp_attention:
        return f"dp_size={arguments.dp_size}: expected 1, or --enable-dp-attention"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name={quoted(name)}: expected 1 to 64 letters, digits, '.', '_', '/' and '-'"
    return None


@scheduler_rpc(_ROOM)
def _require_room(scheduler: "Scheduler", config: dict[str, Any]) -> dict[str, Any]:
    """In a scheduler: refuse what SGLang would refuse, before the former adapter is unloaded."""
    from sglang.srt.lora.lora_config import LoRAConfig

    pool = scheduler.tp_worker.model_runner.lora_manager.memory_pool
    if not pool.can_support(LoRAConfig.from_dict(config)):
        raise ControlError(
            f"config: r={config['r']}, target_modules={quoted(config['target_modules'])}: expected"
            f" --max-lora-rank {pool.max_lora_rank} at most, and of --lora-target-modules"
            f" {', '.join(sorted(pool.target_modules))}"
        )
    return {}


def _completed(
    tensors: "Mapping[str, torch.Tensor]", shapes: Mapping[str, tuple[int, int]]
) -> "dict[str, torch.Tensor]":
    """`tensors`, plus zero factors for projections without any, if fused with one that has them."""
    completed = dict(tensors)
    for key, tensor in tensors.items():
        match = FACTOR.fullmatch(key)
        assert match is not None, "the names have been checked"
        parent, _, last = match[1].rpartition(".")
        for other in (name for group in FUSED if last in group for name in group):
            module = f"{parent}.{other}"
            sibling = key.replace(f".{last}.", f".{other}.")
            if module in shapes and sibling not in completed:
                rows = tensor.shape[0] if match[2] == "A" else shapes[module][0]
                completed[sibling] = tensor.new_zeros(rows, tensor.shape[1])
    return completed
