"""The estimated memory of training, against peaks that PyTorch measured on a GPU."""

import json
from pathlib import Path

import pytest

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.training_memory import training_memory

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "results" / "h200" / "train_memory_qwen3-1.7b.json"
GIB = 2**30


@pytest.mark.parametrize("row", json.loads(MEASURED.read_text())["rows"], ids=str)
def test_peaks_are_within_15_percent_of_those_measured(row) -> None:
    config = ROOT / "benchmarks" / "models" / "qwen3-1.7b" / "config.json"
    shape = ModelShape.from_config(json.loads(config.read_text()))
    itemsize = {"float32": 4, "bfloat16": 2}[row["dtype"]]
    memory = training_memory(shape, shape.parameters, row["tokens"], itemsize)
    assert memory.idle / GIB == pytest.approx(row["idle_gib"], rel=0.02)
    assert memory.update_peak / GIB == pytest.approx(row["step_peak_gib"], rel=0.15)
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
