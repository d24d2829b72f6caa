"""One engine on two GPUs: split, replicated, and with replicated attention in a split model. The
output of each rank is compared with transformers and the contract's loop, teacher-forced along the
engine's own samples; requests are routed to each replica by its rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from audits import outcomes
from engines import random_prompt, save_tiny_model
from oracle import ContractModel
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM

from sparrow_sglang.plugin.launcher.audit.statistics import AuditReport
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.schedules.schedule import BudgetSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ON_GPU = torch.cuda.is_available()
SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "spread": 0.1,
}
SCHEDULES = {tokens: BudgetSchedule.fixed(tokens) for tokens in (64, 160)}
PROMPTS = [random_prompt(seed, 170 + 13 * seed) for seed in range(6)]
NEW_TOKENS = 40
# Bound of the mean |difference| of log-probs from float64: the rounding of half precision, and
# pages whose order the rounding changes.
NOISE = 0.02 if ON_GPU else 1e-4
LAYOUTS = {
    "one": {},
    "tp": {"tp_size": 2},
    "dp": {"dp_size": 2},
    "dp-attention": {
        "tp_size": 2,
        "dp_size": 2,
        "enable_dp_attention": True,
        "enable_dp_lm_head": True,
    },
}
Answer = tuple[list[int], list[int], torch.Tensor]
"""Prompt, response, and the log-probs of its tokens [T]."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("two-gpus"), "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("other"), "qwen3", seed=1, **SHAPE)


@pytest.fixture(scope="module")
def oracles(model: str) -> dict[int | None, ContractModel]:
    """Oracles by budget in tokens; the one of None decodes densely."""
    sparse = {tokens: ContractModel(model, schedule) for tokens, schedule in SCHEDULES.items()}
    return {None: ContractModel(model), **sparse}


def start(model: str, **arguments: Any) -> LocalEngine:
    engines.import_for_fork()
    return LocalEngine(
        model,
        "fixed-160",
        **{
            "skip_tokenizer_init": True,
            # float16 has three bits more than bfloat16, to tell noise from a wrong page.
            "dtype": "float16" if ON_GPU else "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 16,
            "cuda_graph_max_bs_decode": 8,
            "disable_prefill_cuda_graph": True,
            # This fusion is SGLang's default for experts; FlashInfer would compile it for minutes.
            "enforce_disable_flashinfer_allreduce_fusion": True,
            "chunked_prefill_size": 128,
            "random_seed": 0,
        }
        | arguments,
    )


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(
    model: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    # This process has the metrics of the layout before.
    for collector in [*REGISTRY._collector_to_names]:
        REGISTRY.unregister(collector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path_factory.mktemp("metrics")))
        engine = start(model, **LAYOUTS[layout], sparrow_audit_rate=1.0, enable_metrics=True)
    yield engine
    engine.close()


def replicas(layout: str) -> list[int | None]:
    return [0, 1] if "dp_size" in LAYOUTS[layout] else [None]


def sample(engine: LocalEngine, rank: int | None, **option: Any) -> list[Answer]:
    """Answers to all prompts from one replica, while the others are idle."""
    answers = engine.engine.generate(
        input_ids=PROMPTS,
        sampling_params={
            "temperature": 1.0,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "custom_params": {"sparrow": option or {"report": True}},
        },
        return_logprob=True,
        routed_dp_rank=rank,
    )
    return [
        (
            prompt,
            [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]],
            torch.tensor([v for v, _, _ in answer["meta_info"]["output_token_logprobs"]]),
        )
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]


def error(oracle: ContractModel, answers: list[Answer]) -> float:
    """Mean |difference| between the answers' log-probs and the oracle's."""
    apart = [found - expected(oracle, prompt, ids) for prompt, ids, found in answers]
    return float(torch.cat(apart).abs().mean())


def expected(oracle: ContractModel, prompt: list[int], ids: list[int]) -> torch.Tensor:
    rows = oracle.log_probs(prompt, ids)
    return rows.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).float()


def assert_decoded_under(
    tokens: int | None, answers: list[Answer], oracles: dict[int | None, ContractModel]
) -> None:
    """The answers follow this oracle, and clearly none of the others."""
    errors = {name: error(oracle, answers) for name, oracle in oracles.items()}
    assert errors[tokens] < NOISE, errors
    assert all(errors[other] > 3 * NOISE for other in errors if other != tokens), errors


def test_every_replica_decodes_as_the_contract_says(
    engine: LocalEngine, layout: str, oracles: dict[int | None, ContractModel]
) -> None:
    for rank in replicas(layout):
        assert_decoded_under(160, sample(engine, rank), oracles)
        assert_decoded_under(64, sample(engine, rank, kv_budget_tokens=64), oracles)
        assert_decoded_under(None, sample(engine, rank, dense=True), oracles)


def test_requests_of_every_replica_are_audited(
    engine: LocalEngine,
    layout: str,
    oracles: dict[int | None, ContractModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: dict[int, Any] = {}

    def add(report: AuditReport, prompt: str, prompt_tokens: int, found: Any) -> None:
        rates[prompt_tokens] = torch.tensor(found)

    monkeypatch.setattr(AuditReport, "add", add)
    apart = []
    for rank in replicas(layout):
        outcomes(engine.engine)
        rates.clear()
        answers = sample(engine, rank)
        outcomes(engine.engine)
        # Requests beyond the audit's slots are dropped.
        assert len(rates) >= 4
        for prompt, ids, _ in answers:
            if len(prompt) in rates:
                p, q = (oracles[tokens].log_probs(prompt, ids).exp() for tokens in (160, None))
                apart.append(rates[len(prompt)] - torch.minimum(p, q).sum(-1)[1:])
    assert torch.cat(apart).abs().nanmean() < NOISE


def test_new_weights_reach_every_rank(
    engine: LocalEngine, layout: str, model: str, other_model: str
) -> None:
    """New weights are loaded, then the first weights again, for later tests."""
    if layout == "dp":
        pytest.skip("SGLang loads tensors into replicas with replicated attention only")
    for version, path in (("1", other_model), ("2", model)):
        oracle = ContractModel(path, SCHEDULES[160])
        trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        engine.update_weights(trained.named_parameters(), version)
        for rank in replicas(layout):
            assert error(oracle, sample(engine, rank)) < NOISE, (version, rank)


@pytest.mark.parametrize(
    "split", [{}, {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=["one", "tp", "ep"]
)
def test_a_mixture_of_experts_decodes_as_the_contract_says(
    split: dict[str, int], tmp_path: Path
) -> None:
    if split.get("ep_size") and not ON_GPU:
        pytest.skip("SGLang's experts in plain torch are never shared out")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = save_tiny_model(tmp_path, "qwen3_moe", **SHAPE, **experts, norm_topk_prob=True)
    oracles = {None: ContractModel(model), 160: ContractModel(model, SCHEDULES[160])}
    engine = start(model, **split)
    try:
        assert_decoded_under(160, sample(engine, None), oracles)
    finally:
        engine.close()
