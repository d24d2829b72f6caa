"""Runs of several trainer workers and engines write what a run in one process writes.

Two raylets on this machine stand for two hosts of three GPUs each. Engines are stand-ins that draw
the same samples in whatever process.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ascii_task
import forked_workers
import numpy as np
import psutil
import pytest
import ray
import torch
from ascii_task import rows, untimed
from cluster_engine import Repeatable, pid, pids
from fluent_engine import FluentEngine, Reader
from ray.cluster_utils import Cluster
from reward_groups import scores_of
from sampler import TOKENS
from transformers import AutoModelForCausalLM

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl import learner, trainer
from sparrow_sglang.rl.advantages import group_advantages
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.cluster import ray_engines
from sparrow_sglang.rl.cluster.ray_engines import RayEngines
from sparrow_sglang.rl.cluster.remote_learner import RemoteLearner
from sparrow_sglang.rl.config import ClusterConfig, EngineConfig, TrainConfig
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.runs.run import Stopped
from sparrow_sglang.rl.tasks import TASKS
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.run_folder import METRICS_FILE

KILLS = int(os.environ.get("SPARROW_KILLS", 0))
RESPONSES = int(os.environ.get("SPARROW_RESPONSES", 0))
SEED = int(os.environ.get("SPARROW_SEED", 0))

DISTILL = {"distill": {"enabled": True, "rank": 2, "sequences": 4, "lr": 1e-3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Under a fixed schedule the first sparse layer is the third one.
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3}
    return ascii_task.save_model_of_bytes(
        tmp_path_factory.mktemp("bytes"), **sizes, intermediate_size=64, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    variables = {
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would kill actors while other tests need most of the memory.
        "RAY_memory_monitor_refresh_ms": "0",
        # As in other tests of this process.
        "RAY_AUTH_MODE": "disabled",
        # How long a process may stand still, seven minutes otherwise.
        "RAY_grpc_client_keepalive_time_ms": "5000",
        "RAY_grpc_client_keepalive_timeout_ms": "15000",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        # Ray counts the GPUs, which need not exist.
        node = {"num_cpus": 1, "num_gpus": 8 if RESPONSES else 3}
        node["object_store_memory"] = (100 + 3 * RESPONSES) * 2**20
        hosts = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            hosts.add_node(**node)
            workers = forked_workers.runtime_env()
            ray.init(hosts.address, log_to_driver=False, runtime_env=workers)
            yield hosts
        finally:
            ray.shutdown()
            hosts.shutdown()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "LocalEngine", Repeatable)
    monkeypatch.setattr(ray_engines, "START", Repeatable)
    monkeypatch.setitem(TASKS, ascii_task.NAME, ascii_task.load)
    score = partial(scores_of, reward=ascii_task.reward)
    monkeypatch.setattr(RewardPool, "score", lambda pool, groups: score(groups))


def settings(model: str, run_dir: Path, **sections: Any) -> TrainConfig:
    fields = {
        "run_dir": run_dir,
        "steps": 2,
        "task": {"name": ascii_task.NAME},
        "model": {"path": model, "gradient_checkpointing": False, "micro_batch_tokens": 200},
        "engine": {"schedule": "fixed-48"},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 3,
            "max_prompt_tokens": 64,
            "max_new_tokens": TOKENS,
        },
        "mismatch": {"sequences": 3},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"every_steps": 0, "prompts": 3},
        "logging": {"tensorboard": False},
        "checkpoint": {"every_steps": 1},
    }
    return TrainConfig.parse(fields | sections)


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step:06d}" / "model"
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def require_same(one: TrainConfig, other: TrainConfig) -> None:
    for alone, both in zip(untimed(one.run_dir), untimed(other.run_dir), strict=True):
        assert both == pytest.approx(alone, rel=1e-5, abs=1e-5)
    for name, weight in weights(one.run_dir, one.steps).items():
        found = weights(other.run_dir, other.steps)[name]
        torch.testing.assert_close(found, weight, atol=1e-5, rtol=1e-5)


def test_a_cluster_reports_and_saves_what_one_process_does(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    """An engine of two GPUs reads the weights of two trainers."""
    algorithm = {"kl_coefficient": 0.1}
    one, many = (settings(model, tmp_path / name, algorithm=algorithm) for name in ("one", "many"))
    trainer.train(one)
    parts = {"trainers": 2, "engines": 1, "gpus_per_engine": 2, "colocate": True}
    many = TrainConfig.parse(many.model_dump() | {"cluster": parts})
    folder = trainer.train(many)
    assert folder == many.run_dir / "checkpoints" / "step-000002"
    require_same(one, many)


def actors() -> list[psutil.Process]:
    """The processes of trainer workers and engines, on all raylets."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith(("ray::TrainerActor", "ray::EngineActor")):
                found.append(process)
    return found


@pytest.mark.skipif(not KILLS, reason="by hand: SPARROW_KILLS=20 in the environment, 10 minutes")
@pytest.mark.timeout(300 + 120 * KILLS)
def test_kills_at_random_times_lose_and_repeat_no_step(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    steps = 3 + 2 * KILLS
    whole = settings(model, tmp_path / "whole", steps=steps)
    trainer.train(whole)
    parts = {"cluster": {"trainers": 2, "engines": 2, "max_restarts": KILLS}}
    config = settings(model, tmp_path / "parts", **parts, steps=steps)
    chance, killed, over = random.Random(SEED), [], threading.Event()

    def kill() -> None:
        done = 0
        while len(killed) < KILLS and not over.wait(chance.uniform(0, 2)):
            taken = len(rows(config.run_dir)) if (config.run_dir / METRICS_FILE).exists() else 0
            # A step between two kills, or the run would end for too many of them.
            if taken > done and (running := actors()):
                victim, done = chance.choice(running), taken
                killed.append(victim.cmdline()[0].split("[")[0])
                victim.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        trainer.train(config)
    finally:
        over.set()
        killer.join()
    print(f"killed after steps: {killed}")
    assert len(killed) == KILLS
    assert [row["step"] for row in rows(config.run_dir)] == list(range(steps))
    require_same(whole, config)


@pytest.mark.skipif(not RESPONSES, reason="by hand: SPARROW_RESPONSES=1024 in the environment")
def test_what_passes_through_the_driver(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 16 engines to 8 trainer workers, at 32,768 tokens a response."""
    monkeypatch.setattr(ray_engines, "START", FluentEngine)
    engines = RayEngines(ClusterConfig(engines=16), EngineConfig(schedule="dense"), "", {})
    readers = [Reader.remote() for _ in range(8)]
    ray.get([reader.ready.remote() for reader in readers])
    engines.load(lambda actors: None, "0")
    prompts = [Prompt(str(index), "task", (1,) * 500) for index in range(RESPONSES // 8)]
    times = [time.perf_counter()]
    groups = engines.generate(prompts, 8, Sampling(max_new_tokens=32768))
    times.append(time.perf_counter())
    batch = Batch.of(groups, group_advantages([range(8) for _ in groups]))
    size = len(ray.cloudpickle.dumps(batch))
    times.append(time.perf_counter())
    reference = ray.put(batch)
    times.append(time.perf_counter())
    # One after the other, as each of them holds all of the responses for a moment.
    assert [ray.get(reader.read.remote([reference])) for reader in readers] == [RESPONSES] * 8
    times.append(time.perf_counter())
    engines.close()
    received, _, stored, read = np.diff(times)
    with capsys.disabled():
        print(
            f"{RESPONSES} responses, {size / 1e6:.0f} MB: {received:.1f} s from engines to the"
            f" driver, {stored:.1f} s into the store, {read / 8:.1f} s for each of 8 to read them"
        )
    assert size < 21 * RESPONSES * 32768


def test_fewer_gpus_than_needed_are_refused(cluster: Cluster, model: str, tmp_path: Path) -> None:
    parts = {"cluster": {"trainers": 3, "engines": 2, "gpus_per_engine": 2}}
    with pytest.raises(InputError, match="they need 7 GPUs, and Ray has 6; lower them, or add"):
        trainer.train(settings(model, tmp_path / "run", **parts))


@pytest.mark.timeout(1800)
def test_a_run_goes_on_after_deaths_and_with_another_number_of_workers(
    cluster: Cluster, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    """Runs last, as a host is gone afterwards."""
    sections = DISTILL | {
        "steps": 4,
        "algorithm": {"mini_batches": 2},
        "evaluation": {"every_steps": 2, "prompts": 3},
    }
    whole = settings(model, tmp_path / "whole", **sections)
    trainer.train(whole)
    parts = {"cluster": {"trainers": 2, "engines": 2}}
    config = settings(model, tmp_path / "parts", **sections, **parts)
    call, stream = RemoteLearner._call, RayEngines.stream
    left, versions = ["engine in rollout", "trainer and host in update"], [""]

    def is_due(event: str, version: str) -> bool:
        """In the second step, one after the other."""
        return version == "1" and left[:1] == [event] and bool(left.pop(0))

    def doomed(learner: RemoteLearner, method: str, *arguments: Any) -> Any:
        if method == "send":
            versions.append(arguments[2])
        if method == "update" and is_due("trainer and host in update", "1"):
            os.kill(pid(learner._workers[1]), signal.SIGKILL)
            # The other host has Ray's head.
            (node,) = cluster.worker_nodes
            cluster.remove_node(node, allow_graceful=False)
        return call(learner, method, *arguments)

    def interrupted(engines: RayEngines, *arguments: Any) -> Iterator[Any]:
        if is_due("engine in rollout", versions[-1]):
            os.kill(pids(engines)[1], signal.SIGKILL)
        for number, answer in enumerate(stream(engines, *arguments)):
            if number == 0 and versions[-1] == "2":
                assert not left
                os.kill(os.getpid(), signal.SIGTERM)
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(ray_engines, "PLACEMENT_TIMEOUT_S", 3.0)
        patch.setattr(RemoteLearner, "_call", doomed)
        patch.setattr(RayEngines, "stream", interrupted)
        with pytest.raises(Stopped) as stopped:
            trainer.train(config)
    assert stopped.value.code == 128 + signal.SIGTERM
    # The workers that died had not finished step 1, which was then taken once.
    assert [row["step"] for row in rows(config.run_dir)] == [0, 1]
    # The three GPUs that are left are for two trainers and one of the two engines.
    assert "Ray has no 1 GPUs on one host for engine 1" in warnings.text
    alone = TrainConfig.parse(config.model_dump() | {"cluster": None})
    trainer.train(alone, resume=True)
    require_same(whole, alone)
