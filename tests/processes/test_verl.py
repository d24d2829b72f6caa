"""What the package relies on in verl, tried on verl itself: `make test-frameworks` installs it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import save_model_of_words, words
from engines import random_prompt, unused_model_files
from oracle import ContractModel

from sparrow_sglang.schedule import BudgetSchedule

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
README = FOLDER / "README.md"
FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
PROMPT = random_prompt(0, 150)
NEW_TOKENS = 24
LIMIT_S = 1500  # five processes import SGLang in turn
# Ray's own limits are too short where something else keeps the cores busy.
ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.sglang"
pytestmark = [
    pytest.mark.skipif(
        find_spec("verl") is None, reason="verl is not installed: make test-frameworks"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
]


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The config that verl's trainer gets by the README's command, which would then train."""
    from omegaconf import OmegaConf

    command = "-m verl.trainer.main_ppo --config-dir . --config-name sparse_grpo"
    assert f"python3 {command}" in README.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *command.split(), "--cfg", "job"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return OmegaConf.create(done.stdout)


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.")
        else:
            yield path


class TestConfig:
    @pytest.mark.parametrize("name", ["sparse_grpo", "rollout_cpu"])
    def test_every_setting_is_one_of_verl(self, name: str) -> None:
        """A setting that verl has renamed would otherwise be ignored."""
        from hydra import compose, initialize_config_module
        from omegaconf import OmegaConf

        with initialize_config_module("verl.trainer.config", version_base=None):
            known = set(leaves(OmegaConf.to_container(compose("ppo_trainer"))))
        ours = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
        skipped = ("defaults", "hydra.", f"{ENGINE}.", "prompt_file", "new_tokens")
        set_here = [path for path in leaves(ours) if not path.startswith(skipped)]
        assert len(set_here) >= 5
        assert set(set_here) <= known

    def test_verl_accepts_the_recipe(self, recipe: Any) -> None:
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.utils.config import omega_conf_to_dataclass, validate_config

        validate_config(recipe, use_reference_policy=False, use_critic=False)
        rollout = omega_conf_to_dataclass(recipe.actor_rollout_ref.rollout)
        assert rollout.name == "sglang"
        assert rollout.calculate_log_probs is True
        assert rollout.engine_kwargs["sglang"] == {
            "attention_backend": "sparrow",
            "sparrow_schedule": "qwen3-1.7b-0.86",
        }
        correction = omega_conf_to_dataclass(
            recipe.algorithm.rollout_correction, RolloutCorrectionConfig
        )
        assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_of_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def printed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the example prints, run as its README says, but with a tiny model."""
    folder = tmp_path_factory.mktemp("run")
    prompt = folder / "prompt.txt"
    prompt.write_text(words(PROMPT))
    assert "python rollout.py" in README.read_text(encoding="utf-8")
    command = [
        *(sys.executable, "rollout.py", f"hydra.run.dir={folder}", f"prompt_file={prompt}"),
        *(f"actor_rollout_ref.model.path={model}", f"new_tokens={NEW_TOKENS}"),
        f"{ENGINE}.sparrow_schedule=fixed-64",
    ]
    unused = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_model_files())}
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env=os.environ | ENVIRONMENT | unused,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class TestRolloutServer:
    def test_settings_reach_the_server(self, printed: list[dict[str, Any]]) -> None:
        assert printed[0]["schedule"] == "fixed-64"

    @pytest.mark.parametrize("decode", ["sparse", "dense"])
    def test_generate_follows_the_contract(
        self, model: str, printed: list[dict[str, Any]], decode: str
    ) -> None:
        """verl's own `generate` against transformers with the definition of sparse decode."""
        [answer] = [line for line in printed if line.get("decode") == decode]
        assert answer["prompt_tokens"] == len(PROMPT)
        assert len(answer["token_ids"]) == len(answer["log_probs"]) == NEW_TOKENS
        schedule = BudgetSchedule.fixed(64) if decode == "sparse" else None
        rows = ContractModel(model, schedule).log_probs(PROMPT, answer["token_ids"])
        expected = rows.gather(1, torch.tensor(answer["token_ids"])[:, None])[:, 0]
        assert answer["log_probs"] == pytest.approx(expected.tolist(), abs=FP32)

    def test_dense_scores_of_sparse_tokens(self, model: str, printed: list[dict[str, Any]]) -> None:
        sparse, _, scored = printed[1:]
        rows = ContractModel(model, None).log_probs(PROMPT, sparse["token_ids"])
        expected = rows.gather(1, torch.tensor(sparse["token_ids"])[:, None])[:, 0].tolist()
        assert scored["log_probs"] == pytest.approx(expected, abs=FP32)
        difference = zip(sparse["log_probs"], expected, strict=True)
        assert max(abs(a - b) for a, b in difference) > 0.01
