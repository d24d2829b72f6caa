"""Which SGLang is installed, whether it is too old, and how the versions in `SUPPORTED` differ.
Every import, attribute or parameter of SGLang that one of them lacks, or has elsewhere, is looked
up here or, on `ServerArgs`, in `sparrow_sglang.sglang_compat.arguments`. Untested versions are not
refused: `sparrow_sglang.plugin.registration` probes what the hooks need of them."""

import base64
import functools
import inspect
import pickle
import pkgutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from sparrow_sglang.provenance import package_version

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

SUPPORTED = ("0.5.15.post1", "0.5.20", "0.5.23")
"""Tested versions: those that slime pins and verl trains with, and `LOCKED`; newer may run, too."""
LOCKED = "0.5.23"
"""The version that the README installs, and that CI tests."""
INSTALL = f"pip install sglang=={LOCKED}, or another of {', '.join(SUPPORTED)}"


def installed_version() -> str:
    return package_version("sglang") or "of an unknown version"


def version_problems() -> list[str]:
    """One sentence if SGLang is missing, or older than supported."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        return [f"SGLang is not installed; {INSTALL}"]
    known = package_version("sglang")
    if known is None or Version(known) < Version(SUPPORTED[0]):
        return [f"SGLang {installed_version()}: expected {SUPPORTED[0]} or newer; {INSTALL}"]
    return []


def import_problem(error: ImportError) -> str:
    return f"SGLang {installed_version()} cannot be imported ({error}); {INSTALL}"


def without_insertion(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Keyword arguments of `release_kv_cache` that keep a request's KV out of the prefix tree. None
    if `arguments`, those of the call, keep it out already."""
    name = "checkpoint" if "checkpoint" in arguments else "is_insert"
    if not arguments.get(name, True):
        return None
    return {**arguments, name: False}


_MOVED: dict[str, str | None] = {
    "sglang.srt.mem_cache.allocation.get_last_loc": "sglang.srt.mem_cache.common.get_last_loc",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": (
        "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
        "._profile_available_bytes"
    ),
    "sglang.srt.utils.numa_utils.init_threads_binding": (
        "sglang.srt.model_executor.model_runner.ModelRunner.init_threads_binding"
    ),
    "sglang.srt.distributed.bootstrap._init_cpu_threads_env": None,
    # In 0.5.15 there is neither lossless decoding nor a dense variant of captured steps.
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": None,
    "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls": None,
    # Until 0.5.20 weights may be loaded at any time.
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.begin_weight_update": None,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.end_weight_update": None,
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".end_weight_update": None,
    # In 0.5.15, models whose windows have a pool of their own are refused.
    "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__": None,
}
"""Names in older versions of targets in the table of hooks; None where they have no such target."""


LOSSLESS_NEEDS = (
    "sglang.srt.runtime_context.get_spec",
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
)
"""What lossless decoding calls and 0.5.15 lacks."""


@functools.cache
def located(target: str) -> str | None:
    """`target`, or its name in this SGLang; None if this version needs no hook there."""
    return _MOVED[target] if target in _MOVED and resolve_target(target) is None else target


def resolve_target(target: str) -> Any:
    """The object that `target` names; None if this SGLang has none."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def last_locations_in_torch() -> Any:
    try:
        from sglang.srt.mem_cache.allocation import get_last_loc_torch
    except ImportError:
        from sglang.srt.mem_cache.common import get_last_loc_torch
    return get_last_loc_torch


def can_flush(scheduler: Any) -> bool:
    """Whether a scheduler would empty its prefix cache now. In 0.5.23 requests that a pause has
    retracted, and that hold no KV, do not matter."""
    arguments: dict[str, Any] = {}
    if "ignore_waiting" in inspect.signature(scheduler.is_fully_idle).parameters:
        arguments["ignore_waiting"] = scheduler._engine_paused
    return scheduler.is_fully_idle(**arguments)


def weight_update_session(manager: Any, step: str) -> Any:
    """The call that opens ("begin") or closes ("end") the session in which weights are loaded. None
    up to 0.5.20, where weights may be loaded at any time."""
    if not hasattr(manager, "begin_weight_update"):
        return None
    from sglang.srt.managers import io_struct

    request = getattr(io_struct, f"{step.title()}WeightUpdateReqInput")()
    return getattr(manager, f"{step}_weight_update")(request, None)


def request_of(fields: Mapping[str, Any]) -> Any:
    """SGLang's `GenerateReqInput`; 0.5.15 lacks the fields for how top log-probs are written."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    known = inspect.signature(GenerateReqInput).parameters
    flat = ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64")
    return GenerateReqInput(
        **{name: value for name, value in fields.items() if name in known or name not in flat}
    )


def adapter_request(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Any], tp_size: int
) -> Any:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    fields: dict[str, Any] = {"lora_name": name, "config_dict": dict(config)}
    known = inspect.signature(LoadLoRAAdapterFromTensorsReqInput).parameters
    if "serialized_named_tensors" in known:
        fields["serialized_named_tensors"] = [
            MultiprocessingSerializer.serialize(dict(tensors)) for _ in range(tp_size)
        ]
    else:
        # In 0.5.15 all ranks read one copy, but shared memory can be received only once.
        copies = pickle.dumps({key: tensor.cpu() for key, tensor in tensors.items()})
        fields["serialized_tensors"] = base64.b64encode(copies).decode()
    return LoadLoRAAdapterFromTensorsReqInput(**fields)


def logits_of(processor: Any, states: Any, lm_head: Any, metadata: Any) -> Any:
    """Logits [T, vocab] of hidden states [T, hidden], which no later call overwrites."""
    arguments: dict[str, Any] = {}
    if "use_logits_buffer" in inspect.signature(processor._get_logits).parameters:
        # From 0.5.20 on the logits would lie in a buffer that the decode step uses, too.
        arguments["use_logits_buffer"] = False
    return processor._get_logits(states, lm_head, metadata, **arguments)


def replica_rank(worker_arguments: Mapping[str, Any]) -> int | None:
    """The rank of this process among the replicas of --dp-size, None without; in 0.5.20 among the
    arguments of a worker of speculative decoding."""
    from sglang.srt.runtime_context import get_parallel

    rank: int | None = worker_arguments.get("ps", get_parallel()).dp_rank
    return rank


def kv_of(req: Any) -> Any:
    """The object with `req_pool_idx`, `kv_committed_len` and `cache_protected_len` of a request."""
    kv = getattr(req, "kv", None)
    return kv if hasattr(kv, "kv_committed_len") else req


def prefilled_tokens(req: Any) -> int:
    return req.extend_end if hasattr(req, "extend_end") else req.extend_range.end


def evicted_tokens(req: Any) -> int:
    """How many of a request's first tokens have lost their KV in a pool for sliding windows."""
    # In 0.5.23 each kind of pool has a count of its own; in 0.5.15 the request has it.
    names = ("max_evicted_seqlen", "swa_evicted_seqlen")
    holders = (getattr(req, "kv", None), req)
    return next(getattr(h, name) for h in holders for name in names if hasattr(h, name))


def cacheable_tokens(req: Any) -> int:
    """How many tokens of a request its release may put into the prefix tree."""
    names = ("owned_kv_len", "effective_kv_committed_len", "_cache_commit_len")
    return next(getattr(req, name)() for name in names if hasattr(req, name))


def cache_prefilled(req: Any, tree_cache: Any) -> None:
    """Put the prefilled tokens of a request that is being released into the prefix tree."""
    if hasattr(tree_cache, "checkpoint"):
        if not req.skip_radix_cache_insert:
            tree_cache.checkpoint(req, up_to=prefilled_tokens(req))
        return
    from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

    maybe_cache_unfinished_req(req, tree_cache)


def ranks(process: Any) -> Any:
    """The object with `tp_rank`, `pp_rank`, `dp_rank` and the ranks of attention, of a scheduler, a
    runner or a KV cache configurator."""
    if hasattr(process, "ps"):
        return process.ps
    if hasattr(process, "tp_rank"):
        return process
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def layer_range(configurator: Any) -> range:
    info = getattr(configurator, "layer_info", configurator)
    return range(info.start_layer, info.end_layer)


def hybrid_config(model_config: "ModelConfig") -> Any:
    """The config of a model with layers that keep a state instead of KV; None for others."""
    try:
        from sglang.srt.configs.hybrid_arch import mambaish_config
    except ImportError:
        # Until 0.5.15 only the model runner knows, which has a pool of another class for them.
        return None
    return mambaish_config(model_config)


def bind_slots(runner: Any, forward_batch: Any) -> None:
    """Give a batch that `ForwardBatch.init_new` has not made its slots as the KV pool has them."""
    translator = runner.kv_index_translator
    # Up to 0.5.21 there is one translation, without a plan.
    bind = getattr(translator, "bind_own_plan", None) or translator.rebind_write_loc
    bind(forward_batch)


def decode_may_become_prefill() -> bool:
    """Whether DP attention turns decode batches into prefills while another rank prefills."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return hasattr(ScheduleBatch, "convert_decode_to_extend")


def weight_metadata(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """The weights' version and, from 0.5.20 on, which tokens come from which."""
    names = ("weight_version", "weight_versions")
    return {"weight_version": None} | {name: meta_info[name] for name in names if name in meta_info}
