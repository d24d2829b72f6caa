"""Refuses to build from a clone without symbolic links, which would give half a package."""

from pathlib import Path

from setuptools import setup

for name in ("attention_backends", "benchmarks", "rl"):
    if not (Path(__file__).parent / "sparrow_sglang" / name).is_dir():
        raise SystemExit(
            f"sparrow_sglang/{name} is not a link to a folder: clone again with symbolic links,"
            " git clone -c core.symlinks=true"
        )
setup()
