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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
