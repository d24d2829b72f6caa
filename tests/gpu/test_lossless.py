"""Lossless decoding on a GPU: kernels, CUDA graphs and streams of a round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import random_prompt, save_tiny_model, start_engine, weight_updates
from rounds import VARIED, require_varied
from safetensors.torch import load_file
from sampled_answers import SETTINGS, SampledAnswers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DRAFTS = {
    "speculative_algorithm": "SPARROW",
    "speculative_num_draft_tokens": 5,
    "sparrow_draft_weights": "fp8",
}
# Twice the log-prob noise of bf16 between two implementations of the same dense model.
ROUNDING = 0.25


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> SampledAnswers:
    return SampledAnswers(tmp_path_factory.mktemp("sampled"), "bfloat16")


def test_sampled_answers_have_the_dense_distribution(sampled: SampledAnswers) -> None:
    values = sampled.p_values(SETTINGS, **DRAFTS)
    assert min(values) > 1e-4, values


def test_the_control_of_sparse_decode_has_another(sampled: SampledAnswers) -> None:
    assert sampled.p_values(SETTINGS[:1])[0] < 1e-12


@pytest.mark.parametrize(
    ("dense", "graphs", "measured", "ranks"),
    [
        ("fa3", True, False, 1),
        ("fa3", True, True, 1),
        ("fa3", True, False, 2),
        ("fa3", False, False, 1),
        ("flashinfer", True, False, 1),
        ("flashinfer", True, True, 1),
        ("triton", True, False, 1),
        ("triton", True, True, 1),
    ],
)
def test_greedy_tokens_lead_densely(
    dense: str,
    graphs: bool,
    measured: bool,
    ranks: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each token of an answer is the best one after those before it, up to rounding, and its
    log-prob is that of a dense prefill; batches of one to five, of which some have no graph. Drafts
    of so small a model do not pay, so that after the measurement, rounds follow a plan."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    model = save_tiny_model(
        tmp_path,
        spread=0.1,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )
    prompts = [random_prompt(seed, length) for seed, length in enumerate((300, 40, 129, 700, 15))]
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "chunked_prefill_size": 256,
        "page_size": 16,
        "disable_prefill_cuda_graph": True,
        "max_running_requests": 8,
        "max_total_tokens": 32768,
    }
    greedy = {"temperature": 0, "max_new_tokens": 100}
    with start_engine(
        model,
        attention_backend="sparrow",
        sparrow_schedule="fixed-64",
        sparrow_dense_backend=dense,
        measured=measured,
        rounds=VARIED if measured else (),
        disable_cuda_graph=not graphs,
        tp_size=ranks,
        **({"cuda_graph_bs_decode": [1, 2, 4]} if graphs else {}),
        **DRAFTS,
        **common,
    ) as engine:
        asked = [*prompts[:1], *prompts]
        answers = [
            answer
            for batch in (prompts[:1], prompts)
            for answer in engine.generate(
                input_ids=batch, sampling_params=greedy, return_logprob=not measured
            )
        ]
        scored = engine.generate(
            input_ids=[
                prompt + answer["output_ids"] for prompt, answer in zip(asked, answers, strict=True)
            ],
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
    for prompt, answer, score in zip(asked, answers, scored, strict=True):
        about, dense_about = answer["meta_info"], score["meta_info"]
        rows = dense_about["input_token_logprobs"][len(prompt) :]
        best = dense_about["input_top_logprobs"][len(prompt) :]
        assert len(rows) == 100
        for (logprob, *_), [(top, *_)] in zip(rows, best, strict=True):
            assert top - logprob < ROUNDING
        # Without log-probs, rounds without drafts are dense decode steps.
        returned = [] if measured else about["output_token_logprobs"]
        for (value, *_), (logprob, *_) in zip(returned, rows, strict=False):
            assert abs(value - logprob) < ROUNDING
        if measured:
            require_varied(answer)
        else:
            assert 1 < about["spec_accept_length"] <= 5
    assert ("rounds draft where it pays" in capfd.readouterr().err) == (graphs and measured)


def test_released_memory_and_new_weights(tmp_path: Path) -> None:
    """Graphs of drafts and verifications read what was loaded after their memory was released."""
    pytest.importorskip("torch_memory_saver")
    shape: dict[str, Any] = {
        "spread": 0.1,
        # Several programs share a tile of a weight.
        "hidden_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    models = [save_tiny_model(tmp_path / str(seed), seed=seed, **shape) for seed in (0, 1)]
    weights = [load_file(Path(model) / "model.safetensors", device="cuda") for model in models]
    fields: dict[str, Any] = {
        "input_ids": random_prompt(0, 300),
        "sampling_params": {"temperature": 0, "max_new_tokens": 100},
        "return_logprob": True,
    }
    answers = []
    with start_engine(
        models[0],
        attention_backend="sparrow",
        sparrow_schedule="fixed-64",
        sparrow_dense_backend="fa3",
        enable_memory_saver=True,
        dtype="bfloat16",
        page_size=16,
        disable_prefill_cuda_graph=True,
        max_running_requests=4,
        max_total_tokens=32768,
        cuda_graph_bs_decode=[1, 2],
        **DRAFTS,
    ) as engine:
        answers.append(engine.generate(**fields))
        for loaded in (weights[1], weights[0]):
            free = torch.cuda.mem_get_info()[0]
            engine.release_memory_occupation()
            assert torch.cuda.mem_get_info()[0] > free
            engine.resume_memory_occupation(["weights"])
            with weight_updates(engine):
                assert engine.update_weights_from_tensor(list(loaded.items()))[0]
            engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
            answers.append(engine.generate(**fields))
    first, other, again = (answer["output_ids"] for answer in answers)
    assert first == again != other
    assert all(1 < answer["meta_info"]["spec_accept_length"] <= 5 for answer in answers)
