"""Natural text with given responses, for checks of schedules."""

from sparrow_sglang.benchmarks.rollouts.given_texts import corpus, given_texts


def test_each_row_is_a_slice_of_the_corpus_and_rows_fill_the_context() -> None:
    text = corpus()
    rows = given_texts(lambda given: list(given.encode()), 4096, 8, 100, seed=0)
    for row in rows:
        assert len(row["response"]) == 100
        assert bytes(row["input_ids"] + row["response"]) in text.encode()
    lengths = [len(row["input_ids"]) for row in rows]
    assert lengths == sorted(lengths) and 3900 < lengths[-1] + 100 < 4096
    assert {length // 512 for length in lengths[:-1]} == set(range(7))
