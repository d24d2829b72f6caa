"""Distributions of acceptance rates against SciPy and plain loops; schedules of equal cost."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascii_task import save_model_of_bytes
from engines import save_tiny_model
from numpy.typing import NDArray
from scipy import stats

from sparrow_sglang.benchmarks.rollouts import acceptance_distribution
from sparrow_sglang.benchmarks.rollouts.acceptance_distribution import rate_row
from sparrow_sglang.benchmarks.rollouts.page_sizes import (
    bytes_read,
    equal_cost_schedule,
    page_size_rows,
)
from sparrow_sglang.benchmarks.rollouts.rate_statistics import (
    EDGES,
    Bootstrap,
    Sample,
    fit_beta,
    histogram,
)
from sparrow_sglang.calibration.choice import Tokens, bin_tails
from sparrow_sglang.calibration.job import Job
from sparrow_sglang.calibration.store import UnitTokens
from sparrow_sglang.schedule import BudgetSchedule

PROMPTS = 40
NAMES = [f"prompt-{index}" for index in range(PROMPTS)]


def generations(seed: int, slope: float = 0.0, drop: float = 0.0) -> list[Tokens]:
    """30 to 60 tokens of each prompt, at positions that grow with the prompt's index.

    Rates fall by `slope` a position and by `drop` everywhere; then some are set above 0.999. Rates
    of one prompt are correlated.
    """
    random = np.random.default_rng(seed)
    made = []
    for index, name in enumerate(NAMES):
        count = int(random.integers(30, 61))
        cached = 520 + 64 * index + np.arange(count)
        rates = random.beta(20 * math.exp(0.5 * random.normal()), 2, count)
        rates = np.clip(rates - drop - slope * cached, 0, 1)
        rates[random.random(count) < 0.1] = 0.9995
        made.append(Tokens(name, cached, rates))
    return made


def repeated(sample: Sample, drawn: NDArray[np.int64]) -> Sample:
    """The tokens of the drawn prompts, as often as each was drawn."""
    return Sample(
        *(
            np.concatenate([values[sample.prompts == prompt] for prompt in drawn])
            for values in (sample.cached, sample.rates, sample.prompts)
        )
    )


# -- shapes of distributions


@pytest.mark.parametrize(("a", "b"), [(6.0, 1.5), (2.0, 0.8), (20.0, 3.0)])
def test_the_fit_recovers_the_distribution_that_made_the_tokens(a: float, b: float) -> None:
    rates = 0.999 * np.random.default_rng(3).beta(a, b, size=20_000)
    fit = fit_beta(np.concatenate([rates, np.full(5000, 0.9995)]))
    assert fit is not None and fit.tokens == 20_000
    assert (fit.a, fit.b) == (pytest.approx(a, rel=0.05), pytest.approx(b, rel=0.05))
    # Critical value of the statistic at the 1 % level: 1.63 / sqrt(20,000) = 0.0115.
    assert fit.ks < 0.0115


def test_the_distance_is_the_largest_gap_between_the_distribution_functions() -> None:
    values = np.random.default_rng(4).uniform(0.2, 0.99, size=300)
    fit = fit_beta(values)
    assert fit is not None
    gaps = []
    for i, value in enumerate(sorted(values)):
        model = stats.beta.cdf(value / 0.999, fit.a, fit.b)
        gaps += [abs((i + 1) / 300 - model), abs(i / 300 - model)]
    assert fit.ks == pytest.approx(max(gaps), abs=1e-9)
    assert fit.ks > 0.02


def test_too_few_or_equal_rates_have_no_fit() -> None:
    assert fit_beta(np.r_[np.linspace(0.1, 0.9, 19), [1.0] * 500]) is None
    assert fit_beta(np.full(100, 0.5)) is None
    fit = fit_beta(np.r_[0.0, 0.999, np.linspace(0.5, 0.99, 60)])
    assert fit is not None and fit.tokens == 62 and 0 < fit.a < 50 and 0 < fit.b < 50


def test_the_histogram_counts_what_is_above_one_edge_and_not_above_the_next() -> None:
    rates = np.r_[np.random.default_rng(0).random(2000), 0.0, 0.05, 0.999, 0.99905, 1.0, 1.0]
    expected = [
        sum(low < rate <= high or (rate == 0 and low == 0) for rate in rates)
        for low, high in zip(EDGES, EDGES[1:], strict=False)
    ]
    assert histogram(rates) == expected and sum(expected) == len(rates)
    row = rate_row(
        Sample(np.arange(len(rates)), rates, np.arange(len(rates)) % PROMPTS), Bootstrap(PROMPTS)
    )
    agreeing = sum(row["histogram"][EDGES.index(0.999) :])
    assert row["share_above_0.999"] == pytest.approx(agreeing / len(rates), rel=1e-12)
    assert row["beta_tokens"] == len(rates) - agreeing


# -- values and intervals


def test_tails_of_bins_are_those_of_a_calibration() -> None:
    made = generations(1)
    bins = Sample.of(made, NAMES).bins(512, 16)
    expected = bin_tails(made, 512, 16)
    assert set(bins) == set(expected) and len(bins) == 6
    draws = Bootstrap(PROMPTS)
    for index, inside in bins.items():
        assert len(inside) == expected[index].tokens
        # `bin_tails` keeps rates on a grid of 1/2000.
        assert draws.tail(inside).value == pytest.approx(expected[index].tail, abs=2.6e-4)


def test_correlations_are_pearsons() -> None:
    sample = Sample.of(generations(2, slope=3e-5), NAMES)
    draws = Bootstrap(PROMPTS)
    found = draws.correlation(sample)
    expected = stats.pearsonr(sample.cached, sample.rates).statistic
    assert found is not None and found.value == pytest.approx(expected, rel=1e-9)
    assert -0.9 < expected < -0.1
    bins = sample.bins(512, 16)
    middles = [512 * index + 256 for index in bins]
    of_bins = draws.correlation_of_bins(list(bins.values()), middles)
    assert of_bins is not None
    for estimate, summary in zip(
        of_bins, (lambda r: sorted(r)[math.ceil(len(r) / 20) - 1], np.mean), strict=True
    ):
        values = [summary(inside.rates) for inside in bins.values()]
        assert estimate.value == pytest.approx(stats.pearsonr(middles, values).statistic, rel=1e-9)


def test_intervals_are_those_of_a_bootstrap_that_repeats_drawn_prompts() -> None:
    sample = Sample.of(generations(3, slope=2e-5), NAMES)
    random = np.random.default_rng(11)
    again = [repeated(sample, random.integers(0, PROMPTS, PROMPTS)) for _ in range(2000)]
    draws = Bootstrap(PROMPTS, resamples=2000)
    tail = [np.percentile(one.rates, 5, method="inverted_cdf") for one in again]
    r = [np.corrcoef(one.cached, one.rates)[0, 1] for one in again]
    mean = [one.rates.mean() for one in again]
    for estimate, values in (
        (draws.tail(sample), tail),
        (draws.correlation(sample), r),
        (draws.mean(sample, sample.rates), mean),
    ):
        assert estimate is not None
        low, high = np.percentile(values, [2.5, 97.5])
        # Ends of two bootstraps of 2,000 draws differ by about 0.07 standard deviations.
        apart = 0.3 * np.std(values)
        assert estimate.low == pytest.approx(low, abs=apart)
        assert estimate.high == pytest.approx(high, abs=apart)
    # Rates of one prompt are correlated, so the interval is wider than for independent tokens.
    whole = draws.mean(sample, sample.rates)
    assert whole.low is not None and whole.high is not None
    assert whole.high - whole.low > 2 * 2 * 1.96 * sample.rates.std() / math.sqrt(len(sample))


def test_one_prompt_has_no_interval_and_constant_rates_no_correlation() -> None:
    draws = Bootstrap(PROMPTS)
    alone = Sample.of(generations(4)[:1], NAMES)
    assert draws.tail(alone)[1:] == (None, None)
    everything = Sample.of(generations(4), NAMES)
    same = Sample(everything.cached, np.ones(len(everything)), everything.prompts)
    assert draws.correlation(same) is None
    bins = list(same.bins(512, 16).values())
    assert draws.correlation_of_bins(bins, list(range(len(bins)))) is None
    assert draws.correlation_of_bins(list(everything.bins(512, 16).values())[:2], [0, 1]) is None


# -- page sizes at the same cost


@pytest.mark.parametrize("page_size", [32, 64])
def test_budgets_of_equal_cost_lie_within_a_page_of_the_references_bytes(page_size: int) -> None:
    def by_hand(budget: int, page: int, cached: int) -> int:
        keys_and_values = sum(2 * 2 * 64 for _ in range(budget))
        landmarks = sum(2 * 64 for _ in range(0, cached, page))
        return keys_and_values + landmarks

    down, up = (equal_cost_schedule(512, page_size, 8192, 512, way) for way in ("down", "up"))
    assert len(down.budget_tokens) == len(up.budget_tokens) == 16
    for index in range(16):
        middle = 512 * index + 256
        reference = by_hand(512, 16, middle)
        low, high = (each.kv_budget_tokens(middle) for each in (down, up))
        assert by_hand(low, page_size, middle) <= reference <= by_hand(high, page_size, middle)
        assert high - low in (0, page_size)
        assert bytes_read(low, page_size, middle, 64) == by_hand(low, page_size, middle)


def test_differences_between_page_sizes_are_those_of_their_tails() -> None:
    reference = BudgetSchedule.fixed(512)
    worse, better = (equal_cost_schedule(512, 32, 4096, 512, way) for way in ("down", "up"))
    made = generations(5)
    higher = [Tokens(each.prompt, each.cached, 0.5 + each.rates / 2) for each in made]
    samples = {
        name: Sample.of(tokens, NAMES)
        for name, tokens in (
            ("reference", made),
            ("worse", generations(5, drop=0.3)),
            ("better", higher),
        )
    }
    rows = list(
        page_size_rows(
            (reference, samples["reference"]),
            [(worse, samples["worse"]), (better, samples["better"])],
            512,
            50,
            64,
            Bootstrap(PROMPTS),
        )
    )
    cells = [row for row in rows if row["kind"] == "page size"]
    first, second = (row for row in rows if row["kind"] == "difference")
    # In bin 1 some steps read everything under the budget of 544 tokens.
    assert sorted({row["bin"] for row in cells}) == [2, 3, 4, 5]
    assert (first["bins"], first["bins_lower"], first["bins_higher"]) == (4, 4, 0)
    assert (second["bins_lower"], second["bins_higher"]) == (0, 4)
    tails = {(row["schedule"], row["bin"]): row["tail"] for row in cells}
    for row, name in ((first, "page32-down"), (second, "page32-up")):
        gaps = [tails[name, index] - tails["fixed-512", index] for index in range(2, 6)]
        assert row["tail_difference"] == pytest.approx(sum(gaps) / 4, rel=1e-9)
    assert first["tail_difference_high"] < 0 < second["tail_difference_low"]


# -- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    save_model_of_bytes(folder)
    return str(save_tiny_model(folder))


def command(model: str, tmp_path: Path, *more: str) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    rows = [{"input_ids": [3 + index] * (100 + 40 * index)} for index in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model-path", model, "--prompts", str(file), "--budgets", "64", "256",
            "--reference-budget", "256", "--bin-tokens", "128", "--new-tokens", "20",
            "--min-tokens", "30", "--engine-args", '{"context_length": 1024}', "--work",
            str(tmp_path / "work"), "--out", str(tmp_path / "x.json"), *more]  # fmt: skip


def test_the_result_has_rows_of_each_budget_and_page_size(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[int, list[str]]] = []

    def measured(job: Job) -> None:
        schedules = job.engine_args["sparrow_schedule"].split(",")
        served.append((job.engine_args["page_size"], [Path(each).stem for each in schedules]))
        random = np.random.default_rng(job.page_size)
        work = []
        for unit in job.units:
            first = len(unit.prompt.input_ids) + 1
            kept = [n for n in range(first, first + 19) if unit.arm.measures(n)]
            dense = unit.arm.every_step
            rates = np.ones(len(kept)) if dense else random.beta(9, 1, len(kept))
            work.append(UnitTokens(unit.number, np.array(kept), rates))
        job.work.add(work)

    monkeypatch.setattr(acceptance_distribution, "measure_missing", measured)
    assert acceptance_distribution.main(command(model, tmp_path)) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert served == [
        (16, ["fixed-1024"]),
        (32, ["fixed-1024", "page32-down", "page32-up"]),
        (64, ["fixed-1024", "page64-down", "page64-up"]),
    ]
    whole = {row["budget_tokens"]: row for row in kind(result, "all tokens")}
    # Each of 20 prompts has 19 steps; under 256 tokens those of the four shortest, of 100 to 220
    # tokens, are dense.
    assert whole[None]["tokens"] == 20 * 19 and whole[None]["share_above_0.999"] == 1
    assert whole[None]["beta_ks"] is None
    assert whole[64]["tokens"] == 20 * 19 and whole[256]["tokens"] == 16 * 19
    assert whole[64]["histogram"] != whole[256]["histogram"]
    bins = kind(result, "bin")
    assert sum(row["tokens"] for row in bins if row["budget_tokens"] == 64) <= 20 * 19
    assert [row["bins"] for row in kind(result, "correlation")] != [0, 0, 0]
    assert {row["schedule"] for row in kind(result, "page size")} == {
        "fixed-256", "page32-down", "page32-up", "page64-down", "page64-up"
    }  # fmt: skip
    assert len(kind(result, "difference")) == 4
    assert result["edges"] == list(EDGES) and "sampled" in result["responses"]


def kind(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] == name]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budgets", "1024"], "budget 1024: expected fewer than the context of 1024"),
        (["--reference-budget", "100"], "nearest allowed"),
        (["--reference-budget", "128"], "below the pages that are always kept"),
        (["--bin-tokens", "96"], "--bin-tokens 96: expected a multiple of the page size 64"),
        (["--page-sizes", "8"], "--page-sizes"),
        (["--model-path", "/nowhere"], "/nowhere"),
        (["--engine-args", "[]"], "--engine-args []"),
    ],
)
def test_refusals_are_one_line_before_anything_starts(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        acceptance_distribution.main(command(model, tmp_path, *arguments))
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and named in line
