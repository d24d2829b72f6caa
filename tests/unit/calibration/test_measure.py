"""What calibration generates, and what it need not."""

from sparrow_sglang.calibration import measure as calibration_measure
from sparrow_sglang.calibration import prompts as calibration_prompts


def test_dense_units_are_not_generated() -> None:
    prompt = calibration_prompts.Prompt("p", tuple(range(3, 103)))
    arms = [calibration_measure.fixed_arm(budget, 16) for budget in (96, 112, 128, 144)]
    units = calibration_measure.units_of_work([prompt], arms, 2, 30, 320)
    # Steps attend to 101 to 129 tokens: 7 to 9 pages.
    assert [u.arm.schedule.budget_tokens[0] for u in units] == [96, 96, 112, 112, 128, 128]


def test_a_given_response_is_decoded_once_and_to_its_end() -> None:
    prompt = calibration_prompts.Prompt("p", tuple(range(3, 103)), tuple(range(20)))
    arms = [calibration_measure.fixed_arm(64, 16)]
    (unit,) = calibration_measure.units_of_work([prompt], arms, 2, 30, 320)
    assert unit.new_tokens == 20


def test_dense_decode_is_measured_at_every_step() -> None:
    prompt = calibration_prompts.Prompt("p", tuple(range(3, 103)))
    arm = calibration_measure.dense_arm(320, 16)
    (unit,) = calibration_measure.units_of_work([prompt], [arm], 1, 30, 320)
    assert unit.new_tokens == 30 and unit.arm.measures(101)
    assert not calibration_measure.fixed_arm(320, 16).measures(101)
