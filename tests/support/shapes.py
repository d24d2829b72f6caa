"""Model shapes for the tests of planning: a small one, and the benchmarked ones."""

import json
from pathlib import Path

from sparrow_sglang.planning.model_shape import ModelShape

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"

# A layer has 8 * (4 * 2 * (4 + 2) + 3 * 16) = 8 * 96 = 768 weights, two have 1536, the
# vocabulary projection 10 * 8 = 80: 1616. A token has 2 * 2 * 4 = 16 values in a layer's KV.
GROUPED = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=10,
)


def qwen(size: str) -> ModelShape:
    return ModelShape.from_config(
        json.loads((MODELS / f"qwen3-{size}" / "config.json").read_text())
    )
