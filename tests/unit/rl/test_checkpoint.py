"""Checkpoints give back the same training, bit for bit, and survive a full disk."""

import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation import SEQUENCES, new_policy
from safetensors.torch import load_file
from sglang.srt.configs.model_config import _get_and_verify_dtype
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import DistillConfig, TaskConfig, TrainConfig
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.learner import LocalLearner
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.optimizer import MOMENTS
from sparrow_sglang.rl.runs.checkpoint import Checkpoints, State, require_space


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def take_step(trained: DensePolicy) -> None:
    trained.loss_step(SEQUENCES, lambda logprobs, where: -logprobs.sum())


def config(run_dir: Path) -> TrainConfig:
    return TrainConfig(run_dir=run_dir, task={"name": "story"})


def learner(policy: DensePolicy) -> LocalLearner:
    return LocalLearner(config(Path("unused")), policy)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_a_restored_policy_trains_on_to_the_bit(tiny_llama, tmp_path, monkeypatch, dtype, computed):
    """The last case is as on a GPU, where weights in fp32 are multiplied in bf16."""
    served = getattr(torch, computed)
    monkeypatch.setattr(DensePolicy, "compute_dtype", served)
    checkpoints, state = (
        Checkpoints(tmp_path, keep=2),
        State(1, {"a": 0.5}, lowest_rewards={"t": -1.0}),
    )
    first = new_policy(tiny_llama, dtype)
    take_step(first)
    exact = {name: weight.clone() for name, weight in first.named_weights()}
    random.seed(3)
    folder = checkpoints.save(learner(first), Tokenizer(), config(tmp_path), state)
    drawn = random.random(), np.random.random(), float(torch.rand(()))
    take_step(first)

    second = new_policy(tiny_llama, dtype)
    assert checkpoints.restore(folder, learner(second)) == state
    assert (random.random(), np.random.random(), float(torch.rand(()))) == drawn
    take_step(second)
    weights = dict(second.named_weights())
    for name, weight in first.named_weights():
        assert torch.equal(weights[name], weight), name
    expected, resumed = first.state_dict(), second.state_dict()
    assert {name.rsplit(".", 1)[1] for name in expected} == {"master", *MOMENTS}
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)

    # The exported model has the dtype that it is computed in, and SGLang serves it in bf16.
    assert (folder / "model" / "tokenizer.json").exists()
    assert load_file(folder / "model" / "model.safetensors").keys() == exact.keys()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert loaded.dtype == served
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, exact[name].to(served)), name
    if computed == "bfloat16":
        exported = AutoConfig.from_pretrained(folder / "model")
        assert _get_and_verify_dtype(exported, "auto") == torch.bfloat16
    # The run itself stays in its own.
    assert first.model.dtype == getattr(torch, dtype) and dtype in str(first.model.config.dtype)


def test_settings_and_data_that_the_run_depends_on_must_not_change(tiny_llama, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    now = config(tmp_path)
    state = State(2, prompts="abc")
    folder = checkpoints.save(learner(new_policy(tiny_llama)), Tokenizer(), now, state)
    assert checkpoints.begin(now, True, "abc") == folder
    with pytest.raises(InputError, match="training prompts of task 'story' are not those"):
        checkpoints.begin(now, True, "abd")
    faster = now.optimizer.model_copy(update={"lr": 0.5, "warmup_steps": 3})
    # The same prompts in another place.
    moved = now.task.model_copy(update={"train_path": tmp_path / "moved.jsonl"})
    free = {"optimizer": faster, "task": moved}
    assert checkpoints.begin(now.model_copy(update=free), True, "abc") == folder
    heavier = now.optimizer.model_copy(update={"weight_decay": 0.5})
    with pytest.raises(InputError, match="optimizer.weight_decay=0.5: .* optimizer.lr"):
        checkpoints.begin(now.model_copy(update={"optimizer": heavier}), True, "abc")


def test_held_out_sets_and_the_files_of_a_mix_may_move(tiny_llama, tmp_path):
    def run(folder, **more):
        path = f"{folder}/a.jsonl"
        task = {"name": "math", "train_path": path, "heldout_sets": {"easy": path}, **more}
        options = {"sums": task, "tales": {"name": "story"}}
        mix = TaskConfig(name="mix", heldout_sets={"easy": path}, options=options)
        return config(tmp_path).model_copy(update={"task": mix})

    checkpoints, written = Checkpoints(tmp_path, keep=1), learner(new_policy(tiny_llama))
    folder = checkpoints.save(written, Tokenizer(), run("old"), State(2))
    assert checkpoints.begin(run("new", heldout_path="b.jsonl"), True, "") == folder
    with pytest.raises(InputError, match="task.options.sums.duplicates"):
        checkpoints.begin(run("new", duplicates="keep"), True, "")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("state.json", content) for content in ("{}", "{", None)),
        *(("random.pt", "x"), ("training/.metadata", None)),
    ],
)
def test_a_damaged_checkpoint_is_named_in_one_line(tiny_llama, tmp_path, file, content):
    checkpoints, now = Checkpoints(tmp_path, keep=1), config(tmp_path)
    trained = new_policy(tiny_llama)
    folder = checkpoints.save(learner(trained), Tokenizer(), now, State(2))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(InputError, match=f"^{folder} [^\n]*$"):
        checkpoints.begin(now, resume=True, prompts="")
        checkpoints.restore(folder, learner(trained))


@pytest.mark.parametrize("wrong", [{"temperature": 0.6, "top_p": 0.9}, {"num_beams": 1}])
def test_a_generation_config_that_transformers_does_not_save_survives(byte_model, tmp_path, wrong):
    """Many fine-tunes have a temperature without do_sample, which `save_pretrained` refuses."""
    source = shutil.copytree(byte_model, tmp_path / "model")
    (source / "generation_config.json").write_text(json.dumps(wrong | {"do_sample": False}))
    trained = new_policy(str(source))
    folder = Checkpoints(tmp_path / "run", keep=1).save(
        learner(trained), Tokenizer(), config(tmp_path / "run"), State(1)
    )
    saved = GenerationConfig.from_pretrained(folder / "model")
    assert all(getattr(saved, name) == value for name, value in wrong.items())


@pytest.mark.parametrize(("existing", "room"), [((), 1), ((80, 90), 1), ((90, 100), 0)])
def test_room_for_a_checkpoint_is_required_unless_all_steps_are_done(
    tmp_path, monkeypatch, existing, room
):
    run = config(tmp_path / "run").model_copy(update={"steps": 100})
    for step in existing:
        (run.run_dir / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    # Weights, moments and exported weights, in fp32.
    usage = shutil.disk_usage(tmp_path)._replace(free=16 * room)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    require_space(run, 1)
    if room:
        with pytest.raises(InputError, match="are free there"):
            require_space(run, 2)
    (tmp_path / "file").touch()
    for place in ("file", "file/run"):
        with pytest.raises(InputError, match=f"{place}': .*file cannot be written; expected a fol"):
            require_space(run.model_copy(update={"run_dir": tmp_path / place}), 1)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Writes beyond this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_newest_stay_and_a_full_disk_costs_none(tiny_llama, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    trained = learner(new_policy(tiny_llama))
    for step in (8, 9, 10):
        checkpoints.save(trained, Tokenizer(), config(tmp_path), State(step))
    names = [f"step-{step:06d}" for step in (9, 10)]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == names
    last = folder / "step-000010"
    model, states = ((last / part).rglob("*") for part in ("model", "training"))
    largest = max(file.stat().st_size for file in model)
    assert largest < max(file.stat().st_size for file in states) - 2**16
    # torch hides why a write of the optimizer's state failed.
    for size, file, why in (
        (50_000, "model/.*", ".*File too large"),
        (largest + 2**15, "training/__0_0.distcp", ""),
    ):
        match = rf"{folder}/step-000011/{file} cannot be written \({why}.*; [0-9,]+ MiB are free"
        with files_up_to(size), pytest.raises(OSError, match=match):
            checkpoints.save(trained, Tokenizer(), config(tmp_path), State(11))
        assert checkpoints.begin(config(tmp_path), resume=True, prompts="") == last
        assert sorted(path.name for path in folder.iterdir()) == names
    checkpoints.restore(last, trained)


@pytest.mark.parametrize("what", ["weight", "moment", "adapter"])
def test_a_state_that_is_not_finite_never_replaces_one_that_is(sharp_llama, tmp_path, what):
    trained = new_policy(sharp_llama, "bfloat16")
    adapter = SparseAdapter(trained, DistillConfig(enabled=True))
    whole = LocalLearner(config(tmp_path), trained, adapter)
    checkpoints = Checkpoints(tmp_path, keep=1)
    kept = checkpoints.save(whole, Tokenizer(), config(tmp_path), State(1))
    parts = {
        "weight": next(trained.named_parameters())[2],
        "moment": trained.optimizer.moments()[-1]["exp_avg_sq"],
        "adapter": next(
            value for name, value in trained.model.named_parameters() if "lora" in name
        ),
    }
    with torch.no_grad():
        parts[what].view(-1)[-1] = torch.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        checkpoints.save(whole, Tokenizer(), config(tmp_path), State(2))
    assert checkpoints.newest() == kept and len(list(kept.parent.iterdir())) == 1


def test_the_best_evaluation_is_that_of_the_same_held_out_set(tmp_path):
    first, again = (Checkpoints(tmp_path, 1, evaluated="a") for _ in range(2))
    other, none = (Checkpoints(tmp_path, 1, evaluated=what) for what in ("b", ""))
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    first.set_best(1, 0.9)
    assert again.best()["pass_rate"] == none.best()["pass_rate"] == 0.9
    assert first.steps() == [1, 2] and other.best() == {}
    # What is no longer the best is as any old checkpoint.
    other.set_best(2, 0.3)
    assert other.best()["pass_rate"] == 0.3 and first.best() == {} and other.steps() == [2]
