"""What `sparrow doctor` finds."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from transformers import Qwen3Config

from sparrow_sglang.commands import cli, doctor
from sparrow_sglang.commands.doctor import Check
from sparrow_sglang.commands.plan import BATCHES, LENGTHS, predictions, verdict
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"

# The tiny model has no tokenizer.
BARE = ["--skip-tokenizer-init", "--port", str(free_port())]


def report(argv: Sequence[str]) -> dict[str, Check]:
    return {check.name: check for check in doctor.examine(argv)}


def test_doctor_finds_nothing_wrong(tiny_llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model-path", tiny_llama, "--sparrow-schedule", "fixed-512"]
    assert cli.main(["doctor", *argv, *BARE]) == 0
    lines = capsys.readouterr().out.splitlines()
    platform, kernels, gain = [line for line in lines[:-1] if not line.startswith("ok ")]
    assert platform.startswith("note  platform     no NVIDIA GPU")
    assert kernels.startswith("note  kernels") and "head_dim=16" in kernels
    assert gain == "note  gain         not predicted for cpu"
    assert any("fixed-512 (NOT calibrated)" in line for line in lines)
    assert lines[-1] == "It works."


def test_doctor_judges_a_model_in_the_dtype_that_a_gpu_would_take() -> None:
    argv = ["--model-path", str(MODELS / "qwen3-8b"), "--load-format", "dummy", *BARE]
    assert report(argv)["kernels"].detail == "torch on cpu; a GPU would take the model, too"
    assert "dtype float32" in report([*argv, "--dtype", "float32"])["kernels"].detail


@pytest.mark.parametrize("mode", ["SPARROW", None])
def test_the_gain_is_that_of_plan(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    arguments = SimpleNamespace(
        device="cuda",
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")),
        speculative_algorithm=mode,
        speculative_num_draft_tokens=9,
        tp_size=1,
        quantization=None,
        kv_cache_dtype="auto",
        sparrow_disable_lookups=False,
    )
    fields = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    model = SimpleNamespace(hf_config=Qwen3Config(**fields), context_len=40960)
    schedule = BudgetSchedule.drafts() if mode else load_schedule("qwen3-8b-0.86", 16)

    def gain(**changed: Any) -> Check:
        return doctor._check_gain(SimpleNamespace(**vars(arguments) | changed), model, schedule)

    shape = ModelShape.from_config(fields)
    cases = [(batch, length) for batch in BATCHES for length in LENGTHS]
    predicted = predictions(shape, "h200", cases, schedule=schedule)
    expected = verdict(predicted, "lossless" if mode else "sparse")
    assert gain() == Check("ok", "gain", f"predicted: {expected}") and "up to 2." in expected
    assert gain(tp_size=2).detail == "not predicted for nvidia h200, tp_size=2"
    off = SimpleNamespace(decode=SimpleNamespace(backend="disabled"))
    undrafted = gain(cuda_graph_config=off).detail
    assert (undrafted == "none: without CUDA graphs nothing is drafted") == bool(mode)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA L4")
    assert gain().detail == "not predicted for nvidia l4"


@pytest.mark.parametrize(
    ("argv", "name", "message"),
    [
        ([], "schedule", "no schedule is shipped for this model"),
        (["--sparrow-schedule", "qwen3-4b"], "schedule", "'qwen3-4b' is not known"),
        (["--sparrow-schedule", "x.json"], "schedule", "x.json (relative to"),
        (["--sparrow-shedule", "1"], "flags", "did you mean --sparrow-schedule"),
        (["--prot", "1"], "model", "did you mean --port"),
    ],
)
def test_doctor_names_what_is_in_the_way(
    tiny_llama: str, capsys: pytest.CaptureFixture[str], argv: list[str], name: str, message: str
) -> None:
    assert cli.main(["doctor", "--model-path", tiny_llama, *argv]) == 1
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith(f"FAIL  {name} ")]
    assert message in line
    if name == "flags":
        # SGLang is not imported for the rest.
        assert "note  plugin" in out and "platform" not in out


def test_doctor_sees_a_whitelist_without_sparrow(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    found = report(["--model-path", tiny_llama])
    assert found["flags"].status == "FAIL" and "add sparrow" in found["flags"].detail


def test_doctor_sees_missing_hooks(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparrow_sglang.plugin import registration as plugin

    monkeypatch.setattr(plugin, "is_applied", lambda hook: False)
    found = report(["--model-path", tiny_llama, "--sparrow-schedule", "fixed-512", *BARE])
    assert found["plugin"].status == "FAIL" and "release_kv_cache" in found["plugin"].detail
    assert "model" not in found


def test_doctor_finds_missing_files(tiny_llama: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(tiny_llama) / "config.json", folder)
    argv = ["--model-path", str(folder), "--sparrow-schedule", "fixed-512"]

    def model(*more: str) -> Check:
        return report([*argv, *more])["model"]

    assert model().status == "FAIL" and "has no weights" in model().detail
    assert model("--load-format", "dummy", *BARE).status == "ok"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert "lacks 1 of 2 files of weights: model-2.safetensors" in model().detail
    # transformers makes a tokenizer of one token for a Qwen3 without vocabulary.
    assert f"{folder} has no tokenizer" in model("--load-format", "dummy").detail
    (folder / "tokenizer.json").touch()
    assert model("--load-format", "dummy").status == "ok"
