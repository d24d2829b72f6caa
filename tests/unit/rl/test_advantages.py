"""Group-relative advantages against arithmetic by hand."""

import numpy as np

from sparrow_sglang.rl.advantages import group_advantages


def test_by_hand() -> None:
    # Mean 1/4; sample variance (3/16 * ... ): deviations -1/4 three times and 3/4, squares sum to
    # 3/16 + 9/16 = 3/4, over n - 1 = 3 is 1/4, so the standard deviation is 1/2.
    (values,) = group_advantages([[0, 0, 0, 1]]).values
    expected = np.array([-0.25, -0.25, -0.25, 0.75]) / (0.5 + 1e-6)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    (values,) = group_advantages([[0.0, 0.5, 1.0, 0.5]], std_normalisation=False).values
    np.testing.assert_allclose(values, [-0.5, 0, 0.5, 0], atol=1e-15)


def test_groups_without_spread_are_left_out_and_counted() -> None:
    """0.1 eight times has a rounded mean, so that its computed deviation is not 0."""
    advantages = group_advantages([[0.1] * 8, [0, 1], [1.0] * 3])
    assert [group.any() for group in advantages.in_loss] == [False, True, False]
    assert not advantages.values[0].any() and not advantages.values[2].any()
    assert advantages.metrics() == {
        "sparrow/zero_std_groups": 2.0,
        "sparrow/zero_std_fraction": 2 / 3,
    }


def test_a_missing_reward_is_in_no_statistics_and_no_loss() -> None:
    (values,) = (advantages := group_advantages([[1.0, None, 3.0, None, 2.0]])).values
    (known,) = group_advantages([[1.0, 3.0, 2.0]]).values
    assert values[[0, 2, 4]].tolist() == known.tolist() and values[[1, 3]].tolist() == [0, 0]
    assert advantages.in_loss[0].tolist() == [True, False, True, False, True]
    nothing = group_advantages([[None, None], [None, 1.0], [1.0, None, 1.0]])
    assert not any(group.any() for group in (*nothing.values, *nothing.in_loss))
