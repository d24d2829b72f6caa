"""The table of docs/versions.md is that of the committed results, each of a supported version."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from sparrow_sglang.sglang_install import SUPPORTED

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite><properties>
<property name="device" value="Some GPU" /><property name="commit" value="{commit}" />
<property name="sglang" value="0.5.16" /><property name="torch" value="2.11.0" />
<property name="transformers" value="5.12.1" /><property name="triton" value="3.6.0" />
</properties>{cases}</testsuite></testsuites>"""


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_sglang", ROOT / "tools" / "test_sglang.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_of_the_results(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"{tool.table()}\n\n" in page
    assert {file.stem for file in tool.RESULTS.glob("*.json")} <= set(SUPPORTED)


def test_reports_of_gpu_tests_are_counted_by_how_each_test_ended_last(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.PAGE.write_text(f"before\n{tool.HEAD}\n\nafter\n")
    case = '<testcase classname="tests.gpu.test_step" name="{}">{}</testcase>'
    # pytest writes a test that was interrupted without a name, and without an outcome.
    first = case.format("a", "") + case.format("b", "<failure />") + '<testcase time="0.003" />'
    second = case.format("b", "") + case.format("c", "<skipped />")
    noted = '<properties><property name="median error" value="0.1" /></properties>'
    second += case.replace("test_step", "test_train").format("d[x]", f"<failure />{noted}")
    files = []
    for commit, cases in (("0123abc", first), ("4567def", second)):
        files.append(tmp_path / f"{commit}.xml")
        files[-1].write_text(REPORT.format(commit=commit, cases=cases))
    tool.count_reports(files)
    counts = json.loads((tool.RESULTS / "0.5.16.json").read_text())["rooms"]["gpu"]
    assert {kind: counts[kind] for kind in tool.KINDS} == {"passed": 2, "failed": 1, "skipped": 1}
    assert counts["failed_tests"] == ["test_train::d[x]"]
    (line,) = (line for line in tool.PAGE.read_text().splitlines() if line.startswith("| 0.5.16"))
    assert "| not run | not run | 2 passed, 1 failed, 1 skipped, on Some GPU |" in line
    assert line.endswith("| `0123abc`, `4567def` |")
