"""What stands for a model before it is loaded: a folder with its config only, and SGLang's object
that sizes the KV pool."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


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


def with_fields(view: Any, **fields: Any) -> Any:
    """Resolved arguments with other values of these fields."""
    return type("View", (), {"__getattr__": lambda _, name: getattr(view, name)} | fields)()


def kv_configurator(server: dict[str, Any], model: dict[str, Any], **fields: Any) -> Any:
    """A KVCacheConfigurator of a bf16 pool, reduced to what hooks read. `server` overrides the
    arguments of a server, `model` has fields of the model's config."""
    arguments = {
        "attention_backend": "sparrow",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "sparrow_schedule": "fixed-512",
        "sparrow_audit_rate": 0.0,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "page_size": 16,
        "max_running_requests": None,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full", max_bs=512)),
    }
    given = {"device": "cuda", "gpu_id": 0, "is_draft_worker": False}
    given |= {"kv_cache_dtype": torch.bfloat16} | fields
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments | server),
        model_config=SimpleNamespace(dtype=torch.bfloat16, **model),
        **given,
    )
