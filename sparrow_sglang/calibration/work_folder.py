"""The work folder of a calibration: its settings, and every batch that was measured.

A batch is a Parquet file that appears whole or not at all, so a killed run goes on where it
stopped. The folder belongs to one set of settings and is refused for another.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.atomic_write import replacing
from sparrow_sglang.calibration.choice import CalibrationError

SETTINGS = "settings.json"
_BATCHES = "batch-*.parquet"
_SAMPLES_KEY = b"sparrow_samples"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleTokens:
    """The sparsely decoded tokens of one sample; arrays [T] as in `Tokens`."""

    sample: int
    cached: NDArray[np.int64]
    rates: NDArray[np.float64]


class WorkFolder:
    """Finished samples on disk, under the settings that they were made with."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or make the folder.

        Raises `CalibrationError` if it holds other settings or cannot be written.
        """
        self.path = path
        target = path / SETTINGS
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = json.loads(target.read_text("utf-8")) if target.exists() else None
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"--work {path}: cannot be used ({error}); expected a new folder or one that an"
                " earlier run of the same command made"
            ) from None
        if found is None:
            with self.writing(SETTINGS) as draft:
                draft.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
            return
        wanted = json.loads(json.dumps(settings))
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                raise CalibrationError(
                    f"--work {path}: its measurements were made with {key}={_short(found.get(key))}"
                    f" and this run has {_short(wanted.get(key))}: expected equal settings; name"
                    " another folder, or repeat the command that made this one"
                )

    def load(self) -> dict[int, SampleTokens]:
        """All finished samples by number. A damaged file is left out with a warning."""
        import pyarrow

        samples: dict[int, SampleTokens] = {}
        for path in sorted(self.path.glob(_BATCHES)):
            try:
                samples |= {sample.sample: sample for sample in _read_batch(path)}
            except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
                logger.warning("%s is damaged and will be measured again (%s)", path, error)
        return samples

    def add(self, samples: Sequence[SampleTokens]) -> None:
        """Append a batch, durable when this returns. Raises `CalibrationError` on a full disk."""
        import pyarrow
        from pyarrow import parquet

        columns = {
            "sample": np.concatenate([np.full(len(s.cached), s.sample, np.int32) for s in samples]),
            "cached": np.concatenate([s.cached.astype(np.int32) for s in samples]),
            "rate": np.concatenate([s.rates.astype(np.float32) for s in samples]),
        }
        numbers = json.dumps([s.sample for s in samples]).encode()
        table = pyarrow.table(columns).replace_schema_metadata({_SAMPLES_KEY: numbers})
        with self.writing(f"batch-{samples[0].sample:08d}.parquet") as draft:
            parquet.write_table(table, draft)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A draft of the file `name`. Raises `CalibrationError` if it cannot be written."""
        try:
            with replacing(self.path / name) as draft:
                yield draft
        except OSError as error:
            raise CalibrationError(
                f"--work {self.path}: cannot write {name} ({error.strerror or error}); what"
                " was measured before is kept: make room and repeat the command"
            ) from None


def _read_batch(path: Path) -> list[SampleTokens]:
    from pyarrow import parquet

    table = parquet.read_table(path)
    numbers = json.loads(table.schema.metadata[_SAMPLES_KEY])
    sample, cached, rates = (table[name].to_numpy() for name in ("sample", "cached", "rate"))
    return [
        SampleTokens(
            number,
            cached[sample == number].astype(np.int64),
            rates[sample == number].astype(np.float64),
        )
        for number in numbers
    ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
