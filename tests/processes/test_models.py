"""The embedded model: converted by several processes, by one that is killed, and what it holds."""

import multiprocessing
import time
from pathlib import Path

import pytest

from sparrow_sglang import models

MODEL = "smollm2-135m-instruct-0.1.2"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def convert_in_this_process(calls: Path) -> None:
    """By a fake conversion that writes all files at once, and takes half a second."""

    def convert(gguf: Path, folder: Path, **_: object) -> None:
        with open(calls, "a") as log:
            log.write("called\n")
        folder.mkdir()
        for name in models.FILES:
            (folder / name).write_text("x")
        time.sleep(0.5)

    models._convert = convert
    assert visible(models.embedded_model()) == sorted(models.FILES)


def test_concurrent_converters_all_end_well_and_one_converts(own_cache: Path) -> None:
    calls, fork = own_cache.parent / "calls", multiprocessing.get_context("fork")
    processes = [fork.Process(target=convert_in_this_process, args=(calls,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert calls.read_text() == "called\n"
    assert visible(own_cache) == [MODEL]


# -- what is in it; uses the checkpoint in the user's cache


@pytest.mark.slow
def test_weights_are_those_of_the_package_and_it_answers() -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.embedded_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = {tensor.name: tensor for tensor in GGUFReader(models._gguf_file()).tensors}
    for name, weight in (
        ("token_embd.weight", model.model.embed_tokens.weight),
        ("blk.7.ffn_down.weight", model.model.layers[7].mlp.down_proj.weight),
        ("blk.29.attn_v.weight", model.model.layers[29].self_attn.v_proj.weight),
        ("output_norm.weight", model.model.norm.weight),
    ):
        wanted = torch.tensor(dequantize(stored[name].data, stored[name].tensor_type))
        assert torch.equal(weight, wanted.to(torch.bfloat16)), name

    # Query and key rows are stored in another order: only a working model shows they are right.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**chat, max_new_tokens=20, do_sample=False)[0]
    text = tokenizer.decode(answer[chat["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
