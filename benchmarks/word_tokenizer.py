"""A tokenizer for models that have none: token id 17 is the word `w17`.

With it, servers and clients that exchange text work with random weights, and all token ids survive
conversion to text and back, so that lengths in tokens are exact.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
PAD = "<|pad|>"


def save_shapes(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the files that a server needs for a model with random weights: config and tokenizer."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_word_tokenizer(folder, config["vocab_size"])


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the files of a transformers tokenizer of `vocab_size` words into `folder`."""
    _word_tokenizer({f"w{index}": index for index in range(vocab_size)}).save_pretrained(folder)


def save_chat_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a word tokenizer that also has what trainers expect of a Qwen tokenizer.

    These are a chat template, padding and end-of-text tokens, a line break, and the end-of-turn
    token; the first four words make room for them.
    """
    words = {f"w{index}": index for index in range(4, vocab_size)}
    # No mark may begin a word: special tokens are found inside words, too.
    marks = {PAD: 0, "<|endoftext|>": 1, "\n": 2, "<|im_end|>": 3}
    tokenizer = _word_tokenizer(marks | words, unknown=PAD)
    # As special tokens they are split off before whitespace is dropped.
    tokenizer.add_tokens(["\n", "<|im_end|>"], special_tokens=True)
    tokenizer.pad_token, tokenizer.eos_token = PAD, "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _word_tokenizer(vocabulary: dict[str, int], unknown: str = "w0") -> Any:
    """A `transformers.PreTrainedTokenizerFast`; words outside the vocabulary become `unknown`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
