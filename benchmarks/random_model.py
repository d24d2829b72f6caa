"""A checkpoint of random weights in the shape of a model, which a trainer can load and serve.

`python -m sparrow_sglang.benchmarks.random_model SHAPE FOLDER` writes it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from sparrow_sglang.benchmarks.common import MODELS, known_models
from sparrow_sglang.benchmarks.word_tokenizer import save_chat_tokenizer
from sparrow_sglang.command_line import OneLineParser


def save_random_model(shape: str, folder: Path) -> None:
    """Write bf16 weights, drawn anew at each call, and a tokenizer of words.

    There is no end-of-text token, so that every response is as long as asked for.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODELS / shape, eos_token_id=None, bos_token_id=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_chat_tokenizer(folder, config.vocab_size)
    # Without this file, the end-of-text token would be taken from the tokenizer.
    generation = {"eos_token_id": None, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m sparrow_sglang.benchmarks.random_model")
    parser.add_argument("shape", choices=known_models())
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    save_random_model(args.shape, args.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
