"""The tokenizer of random models."""

from pathlib import Path

import pytest

from sparrow_sglang.benchmarks.random_model import save_chat_tokenizer


@pytest.mark.parametrize(
    ("text", "ids"),
    [("\n", [2]), ("<|im_end|>", [3]), ("w4 foreign\nw199<|im_end|>", [4, 0, 2, 199, 3])],
)
def test_a_chat_tokenizer_has_line_breaks_and_ends_of_turns(
    tmp_path: Path, text: str, ids: list[int]
) -> None:
    from transformers import AutoTokenizer

    save_chat_tokenizer(tmp_path, 300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    chat = [{"role": "user", "content": "w7 w8"}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == [7, 8]
