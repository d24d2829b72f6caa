"""The table of hooks: which functions of SGLang are changed, by which of ours, and how. SGLang's
plugin framework puts a function of ours BEFORE, AFTER or AROUND one of its own, or in its place
(REPLACE). Except for `CPU_HOOKS`, which belong to our CPU platform, all do nothing in a process
with another attention backend. `Mode.hooks` are applied in schedulers of that mode only."""

import inspect
import operator
from collections.abc import Iterable

from sparrow_sglang.plugin import scheduler_calls
from sparrow_sglang.plugin.arguments import server_args
from sparrow_sglang.plugin.cpu import fallbacks
from sparrow_sglang.plugin.launcher import control_guards, request_hooks, routes
from sparrow_sglang.plugin.lossless.hooks import WEIGHT_HOOKS
from sparrow_sglang.plugin.scheduler import (
    adapter_checks,
    exact_acceptance,
    memory,
    scheduler_hooks,
    stop_regex,
    weight_checks,
)
from sparrow_sglang.plugin.state import Hook
from sparrow_sglang.sglang_compat.versions import located, resolve_target

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_TEXT = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"
_MEMORY = "sglang.srt.mem_cache"
_CONFIGURATOR = f"{_MEMORY}.kv_cache_configurator.KVCacheConfigurator"
_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_POOL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
_POOLS = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"


# fmt: off
HOOKS = tuple(Hook(*row) for row in (
    # The launching process: run-time control, then each request on its way in and out.
    (f"{_MANAGER}.__init__", "AFTER", routes.attach_server),
    (f"{_MANAGER}.generate_request", "AROUND", request_hooks.wrap_generate_request, "obj"),
    (f"{_MANAGER}._create_tokenized_object", "AFTER", request_hooks.check_request, "obj"),
    (f"{_CHAT}._build_chat_response", "AFTER", request_hooks.report_in_response, "request ret"),
    (f"{_TEXT}._build_completion_response", "AFTER", request_hooks.report_in_response,
     "request ret"),
    (f"{_CHAT}._generate_chat_stream", "AROUND", request_hooks.report_in_stream, "adapted_request"),
    (f"{_TEXT}._generate_completion_stream", "AROUND", request_hooks.report_in_stream,
     "adapted_request"),
    # The launching process: the audit.
    (f"{_MANAGER}._send_one_request", "BEFORE", request_hooks.show_requests, "tokenized_obj"),
    (f"{_MANAGER}._send_batch_request", "BEFORE", request_hooks.show_requests, "tokenized_objs"),
    (f"{_MANAGER}._handle_batch_output", "BEFORE", request_hooks.show_outputs, "recv_obj"),
    # The launching process: control calls that a score disturbs, or that would end the scheduler.
    (f"{_MANAGER}.pause_generation", "AROUND", control_guards.without_scores),
    (f"{_MANAGER}.flush_cache", "AROUND", control_guards.flush_cache),
    (f"{_MANAGER}.check_weights", "AROUND", control_guards.check_weights),
    (f"{_MANAGER}.update_weights_from_disk", "AROUND", control_guards.update_weights, "obj"),
    (f"{_MANAGER}.update_weights_from_tensor", "AROUND", control_guards.load_weights, "obj"),
    (f"{_MANAGER}.update_weights_from_distributed", "AROUND", control_guards.load_weights, "obj"),
    (f"{_MANAGER}.update_weights_from_ipc", "AROUND", control_guards.update_weights, "obj"),
    (f"{_MANAGER}.begin_weight_update", "AROUND", control_guards.begin_weight_update),
    (f"{_MANAGER}.end_weight_update", "AROUND", control_guards.end_weight_update),
    (f"{_MANAGER}.release_memory_occupation", "AROUND", control_guards.release_memory, "obj"),
    (f"{_MANAGER}.resume_memory_occupation", "AROUND", control_guards.resume_memory, "obj"),
    # Schedulers: memory, then each request from its prefill to its end.
    (f"{_POOL}._compute_cell_size", "AFTER", memory.reserve_landmarks,
     "kvc|mr num_layers"),
    (f"{_POOLS}.__init__", "AFTER", memory.reserve_landmarks_beside_windows, "kvc|mr"),
    (f"{_CONFIGURATOR}._profile_available_bytes", "AFTER",
     memory.reserve_decode_buffers, "pre_model_load_memory"),
    (f"{_FORWARD_BATCH}.init_new", "AFTER", scheduler_hooks.remember_options,
     "batch model_runner"),
    (f"{_MEMORY}.common.release_kv_cache", "BEFORE", scheduler_hooks.keep_sparse_kv_private,
     "req tree_cache is_insert|checkpoint"),
    (f"{_SCHEDULER}.abort_request", "AROUND", scheduler_hooks.abort_one, "recv_req"),
    ("sglang.srt.managers.schedule_batch.Req._check_str_based_finish", "AROUND",
     stop_regex.finish_by_pattern, "new_accepted_len"),
    (f"{_WEIGHTS}.update_weights_from_disk", "AROUND", weight_checks.guard_update, "recv_req"),
    (f"{_WEIGHTS}.update_weights_from_tensor", "AROUND", weight_checks.guard_update, "recv_req"),
    (f"{_WEIGHTS}.update_weights_from_distributed", "AROUND", weight_checks.guard_update,
     "recv_req"),
    (f"{_WEIGHTS}.end_weight_update", "AROUND", weight_checks.guard_update, "recv_req"),
    ("sglang.srt.managers.schedule_batch.Req.reset_for_retract", "AFTER",
     scheduler_hooks.note_retraction),
    (f"{_LORA}.validate_new_adapter", "BEFORE", adapter_checks.check_new_adapter, "lora_config"),
    (f"{_ADAPTER}._process_weight", "BEFORE", adapter_checks.check_weight, "name loaded_weight"),
    (f"{_ADAPTER}._normalize_weights", "BEFORE", adapter_checks.check_weights),
    (f"{_SCHEDULER}.handle_dumper_control", "AROUND", scheduler_calls.answer_call, "recv_req"),
    ("sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls", "AROUND",
     scheduler_hooks.graph_runner_class),
    ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", "AFTER",
     server_args.prepare_model),
    # Schedulers: the audit, and exact acceptance rates.
    ("sglang.srt.layers.logits_processor.LogitsProcessor.forward", "AROUND",
     exact_acceptance.keep_or_compare, "input_ids hidden_states lm_head logits_metadata"),
)) + WEIGHT_HOOKS

CPU_HOOKS = tuple(Hook(*row) for row in (
    ("sglang.srt.utils.common.support_triton", "REPLACE", fallbacks.no_triton, "backend"),
    (f"{_MEMORY}.allocation.get_last_loc", "REPLACE", fallbacks.last_locations,
     "req_to_token req_pool_indices_tensor prefix_lens_tensor"),
    (f"{_MEMORY}.allocation.assign_req_to_token_pool_func", "REPLACE", fallbacks.assign_slots,
     "req_pool_indices req_to_token start_offset end_offset out_cache_loc"),
    (f"{_MEMORY}.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", "REPLACE",
     fallbacks.without_copies),
    ("sglang.srt.distributed.parallel_state.init_model_parallel_group", "BEFORE",
     fallbacks.without_nccl, "*use_pynccl"),
    ("sglang.srt.distributed.bootstrap._init_cpu_threads_env", "REPLACE", fallbacks.prepare_rank),
    ("sglang.srt.utils.numa_utils.init_threads_binding", "REPLACE", fallbacks.no_binding),
    (f"{_WEIGHTS}.release_memory_occupation", "AROUND", fallbacks.without_accelerator),
    ("sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras", "AROUND",
     fallbacks.without_streams),
    (f"{_LORA}.__init__", "AROUND", fallbacks.without_pinned_memory),
    (f"{_LORA}.load_lora_adapter", "AROUND", fallbacks.without_pinned_memory),
    (f"{_LORA}.load_lora_adapter_from_tensors", "AROUND", fallbacks.without_pinned_memory),
    (f"{_LORA}.prepare_lora_batch", "AROUND", fallbacks.without_pinned_memory),
    (f"{_LORA}.fetch_new_loras", "AROUND", fallbacks.without_pinned_memory),
))
# fmt: on

_OF_STREAMS = (request_hooks.wrap_generate_request, request_hooks.report_in_stream)


def failing_probes(hooks: Iterable[Hook]) -> list[str]:
    """What `hooks` need and this version of SGLang lacks, one phrase each."""
    return [problem for hook in hooks if (problem := _probe(hook)) is not None]


def _probe(hook: Hook) -> str | None:
    if (target := located(hook.target)) is None:
        return None
    if (function := resolve_target(target)) is None:
        return f"{target} is not there"
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    expected = [name.split("|") for name in hook.parameters.split()]
    plain = inspect.unwrap(function)
    if inspect.iscoroutinefunction(hook.function) and not inspect.iscoroutinefunction(plain):
        return f"{target} is no coroutine function"
    if hook.function in _OF_STREAMS and not inspect.isasyncgenfunction(plain):
        return f"{target} is no asynchronous generator"
    anywhere = [options[0][1:] for options in expected if options[0].startswith("*")]
    first = expected[: len(expected) - len(anywhere)]
    fits = len(names) >= len(first) and all(map(operator.contains, first, names))
    if fits and set(anywhere) <= set(names):
        return None
    listed = ", ".join(" or ".join(alternatives) for alternatives in expected)
    return f"{target} takes ({', '.join(names)}), expected ({listed})"


def register_hooks(hooks: Iterable[Hook]) -> None:
    """Have SGLang apply `hooks` once all plugins are loaded; it only logs those it cannot apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if (target := located(hook.target)) is not None:
            HookRegistry.register(target, hook.function, HookType[hook.kind])


def is_applied(hook: Hook) -> bool:
    """Whether this hook's function is among the wrappers that SGLang put round the target."""
    target = located(hook.target)
    if target is None:
        return True
    wrapper = resolve_target(target)
    while wrapper is not None:
        cells = getattr(wrapper, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False
