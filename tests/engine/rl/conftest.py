"""Training runs start engines, forked from this process."""

from typing import Any

import forked_workers
import pytest
import torch
from engines import import_for_fork

forked_workers.start_forking()


@pytest.fixture(scope="module")
def byte_model(byte_model: str) -> str:
    import_for_fork()
    return byte_model


@pytest.fixture(scope="module")
def model(sharp_llama: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(sharp_llama, dtype=torch.float32).eval()
