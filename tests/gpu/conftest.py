"""What a report of these tests carries, to be counted by tools/test_sglang.py."""

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
