"""Real SGLang engines that start in about a second, and tiny checkpoints for them to serve. SGLang
spawns its processes, and each would import SGLang anew (20 s on two cores). Here they are forked
from the test process, which has imported everything once. That is safe as long as no OpenMP threads
run in the test process, see conftest.py; engines inherit its limit of one thread, which is also
fastest for models this small."""

import gc
import multiprocessing
import os
import pkgutil
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import zmq
from packaging.version import Version
from ports import free_port
from rounds import run_scheduler
from waiting import wait_until

from sparrow_sglang.plugin.state import server_state
from sparrow_sglang.schedules.schedule import INT4, BudgetSchedule
from sparrow_sglang.sglang_compat.versions import installed_version

NEEDS_GEMMA3 = pytest.mark.skipif(
    Version(installed_version()) < Version("0.5.17"),
    reason="older SGLangs call the attention of Gemma 3 bidirectional, which is refused",
)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang serves from the GPU")
VOCAB_SIZE = 256
NUM_LAYERS = 4
# Arguments of all engines and servers, unless a test gives others.
SERVER_ARGS: dict[str, Any] = {
    # The tiny checkpoints have no tokenizer.
    "skip_tokenizer_init": True,
    # SGLang would serve a float32 checkpoint in half precision.
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "random_seed": 0,
}
SERVED_MODEL_FILES = (
    "gemma3_causal gpt_oss llama qwen2 qwen2_moe qwen3 qwen3_5 qwen3_moe qwen3_next".split()
)
# Bins and budgets so small that generations of 300 tokens cross several of them.
SCHEDULE = BudgetSchedule(
    name="test", page_size=16, bin_tokens=4 * 16, budget_tokens=(4 * 16, 5 * 16, 5 * 16, 7 * 16)
)
# Larger pages, and other numbers of pages that are always kept.
LARGE_PAGES = BudgetSchedule(
    name="pages-of-64",
    page_size=64,
    bin_tokens=256,
    budget_tokens=(256, 320),
    sink_pages=2,
    recent_pages=1,
)
# The same budgets by int4 landmarks, without dense layers.
INT4_SCHEDULE = BudgetSchedule(
    **SCHEDULE.model_dump() | {"name": "int4", "dense_layers": (), "selection": INT4}
)
# The windows are far shorter than the tests' prompts; layers 1, 3 and 5 have full attention.
GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# The same windows, but with a KV pool of their own in SGLang; with attention sinks and experts.
GPT_OSS = {
    "num_hidden_layers": 6,
    "layer_types": GEMMA3["layer_types"],
    "sliding_window": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "pad_token_id": 0,
}
# Layers 1 and 3 have full attention, the others linear; RoPE covers a quarter of a head's channels.
QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    # SGLang reads this field instead of `layer_types`.
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
QWEN3_NEXT = QWEN3_5 | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


class EngineDied(RuntimeError):
    """A process of the engine failed; its traceback is on stderr."""


@cache
def _schedules() -> "tempfile.TemporaryDirectory[str]":
    """A folder for the files of schedules, which is deleted when the tests end."""
    return tempfile.TemporaryDirectory(prefix="sparrow-schedules-")


def sparse(schedule: str | BudgetSchedule) -> dict[str, Any]:
    """Arguments of a server with our backend and this schedule."""
    if isinstance(schedule, BudgetSchedule):
        path = Path(_schedules().name, f"{schedule.name}.json")
        schedule.save(path)
        schedule = str(path)
    return {"attention_backend": "sparrow", "sparrow_schedule": schedule}


@contextmanager
def start_engine(
    model_path: str,
    *,
    measured: bool = False,
    rounds: Sequence[Any] = (),
    engine_class: Any = None,
    **server_args: Any,
) -> Iterator[Any]:
    """A running `sglang.Engine`; several may run at once. Unless `measured`, the speed of this
    machine does not decide which steps are dense, nor what a round drafts: it follows the plans
    `rounds` in turn, see rounds.py; or an `engine_class` decides. `server_args` go to SGLang
    unchanged and override SERVER_ARGS."""
    engine_module = import_for_fork()

    class Engine(engine_module.Engine):  # type: ignore[misc, name-defined]
        run_scheduler_process_func = staticmethod(partial(run_scheduler, rounds=rounds))

    defaults = {"log_level": "error", "custom_sigquit_handler": _raise_engine_died} | SERVER_ARGS
    before = _children()
    engine = None
    contexts: list[zmq.Context[Any]] = []
    try:
        with _zmq_contexts_into(contexts):
            engine = (engine_class or Engine)(model_path=model_path, **defaults | server_args)
        if (state := server_state(engine.tokenizer_manager)) is not None:
            state.measures_dense &= measured
        yield engine
    finally:
        own = _children() - before
        # SGLang's shutdown would kill all children of this process, also those of other engines.
        with mock.patch.object(engine_module, "kill_process_tree", lambda *_, **__: kill(own)):
            if engine is None:
                kill(own)
            else:
                engine.shutdown()
        # If the garbage collector closed a context, it would wait forever to deliver messages to a
        # dead process.
        for context in contexts:
            context.destroy(linger=0)


@contextmanager
def _zmq_contexts_into(found: "list[zmq.Context[Any]]") -> Iterator[None]:
    """Append to `found` the ZeroMQ contexts that are created within."""
    init = zmq.Context.__init__

    def recorded(self: "zmq.Context[Any]", *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found.append(self)

    with mock.patch.object(zmq.Context, "__init__", recorded):
        yield


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of the tiny checkpoints' vocabulary, without its special tokens."""
    return random.Random(seed).choices(range(3, 250), k=length)


def greedy(
    engine: Any,
    prompts: list[list[int]],
    new_tokens: int | list[int],
    options: Any = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """SGLang's answers, with log-probs. `new_tokens` and `options`, what requests ask of sparse
    decode, are one for all or a list with one for each."""
    count = len(prompts)
    lengths = new_tokens if isinstance(new_tokens, list) else [new_tokens] * count
    asked = options if isinstance(options, list) else [options] * count
    sampling = [
        {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        | ({"custom_params": {"sparrow": option}} if option else {})
        for length, option in zip(lengths, asked, strict=True)
    ]
    answers: list[dict[str, Any]] = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, **fields
    )
    return answers


async def start_request(engine: Any, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """Start a request, wait for its first answer, and return the iterator of the others."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(**fields, stream=True)
    answers: AsyncIterator[dict[str, Any]] = engine.tokenizer_manager.generate_request(
        request, None
    )
    await anext(answers)
    return answers


async def last_of(answers: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    *_, last = [answer async for answer in answers]
    return last


def flush(engine: Any) -> None:
    """Empty the prefix cache; a scheduler that has just finished a request may still be busy."""
    wait_until(lambda: engine.flush_cache().success)


def require_whole_pool(scheduler: Any) -> None:
    """Runs in the scheduler."""
    free = scheduler.token_to_kv_pool_allocator.available_size()
    size = scheduler.max_total_num_tokens
    assert free == size, f"{size - free} tokens of the pool are still in use"


@contextmanager
def weight_updates(engine: Any) -> Iterator[None]:
    """A context in which weights may be loaded; SGLang requires it from 0.5.21 on."""
    for step in ("begin", "end"):
        if hasattr(engine, f"{step}_weight_update"):
            getattr(engine, f"{step}_weight_update")()
        if step == "begin":
            yield


@cache
def import_for_fork() -> Any:
    """SGLang's engine module, with everything imported that its processes need."""
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused_model_files()))
    from sglang.srt import server_args
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # A port from SGLang's own function is sometimes taken by another process before the engine
    # binds it.
    server_args.get_free_port = free_port
    set_envs_and_config = engine._set_envs_and_config
    # All present objects stay alive: neither this process nor its forks need to scan them again.
    gc.collect()
    gc.freeze()

    def then_fork(server_args: Any) -> None:
        set_envs_and_config(server_args)
        # Spawned processes would receive them pickled.
        ForkingPickler.dumps(server_args)
        # A forked process cannot use CUDA once its parent has.
        if not torch.cuda.is_available():
            multiprocessing.set_start_method("fork", force=True)
        # Collect garbage here, before the fork: SGLang collects it in its processes, where a
        # leftover Ray client would wait for a thread that does not exist after the fork.
        gc.collect()

    engine._set_envs_and_config = then_fork
    engine.Engine.run_scheduler_process_func = staticmethod(run_scheduler)
    return engine


def unused_model_files() -> list[str]:
    """Model implementations that SGLang need not import, for SGLANG_DISABLED_MODEL_ARCHS."""
    import sglang.srt

    folder = Path(sglang.srt.__path__[0]) / "models"
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    return [name for name in names if name not in SERVED_MODEL_FILES]


def _raise_engine_died(signum: int, frame: FrameType | None) -> None:
    raise EngineDied("a process of the engine failed")


def _children() -> set[psutil.Process]:
    """Forked descendants in this session; servers that a test starts have sessions of their own."""
    session = os.getsid(0)
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if os.getsid(process.pid) == session:
                found.add(process)
        except ProcessLookupError:
            pass
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes at once; processes that have already ended are ignored."""
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(processes, timeout=10)


def _qwen3_5_config(**fields: Any) -> Any:
    """Config of a language model and the smallest possible vision model, which Qwen3.5 requires."""
    import transformers

    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1}
    vision |= {"out_hidden_size": fields["hidden_size"], "num_position_embeddings": 4}
    tied = fields["tie_word_embeddings"]
    return transformers.Qwen3_5Config(
        text_config=fields, vision_config=vision, tie_word_embeddings=tied
    )


def save_tiny_model(
    folder: Path, kind: str = "llama", seed: int = 0, spread: float = 0.05, **overrides: Any
) -> str:
    """Write a random float32 checkpoint of four layers, nine query and three KV heads. Every other
    layer of the kinds gemma3 and gpt_oss has a sliding window, of qwen3_next and qwen3_5 linear
    attention. `spread` is the standard deviation of the weights; from about 0.15 on, attention is
    sharp enough that it matters which pages are read. `overrides` are fields of the config."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
        "qwen3_5": (_qwen3_5_config, transformers.Qwen3_5ForConditionalGeneration),
    }[kind]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 144,
        "intermediate_size": 192,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": spread,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        # No token ends a generation, so that its length is always the one that was asked for.
        "eos_token_id": None,
        "dtype": "float32",
    }
    own = {"gemma3": GEMMA3, "gpt_oss": GPT_OSS, "qwen3_next": QWEN3_NEXT, "qwen3_5": QWEN3_5}
    fields |= own.get(kind, {})
    torch.manual_seed(seed)
    fields |= overrides
    model = model_class(config_class(**fields))
    if kind == "gemma3":
        # The embeddings are also the output layer, and gemma3 scales them up at the input: without
        # this division, the model would always repeat its last token.
        model.model.embed_tokens.weight.data /= 3
    if kind == "gpt_oss":
        for layer in model.model.layers:
            # SGLang keeps sinks in bfloat16, so they are rounded to it.
            sinks = torch.randn(len(layer.self_attn.sinks)) + 2
            layer.self_attn.sinks.data = sinks.bfloat16().float()
    model.to(getattr(torch, fields["dtype"])).save_pretrained(folder)
    return str(folder)
