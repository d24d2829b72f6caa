"""Calibration: the choice against brute force, resuming, errors, and a tiny model end to end."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engines import save_tiny_model, start_engine

from sparrow_sglang.calibration import measure as calibration_measure
from sparrow_sglang.calibration import prompts as calibration_prompts
from sparrow_sglang.calibration.choice import (
    CalibrationError,
    Tokens,
    bin_tails,
    choose,
    closest,
)
from sparrow_sglang.calibration.engine import stop_waiting_when_it_dies
from sparrow_sglang.calibration.prompts import builtin_prompts, read_prompts
from sparrow_sglang.calibration.report import describe_misses, make_schedule
from sparrow_sglang.calibration.store import UnitTokens, WorkFolder
from sparrow_sglang.commands import calibrate, cli
from sparrow_sglang.mismatch.tail import BinTail
from sparrow_sglang.schedule import BudgetSchedule

BIN = 64


def tail(index: int, low: float, tokens: int = 1000) -> BinTail:
    """A bin whose tail has its lower confidence end at `low`."""
    return BinTail(index, index * BIN, (index + 1) * BIN, tokens, low + 0.1, low, 1.0, 1, 1, 1)


# -- the choice


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_cheapest_that_holds_with_all_above_it_and_never_falls(seed: int) -> None:
    draw = random.Random(seed)
    budgets, bins, target = [64, 96, 128, 192], 6, 0.8
    lows = {b: [draw.random() for _ in range(bins)] for b in budgets}
    tails = {b: {i: tail(i, lows[b][i]) for i in range(bins)} for b in budgets}
    chosen = choose(tails, target, bins, BIN, min_tokens=500)
    highest = 0
    for i, choice in enumerate(chosen):
        end = (i + 1) * BIN
        least = [b for b in budgets if all(lows[c][i] >= target for c in budgets if b <= c < end)]
        own = min([*least, end])
        highest = max(highest, own)
        assert (choice.needed, choice.budget) == (own, highest)


def test_a_budget_below_one_that_fails_is_not_taken() -> None:
    """Under a budget far too small a model repeats itself, and both laws agree on that."""
    tails = {b: {4: tail(4, low)} for b, low in ((64, 0.99), (96, 0.3), (128, 0.7), (192, 0.85))}
    (choice,) = [each for each in choose(tails, 0.8, 5, BIN, min_tokens=500) if each.bin == 4]
    assert (choice.budget, choice.basis) == (192, "measured")


def test_bins_with_few_tokens_are_extrapolated_and_say_so() -> None:
    tails = {
        64: {1: tail(1, 0.9, tokens=10), 2: tail(2, 0.9), 3: tail(3, 0.2), 4: tail(4, 0.9, 10)},
        128: {2: tail(2, 0.95), 3: tail(3, 0.9)},
    }
    chosen = choose(tails, 0.8, 6, BIN, min_tokens=500)
    assert [c.basis for c in chosen] == [*["extrapolated"] * 2, *["measured"] * 2,
                                         *["extrapolated"] * 2]  # fmt: skip
    # Before a filled bin its need; after the last, in proportion: 128 * 5/4, 128 * 6/4.
    assert [c.budget for c in chosen] == [64, 64, 64, 128, 192, 192]


def test_the_closest_budget_is_the_best_of_those_that_miss() -> None:
    tails = {
        64: {3: tail(3, 0.99), 4: tail(4, 0.2)},
        96: {3: tail(3, 0.5), 4: tail(4, 0.6)},
        128: {3: tail(3, 0.4), 4: tail(4, 0.7, tokens=10)},
        192: {3: tail(3, 0.3), 4: tail(4, 0.9)},
    }
    # 64 holds in bin 3, but a larger budget does not: the model repeats itself.
    assert closest(tails, 3, 0.8, BIN, 500) == (96, tails[96][3])
    assert closest(tails, 4, 0.95, BIN, 500) == (192, tails[192][4])
    assert closest(tails, 4, 0.8, BIN, 500) is None and closest(tails, 9, 0.8, BIN, 500) is None
    (miss,) = describe_misses(tails, 0.8, BIN, 500)
    assert miss == (
        "positions 192-255: no budget holds 0.8; 96 came closest, with a tail of 0.600 (interval"
        " 0.500-1.000); try more prompts or --samples, or --budgets with 224, and a --work of its"
        " own, or a --target of at most 0.50"
    )


def test_a_schedule_without_a_measured_bin_is_not_calibrated() -> None:
    origin = {"model": "m", "model_match": {}}
    tails = {64: {3: tail(3, 0.5)}, 96: {3: tail(3, 0.6), 4: tail(4, 0.1)}}
    with pytest.raises(CalibrationError, match="96 came closest.* at positions 192-255") as error:
        make_schedule("m", 0.8, tails, 16, BIN, 320, 500, origin)
    assert "\n" not in str(error.value)
    assert make_schedule("m", 0.55, tails, 16, BIN, 320, 500, origin).calibrated


def test_no_filled_bin_and_wrong_targets_are_refused() -> None:
    with pytest.raises(CalibrationError, match="the fullest has 10 at one budget"):
        choose({64: {1: tail(1, 0.9, tokens=10)}}, 0.8, 2, BIN, 500)
    for target in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(CalibrationError, match="between 0 and 1"):
            choose({64: {1: tail(1, 0.9)}}, target, 2, BIN, 500)


def test_tokens_fall_into_the_bin_whose_budget_their_step_has() -> None:
    schedule = BudgetSchedule(name="t", page_size=16, bin_tokens=BIN, budget_tokens=(64,) * 9)
    for cached in range(1, 8 * BIN):
        tokens = Tokens("a", np.array([cached]), np.array([0.5]))
        assert list(bin_tails([tokens], BIN, 16)) == [schedule.bin_index(cached)], cached


# -- prompts


def words(text: str | list[dict[str, Any]]) -> list[int]:
    """A tokenizer without a model: one token per word, by content."""
    flat = text if isinstance(text, str) else " ".join(m["content"] for m in text)
    return [sum(word.encode()) + 1 for word in flat.split()]


def test_prompts_are_read_in_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n'
        '{"input_ids": [7, 8, 9]}\n'
    )
    assert [p.input_ids for p in read_prompts(path, words, 10)] == [(98, 99), (100,), (7, 8, 9)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ('{"input_ids": [1]}\nnot json\n', ":2: 'not json' is no prompt"),
        ('{"input_ids": []}', "is no prompt"),
        ('{"input_ids": [true]}', "is no prompt"),
        (json.dumps({"input_ids": [1] * 8}), "has 8 tokens.*context of 10: expected at most 7"),
    ],
)
def test_wrong_prompts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        read_prompts(path, words, 10)


def test_builtin_prompts_reach_every_bin_and_the_two_parts_differ() -> None:
    parts = {
        part: builtin_prompts(words, 4096, 512, 64, 4, part) for part in ("calibration", "check")
    }
    for prompts in parts.values():
        lengths = [len(prompt.input_ids) for prompt in prompts]
        assert max(lengths) <= 4096 - 64
        assert {length // 512 for length in lengths} == set(range(8))
    assert not {p.name for p in parts["calibration"]} & {p.name for p in parts["check"]}
    corpora = [calibration_prompts._corpus(part) for part in parts]
    assert not set(corpora[0].split("\n\n")) >= set(corpora[1].split("\n\n"))


# -- the work folder


def unit(number: int) -> UnitTokens:
    return UnitTokens(number, np.array([5, 6]), np.array([0.5, 0.25]))


def test_a_work_folder_keeps_batches_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "w", {"model": "m"})
    work.add([unit(0), UnitTokens(1, *[np.empty(0)] * 2)])
    work.add([unit(2)])
    again = WorkFolder(tmp_path / "w", {"model": "m"}).load()
    assert sorted(again) == [0, 1, 2] and again[2].rates.tolist() == [0.5, 0.25]
    damaged = tmp_path / "w" / "batch-00000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert sorted(WorkFolder(tmp_path / "w", {"model": "m"}).load()) == [0, 1]


def test_a_work_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    WorkFolder(tmp_path / "w", {"model": "m", "budgets": [64]})
    with pytest.raises(CalibrationError, match=r"budgets=\[64\] and this run has \[96\]"):
        WorkFolder(tmp_path / "w", {"model": "m", "budgets": [96]})


def test_a_full_disk_is_one_error_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkFolder(tmp_path / "w", {"model": "m"})
    work.add([unit(0)])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CalibrationError, match="No space left on device.*is kept"):
        work.add([unit(1)])
    assert sorted(work.load()) == [0] and not list(work.path.glob(".draft-*"))


# -- end to end, with a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calibrated")
    return save_tiny_model(folder, spread=0.12, vocab_size=32, max_position_embeddings=320)


@contextmanager
def forked_engine(model_path: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    extra = {"attention_backend": "sparrow", "max_running_requests": 40, "max_total_tokens": 12000}
    with start_engine(model_path, **(extra | engine_args)) as engine:
        stop_waiting_when_it_dies(engine)
        yield engine


@pytest.fixture(autouse=True)
def fast_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "running_engine", forked_engine)


def write_prompts(path: Path, seed: int, count: int = 10) -> Path:
    draw = random.Random(seed)
    rows = [
        {"input_ids": [draw.randrange(3, 32) for _ in range(40 + i * 150 // count)]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(model: str, prompts: Path, *more: str) -> list[str]:
    return ["calibrate", "--model-path", model, "--prompts", str(prompts), "--new-tokens", "100",
            "--samples", "2", "--min-tokens", "200", *more]  # fmt: skip


BUDGETS = ["--bin-tokens", "64", "--budgets", "64", "96", "128", "160"]
TARGETS = ("0.75", "0.86", "0.92")


@pytest.fixture(scope="module")
def calibrated(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the schedules of three targets, from one measurement."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "running_engine", forked_engine)
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
        assert schedule.provenance["settings"]["num_prompts"] == 10
        for row in schedule.provenance["bins"]:
            if row["basis"] == "measured" and row["budget_tokens"] == row["needed_tokens"]:
                assert row["tail_low"] >= float(target) and row["tokens"] >= 200
    assert any(row["basis"] == "measured" for row in found[0].provenance["bins"])
    assert (calibrated / "m.png").read_bytes().startswith(b"\x89PNG")


def test_another_target_needs_no_engine(
    calibrated: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "running_engine", None)
    words = command(model, calibrated / "p.jsonl", *BUDGETS)
    assert cli.main([*words, "--target", "0.8", "--out", str(calibrated / "n.json")]) == 0
    assert BudgetSchedule.from_json(calibrated / "n.json").tail_target == 0.8


def test_every_measured_tail_is_printed(
    calibrated: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibrate, "running_engine", None)
    words = command(model, calibrated / "p.jsonl", *BUDGETS)
    out = ["--target", "0.75", "0.86", "--out", str(calibrated / "t.json")]
    assert cli.main([*words, *out]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()[2:]
    stored = BudgetSchedule.from_json(calibrated / "t-0.75.json").provenance["tails"]
    expected = []
    for budget, row in [(budget, row) for budget, rows in stored.items() for row in rows]:
        words = [budget, f"{row['tail']:.3f}"]
        if row["low"] is None:
            assert row["tokens"] < 200
        else:
            words.append(f"{row['low']:.3f}-{row['high']:.3f}")
        words.append(f"{row['tokens']}")
        held = [target for target in ("0.75", "0.86") if (row["low"] or 0) >= float(target)]
        words += ["too", "few", "tokens"] if row["tokens"] < 200 else held or ["-"]
        expected.append((row["bin"], int(budget), words))
    found, span = [], ""
    for line in table:
        words = line.split()
        if "-" in words[0]:
            span = words.pop(0)
        found.append((int(span.split("-")[0]) // 64, int(words[0]), words))
    assert found == sorted(expected)


def test_a_target_that_no_budget_holds_is_no_schedule(
    calibrated: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibrate, "running_engine", None)
    words = command(model, calibrated / "p.jsonl", *BUDGETS)
    assert cli.main([*words, "--target", "0.99999", "--out", str(calibrated / "none.json")]) == 2
    out, error = capsys.readouterr()
    (line,) = error.strip().splitlines()
    assert line.startswith("sparrow calibrate: error: target 0.99999: no measured budget holds it")
    assert "came closest" in line and "no schedule is written" in line and "are kept in" in line
    assert not (calibrated / "none.json").exists() and (calibrated / "none.png").exists()
    hints = [line for line in out.splitlines() if "no budget holds 0.99999" in line]
    bins = {int(line.split("-")[0].removeprefix("positions ")) // 64 for line in hints}
    stored = BudgetSchedule.from_json(calibrated / "m-0.75.json").provenance["tails"]
    filled = {row["bin"] for rows in stored.values() for row in rows if row["tokens"] >= 200}
    assert bins == filled and all("came closest" in line and "; try " in line for line in hints)
    # One that is held is written all the same.
    both = ["--target", "0.75", "0.99999", "--out", str(calibrated / "both.json")]
    assert cli.main([*words, *both]) == 2
    assert "target 0.99999: no measured" in capsys.readouterr().err
    assert BudgetSchedule.from_json(calibrated / "both-0.75.json").calibrated
    assert not (calibrated / "both-0.99999.json").exists()


def test_fresh_prompts_hold_the_targets(calibrated: Path, model: str) -> None:
    words = command(model, write_prompts(calibrated / "q.jsonl", 1))
    files = [str(calibrated / f"m-{target}.json") for target in TARGETS]
    assert cli.main([*words, "--check", *files, "--out", str(calibrated / "check.json")]) == 0
    checks = json.loads((calibrated / "check.json").read_text())["checks"]
    judged = [row for check in checks for row in check["bins"] if row["verdict"] == "holds"]
    assert judged and all(check["holds"] for check in checks)


def test_a_schedule_that_promises_too_much_fails_the_check(calibrated: Path, model: str) -> None:
    schedule = BudgetSchedule(
        name="bold", page_size=16, bin_tokens=64, budget_tokens=(64,), tail_target=0.99
    )
    schedule.save(calibrated / "bold.json")
    words = command(model, calibrated / "p.jsonl")
    out = ["--out", str(calibrated / "bold.check.json")]
    assert cli.main([*words, "--check", str(calibrated / "bold.json"), *out]) == 1


def _run_in_child(argv: list[str], kill_after_batches: int | None, report: Path) -> None:
    """A calibration in a session of its own; optionally its scheduler dies midway."""
    os.setsid()
    calibrate.running_engine = forked_engine  # type: ignore[assignment]
    if kill_after_batches is not None:
        add, seen = WorkFolder.add, []

        def add_then_kill(self: WorkFolder, units: Any) -> None:
            add(self, units)
            seen.append(units)
            if len(seen) == kill_after_batches:
                for child in psutil.Process().children():
                    child.kill()

        WorkFolder.add = add_then_kill  # type: ignore[method-assign]
    with open(report, "w") as log, redirect_stderr(log):
        code = cli.main(argv)
    os._exit(code)


def _start(argv: list[str], kill_after_batches: int | None, report: Path) -> Any:
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_run_in_child, args=(argv, kill_after_batches, report))
    child.start()
    return child


def test_a_kill_and_a_dead_engine_lose_only_the_open_batch(
    calibrated: Path, model: str, tmp_path: Path
) -> None:
    # `calibrated` has imported all that a forked child needs.
    words = command(model, calibrated / "p.jsonl", "--samples", "1", "--min-tokens", "100")
    sizes = ["--bin-tokens", "64", "--budgets", "64", "96", "--batch", "4"]
    out = ["--target", "0.7", "--out", str(tmp_path / "m.json"), "--work", str(tmp_path / "w")]
    argv = [*words, *sizes, *out]
    child = _start(argv, None, tmp_path / "log")
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "w").glob("batch-*.parquet"))) < 2:
        assert child.is_alive() and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.join()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "w").glob("batch-*.parquet")}

    child = _start(argv, 1, tmp_path / "log")
    child.join(60)
    assert child.exitcode == 2
    assert "the engine failed" in (message := (tmp_path / "log").read_text().splitlines()[-1])
    assert "generations are kept" in message

    assert cli.main(argv) == 0
    assert all(path.stat().st_mtime_ns == changed for path, changed in kept.items())
    assert BudgetSchedule.from_json(tmp_path / "m.json").calibrated


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "1"], "--target 1.0: expected a tail between 0 and 1"),
        (["--budgets", "32"], "budget_tokens[0]=32 is below the pages that are always kept"),
        (["--budgets", "70"], "not a multiple of page_size=16"),
        (["--bin-tokens", "60"], "--bin-tokens=60: expected a multiple"),
        (["--engine-args", "[]"], "expected a JSON object"),
        (["--engine-args", '{"tp_sise": 2}'], "did you mean 'tp_size'"),
        (["--budgets", "304"], "no generation would decode sparsely"),
        (["--model-path", "/nowhere"], "--model-path /nowhere: no such folder; expected"),
        (["--new-tokens", "1"], "--new-tokens=1: expected 2 or more"),
        (["--out", "my schedule.json"], "--out my schedule.json: expected a file name of 1 to 64"),
    ],
)
def test_wrong_options_are_one_error(
    model: str, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(model, write_prompts(tmp_path / "p.jsonl", 0), "--bin-tokens", "64")
    argv = [*words, "--out", str(tmp_path / "m.json"), *more]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("sparrow calibrate: error: ") and message in line


def test_dense_units_are_not_generated() -> None:
    prompt = calibration_prompts.Prompt("p", tuple(range(3, 103)))
    arms = [calibration_measure.fixed_arm(budget, 16) for budget in (96, 112, 128, 144)]
    units = calibration_measure.units_of_work([prompt], arms, 2, 30, 320)
    # Steps attend to 101 to 129 tokens: 7 to 9 pages.
    assert [u.arm.schedule.budget_tokens[0] for u in units] == [96, 96, 112, 112, 128, 128]
