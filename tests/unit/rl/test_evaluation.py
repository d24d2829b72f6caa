"""pass@k against all choices of k responses."""

from itertools import combinations

import numpy as np
import pytest

from sparrow_sglang.rl.evaluation import pass_at


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass(k: int) -> None:
    prompts = [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    shares = [np.mean([any(chosen) for chosen in combinations(prompt, k)]) for prompt in prompts]
    passed = [np.array(prompt, dtype=bool) for prompt in prompts]
    assert pass_at(k, passed) == pytest.approx(np.mean(shares))


def test_binomials_of_many_responses_do_not_overflow() -> None:
    passed = np.zeros(2048, dtype=bool)
    passed[:3] = True
    # None of the three is chosen: (2048 - 256) (2047 - 256) (2046 - 256) of 2048 * 2047 * 2046.
    none = 1792 * 1791 * 1790 / (2048 * 2047 * 2046)
    assert pass_at(256, [passed]) == pytest.approx(1 - none)
