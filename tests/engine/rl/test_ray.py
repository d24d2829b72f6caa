"""Rollout engines as Ray actors: whose weights they sample from, and what happens when they die."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import ascii_task
import forked_workers
import psutil
import pytest
import ray
from ascii_task import rows
from cluster_engine import pids
from engines import SERVER_ARGS, import_for_fork, kill, unused_model_files
from oracle import FP32
from training import ALL, PROMPTS, error, generate, scaled, settings
from waiting import wait_until

from sparrow_sglang.rl import train
from sparrow_sglang.rl.cluster import ray_engines, trainer_actor
from sparrow_sglang.rl.cluster.ray_engines import Actors, RayEngines
from sparrow_sglang.rl.cluster.weight_broadcast import WeightBroadcast
from sparrow_sglang.rl.config import ClusterConfig, EngineConfig
from sparrow_sglang.rl.engines.local_engine import LocalEngine, pack
from sparrow_sglang.rl.rollout import EngineDied, Sampling
from sparrow_sglang.rl.tasks import TASKS

MARK = "SPARROW_TEST_CLUSTER"
SAMPLING = Sampling(max_new_tokens=20)
# Long enough to be interrupted: each engine samples 12 groups in turns of 8 sequences.
MANY = PROMPTS * 8
LONG = Sampling(max_new_tokens=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    disabled = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_model_files())}
    # The fork server stays for the tests after these, so it must not carry the mark.
    forkserver.ensure_running()
    with mock.patch.dict(os.environ, forked_workers.RAY | disabled | {MARK: str(os.getpid())}):
        try:
            _start_ray(forked_workers.runtime_env())
            yield
        finally:
            ray.shutdown()
            try:
                wait_until(lambda: not marked_processes())
            finally:
                kill(marked_processes())


def _start_ray(runtime_env: dict[str, str]) -> None:
    try:
        ray.init(
            "local",
            # Ray starts one worker per CPU in advance; the engines need no CPUs.
            num_cpus=1,
            # The GPUs need not exist, Ray only counts them: a replacement needs the dead engine's.
            num_gpus=4,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env=runtime_env,
        )
    except Exception as error:
        # Ray raises errors of no particular type if one of its own processes does not start.
        pytest.skip(f"Ray itself does not start on this machine: {error}")


def marked_processes() -> list[psutil.Process]:
    """Processes that the cluster has started, those whose parents have died included."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid()):
                processes.append(process)
        except psutil.Error:
            pass
    return processes


def start_forked(*arguments: Any, **server_args: Any) -> LocalEngine:
    """An engine of an actor's process that starts in a second instead of half a minute."""
    import_for_fork()
    return LocalEngine(*arguments, **server_args)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engines, "START", start_forked)


def started(count: int, path: str, **arguments: Any) -> RayEngines:
    cluster = ClusterConfig(engines=count)
    return RayEngines(cluster, EngineConfig(schedule=ALL), path, arguments)


class Sender:
    """Sends a model's weights as the first trainer does."""

    def __init__(self) -> None:
        self.broadcast = WeightBroadcast(1)

    def send(self, tensors: Callable[[], Any], version: str, actors: Actors) -> None:
        for bucket in pack(tensors()):
            failure = trainer_actor._failure_of(
                partial(self.broadcast.send, actors, bucket, version)
            )
            if failure is not None:
                raise failure

    def load(self, engines: RayEngines, model: Any, version: str) -> None:
        engines.load(partial(self.send, model.state_dict().items, version), version)


def test_training_on_a_colocated_engine(cluster, tmp_path, monkeypatch):
    """As with the engine in this process: each step samples from the weights of the last one."""
    monkeypatch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
    model = ascii_task.save_model_of_bytes(tmp_path / "model")
    config = settings(model, tmp_path / "run", "dense", steps=2, evaluation={"every_steps": 0})
    config = config.model_copy(update={"cluster": ClusterConfig(colocate=True)})
    train(config)
    written = rows(config.run_dir)
    assert [row["step"] for row in written] == [0, 1]
    assert max(row["training/rollout_probs_diff_max"] for row in written) < FP32
    assert all(row["response_length/mean"] == 60 for row in written)
    assert written[0]["actor/grad_norm"] > 0


@pytest.fixture(scope="module")
def sender() -> Sender:
    return Sender()


@pytest.fixture(scope="module")
def engines(cluster, sharp_llama, model, sender) -> Iterator[RayEngines]:
    # Idle schedulers would take the cores from the engine that is starting.
    engines = started(2, sharp_llama, **SERVER_ARGS, sleep_on_idle=True)
    sender.load(engines, model, "0")
    yield engines
    engines.close()


def family(pid: int) -> list[psutil.Process]:
    """Processes of an actor and its SGLang engine: the scheduler first, the actor last."""
    actor = psutil.Process(pid)
    children = actor.children(recursive=True)
    return sorted(children, key=lambda child: "scheduler" not in child.name()) + [actor]


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def require_complete(groups, prompts, n: int, sampling: Sampling, version: str) -> None:
    assert [group.prompt for group in groups] == list(prompts)
    for group in groups:
        assert [rollout.sample for rollout in group.rollouts] == list(range(n))
        assert len({rollout.response_ids for rollout in group.rollouts}) == n
        for rollout in group.rollouts:
            assert rollout.prompt_ids == group.prompt.input_ids
            ended = len(rollout.response_ids), rollout.finish_reason
            assert ended == (sampling.max_new_tokens, "length")
            assert (rollout.weight_version, rollout.schedule) == (version, ALL)


def require_from_both(engines, model, version: str) -> None:
    """Groups are complete, and while one engine stands still the other gives exactly its half."""
    prompts = PROMPTS * 2
    with stopped(family(pids(engines)[1])):
        groups = engines.stream(prompts, 2, SAMPLING)
        first = [next(groups) for _ in range(3)]
    rest = list(groups)
    groups = dict(first + rest)
    ordered = [groups[position] for position in range(6)]
    require_complete(ordered, prompts, 2, SAMPLING, version)
    # Check each engine's half alone, so that no error can hide behind the other half.
    for half in (first, rest):
        assert error(model, [group for _, group in half]) < FP32


def test_after_an_update_both_engines_sample_from_the_new_weights(engines, sender, model) -> None:
    require_from_both(engines, model, "0")
    changed = scaled(model)
    sender.load(engines, changed, "1")
    require_from_both(engines, changed, "1")
    assert error(model, generate(engines, PROMPTS, 1, SAMPLING)) > 100 * FP32


def test_the_death_of_an_engine_ends_the_rollout_with_the_reason(engines) -> None:
    """Runs after the other tests of `engines`, since one engine is missing afterwards."""
    victims = family(pids(engines)[1])
    stream = engines.stream(MANY, 4, LONG)
    next(stream)
    victims[0].kill()
    with pytest.raises(EngineDied, match=rf"engine 1 died: process {victims[0].pid}"):
        list(stream)
    with pytest.raises(EngineDied):
        engines.load(lambda actors: None, "8")
