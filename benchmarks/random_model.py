"""A checkpoint of random weights in the shape of a model, which a trainer or a server can load.
`python -m sparrow_sglang.benchmarks.random_model SHAPE FOLDER` writes it. In its tokenizer token id
17 is the word `w17`, so that all ids survive conversion to text and back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.common import MODELS, known_models
from sparrow_sglang.command_line import OneLineParser

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
PAD = "<|pad|>"


def save_random_model(shape: str, folder: Path) -> None:
    """Write random bf16 weights, and a tokenizer of words without an end of text."""
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


def save_chat_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a word tokenizer with what trainers expect of a Qwen tokenizer: a chat template and, in
    place of the first four words, padding, end of text, a line break and end of turn."""
    words = {f"w{index}": index for index in range(4, vocab_size)}
    # No mark may begin a word: special tokens are found inside words, too.
    marks = {PAD: 0, "<|endoftext|>": 1, "\n": 2, "<|im_end|>": 3}
    tokenizer = word_tokenizer(marks | words, unknown=PAD)
    # As special tokens they are split off before whitespace is dropped.
    tokenizer.add_tokens(["\n", "<|im_end|>"], special_tokens=True)
    tokenizer.pad_token, tokenizer.eos_token = PAD, "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def word_tokenizer(vocabulary: dict[str, int], unknown: str) -> Any:
    """A `transformers.PreTrainedTokenizerFast`; words outside the vocabulary become `unknown`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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
