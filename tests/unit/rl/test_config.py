"""Training configurations: what they default to, and what they refuse in one line."""

from pathlib import Path

import pytest

from sparrow_sglang.commands.cli import main
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
LEAST = 'run_dir = "runs/x"\n[task]\nname = "copy"\n'


def load(folder: Path, text: str) -> TrainConfig:
    path = folder / "train.toml"
    path.write_text(text)
    return TrainConfig.load(path)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ("[optimzer]\nlr = 1.0", "optimzer.*optimizer"),
        ("[algorithm]\ntis_cpa = 2.0", "tis_cpa.*tis_cap"),
        ("[rollout]\ntemperature = 0", "rollout.temperature=0"),
        ("[algorithm]\nmini_batches = 5", "algorithm.mini_batches=5"),
        ("[rollout]\noversubscribe = 1.5", "rollout.oversubscribe was removed: .*max_new_tokens"),
        ("[rollout]\ntruncated = 'keep'", "rollout.truncated was removed: .* finish_reason"),
        ("[algorithm]\nkl_coefficient = 0.0", "algorithm.kl_coefficient was removed: .*lr"),
        ("[algorithm]\ncorrection = 'sequence'", "correction='sequence' .* 'none' or 'tis'"),
        ("heldout_path = 'a.jsonl'\nheldout_sets = {b = 'b.jsonl'}", "heldout_sets"),
        ("[cluster]\ntrainers = 4\ncolocate = true", "trainers=4"),
        ("heldout_path = 3", "heldout_path=3 is not allowed: expected a path in quotes"),
        ("steps = 3 3", "TOML"),
        ('train_path = "a\\u0000b"', "train_path"),
        ("[engine]\nserver_args = {random_seed = 1}", "set seed"),
        ("[engine]\nschedule = 'dense'\nserver_args = {attention_backend = 'sparrow'}", "schedule"),
        ("[mismatch]\nsequences = true", "mismatch.sequences=True"),
        ("[logging]\ntensorboard = 0", "logging.tensorboard=0"),
        ("[model]\ndtype = '" + "x" * 9000 + "'", r"model.dtype='xxx.{,300}$"),
        ('[task.a]\n"\\u0000\\n" = 1', r"\[task\]"),
        ("[task.options]\na = " + "[" * 5000, "TOML"),
    ],
)
def test_refusals_name_file_key_and_value(tmp_path: Path, extra: str, field: str) -> None:
    with pytest.raises(InputError, match=field) as refused:
        load(tmp_path, f"{LEAST}{extra}\n")
    line = str(refused.value)
    assert line.startswith(f"{tmp_path}/train.toml: ") and "\n" not in line


def test_lossless_rollouts_are_not_corrected_by_default(tmp_path: Path) -> None:
    lossless = "[engine]\nlossless = true\n"
    assert load(tmp_path, LEAST).algorithm.correction == "tis"
    assert load(tmp_path, LEAST + lossless).algorithm.correction == "none"
    chosen = '[algorithm]\ncorrection = "tis"\n'
    assert load(tmp_path, LEAST + lossless + chosen).algorithm.correction == "tis"
    for other in ("[distill]\nenabled = true\n", 'schedule = "dense"\n'):
        with pytest.raises(InputError, match="lossless"):
            load(tmp_path, LEAST + lossless + other)


@pytest.mark.parametrize(
    ("path", "task"), [("story_smollm2.toml", "story"), ("ray_cluster/cluster.toml", "math")]
)
def test_the_examples_are_valid(path: str, task: str) -> None:
    assert TrainConfig.load(EXAMPLES / path).task.name == task


def test_settings_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        LEAST + "[task.options]\ndigits = 3\n[optimizer]\nlr = 1.0\ngrad_clip = 2.0\n"
        "[cluster]\nengines = 3\ngpus_per_engine = 2\n"
    )
    settings = [
        "steps=7",
        "optimizer.lr=3e-6",
        "optimizer.betas=[0.8, 0.9]",
        "run_dir=2026-01-31",
        "task.train_path=a=b.jsonl",
        "task.heldout_path=~/c.jsonl",
        "model.path='Qwen/Qwen3-4B'",
        "algorithm.correction=none",
        "engine.server_args.tp_size=2",
        "engine.server_args.dtype=float32",
        "steps = 9",
    ]
    config = TrainConfig.load(path, settings)
    assert (config.steps, config.optimizer.lr, config.optimizer.grad_clip) == (9, 3e-6, 2.0)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.run_dir == Path("2026-01-31")
    assert config.task.train_path == Path("a=b.jsonl")
    assert config.task.heldout_path == Path.home() / "c.jsonl"
    assert config.model.path == "Qwen/Qwen3-4B"
    assert config.algorithm.correction == "none"
    assert config.engine.server_args == {"tp_size": 2, "dtype": "float32"}
    assert config.task.name == "copy" and config.task.options == {"digits": 3}
    assert config.cluster is not None and config.cluster.gpus == 7


def test_the_printed_defaults_are_those_of_the_least_file_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--defaults"]) == 0
    text = capsys.readouterr().out
    loaded = load(tmp_path, text)
    assert loaded == TrainConfig.parse({"run_dir": "runs/my-run", "task": {"name": "story"}})
