"""The table of docs/versions.md is that of the committed results, each of a supported version."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from sparrow_sglang.sglang_install import SUPPORTED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_sglang", ROOT / "tools" / "test_sglang.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_of_the_results(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"{tool.table()}\n\n" in page


def test_every_result_is_whole_and_of_a_supported_version(tool: ModuleType) -> None:
    for file in tool.RESULTS.glob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert file.stem == result["sglang"] in SUPPORTED
        for room, counts in result["rooms"].items():
            assert {*tool.KINDS, "commits" if room == tool.GPU else "commit"} <= counts.keys()
            for kind in tool.KINDS if room == tool.GPU else ():
                assert counts[kind] == sum(of[kind] for of in counts["files"].values())


REPORT = """<testsuites><testsuite><properties>
<property name="device" value="Some GPU" /><property name="commit" value="{commit}" />
<property name="sglang" value="{version}" /><property name="torch" value="2.11.0" />
<property name="transformers" value="5.12.1" /><property name="triton" value="3.6.0" />
</properties>{cases}</testsuite></testsuites>"""


@pytest.fixture
def fresh_tool(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool with a page of its own and no results yet."""
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.RESULTS.mkdir()
    tool.PAGE.write_text(f"before\n{tool.HEAD}\n\nafter\n")
    return tool


def test_reports_of_gpu_tests_are_counted_by_how_each_test_ended_last(
    fresh_tool: ModuleType, tmp_path: Path
) -> None:
    tool = fresh_tool
    case = '<testcase classname="tests.gpu.test_step" name="{}">{}</testcase>'
    # pytest writes a test that was interrupted without a name, and without an outcome.
    first = case.format("a", "") + case.format("b", "<failure />") + '<testcase time="0.003" />'
    second = case.format("b", "") + case.format("c", "<skipped />")
    noted = '<properties><property name="median error" value="0.1" /></properties>'
    second += case.replace("test_step", "test_train").format("d[x]", f"<failure />{noted}")
    files = []
    for commit, cases in (("0123abc", first), ("4567def", second)):
        files.append(tmp_path / f"{commit}.xml")
        files[-1].write_text(REPORT.format(version="0.5.16", commit=commit, cases=cases))
    tool.count_reports(files)
    counts = json.loads((tool.RESULTS / "0.5.16.json").read_text())["rooms"]["gpu"]
    assert {kind: counts[kind] for kind in tool.KINDS} == {"passed": 2, "failed": 1, "skipped": 1}
    assert counts["files"] == {
        "test_step": {"passed": 2, "failed": 0, "skipped": 1, "commits": ["0123abc", "4567def"]},
        "test_train": {"passed": 0, "failed": 1, "skipped": 0, "commits": ["4567def"]},
    }
    assert counts["failed_tests"] == ["test_train.py::d[x]"]
    assert counts["commits"] == ["0123abc", "4567def"]
    (line,) = (line for line in tool.PAGE.read_text().splitlines() if line.startswith("| 0.5.16"))
    assert "| 2 passed, 1 failed, 1 skipped, on Some GPU |" in line
    assert line.endswith("| `0123abc`, `4567def` |")


def test_reports_of_another_run_replace_the_counts_of_their_files_only(
    fresh_tool: ModuleType, tmp_path: Path
) -> None:
    tool = fresh_tool
    report = tmp_path / "report.xml"

    def count(device: str, commit: str, **files: str) -> dict:
        cases = "".join(
            f'<testcase classname="tests.gpu.{name}" name="a">{outcome}</testcase>'
            for name, outcome in files.items()
        )
        text = REPORT.format(version="0.5.16", commit=commit, cases=cases)
        report.write_text(text.replace("Some GPU", device))
        tool.count_reports([report])
        return json.loads((tool.RESULTS / "0.5.16.json").read_text())["rooms"]["gpu"]

    count("A", "0123abc", test_step="<failure />", test_train="<failure />")
    counts = count("A", "4567def", test_step="")
    assert {kind: counts[kind] for kind in tool.KINDS} == {"passed": 1, "failed": 1, "skipped": 0}
    assert counts["failed_tests"] == ["test_train.py::a"]
    assert counts["commits"] == ["0123abc", "4567def"]
    assert counts["files"]["test_step"]["commits"] == ["4567def"]
    # Counts of two machines are not added up.
    assert count("B", "4567def", test_step="")["files"].keys() == {"test_step"}


def test_a_version_that_no_entry_point_reached_says_so(tool: ModuleType) -> None:
    counts = {"passed": 0, "failed": 1, "skipped": 0, "commit": "0123abc"}
    result = {
        "sglang": "0.5.16",
        "packages": {"torch": "2.11.0", "transformers": "5.12.1"},
        "entry_points": [],
        "rooms": {"engine": counts},
    }
    assert tool.row(result).split(" | ")[-2] == "none"
