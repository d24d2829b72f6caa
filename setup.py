"""Refuses to build from a clone without symbolic links, which would give half a package, and makes
the README's links absolute for the package index."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)]*)\)")


def link(match: re.Match[str]) -> str:
    """An absolute link below the repository's address; without an address, its text."""
    base = URLS.get("Repository")
    return f"[{match[1]}]({base}/blob/main/{match[2]})" if base else match[1]


for name in ("attention_backends", "benchmarks", "rl"):
    if not (ROOT / "sparrow_sglang" / name).is_dir():
        raise SystemExit(
            f"sparrow_sglang/{name} is not a link to a folder: clone again with symbolic links,"
            " git clone -c core.symlinks=true"
        )
setup(
    long_description=LINK.sub(link, (ROOT / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
