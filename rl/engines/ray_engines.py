"""Rollout engines on any number of machines: Ray actors with one SGLang engine each.

In: prompts, distributed among the engines, and weights. Out: groups, complete even if engines die:
a dead engine is replaced, given the current weights, and its unfinished groups are rolled out
again.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from sparrow_sglang.rl.engines.buckets import NamedTensors, pack
from sparrow_sglang.rl.engines.engine_actor import CONTROL, EngineActor, StoredWeights, store
from sparrow_sglang.rl.engines.nccl_settings import share_nccl_settings
from sparrow_sglang.rl.engines.processes import EngineDied
from sparrow_sglang.rl.engines.responses import MoreGroups, OnFinished, ShouldStop
from sparrow_sglang.rl.engines.weight_broadcast import BroadcastTimeout, WeightBroadcast
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group, Prompt
from sparrow_sglang.schedule import BudgetSchedule

MAX_DEATHS = 3
"""Engines that may die in one rollout or update; if more die, the run stops, as the cause will
likely persist."""

START_TIMEOUT_S = 1800.0
"""Time for an engine to start serving, enough for a large checkpoint on a slow disk."""

Transfer = Literal["object_store", "broadcast"]

ANSWER_TIMEOUT_S = 900.0
"""Time for all engines to complete a call between rollouts, such as loading weights from the object
store; an engine that takes longer is replaced. If an engine dies in a broadcast, others may wait in
NCCL, which ends their processes after ten minutes."""

_DEATH = (RayActorError, ObjectLostError, EngineDied, GetTimeoutError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Latest:
    """Weights that were broadcast, to be read again for an engine that starts later."""

    version: str
    tensors: NamedTensors


class RayEngines:
    """Any number of engines behind the interface of one.

    Uses the Ray cluster that this process is connected to, or starts one on this machine. Engines
    take whole GPUs from Ray where it has any, as many as `tp_size` x `pp_size`; the trainer's own
    GPU must not be among them, so on one machine start Ray with the others only
    (CUDA_VISIBLE_DEVICES=1,2 ray start --head).
    """

    def __init__(
        self,
        count: int,
        model_path: str,
        schedule: str = "auto",
        transfer: Transfer = "object_store",
        **server_args: Any,
    ) -> None:
        """Start `count` engines and wait until all of them serve.

        Args:
            transfer: how weights travel. "broadcast" needs GPUs that reach each other by NCCL.
                "object_store" needs room for half a GiB of them, or for the largest tensor, in
                /dev/shm of every engine's machine.

        Raises:
            ValueError: Ray has fewer GPUs than the engines need.
            EngineDied: an engine did not start; the message holds its reason.
        """
        self._actors: list[Any] = []
        self._start_args = (model_path, schedule, server_args)
        self._ranks = server_args.get("tp_size", 1) * server_args.get("pp_size", 1)
        self._broadcast: WeightBroadcast | None = None
        self._nccl_settings: dict[str, str] = {}
        if transfer == "broadcast":
            self._broadcast = WeightBroadcast(self._ranks)
            self._nccl_settings = share_nccl_settings(server_args)
        self._dtype: torch.dtype
        self._weights: StoredWeights | None = None
        self._latest: _Latest | None = None
        self._adapter: tuple[str, dict[str, torch.Tensor], Any] | None = None
        self._schedule: BudgetSchedule | None = None
        self._complete = True
        self._deaths = self._rollouts = 0
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray()
        try:
            self._num_gpus = _gpus_per_engine(count, self._ranks)
            self._actors = [self._start(slot) for slot in range(count)]
            self._pids = [self._await_start(actor) for actor in self._actors]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors, each on its own machine."""
        return list(self._pids)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> list[Group]:
        """See `RolloutEngine`; raises what `stream` raises."""
        begun = [Group.begun(prompt, n) for prompt in prompts]
        groups = dict(self.stream(begun, sampling, on_finished))
        return [groups[position] for position in range(len(prompts))]

    def stream(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        on_finished: OnFinished | None = None,
        more_groups: MoreGroups | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[tuple[int, Group]]:
        """See `RolloutEngine`; an engine starts added groups once its others are complete.

        If the caller abandons a stream, engines still finish it before they do anything else.

        Raises:
            EngineDied: engines died more than `MAX_DEATHS` times, or one could not be replaced.
            ray.exceptions.RayTaskError: an engine failed without dying, e.g. `RolloutError`.
        """
        if not self._complete:
            raise RuntimeError(
                "the engines' weights were loaded in part: call update_weights first"
            )
        self._deaths, self._rollouts = 0, self._rollouts + 1
        groups = list(groups)
        # Positions of the groups that each engine still owes. Of n engines each gets every n-th
        # group, as groups of one task may be adjacent.
        count = min(len(self._actors), len(groups))
        owed = {slot: list(range(slot, len(groups), count)) for slot in range(count)}
        streams: dict[int, tuple[Any, list[int]]] = {}
        stopped = False
        report: OnFinished = on_finished or (lambda count: None)
        while True:
            if not stopped and should_stop is not None and should_stop():
                stopped = True
                for slot in streams:
                    self._actors[slot].stop.remote(self._rollouts)
            for slot, positions in owed.items():
                if positions and slot not in streams and not stopped:
                    method = self._actors[slot].stream.options(num_returns="streaming")
                    share = list(positions)
                    begun = [groups[position] for position in share]
                    streams[slot] = method.remote(begun, sampling, self._rollouts), share
            if not streams:
                break
            slots = {stream: slot for slot, (stream, _) in streams.items()}
            ready, _ = ray.wait(list(slots), num_returns=1, fetch_local=False)
            slot = slots[ready[0]]
            stream, share = streams[slot]
            try:
                index, group = ray.get(next(stream))
            except StopIteration:
                del streams[slot]
            except _DEATH as error:
                self._replace(slot, error)
                del streams[slot]
            else:
                owed[slot].remove(share[index])
                report(sum(rollout.finished for rollout in group.rollouts))
                yield share[index], group
            for group in () if stopped or more_groups is None else more_groups(not streams):
                slot = min(owed, key=lambda slot: len(owed[slot]))
                owed[slot].append(len(groups))
                groups.append(group)
        # Groups of engines that died after they were told to stop.
        for position in sum(owed.values(), []):
            yield position, groups[position]

    def update_weights(self, tensors: NamedTensors, version: str) -> None:
        """See `RolloutEngine`; engines that have died meanwhile, or die now, are replaced.

        Ray's object store keeps a copy of the weights for engines that replace others later. With
        broadcast, `tensors` are read again instead, so they must not change until the next update;
        a one-time iterator is read into a list for this purpose.

        Raises:
            EngineDied: as in `stream`, or an engine does not answer in time.
        """
        self._deaths = 0
        self._complete = False
        # Drop the old weights first, so that the store holds only one set of weights at a time.
        self._weights = self._latest = None
        # Again if an engine was replaced, as its replacement is not prepared.
        deaths = -1
        while deaths != self._deaths:
            deaths = self._deaths
            self._call_all("prepare_load" if self._broadcast else "ready")
        if self._try_broadcast("start"):
            latest = _Latest(version, list(tensors) if iter(tensors) is tensors else tensors)
            packed = pack(latest.tensors, self._dtype)
            if all(self._try_broadcast("send", bucket, version) for bucket in packed):
                self._latest = latest
                self._call_all("finish_load", version)
                self._complete = True
                return
            tensors = latest.tensors
        self._weights = self._put(tensors, version)
        self._call_all("load_stored", self._weights)
        self._complete = True

    def _put(self, tensors: NamedTensors, version: str) -> StoredWeights:
        buckets = tuple(store(bucket) for bucket in pack(tensors, self._dtype))
        return StoredWeights(version, buckets)

    def set_adapter(self, name: str, tensors: Mapping[str, torch.Tensor], config: Any) -> None:
        """See `RolloutEngine`; a replaced engine gets the adapter too."""
        self._deaths = 0
        on_cpu = {key: tensor.cpu() for key, tensor in tensors.items()}
        self._adapter = name, on_cpu, config
        self._call_all("set_adapter", *self._adapter)

    def set_schedule(self, schedule: BudgetSchedule) -> None:
        """See `RolloutEngine`; a replaced engine gets the schedule too."""
        self._deaths = 0
        self._schedule = schedule
        self._call_all("set_schedule", schedule)

    def release(self) -> None:
        """Does nothing: the engines share no GPU with the trainer."""

    def resume(self) -> None:
        """Does nothing, as `release`."""

    def close(self) -> None:
        """End all engines, and Ray if it was started here."""
        if self._broadcast:
            self._broadcast.stop([])
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._owns_ray:
            ray.shutdown()

    def _start(self, slot: int) -> Any:
        model_path, schedule, server_args = self._start_args
        if server_args.get("random_seed") is not None:
            # With one seed, all engines would answer the same prompt with the same samples.
            server_args = server_args | {"random_seed": server_args["random_seed"] + slot}
        # An actor that reserves no CPUs need not wait for free ones, for ever on a small machine.
        # Any: Ray's handles are typed as if calls through them were plain attributes.
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": self._num_gpus,
            "scheduling_strategy": "SPREAD",
            "concurrency_groups": {CONTROL: 1},
        }
        actor: Any = ray.remote(**options)(EngineActor)
        modules = [os.path.abspath(folder) for folder in sys.path]
        return actor.remote(model_path, schedule, server_args, self._nccl_settings, modules)

    def _try_broadcast(self, step: Literal["start", "send"], *arguments: Any) -> bool:
        """Whether the step succeeded; if not, this update must go through the object store."""
        if self._broadcast is None:
            return False
        deaths = self._deaths
        try:
            getattr(self._broadcast, step)(self._actors, *arguments)
        except BroadcastTimeout:
            # Engines that wait in NCCL no longer answer any call.
            raise
        except (RayActorError, RuntimeError):
            self._broadcast.stop(self._actors)
            self._call_all("ready")
            if self._deaths == deaths:
                raise
            return False
        return True

    def _call_all(self, method: str, *arguments: Any) -> None:
        """Call the method on all engines at the same time; a dead engine is replaced instead.

        The replacement gets no call: `_await_start` gives it all that the others have, except for
        what only prepares a load.
        """
        calls = [actor.call.remote(method, *arguments) for actor in self._actors]
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        for slot, call in enumerate(calls):
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except _DEATH as error:
                self._replace(slot, error)

    def _replace(self, slot: int, error: Exception) -> None:
        self._deaths += 1
        reason = _reason(error)
        # The dead engine's remaining processes would keep their GPUs.
        ray.kill(self._actors[slot])
        if self._broadcast:
            self._broadcast.stop(self._actors)
        if self._deaths > MAX_DEATHS:
            raise EngineDied(
                f"{self._deaths} rollout engines died within one rollout or update, the last one in"
                f" slot {slot}: {reason} Look at Ray's logs of its worker for the cause."
            ) from error
        logger.warning("rollout engine %d died (%s); starting another", slot, reason)
        self._actors[slot] = self._start(slot)
        self._pids[slot] = self._await_start(self._actors[slot])

    def _await_start(self, actor: Any) -> int:
        """The process id of an actor, once its engine has weights, adapter and schedule."""
        try:
            pid: int
            pid, self._dtype = ray.get(actor.ready.remote(), timeout=START_TIMEOUT_S)
            if self._weights is None and self._latest is not None:
                self._weights = self._put(self._latest.tensors, self._latest.version)
            for method, arguments in (
                ("load_stored", self._weights and (self._weights,)),
                ("set_adapter", self._adapter),
                ("set_schedule", self._schedule and (self._schedule,)),
            ):
                if arguments is not None:
                    ray.get(actor.call.remote(method, *arguments))
            return pid
        except GetTimeoutError:
            raise EngineDied(
                f"a rollout engine did not start within {START_TIMEOUT_S:.0f} s: Ray has no machine"
                " with enough free GPUs for it (see `ray status`), or it is still loading"
            ) from None
        except _DEATH as error:
            raise EngineDied(f"a rollout engine did not start: {error}") from error


def _start_ray() -> None:
    # Ray's processes have half a minute to start, which is too short if cores are busy.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    # Ray's workers have a low priority, at which engines starve beside a trainer on the same cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(include_dashboard=False, log_to_driver=False)


def _reason(error: Exception) -> str:
    """The cause of an engine's death, without Ray's ids and tracebacks, which come first."""
    text = str(getattr(error, "cause", error)).strip() or repr(error)
    return text.splitlines()[-1]


def _gpus_per_engine(count: int, ranks: int) -> int:
    available = int(ray.cluster_resources().get("GPU", 0))
    if not available and not torch.cuda.is_available():
        return 0
    if count * ranks > available:
        raise ValueError(
            f"num_engines={count} with {ranks} GPUs each: Ray has {available} GPUs; lower"
            " num_engines or tp_size, or add machines"
        )
    return ranks
