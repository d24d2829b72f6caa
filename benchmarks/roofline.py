"""Bytes that one decode step must read, counted from a model's shapes."""

import json
from dataclasses import dataclass
from pathlib import Path

from sparrow_sglang.schedule import BudgetSchedule


@dataclass(frozen=True)
class ModelShape:
    """What a decode step's bytes depend on; read from a Hugging Face `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_value: int = 2

    @classmethod
    def from_config(cls, folder: Path) -> "ModelShape":
        config = json.loads((folder / "config.json").read_text())
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_q_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            vocab_size=config["vocab_size"],
        )

    @property
    def weight_bytes(self) -> int:
        """Weights read once a step: the layers and the vocabulary projection."""
        attention = (
            self.hidden_size * self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        )
        mlp = 3 * self.hidden_size * self.intermediate_size
        values = self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size
        return values * self.bytes_per_value

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_value


def dense_step_bytes(shape: ModelShape, seq_lens: list[int]) -> int:
    """Bytes of a dense decode step: weights and every cached token."""
    kv = sum(seq_lens) * shape.kv_bytes_per_token_and_layer * shape.num_layers
    return shape.weight_bytes + kv


def sparse_step_bytes(shape: ModelShape, seq_lens: list[int], schedule: BudgetSchedule) -> int:
    """Bytes of a sparse decode step: weights, dense layers, landmarks once, selected pages."""
    per_token = shape.kv_bytes_per_token_and_layer
    dense_layers = len([layer for layer in schedule.dense_layers if layer < shape.num_layers])
    total = shape.weight_bytes
    for length in seq_lens:
        selected = min(length, schedule.num_selected_pages(length) * schedule.page_size)
        # Below the budget nothing is scored, so no landmark is read.
        landmarks = length // schedule.page_size * per_token // 2 if selected < length else 0
        total += dense_layers * length * per_token
        total += (shape.num_layers - dense_layers) * (selected * per_token + landmarks)
    return total
