"""Checkpoint folders with only a model's config: enough for checks that run before loading."""

import json
from pathlib import Path
from typing import Any


def save_config(folder: Path, **fields: Any) -> str:
    """Write the config of a small model, overridden by `fields`, and return the folder."""
    base = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(base | fields))
    return str(folder)
