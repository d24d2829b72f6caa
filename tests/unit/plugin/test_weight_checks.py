"""Which weights a model takes, by the names and shapes of its checkpoint and of transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from engines import save_tiny_model

from sparrow_sglang.models import stored_shapes
from sparrow_sglang.plugin.scheduler.weight_checks import Checkpoint

TEXT = SimpleNamespace(tie_word_embeddings=False)
TIED = SimpleNamespace(tie_word_embeddings=True)
SEES = SimpleNamespace(text_config=TEXT)
EMBEDDINGS, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"
SCALE = "model.layers.0.self_attn.q_proj.weight_scale"


def checkpoint(hf_config: Any = TEXT, *names: str) -> Checkpoint:
    return Checkpoint({EMBEDDINGS: [8, 4], QUERY: [4, 4]} | dict.fromkeys(names, [1]), hf_config)


@pytest.mark.parametrize(
    ("known", "name", "shape", "problem"),
    [
        (checkpoint(), QUERY, [4, 4], None),
        (checkpoint(), QUERY, [4, 2], f"{QUERY} is [4, 2]: expected [4, 4]"),
        (checkpoint(), f"module.{QUERY}", [4, 4], "no tensor of that name"),
        (checkpoint(), QUERY.replace("model.", "model.language_model."), [4, 4], "no tensor"),
        (checkpoint(SEES), QUERY.replace("model.", "model.language_model."), [4, 4], None),
        (checkpoint(SEES), QUERY.replace("model.", "language_model.model."), [4, 3], "expected"),
        (checkpoint(), "lm_head.weight", [8, 4], "no tensor of that name"),
        (checkpoint(TIED), "lm_head.weight", [8, 4], None),
        (checkpoint(TIED), "lm_head.weight", [9, 4], "expected [8, 4]"),
        (checkpoint(), "model.layers.0.self_attn.rotary_emb.inv_freq", [2], None),
        (checkpoint(TEXT, EXPERT.format(0)), STACKED, [2, 8, 4], None),
        (checkpoint(), STACKED, [2, 8, 4], "no tensor of that name"),
        (checkpoint(TEXT, SCALE), SCALE, [], None),
        # Neither the files nor transformers tell.
        (Checkpoint({}, None), "anything", [3], None),
    ],
)
def test_what_a_model_takes(
    known: Checkpoint, name: str, shape: list[int], problem: str | None
) -> None:
    found = known.problem(name, torch.Size(shape))
    assert found is None if problem is None else problem in (found or "")


@pytest.mark.parametrize(
    ("known", "names", "note"),
    [
        (checkpoint(), [EMBEDDINGS, QUERY], ""),
        (checkpoint(), [QUERY], f"1 of 2 tensors were updated, not {EMBEDDINGS}"),
        (checkpoint(), [], f"0 of 2 tensors were updated, not {EMBEDDINGS}"),
        # No model loads them, so that no trainer sends them.
        (checkpoint(TIED, "lm_head.weight", "mtp.fc.weight"), [EMBEDDINGS, QUERY], ""),
        (checkpoint(TEXT, EXPERT.format(0)), [EMBEDDINGS, QUERY, STACKED], ""),
    ],
)
def test_what_an_update_leaves(known: Checkpoint, names: list[str], note: str) -> None:
    assert known.note(names) == note


def test_of_a_config_without_files(tiny_llama: str, tmp_path: Path) -> None:
    """As of a server of load_format="dummy", into which a trainer loads the weights."""
    config = transformers.AutoConfig.from_pretrained(tiny_llama)
    config.save_pretrained(tmp_path)
    dummy = SimpleNamespace(model_path=str(tmp_path), revision=None, hf_config=config)
    expected = {name: shape for name, (_, shape) in stored_shapes(Path(tiny_llama)).items()}
    assert Checkpoint.of_model(dummy).shapes == expected
    dummy.model_path = "s3://bucket/model"
    assert Checkpoint.of_model(dummy).shapes == expected


def test_shapes_in_files(tiny_llama: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    # A file beside those of the index, in other names.
    (tmp_path / "parts" / "consolidated.safetensors").write_bytes(
        Path(tiny_llama, "model.safetensors").read_bytes().replace(b"model.layers", b"other.layers")
    )
    parts = stored_shapes(tmp_path / "parts")
    assert {name: shape for name, (_, shape) in parts.items()} == expected


@pytest.mark.parametrize(
    "kind", ["qwen3", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5"]
)
def test_what_transformers_trains_is_taken(tmp_path: Path, kind: str) -> None:
    """Under the names of its modules, which differ from those in the files for some kinds."""
    folder = save_tiny_model(tmp_path, kind)
    config = transformers.AutoConfig.from_pretrained(folder)
    known = Checkpoint.of_model(SimpleNamespace(model_path=folder, revision=None, hf_config=config))
    with torch.device("meta"):
        auto = transformers.AutoModelForImageTextToText if kind == "qwen3_5" else None
        model = (auto or transformers.AutoModelForCausalLM).from_config(config)
    weights = model.state_dict()
    assert len(known.stored) > 20 and len(weights) > 20
    assert not [found for name in weights if (found := known.problem(name, weights[name].shape))]
    assert known.note(weights) == ""
