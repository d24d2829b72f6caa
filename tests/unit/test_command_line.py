"""Counts that are too small are one line with the option, its value and what is allowed."""

from importlib.metadata import version

import pytest

import sparrow_sglang
from sparrow_sglang.commands import cli


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "1"], "argument --new-tokens: expected 2 or more, got 1"),
        (["--samples", "0"], "argument --samples: expected 1 or more, got 0"),
        (["--batch", "many"], "argument --batch: expected 1 or more, got many"),
    ],
)
def test_counts_that_are_too_small(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["calibrate", "--model-path", "m", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sparrow calibrate: error: {message}")


def test_the_package_shows_its_names_and_its_version() -> None:
    assert set(dir(sparrow_sglang)) == {*sparrow_sglang.__all__, "__version__"}
    assert sparrow_sglang.__version__ == version("sparrow-sglang")
