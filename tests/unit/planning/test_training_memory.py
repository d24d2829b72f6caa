"""The estimated memory of training, against peaks that PyTorch measured on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.training_memory import training_memory

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks" / "results" / "h200"
MEASURED = [
    (run["model"], row)
    for run in (json.loads(file.read_text()) for file in sorted(FOLDER.glob("train_memory_*.json")))
    for row in run["rows"]
]
GIB = 2**30


@pytest.mark.parametrize(("model", "row"), MEASURED, ids=str)
def test_peaks_are_within_15_percent_of_those_measured(model: str, row: dict[str, Any]) -> None:
    config = json.loads((ROOT / "benchmarks" / "models" / model / "config.json").read_text())
    shape = ModelShape.from_config(config)
    embeddings = 0 if config["tie_word_embeddings"] else shape.vocab_size * shape.hidden_size
    itemsize = {"float32": 4, "bfloat16": 2}[row["dtype"]]
    memory = training_memory(
        shape,
        shape.parameters + embeddings,
        row["tokens"],
        itemsize,
        ranks=row.get("ranks", 1),
        offload=row.get("offload", False),
    )
    assert memory.idle / GIB == pytest.approx(row["idle_gib"], rel=0.02)
    assert memory.update_peak / GIB == pytest.approx(row["step_peak_gib"], rel=0.15)
    if "adapter_peak_gib" in row:
        assert memory.adapter_peak / GIB == pytest.approx(row["adapter_peak_gib"], rel=0.15)


def test_offload_leaves_the_weights_and_what_a_micro_batch_needs() -> None:
    shape = ModelShape(64, 256, 4, 4, 2, 16, 1000)
    kept = training_memory(shape, 1000, 100, 2)
    offloaded = training_memory(shape, 1000, 100, 2, offload=True)
    assert kept.idle - offloaded.idle == 12 * 1000
    assert offloaded.update_peak == 2000 + offloaded.saved + offloaded.working


def test_ranks_share_all_but_what_they_gather() -> None:
    shape = ModelShape(64, 256, 4, 4, 2, 16, 1000)
    alone = training_memory(shape, shape.parameters, 100, 2)
    of_four = training_memory(shape, shape.parameters, 100, 2, ranks=4)
    assert of_four.idle == pytest.approx(alone.idle / 4, abs=64)
    assert of_four.gradients == pytest.approx(alone.gradients / 4, abs=16)
    embeddings = 1000 * 64
    layer = (shape.parameters - embeddings) // 4
    # 16 bits for weights and the gradients of the embeddings, 32 for those of a layer.
    assert of_four.gathered == 2 * 2 * embeddings + (2 * 2 + 4) * layer
    assert of_four.update_peak - of_four.idle - of_four.gathered == of_four.saved + of_four.working
