"""Random inputs: right ones are read as they are meant, wrong ones get one clear line.

SPARROW_FUZZ_CASES and SPARROW_FUZZ_SEED say how many and which; `make fuzz` runs 100,000. Seed,
kind and number name a case, and always give the same one.
"""

import os
from pathlib import Path

import fuzz_inputs
import pytest
from adapted_models import save_adapter, save_model_of_words
from fuzz_server import Live
from servers import start_server

CASES = int(os.environ.get("SPARROW_FUZZ_CASES", "1000"))
SEED = int(os.environ.get("SPARROW_FUZZ_SEED", "0"))
FIRST = int(os.environ.get("SPARROW_FUZZ_FIRST", "0"))
# Most cases go to the kinds that are cheap to test.
SHARES = {
    "schedule_file": 0.4,
    "run_configuration": 0.3,
    "request_option": 0.22,
    "request": 0.04,
    "schedule_route": 0.02,
    "adapter_route": 0.02,
    "any_field": 0.04,
    "control": 0.01,
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def numbers(kind: str) -> range:
    return range(FIRST, FIRST + round(CASES * SHARES[kind]))


def report(problems: list[str]) -> str:
    return "\n".join([f"{len(problems)} cases", *problems[:40]])


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_files_and_options(kind: str, tmp_path: Path) -> None:
    problems = fuzz_inputs.problems(kind, SEED, numbers(kind), tmp_path)
    assert not problems, report(problems)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("words")
    model = save_model_of_words(folder)
    adapter, _ = save_adapter(model, folder, 0, ("q_proj", "up_proj"))
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise the server closes idle connections, perhaps when a request is under way.
        patch.setenv("SGLANG_TIMEOUT_KEEP_ALIVE", "3600")
        with start_server(
            model,
            skip_tokenizer_init=False,
            grammar_backend="none",
            attention_backend="sparrow",
            sparrow_schedule="fixed-64,fixed-96",
            served_model_name="tiny",
            enable_lora=True,
            max_lora_rank=8,
            lora_target_modules=list(MODULES),
            max_loras_per_batch=2,
            lora_backend="torch_native",
            # At lower levels the server logs each bad request.
            log_level="critical",
        ) as url:
            yield Live(url, Path(adapter, "adapter_model.safetensors").read_bytes())


@pytest.mark.parametrize(
    "kind", ["request", "schedule_route", "adapter_route", "any_field", "control"]
)
def test_a_live_server(kind: str, live: Live) -> None:
    problems = live.problems(kind, SEED, numbers(kind))
    assert not problems, report(problems)
    assert live.http.get("/health_generate").status_code == 200
