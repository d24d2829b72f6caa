"""What the GPU kernels cannot serve is refused from arguments and config, before anything loads."""

import importlib
import pkgutil
from itertools import count
from pathlib import Path

import pytest
from configs import save_config, with_fields

from sparrow_sglang.attention_backends import kernels
from sparrow_sglang.attention_backends.kernel_limits import kernel_problems
from sparrow_sglang.sglang_compat.arguments import read_model_config, resolved

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}


def folder_of(folder: Path, config: dict) -> str:
    folder.mkdir()
    return save_config(folder, **(LLAMA | config))


@pytest.fixture
def problems(make_args, tmp_path):
    """Problems on a GPU of a llama with these fields in its config and these arguments."""

    number = count()

    def find(config: dict, **arguments) -> list[str]:
        # SGLang caches the config of a folder, so every call uses a new one.
        args = make_args(folder_of(tmp_path / str(next(number)), config), **arguments)
        return kernel_problems(args, read_model_config(args))

    return find


@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 112, 128, 192, 256, 512])
def test_head_dims(problems, head_dim):
    served = head_dim in (64, 80, 96, 128, 256)
    assert [f"head_dim={head_dim}" in problem for problem in problems({"head_dim": head_dim})] == (
        [] if served else [True]
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "arguments", "group"),
    [
        (16, 1, {}, None),
        (17, 1, {}, 17),
        (64, 2, {}, 32),
        # KV heads are repeated where there are more ranks than heads, so groups get smaller.
        (32, 1, {"tp_size": 2}, None),
        (64, 2, {"tp_size": 2}, 32),
        (32, 1, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 32),
    ],
)
def test_query_heads_of_a_kv_head(problems, heads, kv_heads, arguments, group):
    config = {
        "head_dim": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        # transformers requires a multiple of the number of heads.
        "hidden_size": 4 * heads,
    }
    found = problems(config, **arguments)
    expected = f"{group} query heads for each KV head: the GPU kernels take up to 16"
    assert found == [] if group is None else expected in found[0] and len(found) == 1


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_context(problems, page_size):
    """The limit is a number of pages, which are counted in 15 bits."""
    longest = (2**15 - 1) * page_size
    config = {"head_dim": 64, "max_position_embeddings": longest}
    assert problems(config, page_size=page_size) == []
    config["max_position_embeddings"] = longest + 1
    [problem] = problems(config, page_size=page_size)
    assert f"--context-length {longest}" in problem
    assert problems(config, page_size=page_size, context_length=longest) == []


def test_dtype(problems):
    [problem] = problems({"head_dim": 64}, dtype="float32")
    assert problem.startswith("dtype float32")


def test_only_a_gpu_refuses(make_args, tmp_path, monkeypatch):
    from sparrow_sglang.plugin.arguments import server_args

    args = make_args(folder_of(tmp_path / "model", {"head_dim": 48}))
    server_args._check_resolved(args)

    on_gpu = with_fields(resolved(args), device="cuda")
    monkeypatch.setattr(server_args, "resolved", lambda _: on_gpu)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match="cannot run here:\n  - .* head_dim=48: the GPU kernels"):
        server_args._check_resolved(args)


def test_every_kernel_can_be_compiled_beside_sglang() -> None:
    """SGLang replaces some of Triton's functions by plain ones, which kernels cannot call."""
    import sglang.srt.utils.common  # noqa: F401
    import triton

    assert triton.next_power_of_2.__module__.startswith("sglang."), "SGLang leaves Triton alone now"
    modules = [
        importlib.import_module(f"{kernels.__name__}.{module.name}")
        for module in pkgutil.iter_modules(kernels.__path__)
    ]
    found = {
        # `cache_key` raises if a kernel refers to anything that Triton cannot compile.
        value.cache_key
        for module in modules
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    }
    assert len(found) > 10
