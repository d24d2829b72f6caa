"""The pages' scripts that start an engine, saved as files and run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/lossless.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_script_with_an_engine_prints_an_answer(page: str, tmp_path: Path) -> None:
    parts = (ROOT / page).read_text().split("```python\n")[1:]
    [script] = [part.partition("```")[0] for part in parts if "sglang.Engine(" in part]
    small = script.replace('"Qwen/Qwen3-4B"', "str(embedded_model())").replace("64}", "8}")
    file = tmp_path / "script.py"
    file.write_text(f"from sparrow_sglang.models import embedded_model\n{small}")
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=550, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), done.stderr
