"""What slime asks of an SGLang server that it did not start, and what of slime we rely on.

The first part needs no slime: it sends what slime's rollout and weight sync send. The second runs
on a checkout on PYTHONPATH: `make test-frameworks SLIME=/path/to/slime`.
"""

import argparse
import dataclasses
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engines import random_prompt, save_tiny_model
from oracle import ContractModel
from servers import start_server

from sparrow_sglang.schedule import BudgetSchedule

needs_slime = pytest.mark.skipif(
    find_spec("slime") is None, reason="slime is not installed in this environment"
)
FP32 = 2e-4  # |difference| of a log-prob between SGLang in fp32 and transformers in float64
RECIPE = Path(__file__).parents[2] / "examples" / "slime" / "sparrow_args.sh"
PROMPT = random_prompt(0, 150)
SCHEDULE = BudgetSchedule.fixed(64)
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 24,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@pytest.fixture(scope="module")
def url(sharp_llama: str) -> Iterator[str]:
    with start_server(
        sharp_llama, attention_backend="sparrow", sparrow_schedule=SCHEDULE.name
    ) as address:
        yield address


def rollout(url: str) -> tuple[list[int], list[float], str]:
    """Token ids, their log-probs and the weight version, read from where slime reads them."""
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    triples = meta["output_token_logprobs"]
    return [t[1] for t in triples], [t[0] for t in triples], meta["weight_version"]


def expected(model: str, tokens: list[int]) -> list[float]:
    rows = ContractModel(model, SCHEDULE).log_probs(PROMPT, tokens)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


class TestExternalEngine:
    def test_rollouts_follow_weights_from_disk(self, url: str, tmp_path: Path) -> None:
        """In slime's order: pause, flush, load under a version, go on."""
        stepped = save_tiny_model(tmp_path, seed=1, spread=0.15)
        assert httpx.post(f"{url}/pause_generation", json={}).status_code == 200
        assert httpx.get(f"{url}/flush_cache").status_code == 200
        load = {"model_path": stepped, "weight_version": "7"}
        loaded = httpx.post(f"{url}/update_weights_from_disk", json=load, timeout=60)
        assert loaded.json()["success"] is True, loaded.text
        assert httpx.post(f"{url}/continue_generation", json={}).status_code == 200
        tokens, log_probs, version = rollout(url)
        assert version == "7"
        assert log_probs == pytest.approx(expected(stepped, tokens), abs=FP32)


def recipe(array: str) -> list[str]:
    """The words of one of the example's arrays."""
    script = f'source {RECIPE} && printf "%s\\n" "${{{array}[@]}}"'
    return subprocess.check_output(["bash", "-c", script], text=True).split()


@needs_slime
class TestSlime:
    def test_flags_reach_the_server_args(self, sharp_llama: str) -> None:
        from sglang.srt.server_args import ServerArgs
        from slime.backends.sglang_utils.arguments import add_sglang_arguments

        parser = argparse.ArgumentParser()
        add_sglang_arguments(parser)
        flags = [*recipe("SPARROW_ARGS"), "--sglang-sparrow-audit-rate", "0.5"]
        known, for_the_trainer = parser.parse_known_args(flags)
        assert for_the_trainer == ["--use-tis", "--tis-clip", "2.0"]
        parsed = vars(known)
        # Take every field that has an argument of its name, as slime's engine does.
        # From SGLang 0.5.20 on ServerArgs is a struct, not a dataclass.
        names = getattr(ServerArgs, "__struct_fields__", None) or [
            field.name for field in dataclasses.fields(ServerArgs)
        ]
        fields: dict[str, Any] = {
            name: parsed[f"sglang_{name}"] for name in names if f"sglang_{name}" in parsed
        }
        server_args = ServerArgs(**fields | {"model_path": sharp_llama})
        assert server_args.attention_backend == "sparrow"
        assert server_args.sparrow_schedule == "qwen3-4b-0.86"
        assert server_args.sparrow_audit_rate == 0.5
        assert server_args.page_size == 16
