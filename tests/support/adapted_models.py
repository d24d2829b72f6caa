"""Tiny models with a tokenizer, and LoRA adapters for them with the checkpoints they merge to."""

from pathlib import Path
from typing import Any

import torch
from engines import VOCAB_SIZE, save_tiny_model

from sparrow_sglang.benchmarks.random_model import CHAT_TEMPLATE, word_tokenizer

RANK = 4
# Arguments of a server for such a model and its adapters.
SERVED: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "grammar_backend": "none",
    "attention_backend": "sparrow",
    "enable_lora": True,
    "lora_backend": "torch_native",
}


def save_model_of_words(folder: Path, **overrides: Any) -> str:
    """A tiny random checkpoint whose token 17 is the word `w17`, in chats too. `overrides` are
    fields of its config."""
    save_tiny_model(folder, spread=0.15, **overrides)
    tokenizer = word_tokenizer({f"w{index}": index for index in range(VOCAB_SIZE)}, "w0")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def words(ids: list[int]) -> str:
    """The text of token ids of such a model."""
    return " ".join(f"w{token}" for token in ids)


def token_ids(text: str) -> list[int]:
    """The reverse of `words`."""
    return [int(word.removeprefix("w")) for word in text.split()]


def save_adapter(model: str, folder: Path, seed: int, modules: tuple[str, ...]) -> tuple[str, str]:
    """Folders of a random adapter and of the checkpoint that it merges to, both written by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=8, target_modules=list(modules))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapter, merged = folder / "adapter", folder / "merged"
    adapted.save_pretrained(adapter)
    adapted.merge_and_unload().save_pretrained(merged)
    return str(adapter), str(merged)
