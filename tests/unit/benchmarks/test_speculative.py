"""The estimate of speculative decoding, and that the committed one is what the command computes."""

import json
import random

import pytest

from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.steps import speculative


def test_expected_tokens_are_those_of_a_simulation() -> None:
    draw = random.Random(0)

    def tokens() -> int:
        accepted = 0
        while accepted < 4 and draw.random() < 0.7:
            accepted += 1
        return accepted + 1

    mean = sum(tokens() for _ in range(100_000)) / 100_000
    assert speculative.expected_tokens(0.7, 4) == pytest.approx(mean, rel=0.01)


def test_the_committed_estimate_is_computed_from_the_committed_results(tmp_path) -> None:
    assert speculative.main(["--out", str(tmp_path / "estimate.json")]) == 0
    committed, computed = (
        json.loads(path.read_text())
        for path in (ROOT / RESULTS / "speculative_estimate.json", tmp_path / "estimate.json")
    )
    assert committed["acceptance"] == pytest.approx(computed["acceptance"])
    for then, now in zip(committed["rows"], computed["rows"], strict=True):
        assert then == pytest.approx(now)
        # A verification costs a dense step, and yields no more than it and the drafts would alone.
        assert 1 <= now["speculative_gain"] <= now["sparse_gain"]
