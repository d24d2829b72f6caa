"""Acceptance rates against whole distributions in float64."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from sparrow_sglang.mismatch.acceptance import acceptance_rate, mean_acceptance_from_samples


class TestExact:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    @pytest.mark.parametrize("chunk", [1, 7, 1000])
    def test_equals_float64(self, dtype: torch.dtype, temperature: float, chunk: int) -> None:
        generator = torch.Generator().manual_seed(chunk)
        sparse = (4 * torch.randn(9, 61, generator=generator)).to(dtype)
        dense = (sparse + torch.randn(9, 61, generator=generator)).to(dtype)
        got = acceptance_rate(sparse, dense, temperature, vocab_chunk=chunk)
        assert got.dtype == torch.float32
        for row in range(9):
            logits = (side[row].double().numpy() for side in (sparse, dense))
            expected = np.minimum(*(softmax(each / temperature) for each in logits)).sum()
            assert got[row].item() == pytest.approx(expected, abs=2e-6)

    @pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
    def test_of_a_distribution_with_itself_is_one(self, scale: float) -> None:
        logits = scale * torch.randn(40, 5000, generator=torch.Generator().manual_seed(1))
        alpha = acceptance_rate(logits, logits.clone(), vocab_chunk=700)
        assert (alpha <= 1).all()
        torch.testing.assert_close(alpha, torch.ones(40), atol=2e-6, rtol=0)

    def test_of_distributions_without_a_common_token_is_zero(self) -> None:
        sparse = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
        dense = torch.tensor([[-torch.inf, -torch.inf, 2.0, 0.0]])
        assert acceptance_rate(sparse, dense, vocab_chunk=2).tolist() == [0.0]

    def test_more_positions_than_one_block_and_no_positions(self) -> None:
        logits = torch.randn(2, 2500, 5, generator=torch.Generator().manual_seed(3))
        got = acceptance_rate(*logits)
        expected = torch.minimum(*torch.softmax(logits, dim=2)).sum(1)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
        assert acceptance_rate(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)

    def test_makes_no_second_full_size_tensor(self) -> None:
        largest = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal largest
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and result._base is None:
                    largest = max(largest, result.numel())
                return result

        logits = torch.randn(2, 3000, 400)
        with Watch():
            acceptance_rate(logits[0], logits[1], vocab_chunk=50)
        assert 0 < largest <= 1024 * 50

    def test_refuses_what_it_cannot_judge(self) -> None:
        logits = torch.zeros(2, 4)
        with pytest.raises(ValueError, match="sparse_logits"):
            acceptance_rate(logits, torch.zeros(2, 5))
        with pytest.raises(ValueError, match="temperature=0"):
            acceptance_rate(logits, logits, temperature=0)
        logits[1, 2] = torch.nan
        with pytest.raises(ValueError, match="logits"):
            acceptance_rate(logits, torch.zeros(2, 4))


class TestSampled:
    def test_its_mean_is_unbiased_and_its_5th_percentile_is_not_the_tail(self) -> None:
        """Many positions with one sampled token each, as a rollout has them."""
        random = np.random.default_rng(0)
        positions, vocab = 40_000, 12
        logits = random.normal(size=(positions, vocab)) * 2
        dense_logits = logits + random.normal(size=(positions, vocab)) * 0.4
        sparse, dense = softmax(logits, 1), softmax(dense_logits, 1)
        alpha = np.minimum(sparse, dense).sum(axis=1)
        token = (sparse.cumsum(1) < random.random((positions, 1))).sum(axis=1).clip(max=vocab - 1)
        rows = np.arange(positions)
        sparse_log, dense_log = np.log(sparse[rows, token]), np.log(dense[rows, token])

        estimate = mean_acceptance_from_samples(sparse_log, dense_log)
        assert estimate.tokens == positions
        assert abs(estimate.mean - alpha.mean()) < 3 * estimate.standard_error
        assert estimate.standard_error < 0.002
        tail = np.percentile(alpha, 5)
        not_the_tail = np.percentile(np.minimum(1, np.exp(dense_log - sparse_log)), 5)
        assert not_the_tail < tail - 0.1
