"""Write a LoRA adapter with small random weights for the embedded model; needs peft."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sparrow_sglang.models import embedded_model


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(embedded_model())
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    # PEFT starts adapters without any effect; these weights have one.
    config.init_lora_weights = "gaussian"
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python make_adapter.py FOLDER")
    main(sys.argv[1])
