"""The tokenizer of models that have none."""

from pathlib import Path

from sparrow_sglang.benchmarks.rollouts.word_tokenizer import save_word_tokenizer


def test_any_token_ids_survive_the_way_to_text_and_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_word_tokenizer(tmp_path, 3000)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.num_special_tokens_to_add()) == (3000, 0)
    ids = [0, 2999, 17, 17, *range(0, 3000, 7)]
    assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=True)) == ids
