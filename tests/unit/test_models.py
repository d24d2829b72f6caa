"""Where the embedded model lies."""

from pathlib import Path

import pytest

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
