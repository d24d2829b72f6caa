"""The benchmark of long training steps: what it counts, alone and as one of two ranks."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_of_a_run import on_ranks

from sparrow_sglang.benchmarks.steps import decode_step
from sparrow_sglang.benchmarks.training import attention_times, train_memory
from sparrow_sglang.planning.cost_model import Hardware
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.rl.config.data import RolloutConfig
from sparrow_sglang.rl.config.learning import DistillConfig
from sparrow_sglang.rl.ranks import ALONE, Ranks
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


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    for module in (train_memory, decode_step):
        monkeypatch.setattr(module, "MODELS", tmp_path)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(train_memory, "_hardware", lambda: Hardware("slow", 1e9, 1e9))
    return argparse.Namespace(
        model="tiny", sequences=None, offload=False, without_adapter=False, steps=2
    )


def test_flops_of_a_step_by_hand() -> None:
    shape = ModelShape.from_config(TINY)
    # 2 FLOPs for each weight in the forward pass, 4 in the backward pass; a query reads half of the
    # keys, and as many values.
    weights = 3 * (16 * (16 + 2 * 8 + 16) + 3 * 16 * 32) + 64 * 16
    attention = 3 * 3 * 2 * (2 * 2 * 8 * 100 * 100 / 2)
    assert train_memory.step_flops(shape, 100) == pytest.approx(6 * weights * 100 + attention)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_has_a_sequence(tiny: argparse.Namespace, tmp_path: Path, ranks: int) -> None:
    def row(joint: Ranks) -> dict[str, Any]:
        schedule = BudgetSchedule.fixed(48)
        return train_memory.measure(tiny, "float32", 100, schedule, "cpu", joint)

    for found in on_ranks(ranks, row, tmp_path / "ranks"):
        assert (found["ranks"], found["sequences"], len(found["step_s"])) == (ranks, ranks, 2)
        assert found["tokens_per_s"] == pytest.approx(ranks * 100 / min(found["step_s"]))
        flops = train_memory.step_flops(ModelShape.from_config(TINY), 100)
        # The share is of one GPU's peak, as each GPU computes one sequence.
        assert found["peak_share"] == pytest.approx(flops / min(found["step_s"]) / 1e9)
        assert found["gather_s"] > 0 and len(found["adapter_step_s"]) == 2


def test_packed_attention_is_timed_once_for_each_length(
    tiny: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def times(shape: ModelShape, tokens: int) -> dict[str, float | None]:
        timed.append(tokens)
        return {"padded_s": tokens / 1e3, "varlen_s": None}

    monkeypatch.setattr(train_memory, "attention_times", times)
    monkeypatch.setattr(train_memory, "measure", lambda options, dtype, *_: {"dtype": dtype})
    tiny.dtypes, tiny.tokens, tiny.out = ["float32", "bfloat16"], [100, 200], tmp_path / "out.json"
    train_memory.measure_all(tiny, BudgetSchedule.fixed(48), ALONE)
    assert timed == [100, 200]
    rows = json.loads(tiny.out.read_text())["rows"]
    assert [row["packed_attention"]["padded_s"] for row in rows] == [0.1, 0.2, 0.1, 0.2]


def test_packs_are_of_like_lengths_and_padding_attends_within_them() -> None:
    lengths = attention_times.like_lengths(1000)
    assert sum(lengths) == 1000 and len(lengths) == 8
    assert 1.9 < max(lengths) / min(lengths) < 2.1
    query, key, value = torch.randn(3, 1, 2, 1000, 4, dtype=torch.float64)
    out = attention_times.by_padding(query, key, value, lengths)
    first, end = sum(lengths[:3]), sum(lengths[:4])
    scores = query[0, 1, end - 1] @ key[0, 1, first:end].T / 2
    torch.testing.assert_close(out[0, end - 1, 1], scores.softmax(0) @ value[0, 1, first:end])


def test_the_docs_say_what_an_adapter_step_costs() -> None:
    root = Path(__file__).parents[3]
    result = root / "benchmarks" / "results" / "h200" / "train_memory_qwen3-1.7b.json"
    ratios: dict[int, list[float]] = {8192: [], 32768: []}
    for row in json.loads(result.read_text())["rows"]:
        steps = zip(row["adapter_step_s"], row["step_s"], strict=True)
        ratios[row["tokens"]] += [adapter / update for adapter, update in steps]
    rollout = RolloutConfig(max_new_tokens=16)
    share = DistillConfig().sequences / (rollout.prompts_per_step * rollout.samples_per_prompt)
    short, long = ratios.values()
    page = " ".join((root / "docs" / "training.md").read_text().split())
    assert (
        f"takes {min(short):.1f} to {max(short):.1f} dense updates of the same responses at 8,192"
        f" tokens, and {min(long):.1f} to {max(long):.1f} at 32,768" in page
    )
    assert f"at most {max(short) * share:.2f} and {max(long) * share:.2f} of the step's" in page
