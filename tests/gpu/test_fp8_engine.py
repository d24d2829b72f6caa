"""An FP8 KV cache in an engine on a GPU, against the contract's loop on rounded keys and values."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import SCHEDULE, greedy, random_prompt, save_tiny_model
from oracle import ContractModel
from safetensors.torch import load_file, save_file

from sparrow_sglang.client.endpoint import connect


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


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP8 = torch.float8_e4m3fn
# Bound of the mean |difference| of log-probs between bf16 and float64. It is 0.016 on a CPU, where
# the error of an oracle that reads everything is 0.051; the latter is 0.048 on an H200.
ROUNDING = 0.04


@pytest.mark.parametrize("dense", ["flashinfer", None])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.5)], ids=["unscaled", "scaled"])
def test_log_probs_follow_the_contract_on_rounded_kv(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scales: tuple[float, float],
    dense: str | None,
) -> None:
    """FlashAttention-3, the default on Hopper, rounds queries of a prefill to FP8, too."""
    import sglang

    shapes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
    (tmp_path / "plain").mkdir()
    model = save_tiny_model(tmp_path / "plain", num_key_value_heads=2, dtype="bfloat16", **shapes)
    SCHEDULE.save(schedule := tmp_path / "schedule.json")
    served = model
    if scales == (1.0, 1.0) and dense == "flashinfer":
        # By default, FlashInfer would compute prefill on keys and values before they are rounded.
        # With scales, the backend itself makes FlashInfer read the pool.
        monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")
    elif scales != (1.0, 1.0):
        served = save_with_kv_scales(model, tmp_path / "scaled", scales)
    prompts = [random_prompt(length, length) for length in (17, 64, 190)]
    with sglang.Engine(
        model_path=served,
        skip_tokenizer_init=True,
        attention_backend="sparrow",
        sparrow_schedule=str(schedule),
        sparrow_dense_backend=dense,
        kv_cache_dtype="fp8_e4m3",
        dtype="bfloat16",
        chunked_prefill_size=64,
        max_total_tokens=4096,
        cuda_graph_max_bs_decode=4,
        disable_prefill_cuda_graph=True,
        log_level="error",
    ) as engine:
        # In the second round, prompts are found in the prefix cache.
        cold, warm = (greedy(engine, prompts, 40) for _ in range(2))
        assert connect(engine).call_sparrow("landmarks")["pages"] > 10
    assert warm[2]["meta_info"]["cached_tokens"] > 100
    oracle = ContractModel(model, SCHEDULE, kv_dtype=FP8, kv_scales=scales)
    reads_all = ContractModel(model, None, kv_dtype=FP8, kv_scales=scales)
    for answers in (cold, warm):
        error = mean_error(oracle, prompts, answers)
        assert error < ROUNDING
        # Otherwise the test could not tell sparse decode from dense.
        assert mean_error(reads_all, prompts, answers) > 1.5 * error


def mean_error(oracle: ContractModel, prompts: list[list[int]], answers: list[dict]) -> float:
    """Mean |difference| between the answers' log-probs and an oracle's."""
    errors = [oracle.errors(*pair) for pair in zip(prompts, answers, strict=True)]
    return float(torch.cat(errors).mean())
