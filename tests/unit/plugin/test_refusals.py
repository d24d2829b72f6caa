"""What is refused, in the process that builds the arguments, and what the message says."""

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import save_config, with_fields
from sglang.srt.layers.radix_attention import AttentionType
from transformers import LlamaConfig

from sparrow_sglang.plugin.scheduler.adapter_checks import check_config, module_shapes
from sparrow_sglang.plugin.scheduler_calls import ControlError
from sparrow_sglang.sglang_compat.arguments import attention_backends, resolved


def config_of(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **fields}


HEADS = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK = config_of("DeepseekV2", "deepseek_v2", kv_lora_rank=32, q_lora_rank=None, **HEADS)
GEMMA2 = config_of("Gemma2", "gemma2", sliding_window=128, attn_logit_softcapping=50.0)
QWEN2_WINDOW = config_of(
    "Qwen2", "qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=0
)
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
QWEN3_NEXT = config_of("Qwen3Next", "qwen3_next", full_attention_interval=4, **LINEAR)
LLAMA = config_of("Llama", "llama")
# InfLLM v2 of MiniCPM4, and that of MiniMax M3.
SPARSE = {"kernel_size": 32, "block_size": 64, "topk": 64, "dense_len": 8192}


@pytest.mark.parametrize("field", ["sparse_config", "sparse_attention_config", "use_sparse_attn"])
def test_a_model_with_a_sparse_attention_of_its_own(make_args, tmp_path, field):
    (tmp_path / "dense").mkdir()
    make_args(save_config(tmp_path / "dense", **LLAMA, **{field: None}, decoder_sparse_step=1))
    with pytest.raises(ValueError, match=rf"sparse attention of its own \({field}\); choose"):
        make_args(save_config(tmp_path, **LLAMA, **{field: SPARSE}))


@pytest.mark.parametrize(
    "config", [DEEPSEEK, GEMMA2, QWEN2_WINDOW, QWEN3_NEXT], ids=lambda config: config["model_type"]
)
def test_model(make_args, tmp_path, config):
    with pytest.raises(ValueError) as error:
        make_args(save_config(tmp_path, **config))
    assert "choose another --attention-backend" in str(error.value)


def test_a_model_for_which_sglang_puts_another_backend_in_the_place_of_ours(make_args, tmp_path):
    """HRM-Text attends to its prompt in both directions, in Triton."""
    with pytest.raises(ValueError, match="triton"):
        make_args(save_config(tmp_path, **config_of("HrmText", "hrm_text")))


@pytest.mark.parametrize("graphs", ["breakable", "disabled"])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_decode_steps_that_dp_attention_would_turn_into_prefills(make_args, graphs, dp_size):
    from sparrow_sglang.plugin.arguments.refusals import server_problems

    arguments = resolved(make_args(tp_size=3, dp_size=dp_size, enable_dp_attention=dp_size > 1))
    # As on a GPU, where graphs of a prefill are the default.
    config = SimpleNamespace(prefill=SimpleNamespace(backend=graphs))
    problems = server_problems(with_fields(arguments, cuda_graph_config=config))
    assert len(problems) == (graphs == "breakable" and dp_size == 3)
    assert all("pass --disable-prefill-cuda-graph" in problem for problem in problems)


def test_a_window_that_is_switched_off_is_none(make_args, tmp_path):
    """Published configs carry the field."""
    args = make_args(save_config(tmp_path, **QWEN2_WINDOW | {"use_sliding_window": False}))
    assert resolved(args).page_size == 16
    assert attention_backends(args) == ("sparrow", "sparrow")


def test_linear_attention_is_served_where_its_kernels_run(make_args, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = save_config(tmp_path, **QWEN3_NEXT)
    # SGLang keeps states of prefixes on GPUs only.
    assert resolved(make_args(model, disable_radix_cache=True)).page_size == 16
    with pytest.raises(ValueError, match="mamba_radix_cache_strategy"):
        make_args(model, mamba_radix_cache_strategy="extra_buffer_lazy")
    monkeypatch.setattr(
        "sparrow_sglang.plugin.arguments.refusals.installed_version", lambda: "0.5.18"
    )
    with pytest.raises(ValueError, match="0.5.18"):
        make_args(model, disable_radix_cache=True)


FLAGS = (
    "enable_hierarchical_cache enable_mixed_chunk enable_unified_memory enable_hisparse"
    " enable_page_major_kv_layout enable_lmcache enable_flexkv enable_two_batch_overlap"
    " enable_pdmux enable_torch_compile enable_streaming_session use_ray smg_grpc_mode grpc_mode"
    " enable_linear_replayssm enable_int8_mamba_checkpoint"
)
WRONG = dict.fromkeys(FLAGS.split(), True) | {
    "page_size": 1,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "decode",
    "moe_a2a_backend": "pplx",
    "dllm_algorithm": "LowConfidence",
    "model_impl": "transformers",
    "tokenizer_worker_num": 2,
    "radix_cache_backend": "other",
    "grpc_port": 1234,
    "sidecar": "other",
    "tp_size": 0,
    "dp_size": 0,
    "pp_size": -1,
    "ep_size": 0,
    "max_running_requests": 0,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "kv_cache_dtype": "fp8_e5m2",
    "sparrow_audit_rate": 1.5,
}


def test_each_wrong_argument_is_named_with_its_value_and_a_remedy(make_args):
    with pytest.raises(ValueError) as error:
        make_args(**WRONG)
    lines = str(error.value).splitlines()
    for field, value in WRONG.items():
        flag = f"--{field.replace('_', '-')}"
        [line] = [line for line in lines if line.startswith(f"  - {field}={value!r}: ")]
        assert re.search(f"; (remove {flag}|pass ({flag} |another {flag}))", line)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "allowed"), [(9, 3, 2, "1, 3, 9"), (12, 4, 6, "1, 2, 4, 12")]
)
def test_heads_that_ranks_cannot_share(make_args, tmp_path, heads, kv_heads, ranks, allowed):
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 72}
    model = save_config(tmp_path, **LLAMA, **shape)
    with pytest.raises(ValueError) as error:
        make_args(model, tp_size=ranks)
    assert f"tp_size={ranks}" in str(error.value) and str(error.value).endswith(allowed)
    # Replicated attention is not split; KV heads are repeated for more ranks than there are.
    make_args(model, tp_size=ranks, dp_size=ranks, enable_dp_attention=True)
    make_args(model, tp_size=int(allowed.rpartition(" ")[2]))


def test_an_adapter_is_refused_before_the_model_is_loaded(make_args, tmp_path):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for folder, named in ((tmp_path, "use_dora=True"), (tmp_path / "gone", "gone")):
        args = make_args(lora_paths={"mine": str(folder)}, enable_lora=True)
        with pytest.raises(ValueError, match=rf"lora_paths='mine'.*{named}"):
            args.check_server_args()


@pytest.mark.parametrize(
    "name",
    [
        *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"),
        *("trainable_token_indices", "alora_invocation_tokens", "target_parameters"),
        *("arrow_config", "kasa_config", "layer_replication", "a_field_of_the_next_peft"),
    ],
)
def test_fields_of_an_adapter_that_sglang_would_ignore(name):
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert check_config(config | {name: False}) == 4
    for wrong in ({name: True}, {"init_lora_weights": "pissa_niter_4"}):
        with pytest.raises(ControlError, match=f"config: {next(iter(wrong))}="):
            check_config(config | wrong)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"attention_backend": None, "decode_attention_backend": "sparrow"},
            "prefill attention backend None",
        ),
        ({"prefill_attention_backend": "torch_native"}, "prefill attention backend 'torch_native'"),
        ({"sparrow_audit_rate": 0.1}, "pass --enable-metrics"),
        ({"sparrow_audit_rate": 0.1, "pp_size": 2}, "pp_size=2"),
        (
            {"sparrow_audit_rate": 0.1, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "pass --enable-dp-lm-head",
        ),
        (
            {"cuda_graph_backend_prefill": "full", "device": "cuda"},
            "cuda_graph_config[prefill].backend='full'",
        ),
    ],
)
def test_arguments_that_do_not_go_together(make_args, fields, named):
    with pytest.raises(ValueError) as error:
        make_args(**fields)
    assert named in str(error.value)


def test_environment(make_args, monkeypatch):
    names = ("USE_HND_KVCACHE", "ENABLE_POST_CAPTURE_KV_SIZING", "RUST_SERVER")
    for name in names:
        monkeypatch.setenv(f"SGLANG_{name}", "1")
    with pytest.raises(ValueError) as error:
        make_args()
    assert all(re.search(f"SGLANG_{name}=1: .*; unset it", str(error.value)) for name in names)


def test_schedule_is_checked_before_anything_is_loaded(make_args):
    with pytest.raises(ValueError, match="qwen3-4b-0.86"):
        make_args(sparrow_schedule="qwen3-4b-0.87")
    with pytest.raises(ValueError):
        make_args(sparrow_schedule=None)
    with pytest.raises(ValueError, match="pass --page-size 16"):
        make_args(sparrow_schedule="qwen3-4b-0.86", page_size=32)


def test_plugin_filtered_out(make_args, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "someone_else, sparrow_cpu")
    with pytest.raises(RuntimeError, match="SGLANG_PLUGINS"):
        make_args()
    monkeypatch.setenv("SGLANG_PLUGINS", "sparrow,sparrow_cpu")
    assert resolved(make_args()).page_size == 16


class TestRunner:
    """Properties of a loaded model: real attention layers, the runner round them reduced."""

    @pytest.fixture
    def problems(self):
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sparrow_sglang.plugin.arguments.refusals import runner_problems

        def find(
            layer: dict,
            attributes: dict | None = None,
            inside: type = torch.nn.Sequential,
            kinds: Sequence[str] = (),
            **runner,
        ) -> list[str]:
            pool = object.__new__(MHATokenToKVPool)
            pool.kv_cache_layout = "nhd"
            attention = RadixAttention(4, 16, 0.25, 2, layer_id=3, **layer)
            for name, value in (attributes or {}).items():
                setattr(attention, name, value)
            fields = {
                "model_config": SimpleNamespace(hf_config={"layer_types": kinds}),
                "sliding_window_size": None,
                "device": "cpu",
                "token_to_kv_pool": pool,
                "kv_cache_dtype": torch.bfloat16,
                "model": inside(attention),
            }
            return runner_problems(SimpleNamespace(**(fields | runner)))

        return find

    @pytest.mark.parametrize(
        ("name", "value", "shown"),
        [
            ("logit_cap", 30.0, "30.0"),
            ("is_cross_attention", True, "True"),
            ("v_head_dim", 8, "8"),
            ("use_irope", True, "True"),
            ("pos_encoding_mode", "ROPE_LLAMA", "'ROPE_LLAMA'"),
            ("attn_type", AttentionType.ENCODER_ONLY, repr(AttentionType.ENCODER_ONLY)),
            # Grok sets it on the layer, and scales the queries of late positions by it.
            ("xai_temperature_len", 1024, "1024"),
            ("k_scale", torch.nn.Parameter(torch.tensor(0.5), requires_grad=False), "0.5"),
            ("v_scale_float", 0.25, "0.25"),
            ("q_scale_float", 2.0, "2.0"),
            ("qk_head_dim", 24, "24"),
        ],
    )
    def test_what_a_model_sets_on_its_layers(self, problems, name, value, shown):
        [problem] = problems({}, attributes={name: value})
        assert problem == f"attention layer 3: {name}={shown} is not supported"

    @pytest.mark.parametrize(
        ("kind", "window", "of_model", "served"),
        [
            ("sliding_attention", 127, 127, True),
            ("sliding_attention", 127, 255, False),
            # SGLang's implementation of the model, or its backend, would attend to everything.
            ("sliding_attention", -1, 127, False),
            ("sliding_attention", 127, None, False),
            ("full_attention", 127, 127, False),
        ],
    )
    def test_a_window_must_be_that_of_the_model(self, problems, kind, window, of_model, served):
        found = problems(
            {"sliding_window_size": window},
            kinds=["full_attention"] * 3 + [kind],
            sliding_window_size=of_model,
        )
        expected = f"attention layer 3: sliding_window_size={window} is not supported"
        assert found == ([] if served else [expected])

    def test_an_fp8_pool_goes_by_the_scales_of_its_layers_on_a_gpu(self, problems, monkeypatch):
        scaled = {name: 0.5 for name in ("k_scale_float", "v_scale", "v_scale_float")}
        scaled["k_scale"] = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        fp8 = {"kv_cache_dtype": torch.float8_e4m3fn}
        assert problems({}, **fp8) == []
        assert "k_scale=0.5" in problems({}, attributes=scaled, **fp8)[0]
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
        assert problems({}, attributes=scaled, device="cuda", **fp8) == []
        assert len(problems({}, attributes=scaled, device="cuda")) == 4
        # SGLang's loader of a file of scales leaves this unset: V would be divided by the
        # scale, and not multiplied by it.
        [problem] = problems({}, attributes=scaled | {"v_scale_float": None}, device="cuda", **fp8)
        assert "v_scale=0.5" in problem
        [problem] = problems({}, attributes={"q_scale_float": 0.5}, device="cuda", **fp8)
        assert "q_scale_float=0.5" in problem
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
        [problem] = problems({}, device="cuda", **fp8)
        assert "of compute capability 8.6" in problem

    def test_pool_and_its_dtype(self, problems):
        assert "float8_e5m2" in problems({}, kv_cache_dtype=torch.float8_e5m2)[0]
        assert "SimpleNamespace" in problems({}, token_to_kv_pool=SimpleNamespace())[0]


def test_shapes_of_a_model_are_those_of_its_own_config() -> None:
    """Python gives the id of a config that is gone to the next one."""
    for width in range(64, 384, 64):
        config = LlamaConfig(hidden_size=width, intermediate_size=8, num_hidden_layers=1)
        assert module_shapes(config)["model.layers.0.mlp.up_proj"] == (8, width)
        del config
