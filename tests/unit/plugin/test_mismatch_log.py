"""The mismatch log: complete files only, whatever happens to the writer."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from numpy.typing import NDArray

from sparrow_sglang.plugin.launcher.audit import mismatch_log
from sparrow_sglang.plugin.launcher.audit.mismatch_log import (
    TOKEN_ROW,
    MismatchLog,
    read_mismatch_log,
)


def rows(request_id: str, tokens: int = 10, seed: int = 0) -> NDArray[Any]:
    draw = np.random.default_rng([seed, tokens])
    found = np.zeros(tokens, TOKEN_ROW)
    found["request_id"] = request_id
    found["position"] = np.arange(100, 100 + tokens)
    found["token_id"] = draw.integers(0, 150_000, tokens)
    for name in ("dense_logprob", "acceptance_rate"):
        found[name] = draw.random(tokens)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_come_while_a_file_is_written_are_kept(tmp_path, monkeypatch, fails):
    """The file is written in a thread; the server goes on scoring."""
    log = MismatchLog(tmp_path)
    write = pyarrow.parquet.write_table

    def write_while_a_row_comes(*args, **kwargs):
        log.append(rows("late", 4))
        if fails:
            raise OSError("no space left")
        write(*args, **kwargs)

    log.append(rows("early", 3))
    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", write_while_a_row_comes)
        with pytest.raises(OSError, match="no space") if fails else nullcontext():
            log.flush()
    log.flush()
    found = read_mismatch_log(tmp_path)["request_id"].to_pylist()
    assert sorted(found) == ["early"] * 3 + ["late"] * 4


def test_many_flushes_make_few_files(tmp_path, monkeypatch):
    """A week of a quiet server is 20,160 flushes."""
    monkeypatch.setattr(mismatch_log, "FILE_ROWS", 100)
    log = MismatchLog(tmp_path)
    for index in range(60):
        log.append(rows(f"r{index}"))
        log.flush()
        assert read_mismatch_log(tmp_path).num_rows == 10 * (index + 1)
    assert [read_mismatch_log(file).num_rows for file in tmp_path.iterdir()] == [100] * 6
    found = read_mismatch_log(tmp_path)["request_id"].to_pylist()
    assert found == [f"r{index}" for index in range(60) for _ in range(10)]


def test_the_oldest_files_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(mismatch_log, "MAX_BYTES", 20_000)
    monkeypatch.setattr(mismatch_log, "FILE_ROWS", 100)
    log = MismatchLog(tmp_path)
    for index in range(30):
        log.append(rows(f"r{index}", 100, seed=index))
        log.flush()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    kept = list(dict.fromkeys(read_mismatch_log(tmp_path)["request_id"].to_pylist()))
    assert 1 < len(kept) < 30
    assert kept == [f"r{index}" for index in range(30 - len(kept), 30)]


def test_damaged_files_are_left_out_with_a_warning(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(mismatch_log, "FILE_ROWS", 1)
    log = MismatchLog(tmp_path)
    for name in "abcd":
        log.append(rows(name))
        log.flush()
    files = sorted(tmp_path.iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-50])
    files[1].write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), files[2])
    (tmp_path / "notes.txt").write_text("not ours")
    table = read_mismatch_log(tmp_path)
    assert set(table["request_id"].to_pylist()) == {"d"}
    for file in files[:3]:
        assert f"{file} is damaged and left out" in warnings.text
