"""Checks and choices of a run before anything starts."""

import json
import shutil
from datetime import datetime

import pytest
from training import settings
from transformers import AutoTokenizer, Gemma3TextConfig, PhiConfig, Qwen3MoeConfig

from sparrow_sglang.commands.cli import main
from sparrow_sglang.errors import InputError
from sparrow_sglang.models import model_folder
from sparrow_sglang.rl import learner
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.runs.setup import check

ENGINE = 'engine = { schedule = "fixed-48", server_args = { %s } }'
SHORT = "rollout = { max_new_tokens = 99 }\n"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('model = { path = "/nowhere" }', "model.path='/nowhere'"),
        ('engine = { schedule = "fixed-50" }', "engine.schedule: budget_tokens[0]=50"),
        ("rollout = { max_prompt_tokens = 3 }", "rollout.max_prompt_tokens=3"),
        ("rollout = { max_new_tokens = 9999 }", "max_new_tokens=9999"),
        (
            'engine = { schedule = "dense" }\ndistill = { enabled = true }',
            "distill.enabled=true with engine.schedule='dense'",
        ),
        (ENGINE % "page_sise = 16", "engine.server_args.page_sise"),
        (ENGINE % "dp_size = 2", "server_args.dp_size=2"),
        (ENGINE % "skip_tokenizer_init = true", "server_args.skip_tokenizer_init=true"),
        (
            'task = { name = "ascii", chat_template_kwargs = { enable_thinking = false } }',
            "task.chat_template_kwargs.enable_thinking",
        ),
        (SHORT + "evaluation = { max_new_tokens = 9999 }", "evaluation.max_new_tokens=9999"),
        (
            SHORT + 'distill = { enabled = true, target_modules = ["lm_head"] }',
            "distill.target_modules=['lm_head']",
        ),
    ],
)
def test_wrong_settings_are_one_line_before_anything_is_written(
    byte_model, tmp_path, capsys, text, field
):
    lines = {
        "run_dir": f'run_dir = "{tmp_path}/run"',
        "task": 'task = { name = "ascii" }',
        "model": f'model = {{ path = "{byte_model}" }}',
        "engine": 'engine = { schedule = "fixed-48" }',
        text.split()[0]: text,
    }
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines.values()))
    assert main(["train", str(path)]) == 2
    # The template of this model has no generation prompt, which is told once.
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("sparrow train: error: ") and field in line
    assert not (tmp_path / "run").exists()


def test_the_engine_gets_the_schedule_that_the_trainer_measures(tmp_path, monkeypatch):
    """An engine that is left to find its schedule takes it from the environment first."""
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed-4096")
    setup = check(TrainConfig(run_dir=tmp_path, task={"name": "story"}))
    assert (
        setup.schedule is not None
        and setup.engine.schedule == setup.schedule.name == "smollm2-135m-int4-0.86"
    )


def test_lossless_rollouts_are_dense_to_the_trainer(tmp_path, byte_model):
    engine = {"lossless": True, "server_args": {"speculative_num_draft_tokens": 5}}
    setup = check(settings(byte_model, tmp_path, "auto", engine=engine))
    assert setup.schedule is None and setup.engine.schedule == "drafts"
    assert setup.engine.server_args == {
        "speculative_algorithm": "SPARROW",
        "speculative_num_draft_tokens": 5,
    }


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"]),
            "model of type qwen3_moe has a mixture of 128 experts: expected",
        ),
        (
            Gemma3TextConfig(architectures=["Gemma3ForCausalLM"]),
            "model of type gemma3_text has layers of type sliding_attention",
        ),
        (
            PhiConfig(architectures=["PhiForCausalLM"], max_position_embeddings=8192),
            "model of type phi has a bias of the vocabulary projection",
        ),
    ],
    ids=["experts", "windows", "bias"],
)
def test_models_that_cannot_be_trained_are_named_before_they_are_loaded(tmp_path, config, problem):
    config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    AutoTokenizer.from_pretrained(model_folder("smollm2-135m")).save_pretrained(tmp_path)
    run = {"run_dir": tmp_path / "run", "task": {"name": "story"}, "model": {"path": str(tmp_path)}}
    with pytest.raises(InputError, match=problem):
        check(TrainConfig.parse(run | {"engine": {"schedule": "fixed-64"}}))


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'run_dir = "{tmp_path}/run"\n[task]\nname = "story"\n')
    return path


def test_a_check_starts_nothing(story, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(learner, "LocalEngine", None)
    settings = ["--set=distill.enabled=true", "--set=engine.schedule=smollm2-135m-int4-0.75"]
    assert main(["train", "--check", str(story), *settings]) == 0
    assert "the settings can be run" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "argument", ["tp_size=5", "pp_size=-1", 'kv_cache_dtype="fp9"', 'device="npu"']
)
def test_a_check_has_sglang_look_at_the_values_of_its_arguments(story, capsys, argument):
    assert main(["train", "--check", str(story), f"--set=engine.server_args.{argument}"]) == 2
    assert "error: engine.server_args: " in capsys.readouterr().err


def test_lossless_rollouts_pass_the_check(story, capsys):
    assert main(["train", "--check", str(story), "--set=engine.lossless=true"]) == 0
    told = capsys.readouterr().out
    assert "engine.lossless = true" in told
    # This process has no GPU.
    assert "lossless, without CUDA graphs: nothing is drafted" in told


def test_rates_are_of_one_held_out_set_only_if_nothing_that_they_measure_differs(
    tmp_path, byte_model
):
    def evaluated(number: int, folder: str = "a", **evaluation) -> str:
        train, held_out = (tmp_path / folder / f"{name}.jsonl" for name in ("train", "test"))
        train.parent.mkdir(exist_ok=True)
        for path, first in ((train, 7), (held_out, number)):
            path.write_text(json.dumps({"problem": f"{first} + 1", "answer": "8"}))
        task = {"name": "math", "train_path": train, "heldout_path": held_out}
        config = settings(byte_model, tmp_path, "dense", task=task, evaluation=evaluation)
        return check(config).evaluated

    first = evaluated(2, every_steps=3)
    assert evaluated(2, "moved", every_steps=5) == first
    others = {evaluated(3), evaluated(2, temperature=0.5), evaluated(2, max_new_tokens=9)}
    assert len(others | {first}) == 4
    assert evaluated(2, every_steps=0) == ""


def test_a_resumed_run_has_the_prompts_of_its_first_day(tmp_path, byte_model):
    model = shutil.copytree(byte_model, tmp_path / "model")
    template = "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}"
    (model / "chat_template.jinja").write_text(template)
    config = settings(str(model), tmp_path / "run", "dense")

    def first_prompt() -> str:
        setup = check(config)
        return setup.tokenizer.decode(setup.train[0].input_ids)

    assert first_prompt().startswith(datetime.now().strftime("%d %b %Y"))
    (config.run_dir / "checkpoints" / "step-000001").mkdir(parents=True)
    starts = [
        {"date": f"{year}-02-03T12:00:00+00:00", "step": year, "config": {}}
        for year in (2001, 2002)
    ]
    (config.run_dir / "run.json").write_text(json.dumps({"starts": starts}))
    assert first_prompt().startswith("03 Feb 2001")
