"""How far rotary pairs tell landmarks apart, against numpy, one query and landmark at a time."""

import numpy as np
import pytest
import torch

from sparrow_sglang.attention_backends.pair_variance import pair_variances


@pytest.mark.parametrize(("heads", "tokens", "length"), [((4, 2), 4, 67), ((3, 3), 2, 40)])
def test_it_is_the_variance_of_a_pairs_part_of_each_product(
    heads: tuple[int, int], tokens: int, length: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(9, heads[0], 12, generator=generator)
    keys = 3 + torch.randn(length, heads[1], 12, generator=generator)
    found = pair_variances(q, keys, tokens)
    assert found.dtype == torch.float64
    landmarks = [
        keys[start : start + tokens].double().numpy().mean(0)
        for start in range(0, length - tokens + 1, tokens)
    ]
    group = heads[0] // heads[1]
    expected = np.zeros((heads[1], 6))
    for query in q.double().numpy():
        for head in range(heads[0]):
            for pair in range(6):
                parts = [
                    query[head, pair] * mark[head // group, pair]
                    + query[head, pair + 6] * mark[head // group, pair + 6]
                    for mark in landmarks
                ]
                expected[head // group, pair] += np.var(parts)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
