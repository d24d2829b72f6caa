"""What the package relies on in verl, tried on verl itself: `make test-frameworks` installs it."""

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engines import VOCAB_SIZE, save_tiny_model, unused_model_files
from forked_workers import RAY
from oracle import FP32, ContractModel
from programs import run

from sparrow_sglang.benchmarks.random_model import save_chat_tokenizer
from sparrow_sglang.mismatch.acceptance import acceptance_rate
from sparrow_sglang.schedules.schedule import BudgetSchedule

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
LIMIT_S = 1500  # five processes import SGLang in turn
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.sglang"
# See tests/support/verl_cpu.py.
CPU_PLATFORM = {
    "VERL_PLATFORM": "cpu",
    # FSDP's engine is registered for CUDA and NPU only.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
}
ON_CPU = (
    "trainer.device=cpu",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "actor_rollout_ref.rollout.dtype=float32",
    f"{ENGINE}.max_total_tokens=8192",
    # SGLang's memory saver, and with it sleep and wake-up, needs a device, so both are off.
    f"++{ENGINE}.enable_memory_saver=false",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "++ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.object_store_memory=200000000",
    # Small enough for two cores.
    "data.max_response_length=96",
    "data.train_batch_size=2",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "trainer.v1.sampler.custom_sampler.name=DumpingSampler",
    "trainer.v1.sampler.sampler_kwargs.bin_tokens=64",
)
# The recipe's models tie their embeddings, and its fused log-probs need that under FSDP2.
TIED = {"tie_word_embeddings": True}
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None, reason="verl is not installed: make test-frameworks"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
]


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path


class TestConfig:
    @pytest.mark.parametrize("name", ["sparse_grpo", "words_grpo", "problems_grpo"])
    def test_every_setting_is_one_of_verl(self, name: str) -> None:
        """A setting that verl has renamed would otherwise be ignored."""
        from hydra import compose, initialize_config_module
        from omegaconf import OmegaConf

        with initialize_config_module("verl.trainer.config", version_base=None):
            known = set(leaves(OmegaConf.to_container(compose("ppo_trainer"))))
        ours = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
        skipped = ("defaults", "hydra.", f"{ENGINE}.")
        # Places where verl takes whatever it is given.
        skipped += ("actor_rollout_ref.model.override_config.", "ray_kwargs.ray_init.")
        skipped += ("trainer.v1.sampler.sampler_kwargs.",)
        set_here = [path for path in leaves(ours) if not path.startswith(skipped)]
        assert len(set_here) >= 5
        assert set(set_here) <= known


@dataclass(frozen=True)
class Trained:
    """A run of verl's trainer: the benchmark's row of it, and the batches that it trained on."""

    model: str
    rows: list[dict[str, Any]]
    batches: list[list[dict[str, Any]]]
    folder: Path

    def curve(self, metric: str) -> list[float]:
        return [row["data"][metric] for row in self.rows if metric in row["data"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two steps of the README's recipe on the CPU with a tiny model, by the benchmark's command."""
    folder = tmp_path_factory.mktemp("trained")
    # verl asks more of the tokenizers of this kind than of others.
    model = tmp_path_factory.mktemp("trained_model")
    save_tiny_model(model, kind="qwen3", spread=0.15, **TIED)
    save_chat_tokenizer(model, VOCAB_SIZE)
    run(sys.executable, "task.py", folder / "data", cwd=FOLDER, timeout=LIMIT_S)
    dump, metrics = folder / "dump.jsonl", folder / "metrics.jsonl"
    support = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-dir", ".", "--config-name", "words_grpo"]
    command += [f"actor_rollout_ref.model.path={model}", f"{ENGINE}.sparrow_schedule=fixed-64"]
    command += [f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}/hydra"]
    # A Ray cluster of its own.
    command += ["++ray_kwargs.ray_init.address=local"]
    command += [f"data.train_files={folder}/data/train.parquet"]
    command += [f"data.val_files={folder}/data/test.parquet", *ON_CPU]
    command += [f"trainer.v1.sampler.custom_sampler.path={support / 'verl_recorded.py'}"]
    ours = {
        "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, support))),
        "SPARROW_DUMP": str(dump),
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_model_files()),
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
    run(*command, cwd=FOLDER, env=os.environ | RAY | CPU_PLATFORM | ours, timeout=LIMIT_S)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    batches = [json.loads(line) for line in dump.read_text().splitlines()]
    return Trained(str(model), rows, batches, folder)


class TestTrainer:
    """verl's own trainer, FSDP, weight sync, validation and checkpoint, with sparse rollouts."""

    def test_it_trains_validates_and_writes_a_checkpoint(self, trained: Trained) -> None:
        assert max(row["step"] for row in trained.rows) == 2
        assert len(trained.curve("val-core/words/acc/mean@1")) == 2
        assert all(value > 0 for value in trained.curve("timing_s/update_weights"))
        [weights] = trained.folder.glob("checkpoints/**/global_step_2/actor/model_*.pt")
        assert weights.stat().st_size > 0

    def test_the_correction_sees_sparse_rollouts(self, trained: Trained) -> None:
        """With dense rollouts of the same weights, every ratio would be 1 up to rounding."""
        assert all(value > 0.01 for value in trained.curve("rollout_corr/rollout_is_std"))
        # k3 is never negative, whereas the mean of log-ratios of few tokens may be.
        assert all(value > 1e-3 for value in trained.curve("rollout_corr/k3_kl"))

    def test_rates_are_those_of_the_contract(self, trained: Trained) -> None:
        """Exact rates of the first batch, which the checkpoint's weights have sampled."""
        recorded = [row for row in trained.batches[0] if row["rates"]]
        assert len(recorded) == 2
        for row in recorded:
            sparse, dense = (
                ContractModel(trained.model, schedule).log_probs(row["prompt"], row["response"])
                for schedule in (BudgetSchedule.fixed(64), None)
            )
            expected = acceptance_rate(sparse, dense)[1:]
            assert row["rates"] == pytest.approx(expected.tolist(), abs=FP32)

    def test_the_tail_stands_among_the_metrics(self, trained: Trained) -> None:
        for step, batch in enumerate(trained.batches):
            rates = sorted(rate for row in batch for rate in row["rates"] or ())
            assert trained.curve("sparrow/accept_tokens")[step] == len(rates)
            fifth = rates[math.ceil(len(rates) / 20) - 1]
            assert trained.curve("sparrow/accept_p05")[step] == pytest.approx(fifth)
        bins = [name for name in trained.rows[-1]["data"] if "accept_p05_bin" in name]
        assert len(bins) >= 2
