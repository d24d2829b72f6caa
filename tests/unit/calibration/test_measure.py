"""What calibration generates, and what it need not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow_sglang.calibration import measure as calibration_measure
from sparrow_sglang.calibration import prompts as calibration_prompts
from sparrow_sglang.calibration.store import WorkFolder
from sparrow_sglang.progress import Progress


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


class Recorder:
    """An endpoint that answers four tokens to each request, and rates of all but the first."""

    def generate(
        self, requests: Sequence[Any], finished: Callable[[], None]
    ) -> list[dict[str, Any]]:
        meta_info = {"sparrow_acceptance": [[0.75, None, 0.5]]}
        return [{"output_ids": [3, 4, 5, 6], "meta_info": meta_info} for _ in requests]


def test_a_token_without_a_rate_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_measure, "connect", lambda target: target)
    prompt = calibration_prompts.Prompt("p", tuple(range(3, 103)))
    arms, work = [calibration_measure.fixed_arm(64, 16)], WorkFolder(tmp_path, {})
    units = calibration_measure.units_of_work([prompt], arms, 1, 4, 320)
    progress = Progress(1, "generations")
    calibration_measure.measure(Recorder(), units, work, 1, progress)
    [tokens] = calibration_measure.tokens_by_arm(units, work)["fixed-64"]
    # The second token of the response is computed with 101 tokens cached.
    np.testing.assert_array_equal(tokens.cached, [101, 103])
    np.testing.assert_array_equal(tokens.rates, [0.75, 0.5])
