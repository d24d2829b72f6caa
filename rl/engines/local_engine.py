"""A rollout engine in the trainer's process: `sglang.Engine`, made to survive a training run."""

import asyncio
import atexit
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import torch

from sparrow_sglang.client.engine import start_engine
from sparrow_sglang.plugin.arguments.server_args import resolve_schedule
from sparrow_sglang.plugin.launcher.adapters import load_adapter
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import BACKEND
from sparrow_sglang.plugin.state import require_server_state
from sparrow_sglang.rl.rollout import (
    EngineDied,
    RolloutEngine,
    Sampling,
    sample_request,
    sampled,
)
from sparrow_sglang.rl.tasks.answers import THINKING_MARK
from sparrow_sglang.rl.types import Group, Prompt, Rollout
from sparrow_sglang.schedules.schedule import DENSE
from sparrow_sglang.sglang_compat.versions import weight_update_session

BUCKET_BYTES = 512 * 2**20
"""Largest size of a bucket; a tensor that is larger has a bucket to itself."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def pack(tensors: NamedTensors, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Any]:
    """Copies of all tensors in order, on their device, as SGLang's `FlattenedTensorBucket`, one
    alive at a time. A bucket has one dtype, so that each tensor is aligned."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if waiting and (tensor.dtype != waiting[0][1].dtype or size + tensor.nbytes > bucket_bytes):
            yield FlattenedTensorBucket(named_tensors=waiting)
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += tensor.nbytes
    if waiting:
        yield FlattenedTensorBucket(named_tensors=waiting)


def serialized(bucket: Any) -> bytes:
    """Handles of a bucket's memory for one process, as SGLang's "flattened_bucket"."""
    from sglang.srt.utils import MultiprocessingSerializer

    payload: bytes = MultiprocessingSerializer.serialize(
        {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    )
    return payload


class EngineProcesses:
    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def are_running(self) -> bool:
        return all(process.is_running() for process in self._processes)

    def require_alive(self) -> None:
        """Raise `EngineDied` if a process has ended."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise EngineDied(f"process {process.pid} of the SGLang engine died; see stderr")

    def kill(self) -> None:
        """End the processes and their children, and no others."""
        family: list[psutil.Process] = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                family += [*process.children(recursive=True), process]
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=10)


def response_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text without special tokens, except those around thinking, which a reward has to see."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    marks = {number for number, content in special.items() if THINKING_MARK.fullmatch(content)}
    if not marks.intersection(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([one for one in ids if one in marks or one not in special]))


IDLE_TIMEOUT_S = 60.0

POLL_S = 1.0
"""Seconds between checks that the engine is still alive, while waiting for it."""

ANSWER_TIMEOUT_S = 600.0
"""Time for the engine to answer a call between rollouts."""


class LocalEngine(RolloutEngine):
    """An `sglang.Engine` of this process, built and used in one thread. On CUDA, SGLang's memory
    saver is on by default. Methods that wait for the engine raise `EngineDied` if one of its
    processes has ended. `engine` is the `sglang.Engine`, and `dtype` its compute dtype."""

    def __init__(self, model_path: str, schedule: str = "auto", **server_args: Any) -> None:
        """Raises `ValueError` if schedule, model or arguments cannot be served."""
        # Dead processes are found by polling.
        wanted = engine_args(model_path, schedule) | server_args
        self.engine = start_engine(wanted, on_death=lambda engine: None, died=EngineDied)
        self._manager = self.engine.tokenizer_manager
        self.dtype: torch.dtype = self._manager.model_config.dtype
        self._processes = EngineProcesses(self.engine.get_all_child_pids())
        if self._manager._subprocess_watchdog is not None:
            self._manager._subprocess_watchdog.stop()
        arguments = self.engine.server_args
        self._saves_memory = arguments.enable_memory_saver
        self._released = False
        self._tp_size = arguments.tp_size
        self._version: str | None = arguments.weight_version
        self._loading = False
        self._schedule = DENSE
        # Lossless decoding samples as dense decode does.
        if arguments.attention_backend == BACKEND and not mode_of(arguments).is_dense:
            active = resolve_schedule(arguments, self._manager.model_config.hf_config)
            self._schedule = active.name
            # The trainer counts by the schedule as it is written, and a run must be repeatable.
            require_server_state(self._manager).measures_dense = False

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine`; once `is_stopped`, unfinished responses are aborted. Raises
        `RolloutError`, and `EngineDied` if a process ended or no response is finished within
        `sampling.timeout_s`."""
        loop, version = self.engine.loop, self._version
        assert version is not None, "weights released or loaded in part: update_weights first"
        groups: list[list[Rollout]] = [[] for _ in prompts]
        running = {
            loop.create_task(self._sampled(position, prompt, sample, sampling, version))
            for position, prompt in enumerate(prompts)
            for sample in range(n)
        }
        silent_s = 0.0
        try:
            while running and not is_stopped():
                began = time.monotonic()
                done, running = loop.run_until_complete(
                    asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                )
                self._processes.require_alive()
                silent_s = 0.0 if done else silent_s + time.monotonic() - began
                if silent_s > sampling.timeout_s:
                    limit = sampling.timeout_s
                    raise EngineDied(f"no response within rollout.timeout_s={limit:.0f}")
                for task in done:
                    position, rollout = task.result()
                    group = groups[position]
                    group.append(rollout)
                    if len(group) == n:
                        group.sort(key=lambda rollout: rollout.sample)
                        yield position, Group(prompts[position], tuple(group))
        finally:
            if running:
                self._abandon(running)

    async def _sampled(
        self, position: int, prompt: Prompt, sample: int, sampling: Sampling, version: str
    ) -> tuple[int, Rollout]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        schedule = DENSE if sampling.dense else self._schedule
        request = sample_request(prompt.input_ids, sampling, self._schedule != DENSE)
        outputs = self._manager.generate_request(GenerateReqInput(**request), None)
        try:
            output = await anext(outputs)
        finally:
            await outputs.aclose()
        tokenizer = self._manager.tokenizer
        decode = partial(response_text, tokenizer) if tokenizer else lambda ids: ""
        return position, sampled(prompt, sample, output, sampling, version, schedule, decode)

    async def _abort(self) -> None:
        """Abort all requests; a coroutine, as the engine's socket belongs to the event loop."""
        self._manager.abort_request(abort_all=True)

    def _abandon(self, running: "set[asyncio.Task[tuple[int, Rollout]]]") -> None:
        loop = self.engine.loop
        if self._processes.are_running():
            loop.run_until_complete(self._abort())
        for task in running:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))

    def update_weights(self, tensors: NamedTensors, version: str) -> None:
        """Load weights under their checkpoint names; later rollouts carry `version`. Raises
        `RuntimeError` if the engine was still busy after a minute, or SGLang rejected a tensor: the
        engine then generates nothing until all are loaded again."""
        self.prepare_load()
        for bucket in pack(tensors):
            self.load_parts([serialized(bucket) for _ in range(self._tp_size)], version)
        self.finish_load(version)

    def load_parts(self, parts: Sequence[bytes], version: str) -> None:
        """Load a bucket; `parts` are handles for each rank of the engine, by `serialized`."""
        self._weights_call(
            "update_weights_from_tensor",
            "UpdateWeightsFromTensorReqInput",
            serialized_named_tensors=list(parts),
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=version,
        )

    def join(self, address: str, port: int, rank: int, world: int, group: str) -> None:
        """Enter a process group for `receive` with ranks `rank`, `rank` + 1, ... of `world`."""
        self._weights_call(
            "init_weights_update_group",
            "InitWeightsUpdateGroupReqInput",
            master_address=address,
            master_port=port,
            rank_offset=rank,
            world_size=world,
            group_name=group,
            backend="nccl" if torch.cuda.is_available() else "gloo",
        )

    def receive(self, metadata: Sequence[Any], group: str, version: str) -> None:
        """Load the bucket of tensors `metadata` that rank 0 of the group broadcasts."""
        self._weights_call(
            "update_weights_from_distributed",
            "UpdateWeightsFromDistributedReqInput",
            names=[tensor.name for tensor in metadata],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in metadata],
            shapes=[list(tensor.shape) for tensor in metadata],
            group_name=group,
            flush_cache=False,
            load_format="flattened_bucket",
            weight_version=version,
        )

    def prepare_load(self) -> None:
        """Empty the prefix cache of the old weights' KV; no rollouts until `finish_load`."""
        # SGLang's own flush after an update kills the scheduler if it is not quite idle yet.
        flushed = self._run(self._manager.flush_cache(timeout_s=IDLE_TIMEOUT_S))
        if not flushed.success:
            raise RuntimeError(
                f"the engine was not idle within {IDLE_TIMEOUT_S:.0f} s: {flushed.message}"
            )
        if self._loading:
            # The previous load failed and left its session open.
            self._weight_session("end")
        self._version = None
        self._weight_session("begin")
        self._loading = True

    def finish_load(self, version: str) -> None:
        self._weight_session("end")
        self._loading = False
        self._version = version

    def _weight_session(self, step: str) -> None:
        call = weight_update_session(self._manager, step)
        if call is not None:
            self._require_success(self._run(call))

    def set_adapter(self, name: str, tensors: Mapping[str, torch.Tensor], config: Any) -> None:
        """Load PEFT's `tensors` and `config` as LoRA adapter, replacing one of the same name.
        Raises `ControlError`, a `ValueError`, if they do not fit the engine."""
        self._run(load_adapter(self._manager, name, config, tensors))

    def release(self) -> None:
        if self._saves_memory and not self._released:
            self.prepare_load()
            self._call("release_memory_occupation", "ReleaseMemoryOccupationReqInput")
            self._released = True

    def resume(self) -> None:
        if self._released:
            self._call("resume_memory_occupation", "ResumeMemoryOccupationReqInput")
            self._released = False

    def close(self) -> None:
        """End this engine's processes, and no others: SGLang's shutdown would end all children."""
        import zmq

        atexit.unregister(self.engine.shutdown)
        self._processes.kill()
        # If the garbage collector closed a ZMQ context, the context would wait for ever to deliver
        # its messages to a dead process.
        for owner in (self.engine, self._manager):
            for value in list(vars(owner).values()):
                if isinstance(value, zmq.Socket):
                    value.context.destroy(linger=0)

    def _weights_call(self, method: str, request: str, **fields: Any) -> None:
        self._require_success(self._call(method, request, **fields))

    def _require_success(self, result: tuple[bool, str]) -> None:
        success, message = result
        if not success:
            raise RuntimeError(f"SGLang did not take the weights: {message}")

    def _call(self, method: str, request: str, **fields: Any) -> Any:
        from sglang.srt.managers import io_struct

        message = getattr(io_struct, request)(**fields)
        return self._run(getattr(self._manager, method)(message, None))

    def _run(self, call: Any) -> Any:
        loop = self.engine.loop
        task, began = loop.create_task(call), time.monotonic()
        while not task.done():
            loop.run_until_complete(asyncio.wait({task}, timeout=POLL_S))
            if not task.done():
                self._processes.require_alive()
                if time.monotonic() - began > ANSWER_TIMEOUT_S:
                    task.cancel()
                    raise EngineDied(f"the engine did not answer within {ANSWER_TIMEOUT_S:.0f} s")
        return task.result()


def engine_args(model_path: str, schedule: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "model_path": model_path,
        # The dtype that the policy computes in; "auto" would be float16 for a checkpoint in
        # float32. On most CPUs, plain torch is fastest in float32.
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "enable_memory_saver": torch.cuda.is_available(),
    }
    if schedule == DENSE:
        return defaults
    chosen = {} if schedule == "auto" else {"sparrow_schedule": schedule}
    return defaults | {"attention_backend": BACKEND} | chosen
