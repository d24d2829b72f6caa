"""What a report of these tests carries, to be counted by tools/test_sglang.py."""

import os
import signal
from collections.abc import Callable

import pytest

from sparrow_sglang.provenance import provenance


@pytest.fixture(scope="session", autouse=True)
def device_versions_and_commit(record_testsuite_property: Callable[[str, object], None]) -> None:
    """As properties of the file that --junitxml names."""
    where = provenance()
    for name in ("device", "commit"):
        record_testsuite_property(name, where[name])
    for package, version in where["packages"].items():
        record_testsuite_property(package, version)


def pytest_sessionstart() -> None:
    """A time limit ends a run by SIGTERM: pytest then reports the tests that have ended."""

    def end(*_: object) -> None:
        pytest.exit("terminated", returncode=128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    # Engines are forked from this process, and end at once.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
