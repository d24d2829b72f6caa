"""Pushing adapters to a running engine, against the checkpoints that PEFT merges them to."""

import pytest
from adapted_models import RANK, save_adapter
from engines import greedy, random_prompt, sparse, start_engine
from oracle import ContractModel
from peft import LoraConfig
from safetensors.torch import load_file

from sparrow_sglang import push_adapter
from sparrow_sglang.client.endpoint import EndpointError
from sparrow_sglang.schedules.schedule import BudgetSchedule

SCHEDULE = BudgetSchedule.fixed(64)
PROMPT = random_prompt(0, 90)
SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def engine(sharp_llama):
    with start_engine(
        sharp_llama,
        **sparse(SCHEDULE.name),
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=list(SERVED),
        max_loras_per_batch=3,
        lora_backend="torch_native",
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def saved(sharp_llama, tmp_path_factory):
    """Folders of adapters and merged checkpoints; SGLang itself does not load the second."""
    modules = {"all": SERVED, "some": ("q_proj", "up_proj")}
    return {
        name: save_adapter(sharp_llama, tmp_path_factory.mktemp(name), seed, modules[name])
        for seed, name in enumerate(modules)
    }


def generate(engine, name: str | None) -> dict:
    return greedy(engine, [PROMPT], 30, lora_path=name)[0]


def assert_law(output: dict, model: str) -> None:
    """The log-probs are those of `model`, decoded sparsely."""
    ContractModel(model, SCHEDULE).assert_greedy(PROMPT, output)


def test_a_pushed_adapter_is_the_merged_model_and_replaces_the_former(engine, saved, sharp_llama):
    folder, merged = saved["all"]
    push_adapter(engine, "mine", folder)
    assert_law(generate(engine, "mine"), merged)
    # Push as a training loop does: PEFT's config, and tensors that change after the call.
    folder, merged = saved["some"]
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    config = LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    push_adapter(engine, "mine", tensors, config.to_dict())
    for tensor in tensors.values():
        tensor.zero_()
    output = generate(engine, "mine")
    assert output["meta_info"]["cached_tokens"] == 0
    assert_law(output, merged)
    assert_law(generate(engine, None), sharp_llama)


def test_what_does_not_fit_is_refused_and_the_former_stays(engine, saved):
    folder, merged = saved["some"]
    push_adapter(engine, "mine", folder)
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    key = next(name for name in tensors if "q_proj.lora_A" in name)
    larger = {
        name: tensor.repeat(3, 1) if "lora_A" in name else tensor.repeat(1, 3)
        for name, tensor in tensors.items()
    }
    for wrong, fields in [
        (larger, config | {"r": 3 * RANK}),
        (tensors, config | {"lora_alpha": None}),
        (tensors, config | {"rank_pattern": {"q_proj": 2}}),
        (tensors, config | {"peft_type": "IA3"}),
        (tensors, config | {"target_modules": ["lm_head"]}),
        (tensors | {key: tensors[key][:, :-1]}, config),
        (tensors | {"q_proj": tensors[key]}, config),
        # Log-probs of NaN would end the sampler, and with it the scheduler.
        (tensors | {key: tensors[key] * float("nan")}, config),
        (tensors | {key: tensors[key] + 1e38}, config),
        (tensors, config | {"lora_alpha": 1e5}),
        ({}, config),
    ]:
        with pytest.raises(EndpointError):
            push_adapter(engine, "mine", wrong, fields)
    with pytest.raises(EndpointError, match="name='a:b'"):
        push_adapter(engine, "a:b", folder)
    assert_law(generate(engine, "mine"), merged)
