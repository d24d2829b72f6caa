"""Runs of several trainer workers and engines write what a run in one process writes. Two raylets
on this machine stand for two hosts of three GPUs each. Engines are stand-ins that draw the same
samples in whatever process."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ascii_task
import forked_workers
import pytest
import ray
import torch
from ascii_task import rows, untimed
from cluster_engine import Repeatable, pid, pids
from ray.cluster_utils import Cluster
from reward_groups import scores_of
from sampler import TOKENS
from training import settings
from transformers import AutoModelForCausalLM

from sparrow_sglang.rl import learner, trainer
from sparrow_sglang.rl.cluster import ray_engines
from sparrow_sglang.rl.cluster.ray_engines import RayEngines
from sparrow_sglang.rl.cluster.remote_learner import RemoteLearner
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.run import Stopped
from sparrow_sglang.rl.tasks import TASKS
from sparrow_sglang.rl.tasks.rewards import RewardPool

SMALL = {
    "steps": 2,
    "model": {"micro_batch_tokens": 200},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_new_tokens": TOKENS},
    "mismatch": {"sequences": 3},
    "optimizer": {"lr": 1e-4},
    "evaluation": {"every_steps": 0, "prompts": 3},
    "logging": {"tensorboard": False},
    "checkpoint": {"every_steps": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Under a fixed schedule the first sparse layer is the third one.
    sizes = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 3}
    return ascii_task.save_model_of_bytes(
        tmp_path_factory.mktemp("bytes"), **sizes, intermediate_size=64, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    variables = forked_workers.RAY | {
        # How long a process may stand still, seven minutes otherwise.
        "RAY_grpc_client_keepalive_time_ms": "5000",
        "RAY_grpc_client_keepalive_timeout_ms": "15000",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        # Ray counts the GPUs, which need not exist.
        node = {"num_cpus": 1, "num_gpus": 3}
        node["object_store_memory"] = 100 * 2**20
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


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step:06d}" / "model"
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def require_same(one: TrainConfig, other: TrainConfig) -> None:
    for alone, both in zip(untimed(one.run_dir), untimed(other.run_dir), strict=True):
        # Differences of distributions that nearly coincide are rounded more than their sums.
        norms = (row.pop("sparrow/distill_grad_norm", 0.0) for row in (both, alone))
        assert next(norms) == pytest.approx(next(norms), rel=5e-4)
        assert both == pytest.approx(alone, rel=1e-5, abs=1e-5)
    for name, weight in weights(one.run_dir, one.steps).items():
        found = weights(other.run_dir, other.steps)[name]
        torch.testing.assert_close(found, weight, atol=1e-5, rtol=1e-5)


def test_a_cluster_reports_and_saves_what_one_process_does(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    """An engine of two GPUs reads the weights of two trainers."""
    one, many = (settings(model, tmp_path / name, "fixed-48", SMALL) for name in ("one", "many"))
    trainer.train(one)
    parts = {"trainers": 2, "engines": 1, "gpus_per_engine": 2, "colocate": True}
    many = TrainConfig.parse(many.model_dump() | {"cluster": parts})
    folder = trainer.train(many)
    assert folder == many.run_dir / "checkpoints" / "step-000002"
    require_same(one, many)


@pytest.mark.timeout(1800)
def test_a_run_goes_on_after_deaths_and_with_another_number_of_workers(
    cluster: Cluster, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    """Runs last, as a host is gone afterwards."""
    sections = {
        "steps": 4,
        "algorithm": {"mini_batches": 2},
        "evaluation": {"every_steps": 2},
        "distill": {"enabled": True, "rank": 2, "sequences": 4, "lr": 1e-3},
    }
    whole = settings(model, tmp_path / "whole", "fixed-48", SMALL, sections)
    trainer.train(whole)
    parts = {"cluster": {"trainers": 2, "engines": 2}}
    config = settings(model, tmp_path / "parts", "fixed-48", SMALL, sections, **parts)
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
