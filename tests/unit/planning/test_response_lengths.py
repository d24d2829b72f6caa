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
        ("", ": holds no lengths"),
        ("[]", ": holds no lengths"),
        ("[1, 2", ": begins as a JSON list, but is none ("),
        ("7\nseven\n", ':2: "seven" is no length'),
        ("7\n\n0\n", ":3: 0 is no length"),
        ("-4\n", ":1: -4 is no length"),
        ("true\n", ":1: true is no length"),
        ("[7, true]", ", item 2: true is no length"),
        ('[7, {"length": "5"}]', ', item 2: {"length": "5"} is no length'),
        ('{"tokens": 7}', ':1: {"tokens": 7} is no length'),
        ("7.5", ":1: 7.5 is no length"),
        (b"\xff\xfe7", ": not UTF-8 text"),
        (None, ": cannot be read (No such file or directory)"),
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
