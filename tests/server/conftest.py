"""One audited server with a tokenizer and LoRA for all tests that send it wrong things."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from adapted_models import SERVED, save_model_of_words
from engines import SCHEDULE, sparse
from servers import start_server

CONTEXT = 4096
TARGETS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def chunked() -> dict[str, Any]:
    """Arguments of an engine with our backend, for which long prompts take several chunks."""
    return sparse(SCHEDULE) | {"chunked_prefill_size": 64}


@pytest.fixture(scope="session")
def model_of_words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_of_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def client(model_of_words: str) -> Iterator[httpx.Client]:
    with (
        # Otherwise the server closes idle connections, perhaps when a request is under way.
        mock.patch.dict(os.environ, SGLANG_TIMEOUT_KEEP_ALIVE="3600"),
        start_server(
            model_of_words,
            sparrow_schedule="fixed-64",
            sparrow_audit_rate=1.0,
            enable_metrics=True,
            context_length=CONTEXT,
            served_model_name="tiny",
            max_lora_rank=16,
            lora_target_modules=list(TARGETS),
            # At lower levels the server logs each bad request.
            log_level="critical",
            **SERVED,
        ) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client
