"""The README's script that starts an engine, saved as a file and run. Others are imported by
tests/unit/test_docs.py."""

import sys
from pathlib import Path

import pytest
from programs import run

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_a_script_with_an_engine_prints_an_answer(tmp_path: Path) -> None:
    parts = README.read_text().split("```python\n")[1:]
    [script] = [part.partition("```")[0] for part in parts]
    small = script.replace('"Qwen/Qwen3-4B"', "str(embedded_model())").replace("64}", "8}")
    assert "embedded_model" in small
    file = tmp_path / "script.py"
    file.write_text(f"from sparrow_sglang.models import embedded_model\n{small}")
    assert run(sys.executable, file, timeout=550).strip()
