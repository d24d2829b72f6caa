"""A tokenizer for models that have none: token id 17 is the word `w17`.

Servers and clients that speak text then work with random weights, and any ids survive the way to
text and back, so that lengths in tokens are exact.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_shapes(folder: Path, config: Mapping[str, Any]) -> None:
    """Write what a server needs of a model with random weights: its config and a tokenizer."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_word_tokenizer(folder, config["vocab_size"])


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the files of a transformers tokenizer of `vocab_size` words into `folder`."""
    _word_tokenizer({f"w{index}": index for index in range(vocab_size)}).save_pretrained(folder)


def save_chat_tokenizer(folder: Path, vocab_size: int) -> None:
    """As `save_word_tokenizer`, with what trainers ask of a Qwen tokenizer in place of words.

    These are a chat template, tokens that pad and end a text, a line break, and the end of a turn.
    """
    words = {f"w{index}": index for index in range(4, vocab_size)}
    marks = {"w0": 0, "w1": 1, "\n": 2, "<|im_end|>": 3}
    tokenizer = _word_tokenizer(marks | words)
    # Split off before whitespace is dropped.
    tokenizer.add_tokens(["\n", "<|im_end|>"], special_tokens=True)
    tokenizer.pad_token, tokenizer.eos_token = "w0", "w1"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _word_tokenizer(vocabulary: dict[str, int]) -> Any:
    """A `transformers.PreTrainedTokenizerFast`; words that are not in the vocabulary are w0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
