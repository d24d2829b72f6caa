"""Where the embedded model lies, and that nobody ever sees half of it."""

from pathlib import Path

import pytest
from model_cache import MODEL, visible, write_files

from sparrow_sglang import models


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
