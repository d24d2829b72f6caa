"""README, docs/ and the READMEs of examples/ say what is there.

Links, commands, settings and names.
"""

import argparse
import ast
import importlib
import itertools
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import sparrow_sglang
from sparrow_sglang.benchmarks import kernels, rollout, serving, step, train
from sparrow_sglang.commands import cli
from sparrow_sglang.plugin.audit import statistics as audit_report
from sparrow_sglang.plugin.server_args import FIELDS
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.tasks import load_task
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

ROOT = Path(__file__).parents[2]
DOCS = {f"docs/{path.name}": path for path in sorted((ROOT / "docs").glob("*.md"))}
EXAMPLES = {
    path.relative_to(ROOT).as_posix(): path
    for path in sorted((*ROOT.glob("examples/README.md"), *ROOT.glob("examples/*/README.md")))
}
PAGES = {"README.md": ROOT / "README.md"} | DOCS | EXAMPLES
SOURCES = [
    path
    for folder in ("sparrow_sglang", "attention_backends", "rl", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Programs of other projects, whose arguments are not checked here.
OTHERS = {
    "apt-get", "cd", "compute-sanitizer", "curl", "export", "git", "kill", "make", "pip", "python3",
    "ray", "source", "tensorboard", "uv",
}  # fmt: skip
LAUNCHERS = (["sparrow", "serve"], ["sparrow", "doctor"], ["python", "-m", "sglang.launch_server"])

BENCHMARK_PARSERS = {
    "step": step._parser,
    "rollout": rollout._parser,
    "serving": serving._parser,
    "train": train._parser,
    "kernels": kernels._parser,
}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            found.append(Block(name, match[2], textwrap.dedent(match[3])))
    return [block for block in found if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without variables set in front of it and what it is piped to."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line_words = shlex.split(line, comments=True)
        for between, group in itertools.groupby(line_words, lambda word: word in ("&", "&&")):
            words = [] if between else list(group)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if "|" in words:
                words = words[: words.index("|")]
            if words:
                yield words


def all_commands() -> list[list[str]]:
    return [words for block in blocks("bash") for words in commands(block)]


def is_script(words: list[str], folder: Path) -> bool:
    """A Python or shell program that lies where its page says, seen from the page's folder."""
    return words[0] in ("python", "bash", "sh") and (folder / words[1]).is_file()


def is_our_module(words: list[str]) -> bool:
    """`python -m` of a module of this package, whose tests run it, or of verl."""
    name = words[2] if words[:2] == ["python", "-m"] else ""
    ours = name.startswith("sparrow_sglang.") and find_spec(name) is not None
    return ours or name.startswith("verl.")


def is_launcher(words: list[str]) -> bool:
    return any(words[: len(start)] == start for start in LAUNCHERS)


def is_executed(words: list[str]) -> bool:
    """Plans of the models whose configs come with the repository."""
    shipped = any("/" in word and (ROOT / word).is_dir() for word in words)
    return words[:2] == ["sparrow", "plan"] and shipped


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    links += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def test_the_index_leads_to_every_page() -> None:
    index = DOCS["docs/README.md"].read_text(encoding="utf-8")
    others = {path.name for name, path in DOCS.items() if name != "docs/README.md"}
    assert {name for name in others if f"]({name})" not in index} == set()
    examples = EXAMPLES["examples/README.md"].read_text(encoding="utf-8")
    # Folders that hold only what running the examples has left there do not count.
    files = [path for kind in ("py", "toml") for path in ROOT.glob(f"examples/**/*.{kind}")]
    shown = {path.relative_to(ROOT / "examples").parts[0] for path in files} - {"runs"}
    assert {name for name in shown if f"`{name}`" not in examples} == set()


def test_every_command_is_known() -> None:
    for block in blocks("bash"):
        folder = PAGES[block.page].parent
        for words in commands(block):
            known = words[0] in OTHERS | {"sparrow"} or is_launcher(words)
            assert known or is_script(words, folder) or is_our_module(words), words


@pytest.mark.parametrize(
    "words",
    [w for w in all_commands() if w[0] == "sparrow" and not is_launcher(w)],
    ids=" ".join,
)
def test_our_commands_parse(words: list[str]) -> None:
    # A benchmark parses its own options.
    benchmark = BENCHMARK_PARSERS.get(words[2]) if words[1] == "bench" else None
    if benchmark:
        benchmark().parse_args(words[3:])
    known = words[1:3] if benchmark else words[1:]
    assert cli.parser_for(words[1]).parse_args(known).command == words[1]


def test_servers_and_doctors_parse() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    launched = [words for words in all_commands() if is_launcher(words)]
    assert len(launched) > 5
    for words in launched:
        flags = words[3 if words[0] == "python" else 2 :]
        if "--model-path" not in flags:
            flags = [*flags, "--model-path", "m"]
        parsed = parser.parse_args(flags)
        for name in (parsed.sparrow_schedule or "").split(","):
            if name and not name.endswith(".json"):
                load_schedule(name, 16)


@pytest.mark.parametrize(
    "words", [words for words in all_commands() if is_executed(words)], ids=" ".join
)
def test_plans_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(words[1:]) == 0
    assert "Expected rollout speed-up" in capsys.readouterr().out


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.page)
def test_training_files_are_allowed(block: Block) -> None:
    config = TrainConfig.parse(tomllib.loads(block.text))
    for name in (config.engine.schedule, *config.ladder.schedules):
        if name not in ("auto", "dense"):
            load_schedule(name, 16)


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.page)
def test_json_is_json(block: Block) -> None:
    value = json.loads(block.text)
    if "budget_tokens" in value:
        BudgetSchedule(**value)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_uses_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(find_spec(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.name for alias in node.names]
            if node.module == "sparrow_sglang":
                assert set(names) <= set(sparrow_sglang.__all__)
            elif node.module.startswith("sparrow_sglang."):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name) for name in names)
            else:
                assert find_spec(node.module)


def test_the_task_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block.text for block in blocks("python") if block.text.startswith("# loud_task.py")]
    [settings] = [block.text for block in blocks("toml") if "loud_task:load" in block.text]
    (tmp_path / "loud_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig.parse(tomllib.loads(settings))
    task = load_task(config.task, lambda messages: tuple(messages[-1]["content"].encode()))
    assert task.train and task.heldout
    assert task.reward(task.train[0], "LOUD, LOUD!") == 1
    assert task.reward(task.train[0], "LOud") == 0.5
    assert task.reward(task.train[0], "") == 0


def test_the_task_of_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block.text for block in blocks("python") if "# guessing_task.py" in block.text]
    (tmp_path / "guessing_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig.parse({"run_dir": "runs/a", "task": {"name": "guessing_task:load"}})
    task = load_task(config.task, lambda messages: (1,))
    prompt = task.train[0]
    number = prompt.payload["number"]
    replies = [task.reply(prompt, (str(number + more),)) for more in (-1, 0, 1)]
    assert [reply and reply["content"] for reply in replies] == ["higher", None, "lower"]
    assert task.reply(prompt, ("1",) * 4) is None and task.reward(prompt, f" {number}") == 1


def test_every_public_name_is_explained() -> None:
    text = DOCS["docs/frameworks.md"].read_text(encoding="utf-8")
    assert [name for name in sparrow_sglang.__all__ if f"`{name}`" not in text] == []


def test_tables_are_complete() -> None:
    serving, training = (
        DOCS[f"docs/{name}.md"].read_text("utf-8") for name in ("serving", "training")
    )
    flags = {"--" + name.replace("_", "-") for name in FIELDS}
    assert set(re.findall(r"^\| `(--[\w-]+)`", serving, re.MULTILINE)) == flags
    gauges = set(re.findall(r"^\| `(sparrow:\w+)`", serving, re.MULTILINE))
    assert gauges == set(audit_report._GAUGES)
    sections = set(TrainConfig.model_fields) - {"run_dir", "steps", "seed"}
    assert [name for name in sections if f"`[{name}]`" not in training] == []


def test_metrics_are_those_that_are_logged() -> None:
    text = DOCS["docs/training.md"].read_text(encoding="utf-8")
    source = "\n".join(path.read_text() for path in SOURCES)
    names = re.findall(r"`((?:sparrow|critic|response_length|eval)/\w+)", text)
    assert len(names) > 10
    assert [name for name in names if f'"{name}' not in source] == []
