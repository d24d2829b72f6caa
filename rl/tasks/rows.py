"""Rows of data files and of Hugging Face data sets."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError

KINDS = (".jsonl", ".parquet")
_DATA_SET = re.compile(r"hf:(?P<name>[^:@]+)(:(?P<config>[^:@]+))?(@(?P<split>.+))?")


def is_hub(path: Path) -> bool:
    """Whether `path` names a Hugging Face data set instead of a file."""
    return str(path).startswith("hf:")


Row = tuple[str, int, dict[str, Any] | ValueError]


def read_rows(path: Path) -> Iterator[Row]:
    """(file and line, line number from 1, fields or what is wrong with them) of each example.

    Raises `InputError`, which says what is expected, if `path` cannot be read.
    """
    if is_hub(path):
        yield from _dataset_rows(str(path))
        return
    if path.suffix not in KINDS:
        raise InputError(
            f"{path}: kind {path.suffix!r} is not read; use .jsonl or .parquet, or hf:NAME, which"
            " may be a folder"
        )
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; expected one JSON object per line") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if "\\u" in line:
                # Half a character, which JSON may hold, can be neither tokenized nor printed.
                json.dumps(example, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            example = ValueError(f"not JSON ({error}); expected one object per line")
        if not isinstance(example, dict | ValueError):
            kind = type(example).__name__
            example = ValueError(f"holds a {kind}; expected a JSON object")
        yield f"{path}:{number}", number, example


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        # In batches, as data sets with tests have gigabytes.
        rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path} row {number}", number, row
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a Parquet file ({error})") from None


def _dataset_rows(address: str) -> Iterator[Row]:
    parts = _DATA_SET.fullmatch(address)
    if parts is None:
        raise InputError(f"{address}: expected hf:NAME, hf:NAME:CONFIG, or either with @SPLIT")
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{address}: the package datasets is not installed; install sparrow-sglang[data]"
        ) from None
    name, split = parts["name"], parts["split"] or "train"
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").exists():
            folder /= split
        if (folder / "state.json").exists():
            rows = datasets.load_from_disk(folder)
        else:
            rows = datasets.load_dataset(name, parts["config"], split=split)
    # Any exception, as a hub's network or a data set's own files may raise many kinds.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{address}: cannot be loaded ({reason})") from None
    for number, row in enumerate(rows, 1):
        yield f"{address} row {number}", number, row
