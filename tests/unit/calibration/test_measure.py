"""What calibration generates, and what it need not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow_sglang.calibration import measure as calibration_measure
from sparrow_sglang.calibration.prompts import Prompt
from sparrow_sglang.calibration.samples import WorkFolder, plan_samples
from sparrow_sglang.progress import Progress
from sparrow_sglang.schedules.schedule import BudgetSchedule

PROMPT = Prompt("p", tuple(range(3, 103)))


def test_dense_samples_are_not_generated() -> None:
    schedules = [BudgetSchedule.fixed(budget) for budget in (96, 112, 128, 144)]
    samples = plan_samples([PROMPT], schedules, 2, 30, 320)
    # Steps attend to 101 to 129 tokens: 7 to 9 pages.
    budgets = [sample.schedule.budget_tokens[0] for sample in samples]
    assert budgets == [96, 96, 112, 112, 128, 128]


class Engine:
    """Answers four tokens to each request, and rates of all but the first; interrupted after
    `pairs` of them."""

    def __init__(self, pairs: int = 9) -> None:
        self.pairs = pairs

    def get_server_info(self) -> dict[str, int]:
        return {"max_total_num_tokens": 10_000}

    def generate_pairs(
        self,
        requests: Sequence[Any],
        following: Callable[[int, Any], Any],
        finished: Callable[[int, Any], object],
    ) -> None:
        for number in reversed(range(len(requests))):
            if self.pairs == 0:
                raise KeyboardInterrupt
            following(number, {"output_ids": [3, 4, 5, 6]})
            finished(number, {"meta_info": {"sparrow_acceptance": [[0.75, None, 0.5]]}})
            self.pairs -= 1


@pytest.fixture(autouse=True)
def engine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_measure, "EngineEndpoint", lambda engine: engine)


def test_a_token_without_a_rate_is_left_out(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, {})
    samples = plan_samples([PROMPT], [BudgetSchedule.fixed(64)], 1, 4, 320)
    calibration_measure.measure(Engine(), samples, work, 1, Progress(1, "generations"))
    [tokens] = work.by_schedule(samples)["fixed-64"]
    # The second token of the response is computed with 101 tokens cached.
    np.testing.assert_array_equal(tokens.cached, [101, 103])
    np.testing.assert_array_equal(tokens.rates, [0.75, 0.5])


def test_a_batch_fits_into_the_kv_pool(tmp_path: Path) -> None:
    """Otherwise generations are scored only after all that wait, and a kill loses all of them."""
    sizes: list[int] = []

    class Small(Engine):
        def get_server_info(self) -> dict[str, int]:
            return {"max_total_num_tokens": 2 * 100 + 5 * 8}

        def generate_pairs(self, requests: Sequence[Any], *calls: Any) -> None:
            sizes.append(len(requests))
            super().generate_pairs(requests, *calls)

    prompts = [Prompt(str(first), (first, *PROMPT.input_ids[1:])) for first in (5, 6, 7)]
    samples = plan_samples(prompts, [BudgetSchedule.fixed(n) for n in (64, 80, 96)], 1, 4, 320)
    calibration_measure.measure(Small(), samples, WorkFolder(tmp_path, {}), 8, Progress(9, "x"))
    # Three of a prompt share its prefix.
    assert sizes == [5, 4]


def test_an_interrupt_keeps_what_was_measured_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = WorkFolder(tmp_path, {})
    samples = plan_samples([PROMPT], [BudgetSchedule.fixed(64)], 5, 4, 320)
    with pytest.raises(KeyboardInterrupt):
        calibration_measure.measure(Engine(pairs=3), samples, work, 4, Progress(5, "generations"))
    assert sorted(work.load()) == [1, 2, 3]
    assert "3 of 5 generations are kept" in capsys.readouterr().out
    calibration_measure.measure(Engine(), samples, work, 4, Progress(5, "generations"))
    assert sorted(work.load()) == [0, 1, 2, 3, 4]
