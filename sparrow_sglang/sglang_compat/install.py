"""Which SGLang is installed, and whether it is too old, without importing it. Untested versions are
not refused here: `sparrow_sglang.plugin.registration` probes what the hooks need of them."""

from importlib.util import find_spec

from packaging.version import Version

from sparrow_sglang.provenance import package_version

SUPPORTED = ("0.5.15.post1", "0.5.20", "0.5.23")
"""Tested versions: those that slime pins and verl trains with, and `LOCKED`; newer may run, too."""
LOCKED = "0.5.23"
"""The version that the README installs, and that CI tests."""
INSTALL = f"pip install sglang=={LOCKED}, or another of {', '.join(SUPPORTED)}"


def installed_version() -> str:
    return package_version("sglang") or "of an unknown version"


def version_problems() -> list[str]:
    """One sentence if SGLang is missing, or older than supported."""
    package = find_spec("sglang")
    if package is None or package.origin is None:
        return [f"SGLang is not installed; {INSTALL}"]
    known = package_version("sglang")
    if known is None or Version(known) < Version(SUPPORTED[0]):
        return [f"SGLang {installed_version()}: expected {SUPPORTED[0]} or newer; {INSTALL}"]
    return []


def import_problem(error: ImportError) -> str:
    return f"SGLang {installed_version()} cannot be imported ({error}); {INSTALL}"
