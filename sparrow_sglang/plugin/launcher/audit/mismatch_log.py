"""The mismatch log: acceptance rate and log-prob of each audited token, on disk as Parquet."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.atomic_write import replacing

if TYPE_CHECKING:
    import pyarrow

FILE_ROWS = 65536
FLUSH_S = 30.0
MAX_BYTES = 2**30

TOKEN_ROW = np.dtype(
    [
        ("request_id", "O"),
        ("position", "i4"),
        ("token_id", "i4"),
        ("kv_budget_tokens", "i4"),
        ("dense_logprob", "f4"),
        ("acceptance_rate", "f4"),
    ]
)
"""One audited token. `position` counts from the first prompt token; `kv_budget_tokens` is what the
schedule let the sparse layers read when the token was sampled; `dense_logprob` is natural and at
temperature 1; `acceptance_rate` is NaN where no decode step sampled the token."""

logger = logging.getLogger("sparrow_sglang")


class MismatchLog:
    """Appends rows to a folder of Parquet files of about FILE_ROWS rows. Each flush replaces the
    newest file, until it has FILE_ROWS rows; a killed process loses the rows since the last one.
    The caller that appends must call `flush` when the log `is_due`. Beyond MAX_BYTES, the oldest
    files are deleted. Another thread may flush meanwhile, and processes may share a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError` if the folder cannot be made."""
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._flushing = threading.Lock()
        self._waiting: list[NDArray[Any]] = []
        self._written: list[NDArray[Any]] = []
        self._file = folder
        self._since = 0.0
        self._files = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Take rows [T] of TOKEN_ROW; they are on disk after the next `flush`."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(rows)

    def is_due(self) -> bool:
        """Whether FILE_ROWS rows wait, or the first of them has waited for FLUSH_S."""
        rows = sum(map(len, self._waiting))
        return rows >= FILE_ROWS or (rows > 0 and time.monotonic() - self._since >= FLUSH_S)

    def flush(self) -> None:
        """Write the waiting rows; on an error they stay, and the files are as before."""
        with self._flushing:
            rows, self._waiting = self._waiting, []
            try:
                if rows:
                    self._write(rows)
            except BaseException:
                self._waiting[:0] = rows
                raise

    def _write(self, added: list[NDArray[Any]]) -> None:
        # Deleted or unmounted. If it were created again, the file might be lost.
        if not self._folder.is_dir():
            raise FileNotFoundError(f"mismatch log {self._folder}: the folder is gone")
        import pyarrow.parquet

        if not self._written:
            # The name begins with the time, so that sorting by name is sorting by age.
            name = f"mismatch-{time.time_ns()}-{os.getpid()}-{self._files}.parquet"
            self._file = self._folder / name
        rows = np.concatenate([*self._written, *added])
        table = pyarrow.table({name: rows[name] for name in TOKEN_ROW.names or ()}, _schema())
        with replacing(self._file) as draft:
            pyarrow.parquet.write_table(table, draft, compression="zstd")
        self._written = [rows]
        if len(rows) >= FILE_ROWS:
            self._written = []
            self._files += 1
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        files = [(path, path.stat().st_size) for path in _files(self._folder)]
        total = sum(size for _, size in files)
        for path, size in files[:-1]:
            if total <= MAX_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= size


def read_mismatch_log(path: str | os.PathLike[str]) -> "pyarrow.Table":
    """All rows of a log folder, oldest file first, or of one of its files; see `TOKEN_ROW`.

    Damaged files are left out, with a warning. Raises `FileNotFoundError`.
    """
    import pyarrow
    import pyarrow.parquet

    log = Path(path)
    if not log.exists():
        raise FileNotFoundError(f"mismatch log {log}: expected the folder of --sparrow-audit-log")
    tables = [_schema().empty_table()]
    for file in _files(log) if log.is_dir() else [log]:
        try:
            table = pyarrow.parquet.read_table(file)
            if not table.schema.equals(_schema()):
                raise pyarrow.ArrowInvalid(f"its columns are {table.column_names}")
            tables.append(table)
        except (pyarrow.ArrowInvalid, OSError) as error:
            logger.warning("mismatch log: %s is damaged and left out (%s)", file, error)
    return pyarrow.concat_tables(tables)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("mismatch-*.parquet"))


def _schema() -> "pyarrow.Schema":
    import pyarrow

    numbers = [
        (name, pyarrow.from_numpy_dtype(TOKEN_ROW[name])) for name in (TOKEN_ROW.names or ())[1:]
    ]
    return pyarrow.schema([("request_id", pyarrow.string()), *numbers])
