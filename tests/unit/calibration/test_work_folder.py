"""The folder that keeps what calibration has generated."""

import os
from pathlib import Path

import numpy as np
import pytest

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.work_folder import SampleTokens, WorkFolder


def sample(number: int) -> SampleTokens:
    return SampleTokens(number, np.array([5, 6]), np.array([0.5, 0.25]))


def test_a_work_folder_keeps_batches_and_leaves_out_damaged_ones(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "w", {"model": "m"})
    work.add([sample(0), SampleTokens(1, *[np.empty(0)] * 2)])
    work.add([sample(2)])
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
    work.add([sample(0)])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CalibrationError, match="No space left on device.*is kept"):
        work.add([sample(1)])
    assert sorted(work.load()) == [0] and not list(work.path.glob(".draft-*"))
