"""`sparrow bench train`: what it counts, with a tiny model on the CPU."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparrow_sglang.benchmarks import step, train
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedule import BudgetSchedule

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def test_flops_of_a_step_by_hand() -> None:
    shape = ModelShape.from_config(TINY)
    # 2 FLOPs for each weight in the forward pass, 4 in the backward pass; a query reads half of the
    # keys, and as many values.
    weights = 3 * (16 * (16 + 2 * 8 + 16) + 3 * 16 * 32) + 64 * 16
    attention = 3 * 3 * 2 * (2 * 2 * 8 * 100 * 100 / 2)
    assert train.step_flops(shape, 100) == pytest.approx(6 * weights * 100 + attention)


def test_a_step_of_several_sequences_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    for module in (train, step):
        monkeypatch.setattr(module, "MODELS", tmp_path)
    monkeypatch.setattr(train, "DEVICE", "cpu")
    monkeypatch.setattr(train, "GPUS", {"slow": SimpleNamespace(flops_per_s=1e9)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A slow GPU")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    options = argparse.Namespace(
        model="tiny", sequences=2, offload=False, without_adapter=False, steps=2
    )
    row = train.measure(options, "float32", 100, BudgetSchedule.fixed(48))
    assert (row["sequences"], len(row["step_s"]), len(row["adapter_step_s"])) == (2, 2, 2)
    assert row["tokens_per_s"] == pytest.approx(200 / min(row["step_s"]))
    flops = 2 * train.step_flops(ModelShape.from_config(TINY), 100)
    assert row["peak_share"] == pytest.approx(flops / min(row["step_s"]) / 1e9)
    options.without_adapter = True
    assert "adapter_step_s" not in train.measure(options, "float32", 80, BudgetSchedule.fixed(48))
