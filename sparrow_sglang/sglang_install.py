"""Which SGLang is installed, and whether it is usable: complete, installed once, not too old.

Versions nobody has tried are not refused here: `sparrow_sglang.plugin.registration` probes what the
hooks need of them. SGLang is not imported.
"""

from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

SUPPORTED = ("0.5.15.post1", "0.5.20", "0.5.23")
"""Tested versions: those that slime pins and verl trains with, and `LOCKED`; newer may run, too."""
LOCKED = "0.5.23"
"""The version that the README installs, and that CI tests."""
INSTALL = f"pip install sglang=={LOCKED}, or another of {', '.join(SUPPORTED)}"


def installed_version() -> str:
    installed = _installed()
    return installed[0].version if installed else "of an unknown version"


def version_problems() -> list[str]:
    """One sentence if SGLang is missing, incomplete, installed twice, or older than supported."""
    package = find_spec("sglang")
    installed = _installed()
    if package is None or package.origin is None:
        what = "is installed in part: its package is missing" if installed else "is not installed"
        return [f"SGLang {what}; {INSTALL}"]
    folder = Path(package.origin).parent
    if not (folder / "srt" / "server_args.py").is_file():
        return [
            f"SGLang in {folder} is installed in part: srt/server_args.py is missing; {INSTALL}"
        ]
    versions = list(dict.fromkeys(distribution.version for distribution in installed))
    if len(versions) > 1:
        return [f"SGLang is on the path {len(versions)} times ({', '.join(versions)}): keep one"]
    if not versions or Version(versions[0]) < Version(SUPPORTED[0]):
        return [f"SGLang {installed_version()}: expected {SUPPORTED[0]} or newer; {INSTALL}"]
    return []


def import_problem(error: ImportError) -> str:
    return f"SGLang {installed_version()} cannot be imported ({error}); {INSTALL}"


def _installed() -> list[Distribution]:
    return list(distributions(name="sglang"))
