"""Dense passes run in the attention backend that stock SGLang would choose, unless a flag names
another one, and never in one that computes the model wrongly."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
from configs import save_config
from sglang.srt.arg_groups import model_override_base
from sglang.srt.runtime_context import override_platform

from sparrow_sglang.attention_backends import dense_side
from sparrow_sglang.attention_backends.dense_side import (
    PlanGuard,
    build_dense_side,
    dense_backend,
    dense_problems,
)
from sparrow_sglang.plugin.lossless import algorithm

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64}
GPUS = {
    "ampere": {"device_sm": 80, "has_flashinfer": True},
    "hopper": {"device_sm": 90, "is_sm90": True, "is_hopper_with_cuda_12_3": True},
    "blackwell": {"device_sm": 100, "is_sm100": True},
}


@pytest.fixture
def on_gpu(make_args, tmp_path, monkeypatch):
    """Arguments and config of a model, as a server on such a GPU has them."""

    def build(gpu: str, fields: dict, asked: str | None = None, **server: str) -> tuple:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        # Resolved on this machine, which refuses the flag.
        args = make_args(save_config(folder, **fields), **server)
        msgspec.structs.force_setattr(args, "sparrow_dense_backend", asked)
        # SGLang takes this machine for a platform of its own kind.
        platform = SimpleNamespace(is_out_of_tree=lambda: False)
        monkeypatch.setattr(model_override_base, "current_platform", platform)
        capability = divmod(GPUS[gpu]["device_sm"], 10)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        platforms.enter_context(override_platform(is_cuda=True, **GPUS[gpu]))
        return args, model_override_base.model_config_of(args)

    with ExitStack() as platforms:
        yield build


@pytest.mark.parametrize(
    ("gpu", "fields", "chosen"),
    [
        ("ampere", LLAMA, "flashinfer"),
        ("hopper", LLAMA, "fa3"),
        ("blackwell", LLAMA, "trtllm_mha"),
        # SGLang has rules of their own for these models.
        ("ampere", OLMO2, "fa3"),
        ("ampere", GPT_OSS, "triton"),
        ("hopper", GPT_OSS, "fa3"),
        # FlashInfer computes these heads wrongly.
        ("ampere", LLAMA | {"head_dim": 80}, "triton"),
        ("hopper", LLAMA | {"head_dim": 80}, "fa3"),
    ],
)
def test_dense_passes_go_where_stock_sglang_sends_them(on_gpu, gpu, fields, chosen):
    args, config = on_gpu(gpu, fields)
    assert dense_backend(args, config) == chosen
    assert args.attention_backend == "sparrow"


def test_a_lossless_server_verifies_where_stock_sglang_decodes(on_gpu):
    algorithm.register()
    args, config = on_gpu("hopper", LLAMA, speculative_algorithm="SPARROW")
    assert dense_backend(args, config) == "fa3"


def test_the_flag_names_another_backend(on_gpu):
    args, config = on_gpu("hopper", LLAMA, "flashinfer")
    assert dense_backend(args, config) == "flashinfer"
    assert dense_problems(args, config) == []


@pytest.mark.parametrize(
    ("gpu", "fields", "asked", "remedy"),
    [
        ("hopper", LLAMA, None, None),
        ("hopper", LLAMA, "triton", None),
        ("blackwell", LLAMA, None, "flashinfer or triton"),
        ("hopper", LLAMA, "fa4", "fa3 or flashinfer or triton"),
        ("blackwell", LLAMA, "fa3", "flashinfer or triton"),
        ("hopper", LLAMA | {"head_dim": 96}, "flashinfer", "fa3 or triton"),
        ("hopper", GPT_OSS, "flashinfer", "fa3 or triton"),
    ],
)
def test_backends_that_would_compute_wrongly_are_refused(on_gpu, gpu, fields, asked, remedy):
    args, config = on_gpu(gpu, fields, asked)
    problems = dense_problems(args, config)
    assert [problem.endswith(f"--sparrow-dense-backend {remedy}") for problem in problems] == (
        [] if remedy is None else [True]
    )


@pytest.mark.parametrize(
    ("name", "value"), [("sparrow_dense_backend", "fa3"), ("quantization", "fp8")]
)
def test_a_cpu_has_no_choice(make_args, tmp_path, name, value):
    folder = save_config(tmp_path, **LLAMA)
    with pytest.raises(ValueError, match=f"{name}='{value}': expected none on cpu"):
        make_args(folder, **{name: value})


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("name", ["fa3", "flashinfer", "triton"])
def test_corrections_are_made_where_they_belong(monkeypatch, name, has_windows):
    """FlashInfer's plan and its ragged prefill, and Triton's windows, are faults of these alone."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    built = SimpleNamespace(sliding_window_size=100, use_paged=False)
    monkeypatch.setitem(ATTENTION_BACKENDS, name, lambda runner: built)
    monkeypatch.setattr(dense_side, "dense_backend", lambda *_: name)
    monkeypatch.setattr(dense_side, "window_layers", lambda _: [1] if has_windows else [])
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    runner = SimpleNamespace(
        device="cuda",
        server_args=None,
        model_config=SimpleNamespace(hf_config=None),
        model=torch.nn.Module(),
    )
    backend, planning = build_dense_side(runner)
    assert backend is built
    assert built.sliding_window_size == 100 + (name == "triton" and has_windows)
    assert built.use_paged == (name == "flashinfer" and has_windows)
    assert type(planning) is (PlanGuard if name == "flashinfer" else nullcontext)
