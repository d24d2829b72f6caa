"""A value from outside is quoted up to a length, so that what is allowed stays in sight."""

import pytest

from sparrow_sglang.commands import cli

LONG = "x" * 5000


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--model-path", LONG],
        ["serve", "--model-path", f"/{LONG}"],
        ["serve", "--port", "9" * 4000],
        ["doctor", "--model-path", LONG],
        ["plan", "--model-path", LONG],
        ["calibrate", "--model-path", LONG],
        ["calibrate", "--engine-args", LONG],
        ["train", LONG],
        ["report", LONG],
        ["bench", "step", "--cases", LONG],
        ["bench", "rollout", "--model-path", LONG],
        ["bench", LONG],
        [LONG],
    ],
)
def test_an_error_quotes_a_long_value_in_part(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    try:
        code: object = cli.main(argv)
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    errors = [line for line in lines if "error: " in line or line.startswith("FAIL")]
    assert errors and all(len(line) < 1300 for line in errors)
