"""Stock SGLang on the CPU platform, against transformers and peft."""

import random
from pathlib import Path

import pytest
import torch
from adapted_models import RANK, save_adapter
from engines import NUM_LAYERS, VOCAB_SIZE, flush, start_engine
from transformers import AutoModelForCausalLM

PAGE = 16
CHUNK = 64


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * length + seed).choices(range(3, VOCAB_SIZE), k=length)


def reference(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


@torch.no_grad()
def log_probs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Log-probs [L, V] of the token after each of `tokens`."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def generate(engine, prompts: list[list[int]], new_tokens: int = 12, **request) -> list[dict]:
    return engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens},
        return_logprob=True,
        **request,
    )


def assert_greedy(model: torch.nn.Module, tokens: list[int], output: dict) -> None:
    """`output` is the greedy continuation of `tokens` under `model`, with its log-probs."""
    answer = output["output_ids"]
    expected = log_probs(model, tokens + answer)[len(tokens) - 1 : -1]
    got = torch.tensor([value for value, *_ in output["meta_info"]["output_token_logprobs"]])
    chosen = expected[range(len(answer)), answer]
    torch.testing.assert_close(got.double(), chosen, atol=1e-4, rtol=0)
    torch.testing.assert_close(chosen, expected.max(-1).values, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def dense_model(sharp_llama):
    return reference(sharp_llama)


@pytest.fixture(scope="module")
def engine(sharp_llama):
    with start_engine(sharp_llama, page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        yield engine


def test_batch_of_chunked_and_whole_prompts(engine, dense_model):
    prompts = [prompt(n) for n in (3, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 200)]
    for tokens, output in zip(prompts, generate(engine, prompts), strict=True):
        assert_greedy(dense_model, tokens, output)


def test_radix_cache_hits_in_whole_pages(engine, dense_model):
    flush(engine)
    tokens = prompt(100)
    branch = tokens[:40] + prompt(50, seed=1)
    hits = []
    for request in (tokens, tokens, branch):
        [output] = generate(engine, [request])
        hits.append(output["meta_info"]["cached_tokens"])
        assert_greedy(dense_model, request, output)
    # 96 = 6 whole pages of 99 tokens (one token is always computed); 32 = 2 of the shared 40.
    assert hits == [0, 96, 32]
    # Without sparse decode, generated tokens are a prefix as in any other SGLang.
    [longer] = generate(engine, [tokens], 40)
    [turn] = generate(engine, [tokens + longer["output_ids"] + prompt(20)])
    assert turn["meta_info"]["cached_tokens"] == 128


def test_lora_load_generate_unload(sharp_llama, dense_model, tmp_path):
    from safetensors.torch import load_file

    adapter, merged = save_adapter(sharp_llama, tmp_path, 3, ("q_proj", "v_proj"))
    adapted = reference(merged)
    config = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    assert len(tensors) == 4 * NUM_LAYERS
    tokens = prompt(90)
    with start_engine(
        sharp_llama,
        page_size=PAGE,
        enable_lora=True,
        max_lora_rank=RANK,
        lora_target_modules=["q_proj", "v_proj"],
    ) as engine:
        assert engine.load_lora_adapter("disk", adapter).success
        loaded = engine.load_lora_adapter_from_tensors(
            "memory", tensors, config | {"peft_type": "LORA"}
        )
        assert loaded.success
        batch = generate(engine, [tokens] * 3, lora_path=["disk", None, "memory"])
        for model, output in zip((adapted, dense_model, adapted), batch, strict=True):
            assert_greedy(model, tokens, output)
        assert batch[0]["output_ids"] != batch[1]["output_ids"]
        # The base model and the adapter each have their own cached prefix.
        again = generate(engine, [tokens] * 2, lora_path=["disk", None])
        assert [output["meta_info"]["cached_tokens"] for output in again] == [80, 80]
        assert_greedy(adapted, tokens, again[0])
        unloaded = engine.unload_lora_adapter("memory")
        assert unloaded.success
        assert list(unloaded.loaded_adapters) == ["disk"]
