"""`sparrow calibrate` with a tiny model: its schedules, resuming, and errors."""

import json
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import save_tiny_model, start_engine
from task_files import jsonl

from sparrow_sglang.calibration import measure
from sparrow_sglang.calibration.measure import stop_waiting
from sparrow_sglang.client.engine import keep_signals
from sparrow_sglang.commands import cli
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.schedules.schedule import BudgetSchedule


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calibrated")
    return save_tiny_model(folder, spread=0.12, vocab_size=32, max_position_embeddings=320)


@contextmanager
def forked_engine(model_path: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    extra = {"attention_backend": "sparrow", "max_running_requests": 40, "max_total_tokens": 12000}
    with start_engine(model_path, **(extra | engine_args)) as engine:
        keep_signals(engine, signal.getsignal(signal.SIGTERM), stop_waiting)
        yield engine


@pytest.fixture(autouse=True)
def fast_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "running_engine", forked_engine)


def write_prompts(path: Path, seed: int) -> Path:
    draw = random.Random(seed)
    rows = [
        {"input_ids": [draw.randrange(3, 32) for _ in range(40 + i * 150 // 24)]} for i in range(24)
    ]
    return jsonl(path, rows)


def command(model: str, prompts: Path, *more: str) -> list[str]:
    return ["calibrate", "--model-path", model, "--prompts", str(prompts), "--new-tokens", "100",
            "--min-tokens", "200", *more]  # fmt: skip


BUDGETS = ["--rule", "published", "--bin-tokens", "64", "--budgets", "64", "96", "128", "160"]
TARGETS = ("0.75", "0.82", "0.88")


@pytest.fixture(scope="module")
def calibrated(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the schedules of three targets, from one measurement."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "running_engine", forked_engine)
        words = command(model, write_prompts(folder / "p.jsonl", 0), *BUDGETS)
        out = ["--target", *TARGETS, "--out", str(folder / "m.json")]
        assert cli.main([*words, *out]) == 0
    return folder


def test_budgets_grow_with_the_target_and_carry_their_evidence(calibrated: Path) -> None:
    found = [BudgetSchedule.from_json(calibrated / f"m-{target}.json") for target in TARGETS]
    for lower, higher in zip(found, found[1:], strict=False):
        pairs = list(zip(lower.budget_tokens, higher.budget_tokens, strict=True))
        assert all(a <= b for a, b in pairs)
    assert sum(found[0].budget_tokens) < sum(found[-1].budget_tokens)
    for schedule, target in zip(found, TARGETS, strict=True):
        assert (schedule.calibrated, schedule.tail_target) == (True, float(target))
        assert schedule.provenance["settings"]["num_prompts"] == 24
        assert 0 < schedule.provenance["cost"]["seconds"] < 3600
        for row in schedule.provenance["bins"]:
            if row["basis"] == "measured" and row["budget_tokens"] == row["needed_tokens"]:
                assert row["tail_low"] >= float(target) and row["tokens"] >= 200
    assert any(row["basis"] == "measured" for row in found[0].provenance["bins"])


def test_a_target_that_no_budget_holds_is_no_schedule(
    calibrated: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measure, "running_engine", None)
    words = command(model, calibrated / "p.jsonl", *BUDGETS)
    assert cli.main([*words, "--target", "0.99999", "--out", str(calibrated / "none.json")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "0.99999" in line
    assert not (calibrated / "none.json").exists()
    # A target that is held is still written.
    both = ["--target", "0.75", "0.99999", "--out", str(calibrated / "both.json")]
    assert cli.main([*words, *both]) == 2
    assert "0.99999" in capsys.readouterr().err
    assert BudgetSchedule.from_json(calibrated / "both-0.75.json").calibrated
    assert not (calibrated / "both-0.99999.json").exists()


def test_fresh_prompts_hold_the_targets_and_no_bolder_one(calibrated: Path, model: str) -> None:
    bold = {"name": "bold", "page_size": 16, "bin_tokens": 64, "budget_tokens": (64,)}
    BudgetSchedule(**bold, tail_target=0.99).save(calibrated / "bold.json")
    words = command(model, write_prompts(calibrated / "q.jsonl", 1))
    files = [str(calibrated / f"m-{target}.json") for target in TARGETS]
    files.append(str(calibrated / "bold.json"))
    assert cli.main([*words, "--check", *files, "--out", str(calibrated / "check.json")]) == 1
    checks = json.loads((calibrated / "check.json").read_text())["checks"]
    judged = [row for check in checks for row in check["bins"] if row["verdict"] == "holds"]
    assert judged and [check["holds"] for check in checks] == [True] * len(TARGETS) + [False]


def test_sigterm_is_not_missed_between_calls(model: str) -> None:
    exit_on_sigterm()
    with (
        pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)),
        forked_engine(model, {"sparrow_schedule": "fixed-64"}) as engine,
    ):
        engine.generate(input_ids=[5] * 8, sampling_params={"max_new_tokens": 1})
        signal.raise_signal(signal.SIGTERM)


def test_the_default_rule_is_measured_with_its_schedule(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command(model, write_prompts(tmp_path / "p.jsonl", 0), "--bin-tokens", "64")
    words += ["--budgets", "96", "160", "--new-tokens", "40", "--min-tokens", "100"]
    words += ["--target", "0.2", "--out", str(tmp_path / "m.json")]
    started = []

    def recorded(model_path: str, engine_args: dict[str, Any]) -> AbstractContextManager[Any]:
        started.append(BudgetSchedule.from_json(engine_args["sparrow_schedule"]))
        return forked_engine(model_path, engine_args)

    monkeypatch.setattr(measure, "running_engine", recorded)
    assert cli.main(words) == 0
    schedule = BudgetSchedule.from_json(tmp_path / "m.json")
    assert (schedule.selection, schedule.dense_layers, schedule.calibrated) == ("int4", (), True)
    assert [(each.selection, each.budget_tokens) for each in started] == [("int4", (320,))]
