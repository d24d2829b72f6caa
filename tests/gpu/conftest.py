"""Properties in the reports of these tests: device, versions and commit."""

import os
import signal
from collections.abc import Callable

import pytest

from sparrow_sglang.provenance import provenance


@pytest.fixture(scope="session", autouse=True)
def device_versions_and_commit(record_testsuite_property: Callable[[str, object], None]) -> None:
    """Record device, versions and commit as properties of the --junitxml report."""
    where = provenance()
    for name in ("device", "commit"):
        record_testsuite_property(name, where[name])
    for package, version in where["packages"].items():
        record_testsuite_property(package, version)


def pytest_sessionstart() -> None:
    """On SIGTERM, which ends a run at a time limit, let pytest report the tests that have ended."""

    def end(*_: object) -> None:
        pytest.exit("terminated", returncode=128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    # Engines are forked from this process; they must end at once on SIGTERM.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
