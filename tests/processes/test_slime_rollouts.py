"""slime's own loop, all but Megatron, on sparse servers: `make test-frameworks SLIME=/checkout`."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import save_model_of_words, words
from engines import random_prompt, unused_model_files
from forked_workers import RAY
from oracle import FP32, ContractModel
from programs import run
from servers import start_server

from sparrow_sglang.schedules.schedule import BudgetSchedule

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
SLIME = find_spec("slime")
SCHEDULE = BudgetSchedule.fixed(64)
PROMPT_TOKENS = 150
ROLLOUTS, GROUPS, GROUP = 3, 2, 2
LIMIT_S = 1500  # processes of Ray import SGLang in turn
pytestmark = [
    pytest.mark.skipif(
        SLIME is None, reason="no slime here: make test-frameworks SLIME=/path/to/slime"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 120),
]


@dataclass(frozen=True)
class Run:
    """What slime wrote into `folder`: what it sampled, trained on and loaded into the servers."""

    folder: Path

    def samples(self, name: object) -> list[dict[str, Any]]:
        path = self.folder / f"details/rollout_data/{name}.pt"
        samples: list[dict[str, Any]] = torch.load(path, weights_only=False)["samples"]
        return samples

    @cached_property
    def all_samples(self) -> list[dict[str, Any]]:
        return [sample for rollout in range(ROLLOUTS) for sample in self.samples(rollout)]

    def parts(self, sample: dict[str, Any]) -> list[tuple[int, list[int], list[int]]]:
        """Weight version, prompt and answer of each request for a sample. The prompt of a request
        is all tokens of the sample before its answer."""
        ends = [event for event in sample["trace"]["events"] if event.get("type") == "span_end"]
        lengths = [
            event["attrs"]["completion_tokens"]
            for event in ends
            if event["name"] == "sglang_generate"
        ]
        assert sum(lengths) == sample["response_length"]
        tokens, parts = sample["tokens"], []
        start = len(tokens) - sample["response_length"]
        for version, length in zip(sample["weight_versions"], lengths, strict=True):
            parts.append((int(version), tokens[:start], tokens[start : start + length]))
            start += length
        return parts

    def expected(self, sample: dict[str, Any], schedule: BudgetSchedule | None) -> list[float]:
        """The reference's log-probs of a response, by the weights of each of its requests."""
        expected: list[float] = []
        for version, prompt, response in self.parts(sample):
            weights = self.folder / f"weights/weight_v{version:06d}"
            if response:
                rows = ContractModel(str(weights), schedule).log_probs(prompt, response)
                expected += rows.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        return expected


def run_slime(model: str, folder: Path, *arguments: str) -> Run:
    prompts = folder / "prompts.jsonl"
    rows = [{"input": words(random_prompt(seed, PROMPT_TOKENS))} for seed in range(32)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *(sys.executable, str(SUPPORT / "slime_loop.py"), "--hf-checkpoint", model),
        *("--prompt-data", str(prompts), "--num-rollout", str(ROLLOUTS)),
        *("--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(GROUP)),
        *("--num-steps-per-rollout", "1", "--rollout-max-response-len", "60"),
        # Stop tokens, so that responses differ in length.
        *("--rollout-stop-token-ids", *map(str, range(3, 11))),
        *("--custom-rm-path", "slime_task.reward", "--lr", "1e-3", "--loss-type", "policy_loss"),
        *("--actor-num-gpus-per-node", "1", "--dump-details", str(folder / "details")),
        *("--update-weight-mode", "full", "--update-weight-transport", "disk"),
        *("--update-weight-disk-dir", str(folder / "weights"), "--update-weight-disk-keep-files"),
        *("--use-tis", "--tis-clip", "2.0", *arguments),
    ]
    checkout = Path(SLIME.origin).parents[1]
    path = os.pathsep.join(map(str, (ROOT / "examples" / "slime", SUPPORT, checkout)))
    unused = {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_model_files()), "PYTHONPATH": path}
    run(*command, env=os.environ | RAY | unused, timeout=LIMIT_S)
    return Run(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_of_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def urls(model: str) -> Iterator[list[str]]:
    settings = {
        "attention_backend": "sparrow",
        "sparrow_schedule": SCHEDULE.name,
        "skip_tokenizer_init": False,
        "grammar_backend": "none",
        "enable_metrics": True,
    }
    with start_server(model, **settings) as first, start_server(model, **settings) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def external(urls: list[str], model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """slime's loop on servers that it did not start, with all that it does to groups."""
    folder = tmp_path_factory.mktemp("external")
    return run_slime(
        model,
        folder,
        *("--rollout-external-engine-addrs", *(url.removeprefix("http://") for url in urls)),
        *("--over-sampling-batch-size", "8", "--partial-rollout"),
        "--mask-offpolicy-in-partial-rollout",
        "--dynamic-sampling-filter-path",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        *("--custom-generate-function-path", "dense_evaluation.generate"),
        *("--eval-interval", "2", "--skip-eval-before-train"),
        *("--eval-prompt-data", "words", f"{folder}/prompts.jsonl@[0:4]"),
        *("--eval-max-response-len", "24"),
    )


class TestExternalEngines:
    def test_recorded_log_probs_are_those_of_sparse_decode(self, external: Run) -> None:
        for sample in external.all_samples:
            expected = external.expected(sample, SCHEDULE)
            assert sample["rollout_log_probs"] == pytest.approx(expected, abs=FP32)
        dense = external.expected(external.all_samples[0], None)
        recorded = external.all_samples[0]["rollout_log_probs"]
        assert max(abs(a - b) for a, b in zip(recorded, dense, strict=True)) > 0.01

    def test_aborted_responses_go_on_with_new_weights(self, external: Run) -> None:
        """Their tokens from older weights are masked, as slime was asked to."""
        both = 0
        for rollout in range(ROLLOUTS):
            for sample in external.samples(rollout):
                parts = external.parts(sample)
                # Weights are loaded before each rollout, the first time as version 1.
                new = [version > rollout for version, _, answer in parts for _ in answer]
                assert sample["loss_mask"] == [int(is_new) for is_new in new]
                both += len(set(new)) == 2
        assert both

    def test_evaluation_is_dense_if_asked_to(self, external: Run) -> None:
        samples = external.samples("eval_1")
        assert len(samples) == 4
        for sample in samples:
            expected = external.expected(sample, None)
            assert sample["rollout_log_probs"] == pytest.approx(expected, abs=FP32)


class TestEnginesOfSlime:
    """Servers that slime starts itself, from the example's flags."""

    @pytest.fixture(scope="class")
    def own(self, model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return run_slime(
            model,
            tmp_path_factory.mktemp("own"),
            *("--rollout-num-gpus", "1", "--sglang-attention-backend", "sparrow"),
            *("--sglang-sparrow-schedule", SCHEDULE.name, "--sglang-dtype", "float32"),
            *("--sglang-max-total-tokens", "8192", "--sglang-grammar-backend", "none"),
        )

    def test_recorded_log_probs_are_those_of_sparse_decode(self, own: Run) -> None:
        assert len(own.all_samples) == ROLLOUTS * GROUPS * GROUP
        for sample in own.all_samples:
            expected = own.expected(sample, SCHEDULE)
            assert sample["rollout_log_probs"] == pytest.approx(expected, abs=FP32)
        assert {sample["weight_versions"][0] for sample in own.all_samples} == {"1", "2", "3"}
