"""The folder that keeps what calibration has generated."""

import os
from pathlib import Path

import numpy as np
import pytest

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.calibration.samples import Tokens, WorkFolder

TOKENS = Tokens("p", np.array([5, 6]), np.array([0.5, 0.25]))


def test_a_work_folder_keeps_batches_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "w", {"model": "m"})
    work.add({0: TOKENS, 1: Tokens("q", np.empty(0), np.empty(0))})
    work.add({2: TOKENS})
    again = WorkFolder(tmp_path / "w", {"model": "m"}).load()
    assert sorted(again) == [0, 1, 2] and again[2].rates.tolist() == [0.5, 0.25]
    assert [tokens.prompt for tokens in again.values()] == ["p", "q", "p"]
    damaged = tmp_path / "w" / "batch-00000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert sorted(WorkFolder(tmp_path / "w", {"model": "m"}).load()) == [0, 1]


def test_a_work_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    # Without a measurement it is a folder like a new one.
    WorkFolder(tmp_path / "w", {"model": "m", "budgets": [32]})
    WorkFolder(tmp_path / "w", {"model": "m", "budgets": [64]}).add({0: TOKENS})
    with pytest.raises(CalibrationError, match="budgets"):
        WorkFolder(tmp_path / "w", {"model": "m", "budgets": [96]})


def test_a_full_disk_is_one_error_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkFolder(tmp_path / "w", {"model": "m"})
    work.add({0: TOKENS})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left .*batch-00000001.parquet"):
        work.add({1: TOKENS})
    assert sorted(work.load()) == [0] and not list(work.path.glob(".draft-*"))


def test_a_work_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"--work .*file/w: Not a directory; expected"):
        WorkFolder(tmp_path / "file" / "w", {})
