"""A checkpoint with scales of an FP8 KV cache in its attention layers, but without FP8 weights."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_with_kv_scales(model: str, folder: Path, scales: tuple[float, float]) -> str:
    """A copy of a checkpoint with `scales` of keys and of values, the same in each layer."""
    shutil.copytree(model, folder)
    path, config_path = folder / "model.safetensors", folder / "config.json"
    weights = load_file(path)
    projections = sorted(
        {name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")}
    )
    for kind, scale in zip("kv", scales, strict=True):
        for name in projections:
            if name.endswith(f"{kind}_proj"):
                weights[f"{name}.{kind}_scale"] = torch.tensor(scale)
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": [*projections, "lm_head"],
    }
    config_path.write_text(json.dumps(config))
    return str(folder)
