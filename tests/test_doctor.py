"""`sparrow doctor` on a model that is not there."""

from pathlib import Path

import pytest

from sparrow_sglang import doctor


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # Read from the environment when the hub's client was imported, maybe long ago.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def problem(*argv: str) -> str:
    (check,) = [check for check in doctor.examine(argv) if check.name == "model"]
    assert check.status == "FAIL" and "\n" not in check.detail
    return check.detail


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "a/b/c"])
@pytest.mark.parametrize("form", ["--model-path {}", "--model={}", "{}"])
def test_a_path_that_is_not_there_is_no_such_folder(path: str, form: str) -> None:
    found = problem(*form.format(path).split())
    assert found.startswith(f"--model-path {path}: no such folder; expected a folder with a config")
    assert "Repo id" not in found


def test_a_name_that_the_hub_does_not_have_says_both() -> None:
    found = problem("--model-path", "nobody/has-this-model")
    assert found.startswith(
        "--model-path nobody/has-this-model: no such folder, and no such model ("
    )


def test_a_folder_without_a_config_is_not_called_missing(tmp_path: Path) -> None:
    assert "no such folder" not in problem("--model-path", str(tmp_path))
