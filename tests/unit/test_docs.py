"""Links of README, docs/ and the READMEs of examples/ resolve, our command lines parse, and other
snippets are valid."""

import argparse
import itertools
import json
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest

from sparrow_sglang.benchmarks import rollout, step
from sparrow_sglang.commands import cli
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = (["sparrow", "serve"], ["sparrow", "doctor"], ["python", "-m", "sglang.launch_server"])
BENCHMARK_PARSERS = {"step": step._parser, "rollout": rollout._parser}


def snippets(kind: str) -> list[str]:
    found = [match for page in PAGES for match in FENCE.finditer(page.read_text("utf-8"))]
    return [textwrap.dedent(match[3]) for match in found if match[2] == kind]


def all_commands() -> list[list[str]]:
    """The words of each command, without variables set in front of it and what it is piped to."""
    commands = []
    for text in snippets("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for between, group in itertools.groupby(words, lambda w: w in ("&", "&&", "|")):
                command = [w for w in group if not re.fullmatch(r"[A-Z_]+=.*", w)]
                commands += [command] if command and not between else []
    return commands


def is_launcher(words: list[str]) -> bool:
    return any(words[: len(start)] == start for start in LAUNCHERS)


def test_files_on_the_paths_exist() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)`", text)
    folders = ("sparrow_sglang", "attention_backends", "benchmarks", "rl", "tests")
    files = [f"/{path}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(named) > 50
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    links += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", target.read_text("utf-8")), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, link


@pytest.mark.parametrize(
    "words", [w for w in all_commands() if w[0] == "sparrow" and not is_launcher(w)], ids=" ".join
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


def test_python_snippets_can_be_imported() -> None:
    """As a file of their own: engines, which need a guard, are run by tests/processes."""
    found = snippets("python")
    assert len(found) > 6
    for text in found:
        code = compile(text, "snippet", "exec")
        # This one sends a request to a server at once.
        if "client.chat" not in text:
            exec(code, {"__name__": "snippet"})


def test_settings_schedules_and_requests_are_valid() -> None:
    for text in snippets("toml"):
        settings = tomllib.loads(text)
        if "run_dir" in settings:
            TrainConfig.parse(settings)
    bodies = [json.loads(text) for text in snippets("json")]
    schedules = [body for body in bodies if "budget_tokens" in body]
    requests = [body["sampling_params"] for body in bodies if "sampling_params" in body]
    assert len(schedules) > 1 and requests
    for body in schedules:
        schedule = BudgetSchedule(**body)
    for parameters in requests:
        RequestOption.read(parameters["custom_params"], schedule)


@pytest.mark.parametrize(
    ("gpu", "kinds", "count"),
    [
        ("h100", ("lossless", "coder"), 8),
        ("h200", ("fp8_drafts.json",), 5),
        ("h200", ("fp8_drafts_32k",), 3),
    ],
)
def test_speed_ups_of_lossless_decoding_are_those_of_the_results(
    gpu: str, kinds: tuple[str, ...], count: int
) -> None:
    page = (ROOT / "docs" / "lossless.md").read_text()
    results = (ROOT / "benchmarks" / "results" / gpu).glob("decode_step_*.json")
    rows = [
        row | {"file": path}
        for path in results
        if any(kind in path.name for kind in kinds)
        for row in json.loads(path.read_text())["rows"]
    ]
    table = step.steps_table(rows).replace("8 fp8", "8")
    computed = [line.split() for line in table.splitlines()]
    rounds = [cells for cells in computed if cells[3:5] == ["drafts", "8"]]
    assert len(rounds) == count
    for _, _, dense, _, _, ms, _, *gains in rounds:
        cells = [dense, ms, *(gain.replace("x", "×") for gain in gains)]
        assert " | ".join(cells) in page
