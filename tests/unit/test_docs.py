"""Links of README, docs/ and the READMEs of examples/ resolve, our command lines parse, and other
snippets are valid."""

import argparse
import itertools
import json
import re
import shlex
import statistics
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.benchmarks import all as every
from sparrow_sglang.benchmarks import rollout, step
from sparrow_sglang.commands import cli
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.step_time import ASSUMED, GPUS, kv_bytes
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
BENCHMARK_PARSERS = {"step": step._parser, "rollout": rollout._parser, "all": every._parser}


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


def test_files_that_pages_and_docstrings_name_exist() -> None:
    folders = ("sparrow_sglang", "attention_backends", "benchmarks", "examples", "rl", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = [page for page in PAGES if page.name != "results.md"]  # By a commit that has them.
    text = "".join(path.read_text("utf-8") for path in [*pages, *sources])
    named = re.findall(r"`([\w/]+\.py)`", text)
    files = [f"/{path}" for path in sources]
    assert len(named) > 100
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """A blank line would turn the rows after it into text."""
    text = FENCE.sub("", page.read_text("utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert re.match(r"\|.*\n\|( -+:? \|)+\n\|", table), table


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
    assert len(found) > 5
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


def test_results_and_schedules_name_no_folder_of_the_machine_that_made_them() -> None:
    folders = ROOT / "benchmarks" / "results", ROOT / "sparrow_sglang" / "schedules"
    files = [path for folder in folders for path in folder.rglob("*.json")]
    own = re.compile(r"/(?:tmp|root|home|work|mnt|dev/shm)/")
    assert len(files) > 50
    assert [path.name for path in files if own.search(path.read_text("utf-8"))] == []


def result(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "h200" / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def result_rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result(name)["rows"]
    return rows


def by_side(rows: list[dict[str, Any]], **case: Any) -> dict[str, dict[str, Any]]:
    """Rows of a case by side; stock is the faster one of its page sizes."""
    chosen = [row for row in rows if all(row[name] == value for name, value in case.items())]
    chosen.sort(key=lambda row: -float(row["tokens_per_s"]))
    sides: dict[str, dict[str, Any]] = {}
    for row in chosen:
        sides.setdefault(row["side"].removesuffix("-16"), row)
    return sides


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text("utf-8").replace("**", "").split())


def test_results_are_of_the_commits_sides_and_settings_that_the_page_names() -> None:
    text, alone = page("docs/benchmarks.md"), set()
    names = set(re.findall(r"h200/([\w.-]+)[.]json", text))
    for name in names:
        content = result(name)
        commit, sglang = f"`{content['commit'][:8]}`", content["packages"]["sglang"]
        if "train" in name:
            assert commit in text[text.index("## Training steps") :]
            continue
        if "tp2" in name:
            assert f"on two GPUs](../benchmarks/results/h200/{name}.json), commit {commit}" in text
        else:
            assert f"H200, SGLang {sglang}, commit {commit}, FlashAttention-3." in text, name
        rows = [row for row in content["rows"] if row["side"].startswith("stock")]
        assert {row["backend"] for row in rows} == {"fa3"}
        if {row["page_size"] for row in rows} == {1}:
            alone.add(name)
        repeats = content["settings"].get("repeats")
        timed = statistics.mean if "tp2" in name else min
        for row in content["rows"] if repeats == 2 else ():
            assert row.get("round_ms", row["step_ms"]) == timed(row["step_ms_all"])
    assert alone == {"rollout-8b-8k", "steps-30b", "steps-8b-tp2", "prefill-8b"}
    assert "of 8K answers, 30B-A3B, two GPUs and prefill only the first ran" in text
    (replayed,) = {
        (row["sequences"], row["prompt_tokens"] // row["sequences"], *row["assumed_rates"].values())
        for name in names
        for row in result_rows(name)
        if row.get("assumed_rates")
    }
    assert "Random weights, {} prompts of {} tokens:".format(*replayed) in text
    assert replayed[2:] == ASSUMED
    drafts, lookups = ASSUMED
    assert f"`--acceptance-rate` ({drafts}) and `--lookup-acceptance` ({lookups})" in text
    assert f"assumed: {drafts} of sparse drafts, {lookups} of lookups" in page("README.md")
    assert f"acceptance is assumed: {drafts} and {lookups}." in page("docs/lossless.md")
    longest = result("rollout-coder")["settings"]["max_tokens"]
    answers = f"temperature 1, {rollout.GROUP} answers a prompt, at most {longest:,} tokens."
    assert answers in text


def test_rollouts_of_the_pages_are_those_of_the_result() -> None:
    readme, benchmarks = page("README.md"), page("docs/benchmarks.md")
    coder = result_rows("rollout-coder")
    for size in (1, 16, 64):
        found = by_side(coder, sequences=size)
        sides = [found[side] for side in ("stock", "sparrow")]
        stock, ours = (row["tokens_per_s"] for row in sides)
        if size != 16:
            label = f"| {size} answers" if size > 1 else "real weights, 1 answer"
            cells = f"{stock:,.0f} tokens/s | {ours:,.0f} | {ours / stock:.2f}× |"
            assert f"{label} | {cells}" in readme
        first = " | ".join(f"{row['first_token_last_s']:.2f}" for row in sides)
        a_round = f"{sides[1]['tokens_per_round']:.2f}"
        cells = f"| {stock:,.0f} | {ours:,.0f} | {ours / stock:.2f}× | {a_round} | {first} |"
        assert f"| {size} {cells}" in benchmarks
    figure = (ROOT / "docs" / "rollout.svg").read_text("utf-8")
    for name, lengths, shown in (
        ("rollout-8b-3k", "3,072, 8,192", "64 answers of 3K tokens"),
        ("rollout-8b-8k", "8,192, 32,768", "64 answers of 8K"),
        ("rollout-1.7b-4k", "4,096, 16,384", ""),
    ):
        both = by_side(result_rows(name))
        sides = [both[side] for side in ("stock", "sparrow")]
        stock, ours = (row["tokens_per_s"] for row in sides)
        cells = f"{stock:,.0f} tokens/s | {ours:,.0f} | {ours / stock:.2f}× |"
        assert not shown or f"{shown} | {cells}" in readme
        seconds = [f"{row['seconds']:.1f}" for row in sides]
        first = " | ".join(f"{row['first_token_last_s']:.2f}" for row in sides)
        cells = f"{seconds[0]} | {seconds[1]} | {ours / stock:.2f}× | {first} |"
        assert f"| {lengths} | {cells}" in benchmarks
        if "8K" in shown:
            for label, last in zip(("stock SGLang (fa3)", "lossless"), seconds, strict=True):
                assert f"{label}, {last} s" in figure


def test_rollouts_named_in_running_text_are_those_of_the_results() -> None:
    coder = [row for row in result_rows("rollout-coder") if row["side"] == "sparrow"]
    alone = sum(row["rounds"]["lookups"]["rounds"] for row in coder)
    others = sum(kind["rounds"] for row in coder for kind in row["rounds"].values()) - alone
    ngram = [row["tokens_per_s"] for row in result_rows("rollout-coder") if row["side"] == "ngram"]
    benchmarks = page("docs/benchmarks.md")
    assert f"All but {others} rounds were lookups alone" in benchmarks
    assert "`NGRAM` gave {:,.0f}, {:,.0f} and {:,.0f} tokens/s".format(*ngram) in benchmarks
    stock = [by_side(result_rows("rollout-coder"), sequences=size)["stock"] for size in (1, 16, 64)]
    device = sorted(row["first_steps"]["device_ms"] for row in stock)
    assert f"the GPU takes {device[0]:.2f} to {device[-1]:.2f} ms of them" in benchmarks
    earlier = result("rollout_qwen2.5-coder-1.5b_fp8_drafts")
    (row,), lossless = earlier["rows"], page("docs/lossless.md")
    assert f"Coder accepted [{row['acceptance_rate']:.2f}](" in lossless
    cached = row["prompt_tokens"] // row["sequences"]
    ended = cached + row["output_tokens"] // row["sequences"]
    assert f"at {cached // 1000}K to {round(ended / 1000)}K tokens" in lossless
    assert f"(commit `{earlier['commit'][:8]}`)" in lossless
    accepted = [row["lookup_acceptance"] for row in coder]
    gains = []
    for name, sizes in ("rollout-coder", (1, 64)), ("rollout-8b-3k", [64]), ("rollout-8b-8k", [64]):
        for size in sizes:
            sides = by_side(result_rows(name), sequences=size)
            gain = sides["sparrow"]["tokens_per_s"] / sides["stock"]["tokens_per_s"]
            gains.append(f"{gain:.2f}×")
    assert (
        f"gain {gains[0]} for one answer, {gains[1]} for 64, by lookups, of which"
        f" {min(accepted):.2f} to {max(accepted):.2f} are accepted; in Qwen3-8B's shapes 64 gain"
        f" {gains[2]} (3K tokens each) and {gains[3]} (8K)"
    ) in page("docs/lossless.md")


def test_an_adapter_of_the_page_is_that_of_the_result() -> None:
    merged, lora = (
        (row["distill_p05_scale0"][-1], row["distill_p05_scale1"][-1], row["rollout_tokens_per_s"])
        for row in result_rows("distill")
    )
    assert (
        f"the tail is {merged[0]:.3f} without it and {merged[1]:.3f} with it merged"
        f" ({merged[2]:,.0f} tokens/s), {lora[0]:.3f} and {lora[1]:.3f} as LoRA"
        f" ({lora[2]:,.0f})"
    ) in page("docs/training.md")
    settings = tomllib.loads((ROOT / "benchmarks" / "distill.toml").read_text("utf-8"))
    assert (settings["steps"], settings["engine"]["schedule"]) == (8, "fixed-64")


@pytest.mark.parametrize(
    ("result", "words"), [("steps-8b-tp2", "on two GPUs"), ("steps-30b", "by lookups alone")]
)
def test_rounds_in_running_text_are_those_of_the_results(result: str, words: str) -> None:
    rows, cells = result_rows(result), []
    for case in dict.fromkeys(row["case"] for row in rows):
        stock, ours = (by_side(rows, case=case)[side] for side in ("stock", "sparrow"))
        batch, length = map(int, case.split("x"))
        cells.append(f"{batch} × {length // 1024}K {stock['step_ms']:.2f}, {ours['step_ms']:.2f}")
        assert words != "by lookups alone" or ours["drafts"] == 0
    assert f"{'; '.join(cells)}." in page("docs/benchmarks.md")


def test_prefill_of_the_page_is_that_of_the_result() -> None:
    rows, cells = result_rows("prefill-8b"), []
    for case, shown in ("1x1024", "1 × 1K"), ("16x4096", "16 × 4K"):
        sides = by_side(rows, case=case)
        seconds = [f"{sides[side]['prefill_s']:.3f}" for side in ("stock", "sparrow")]
        cells.append(f"{shown} {', '.join(seconds)}")
    assert f"stock and lossless: {'; '.join(cells)}." in page("docs/benchmarks.md")


def test_attention_of_the_page_is_that_of_the_result() -> None:
    of_case = {
        row["case"]: row for row in result_rows("attention") if row["schedule"] == "qwen3-8b-0.86"
    }
    one, many = of_case["1x32768"], of_case["16x32768"]
    ours, theirs = (
        [f"{row[name]:.1f}" for row in (one, many)]
        for name in ("sparrow_us", "flashinfer_tensor_us")
    )
    text = page("docs/how-it-works.md")
    assert f"{ours[0]} µs a layer for 1 × 32K and {ours[1]} for 16 × 32K" in text
    assert f"takes {theirs[0]} and {theirs[1]} without its plan" in text


def test_rounds_of_the_pages_are_those_of_the_result() -> None:
    lossless, readme = page("docs/lossless.md"), page("README.md")
    of_case: dict[str, dict[Any, float]] = {}
    for row in result_rows("steps-8b"):
        kind = row["schedule"] and (row["drafts"], row["lookups"])
        ms = of_case.setdefault(row["case"], {})
        ms[kind] = min(row["step_ms"], ms.get(kind, row["step_ms"]))
    assert len(of_case) == 6
    assert "the better of 0 + 3 and 0 + 8. | batch" in lossless
    assert "| stock | 8 + 0 | 3 + 5 | 1 + 2 | lookups alone |" in lossless
    for case, ms in of_case.items():
        batch, length = map(int, case.split("x"))
        alone = min(ms[kind] for kind in ((0, 3), (0, 8)) if kind in ms)
        cells = [ms[None], *(ms[kind] for kind in ((8, 0), (3, 5), (1, 2))), alone]
        gain = ms[None] / min(cells)
        shown = " | ".join(f"{cell:.2f}" for cell in cells)
        name = f"{batch} × {length // 1024}K"
        assert f"| {name} | {shown} | {gain:.2f}× |" in lossless
        if case in ("1x1024", "8x32768"):
            requests = f"{batch} request{'s' * (batch > 1)}, {length // 1024}K"
            row = f"{ms[None]:.2f} ms | {min(cells):.2f} | {gain:.2f}× |"
            assert f"| a token, {requests} | {row}" in readme


def test_sparse_steps_of_the_page_are_those_of_the_results() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    text = text[text.index("## Sparse steps") : text.index("## Training steps")]
    name, schedule, quoted = "", "", 0
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) != 5 or "×" not in cells[4]:
            continue
        if link := re.search(r"h200/([^)]+)[.]json", cells[0]):
            name, schedule = link[1], cells[0].split("`")[1]
        elif link := re.search(r"schedules/([^)]+[.]json)", cells[0]):
            schedule = link[1]
        batch, thousands = cells[1].rstrip("K").split(" × ")
        rows = [
            row
            for row in result_rows(name)
            if row["batch"] == int(batch)
            and int(row["case"].split("x")[1]) // 1024 == int(thousands)
        ]
        stock = by_side(rows)["stock"]["step_ms"]
        (sparse,) = [row["step_ms"] for row in rows if row["schedule"] == schedule]
        assert cells[2:] == [f"{stock:.2f}", f"{sparse:.2f}", f"{stock / sparse:.2f}×"], line
        quoted += 1
        if (name, cells[1]) == ("sparse-1.7b", "16 × 32K") and ".json" not in schedule:
            assert parts_of_a_step(float(cells[3])) in " ".join(text.split())
    assert quoted == 11
    rows = [row for row in result_rows("sparse-hybrid") if row["case"] == "1x32768"]
    stock, sparse = (by_side(rows)[side]["device_ms"] for side in ("stock", "sparrow"))
    assert f"the GPU takes {stock:.2f} and {sparse:.2f} ms of Qwen3.5-2B's 1 × 32K" in text


def parts_of_a_step(ms: float) -> str:
    """Of Qwen3-1.7B, 16 sequences of 32K tokens: the time of reading bytes by the data sheet."""
    schedule, bandwidth = load_schedule("qwen3-1.7b-0.86", 16), GPUS["h200"].bandwidth
    shape = ModelShape.from_config(step.model_config("qwen3-1.7b"))
    dense, few = len(schedule.dense_layers), shape.num_layers - len(schedule.dense_layers)
    layer = kv_bytes(shape, 16, 32768) / shape.num_layers
    pages = few * layer * schedule.budget_at(32768) / 32768
    landmarks = kv_bytes(shape, 16, 32768, schedule) - dense * layer - pages
    read = [1e3 * each / bandwidth for each in (2 * shape.weights, dense * layer, pages, landmarks)]
    return (
        "Qwen3-1.7B at 16 × 32K, at the data sheet's {} TB/s: weights {:.2f} ms, two dense"
        " layers {:.2f}, {} sparse layers {:.2f}, landmarks {:.2f}; the other {:.1f} are"
    ).format(bandwidth / 1e12, *read[:2], few, *read[2:], ms - sum(read))


def test_training_steps_of_the_page_are_those_of_the_results() -> None:
    text = page("docs/benchmarks.md")
    for name, model in (
        ("train_memory_qwen3-1.7b", "Qwen3-1.7B"),
        ("train_memory_qwen3-1.7b_2gpus", "Qwen3-1.7B"),
        ("train_memory_qwen3-8b_2gpus", "Qwen3-8B"),
    ):
        (row,) = [
            row for row in result_rows(name) if (row["dtype"], row["tokens"]) == ("bfloat16", 32768)
        ]
        seconds = f"{min(row['step_s']):.2f}"
        if adapter := row.get("adapter_step_s"):
            seconds += f" (adapter {min(adapter):.2f})"
        cells = f"{row.get('ranks', 1)} | {seconds} | {row['step_peak_gib']:.1f} |"
        assert f"| [{model}](../benchmarks/results/h200/{name}.json) | {cells}" in text
    assert "in bf16 with gradient checkpointing, 32,768 tokens, H200" in text
