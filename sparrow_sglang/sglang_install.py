"""Which SGLang is installed, and whether it is not too old.

Versions nobody has tried are not refused here: `sparrow_sglang.plugin.registration` probes what the
hooks need of them. SGLang is not imported.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import InvalidVersion, Version

SUPPORTED = ("0.5.15.post1", "0.5.16", "0.5.17", "0.5.20", "0.5.23")
"""The versions that the engine and server tests are run on; see docs/versions.md."""
LOCKED = "0.5.23"
"""The version that the README installs, and that CI tests."""
INSTALL = f"pip install sglang=={LOCKED}, or another of {', '.join(SUPPORTED)}"


def installed_version() -> str:
    """The version of SGLang, as the installer knows it."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"


def version_problems() -> list[str]:
    """One sentence if SGLang is missing, or older than supported."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        return [f"SGLang is not installed; {INSTALL}"]
    found = installed_version()
    try:
        known = Version(found)
    except InvalidVersion:
        folder = Path(package.origin).parent
        return [f"SGLang {found} in {folder}: expected one that pip knows; {INSTALL}"]
    if known < Version(SUPPORTED[0]):
        return [f"SGLang {known}: expected {SUPPORTED[0]} or newer; {INSTALL}"]
    return []


def import_problem(error: ImportError) -> str:
    """The message for an SGLang that lacks a part of itself or a package that it needs."""
    return f"SGLang {installed_version()} cannot be imported ({error}); {INSTALL}"
