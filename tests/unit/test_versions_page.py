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
        for counts in result["rooms"].values():
            assert {*tool.KINDS, "commit"} <= counts.keys()
