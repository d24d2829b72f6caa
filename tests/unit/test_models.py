"""Where the embedded model lies, and what happens where it cannot be written."""

import resource
from pathlib import Path

import pytest
import transformers

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


@pytest.mark.parametrize("written", [10**5, 3 * 10**6], ids=["weights", "tokenizer"])
def test_a_disk_that_fills_is_one_line_and_nothing_is_left(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """A small model stands in for the converted one; its tokenizer is larger."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model
    )
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, before[1]))
    try:
        with pytest.raises(models.ModelError, match=r"^cannot write.*large.*: free space [^\n]*$"):
            models.embedded_model()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
