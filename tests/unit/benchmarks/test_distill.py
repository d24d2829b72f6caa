"""What `sparrow bench distill` makes of a run's metrics."""

import pytest

from sparrow_sglang.benchmarks.distill import row_of


@pytest.mark.parametrize(
    ("scales", "speed"), [([0, 0.5, 1, 0], 35), ([0, 0, 0, 1], None), ([1], None)]
)
def test_the_speed_is_that_of_rollouts_with_the_adapter(scales, speed) -> None:
    """A step chooses the scale of the next one's rollout."""
    steps = [
        {"sparrow/rollout_tokens_per_s": 10 * (1 + i), "sparrow/distill_scale": scale}
        for i, scale in enumerate(scales)
    ]
    row = row_of("lora", [step | {"timing_s/step": 1.0} for step in steps])
    assert row["rollout_tokens_per_s"] == speed
    assert len(row["rollout_tokens_per_s_all"]) == len(scales) - 1
