"""Training configurations: what they default to, and what they refuse in one line."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from sparrow_sglang.commands.cli import main
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig, with_overrides

EXAMPLES = Path(__file__).parents[3] / "examples"
LEAST = 'run_dir = "runs/x"\n[task]\nname = "copy"\n'


def load(folder: Path, text: str) -> TrainConfig:
    path = folder / "train.toml"
    path.write_text(text)
    return TrainConfig.load(path)


BOUNDS = """
steps=0: Input should be greater than 0
run_dir='': expected a path, not an empty string
seed=2147483648: Input should be less than 2147483648
model.dtype='fp16': Input should be 'float32' or 'bfloat16'
cluster=2: Input should be a valid table
task.columns.answer='': String should have at least 1 character
rollout.samples_per_prompt=1: Input should be greater than or equal to 2
rollout.oversubscribe=nan: Input should be a finite number
rollout.temperature=101: Input should be less than or equal to 100
evaluation.pass_at=4: Input should be a valid array
algorithm.kl_coefficient=inf: Input should be a finite number
distill.target_modules=[]: Value should have at least 1 item after validation, not 0
"""


@pytest.mark.parametrize("line", BOUNDS.strip().splitlines())
def test_a_value_outside_its_bounds_is_named_with_them(line: str) -> None:
    setting, allowed = line.split(": ")
    values = {"run_dir": "runs/x", "task": {"name": "copy"}}
    with pytest.raises(InputError) as refused:
        TrainConfig.parse(with_overrides(values, [setting]), "x.toml")
    assert str(refused.value) == f"x.toml: {setting} is not allowed: {allowed}"


def test_values_of_the_file_arrive(tmp_path: Path) -> None:
    text = (
        LEAST + "[task.options]\ndigits = 3\n[algorithm]\ncorrection = 'mask'\n"
        "[engine]\nserver_args = {tp_size = 2}\n[cluster]\nengines = 3\ngpus_per_engine = 2\n"
    )
    config = load(tmp_path, text)
    assert config.task.options == {"digits": 3}
    assert config.algorithm.correction == "mask"
    assert config.engine.server_args == {"tp_size": 2}
    assert config.cluster is not None and config.cluster.gpus == 7


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ("[optimzer]\nlr = 1.0", "optimzer.*optimizer"),
        ("[algorithm]\ntis_cpa = 2.0", "tis_cpa.*tis_cap"),
        ("[rollout]\ntemperature = 0", "rollout.temperature=0"),
        ("[algorithm]\nmini_batches = 5", "algorithm.mini_batches=5"),
        ("[rollout]\noversubscribe = 1.5\ndynamic_sampling = 4", "dynamic_sampling=4"),
        ("heldout_path = 'a.jsonl'\nheldout_sets = {b = 'b.jsonl'}", "heldout_sets"),
        ("[rollout]\nmax_new_tokens = 8\noverlong_tokens = 9", "overlong_tokens=9"),
        ("[cluster]\ntrainers = 4\ncolocate = true", "trainers=4"),
        ("[cluster]\ntrainer = 4", "trainer.*trainers"),
        ("steps = 3 3", "TOML"),
        ('train_path = "a\\u0000b"', "train_path"),
        ("[mismatch]\nsequences = true", "mismatch.sequences=True"),
        ("[mismatch]\nsequences = '16'", "mismatch.sequences='16'"),
        ("[logging]\ntensorboard = 0", "logging.tensorboard=0"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas="),
        ("[model]\ndtype = {a = 1}", "model.dtype="),
        ("[model]\ndtype = '" + "x" * 9000 + "'", r"model.dtype='xxx.{,300}$"),
        ('[task.a]\n"\\u0000\\n" = 1', r"\[task\]"),
        ('[optimizer]\n"a\\nb" = 1', r"a\\nb"),
        ("[task.options]\na = " + "[" * 5000, "TOML"),
        ("[task.options]\na = " + "9" * 5000, "TOML"),
    ],
)
def test_refusals_name_file_key_and_value(tmp_path: Path, extra: str, field: str) -> None:
    with pytest.raises(InputError, match=field) as refused:
        load(tmp_path, f"{LEAST}{extra}\n")
    line = str(refused.value)
    assert line.startswith(f"{tmp_path}/train.toml: ") and "\n" not in line


def test_a_cap_may_be_infinite_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, LEAST + "[algorithm]\ntis_cap = inf\n[optimizer]\nlr = 1\n")
    assert (config.algorithm.tis_cap, config.optimizer.lr) == (float("inf"), 1.0)


def test_lossless_rollouts_are_not_corrected_unless_they_span_updates(tmp_path: Path) -> None:
    lossless = "[engine]\nlossless = true\n"
    assert load(tmp_path, LEAST).algorithm.correction == "tis"
    assert load(tmp_path, LEAST + lossless).algorithm.correction == "none"
    chosen = '[algorithm]\ncorrection = "tis"\n'
    assert load(tmp_path, LEAST + lossless + chosen).algorithm.correction == "tis"
    partial = "[rollout]\noversubscribe = 1.5\n"
    assert load(tmp_path, LEAST + lossless + partial).algorithm.correction == "tis"
    for other in ("[distill]\nenabled = true\n", 'schedule = "dense"\n'):
        with pytest.raises(InputError, match="lossless"):
            load(tmp_path, LEAST + lossless + other)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task is missing"):
        load(tmp_path, 'run_dir = "x"')
    with pytest.raises(InputError, match="no.toml: cannot be read"):
        TrainConfig.load(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("path", "task"), [("story_smollm2.toml", "story"), ("ray_cluster/cluster.toml", "math")]
)
def test_the_examples_are_valid(path: str, task: str) -> None:
    assert TrainConfig.load(EXAMPLES / path).task.name == task


def test_settings_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(LEAST + "[optimizer]\nlr = 1.0\ngrad_clip = 2.0\n")
    settings = [
        "steps=7",
        "optimizer.lr=3e-6",
        "optimizer.betas=[0.8, 0.9]",
        "run_dir=2026-01-31",
        "task.train_path=a=b.jsonl",
        "model.path='Qwen/Qwen3-4B'",
        "algorithm.correction=mask",
        "engine.server_args.tp_size=2",
        "engine.server_args.dtype=float32",
        "steps = 9",
    ]
    config = TrainConfig.load(path, settings)
    assert (config.steps, config.optimizer.lr, config.optimizer.grad_clip) == (9, 3e-6, 2.0)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.run_dir == Path("2026-01-31")
    assert config.task.train_path == Path("a=b.jsonl")
    assert config.model.path == "Qwen/Qwen3-4B"
    assert config.algorithm.correction == "mask"
    assert config.engine.server_args == {"tp_size": 2, "dtype": "float32"}
    assert config.task.name == "copy"


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("optimizer.rl=1", "'rl'.*'lr'"),
        ("optimzer.lr=1", "optimzer.*optimizer"),
        ("optimizer.lr=fast", "optimizer.lr='fast'"),
        ("steps.lr=1", "steps="),
        ("steps", "'steps'"),
        (".steps=1", "'.steps=1'"),
        ("task.heldout_sets={'' = 'a.jsonl'}", "task.heldout_sets"),
        ("evaluation.pass_at=[1, 0]", r"evaluation.pass_at\[1\]=0"),
        ("optimizer.betas=[0.9, 1.5]", r"optimizer.betas\[1\]=1.5"),
        ("evaluation.pass_at=[1, 4]", "samples_per_prompt=1"),
        ("evaluation.top_k=0", "evaluation.top_k=0"),
    ],
)
def test_a_wrong_setting_of_the_command_line_is_one_line(
    tmp_path: Path, setting: str, field: str
) -> None:
    path = tmp_path / "train.toml"
    path.write_text(LEAST)
    with pytest.raises(InputError, match=field) as refused:
        TrainConfig.load(path, [setting])
    assert "\n" not in str(refused.value)


def test_the_printed_defaults_are_those_of_the_least_file_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--defaults"]) == 0
    text = capsys.readouterr().out
    loaded = load(tmp_path, text)
    assert loaded == TrainConfig.parse({"run_dir": "runs/my-run", "task": {"name": "story"}})
    explained = " ".join(line.removeprefix("# ") for line in text.splitlines())
    sections = [field.annotation for field in TrainConfig.model_fields.values()]
    kinds = [kind for kind in sections if isinstance(kind, type) and issubclass(kind, BaseModel)]
    assert len(kinds) >= 11
    for section in (TrainConfig, *kinds):
        for name, field in section.model_fields.items():
            if field.annotation not in kinds:
                assert name in text
                assert " ".join((field.description or "missing").split()) in explained, name
    assert main(["train"]) == 2
    assert "sparrow train --defaults prints one" in capsys.readouterr().err
