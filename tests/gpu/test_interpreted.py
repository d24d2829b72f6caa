"""Kernels in Triton's interpreter, which must be enabled before Triton is imported."""

from pathlib import Path

import pytest
from kernel_step import require_passes_interpreted


@pytest.mark.parametrize("name", ["test_kernels.py", "test_lossless_kernels.py"])
def test_kernels_in_tritons_interpreter(name: str) -> None:
    require_passes_interpreted(Path(__file__).with_name(name))
