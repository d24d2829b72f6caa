"""Tasks: what they read, what they refuse, and how they reward."""

import operator
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from task_files import jsonl, load, verl_row

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TaskConfig, TrainConfig
from sparrow_sglang.rl.runs.setup import check_settings
from sparrow_sglang.rl.tasks import TASKS, ChatRender, load_task, math, require_module, story
from sparrow_sglang.rl.types import Prompt


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(count)]


def test_messages_instruction_and_heldout_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    train = jsonl(tmp_path / "a.jsonl", [{"prompt": chat, "answer": 1}, *sums(1)])
    heldout = jsonl(tmp_path / "b.jsonl", [{"id": "mine", "prompt": "2?", "answer": "2"}])
    options = {"instruction": "Box it.", "system": "Be brief."}
    task = load("math", train, heldout_path=heldout, options=options)
    assert bytes(task.train[0].input_ids) == b"<user>hello"
    assert bytes(task.train[1].input_ids) == b"<system>Be brief.<user>0 + 1?\nBox it."
    assert [prompt.id for prompt in task.heldout] == ["mine"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no examples"),
        ('{"prompt": "a", "answer": 1}\nnonsense\n', r"data.jsonl:2"),
        ('\n{"prompt": "a"}\n', r"data.jsonl:2: field 'answer'"),
        ('{"task": 1, "gold": 2}\n', r"task.columns.prompt"),
        ('{"prompt": "", "answer": 1}\n', r"data.jsonl:1: prompt=''"),
        ('{"prompt": "a", "answer": true}\n', r"data.jsonl:1: answer=True"),
        (
            '{"id": 1, "prompt": "a", "answer": 1}\n{"id": 1, "prompt": "b", "answer": 1}',
            "2: id '1'",
        ),
    ],
)
def test_wrong_files_are_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load("math", path)
    assert "\n" not in str(caught.value)


def test_unknown_tasks_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task.name='mth': did you mean 'math'"):
        load("mth")
    with pytest.raises(InputError, match=r"\[task.options\] unknown key 'word': .* 'words'"):
        load("story", options={"word": 3})
    for wrong in (0, "2", True):
        with pytest.raises(InputError, match=f"task.options.words={wrong!r} is not allowed"):
            load("story", options={"words": wrong})
    assert set(TASKS) == {"math", "code", "story", "files", "mix"}


def test_a_missing_module_is_refused_and_none_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package").mkdir()
    for name in ("own_package/__init__.py", "own_package/task.py"):
        (tmp_path / name).write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    require_module("task.name", "own_package.task:load")
    for name in ("own_packages:load", "own_packages.task:load", ":load"):
        with pytest.raises(InputError, match=f"task.name='{name}'"):
            check_settings(
                TrainConfig.model_validate({"run_dir": tmp_path, "task": {"name": name}})
            )


@pytest.mark.parametrize("words", [1, 2, 5])
def test_stories_are_the_same_for_a_seed_and_never_held_out_twice(words: int) -> None:
    options = {"words": words, "train": 20, "heldout": 10, "seed": 3}
    task = load("story", options=options)
    assert task == load("story", options=options)
    assert task != load("story", options=options | {"seed": 4})
    assert task.heldout == load("story", options=options | {"train": 30}).heldout
    prompts = [*task.train, *task.heldout]
    assert len({frozenset(prompt.payload["words"]) for prompt in prompts}) == 30
    for prompt in prompts:
        listed = re.findall(r"[a-z]+", bytes(prompt.input_ids).decode().rpartition(":")[2])
        assert tuple(listed) == prompt.payload["words"] and len(listed) == words


def test_stories_are_rewarded_by_whole_words_and_length() -> None:
    prompt = Prompt("p", "story", (1,), {"words": ("river", "table"), "min_length": 8})
    assert story.reward(prompt, "The River ran past a table, and on it went.") == 1.0
    assert story.reward(prompt, "The rivers ran past a table, and on it went.") == 0.0
    assert story.reward(prompt, "The river ran past a house, and on it went.") == 0.0
    assert story.reward(prompt, "river table") == 0.0


class Tokenizer:
    """One token a byte; the template puts `header` after the messages if asked for an opening."""

    def __init__(self, header: str, template: str = "{}") -> None:
        self.header, self.template = header, template

    def apply_chat_template(self, messages: list[dict[str, str]], **how: bool) -> str:
        assert how.pop("enable_thinking") is False and how.pop("tokenize") is False
        text = self.template.format("".join(message["content"] for message in messages))
        return text + (self.header if how["add_generation_prompt"] else "")

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=list(text.encode()))


def test_rendering_opens_the_assistants_turn_and_adds_no_special_token() -> None:
    render = ChatRender(Tokenizer(">"), enable_thinking=False)
    assert render([{"role": "user", "content": "Hi"}]) == tuple(b"Hi>")


@pytest.mark.parametrize(("header", "paid"), [(">", 1), ("><think>\n", 0)])
def test_an_answer_in_a_thinking_that_the_template_opens_is_not_paid(
    tmp_path: Path, header: str, paid: float
) -> None:
    config = TaskConfig(name="math", train_path=jsonl(tmp_path / "data.jsonl", sums(1)))
    task = load_task(config, ChatRender(Tokenizer(header), enable_thinking=False))
    assert math.reward(task.train[0], r"I guess \boxed{1}") == paid
    assert math.reward(task.train[0], r"I guess.</think> \boxed{1}") == 1


@pytest.mark.parametrize("header", ["", ">"])
def test_a_template_that_renders_nothing_is_refused_with_its_row(
    tmp_path: Path, header: str
) -> None:
    render = ChatRender(Tokenizer(header, template=""), enable_thinking=False)
    config = TaskConfig(name="math", train_path=jsonl(tmp_path / "data.jsonl", sums(2)))
    with pytest.raises(InputError, match="data.jsonl:1: .*renders nothing"):
        load_task(config, render)


def verl_rows(count: int) -> list[dict[str, Any]]:
    chats = [[{"role": "user", "content": f"{i} + 1?"}] for i in range(count)]
    return [verl_row(str(i + 1), chat, i) for i, chat in enumerate(chats)]


def test_verls_files_and_saved_data_sets_are_read_by_columns(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = verl_rows(20)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    saved = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": saved, "test": saved.select([3])}).save_to_disk(tmp_path / "set")
    columns = {"answer": "reward_model.ground_truth", "id": "extra_info.index"}
    for path in (tmp_path / "train.parquet", Path(f"hf:{tmp_path}/set")):
        task = load("math", path, columns=columns, heldout_path=Path(f"hf:{tmp_path}/set@test"))
        assert [prompt.input_ids for prompt in task.heldout] == [tuple(b"<user>3 + 1?")]
        assert [p.payload for p in task.heldout] == [{"answer": "4"}]
        assert [prompt.input_ids for prompt in task.train] == [
            tuple(f"<user>{i} + 1?".encode()) for i in range(20)
        ]
    with pytest.raises(InputError, match="set@tset: cannot be loaded"):
        load("math", Path(f"hf:{tmp_path}/set@tset"))
    with pytest.raises(InputError, match="task.columns.answer='reward_model.answer'"):
        load("math", tmp_path / "train.parquet", columns={"answer": "reward_model.answer"})


def test_a_reward_of_ones_own_sees_the_columns_of_its_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", verl_rows(12))
    task = load("files", path, options={"reward": "operator:eq"})
    assert task.reward is operator.eq
    payloads = {p.payload["extra_info"]["index"]: p.payload for p in (*task.train, *task.heldout)}
    assert payloads["id-5"]["reward_model"]["ground_truth"] == "6"
    with pytest.raises(InputError, match="task.options.reward='task_files:x': .* no attribute 'x'"):
        load("files", path, options={"reward": "task_files:x"})
    for reward, problem in (("abs", "too many positional"), ("max", "no signature")):
        problem = f"task.options.reward='builtins:{reward}': {problem}.*; expected a function .prom"
        with pytest.raises(InputError, match=problem):
            load("files", path, options={"reward": f"builtins:{reward}"})
    # Only a reward of whole groups receives `finish_reasons`.
    with pytest.raises(InputError, match="missing a required argument: 'finish_reasons'"):
        load("files", path, options={"reward": "task_files:single_with_reasons"})
    with pytest.raises(InputError, match=r"expected a function \(config, render\)"):
        load("os:getcwd")
    with pytest.raises(InputError, match="task.options.reward is missing"):
        load("files", path)


def test_a_mix_has_the_prompts_and_rewards_of_its_tasks(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sums(3))
    sets = {"one": str(path), "two": str(jsonl(tmp_path / "b.jsonl", sums(2)))}
    options = {
        "sums": {"name": "math", "train_path": str(path), "heldout_sets": sets},
        "tales": {"name": "story", "options": {"train": 5, "heldout": 4}},
    }
    task = load("mix", options=options)
    assert [prompt.task for prompt in task.train] == ["sums"] * 3 + ["tales"] * 5
    sizes = {name: len(prompts) for name, prompts in task.heldout.items()}
    assert sizes == {"sums/one": 3, "sums/two": 2, "tales": 4}
    assert task.reward == {"sums": math.reward, "tales": story.reward}
    for wrong, message in [
        ({}, "task.options"),
        ({"a": {"name": "mth"}}, "task.options.a: task.name='mth'"),
        ({"a": {"nmae": "math"}}, "'nmae'.*'name'"),
        ({"a": {"name": "math"}}, "task.options.a: task.train_path"),
    ]:
        with pytest.raises(InputError, match=message):
            load("mix", options=wrong)
