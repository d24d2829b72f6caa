"""Files of response lengths: what is read, and how what is wrong with them is told."""

import re
from pathlib import Path

import pytest

from sparrow_sglang.planning.response_lengths import read_lengths


@pytest.mark.parametrize("text", ["[7, 5, 9]", '7\n\n{"length": 5, "reward": 1}\n9\n'])
def test_recorded_lengths_keep_their_order(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    assert read_lengths(path) == [7, 5, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", ": holds no lengths"),
        ("[1, 2", ": cannot be read ("),
        ("7\n\nseven\n", ', line 3: "seven" is no length'),
        ("0\n", ", line 1: 0 is no length"),
        ("[7, true]", ", item 2: true is no length"),
        ('{"tokens": 7}', ', line 1: {"tokens": 7} is no length'),
        ("7.5", ", line 1: 7.5 is no length"),
        (b"\xff\xfe7", ": cannot be read ("),
        (None, ": cannot be read ("),
    ],
)
def test_what_is_no_length_is_named(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "lengths.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")) as problem:
        read_lengths(path)
    text = str(problem.value)
    assert text.count("\n") == 0 and text.endswith('1 or more tokens, or {"length": 1234}')
