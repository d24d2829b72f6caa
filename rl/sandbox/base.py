"""What a sandbox takes and gives: limits, results, and the error of one that does not work."""

from dataclasses import dataclass
from typing import Literal

from sparrow_sglang.errors import SparrowError


class SandboxError(SparrowError, RuntimeError):
    """Untrusted code cannot be run safely; the message says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a program fails.

    `memory_bytes` bounds the address space of each process, and all memory of all together where a
    control group can be made. `processes` counts threads too. `disk_bytes` holds for the program's
    files together, and for each of stdout and stderr.
    """

    wall_clock_s: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of a program: `limit` names the limit it was killed for, None if it was not.

    If a signal ended the program, `returncode` is below 0 or above 128.
    """

    limit: Literal["wall_clock", "memory"] | None
    returncode: int
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        return self.limit is None and self.returncode == 0
