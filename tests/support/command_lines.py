"""Wrong command lines of `sparrow`, and their error messages."""

from collections.abc import Sequence

import pytest

from sparrow_sglang.commands import cli


def refusal(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one-line error of `sparrow bench NAME` for wrong arguments, without its prefix."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    out, error = capsys.readouterr()
    assert (stopped.value.code, out, error.count("\n")) == (2, "", 1)
    command = f"sparrow {' '.join(argv[:2])}: error: "
    assert error.startswith(command)
    return error.removeprefix(command)
