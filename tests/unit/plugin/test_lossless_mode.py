"""What lossless decoding refuses, what memory it reserves, and what it says of itself."""

from types import SimpleNamespace
from typing import Any

import pytest
from configs import kv_configurator
from messages import tokenized

from sparrow_sglang.attention_backends.gpu_decode import DecodeBuffers
from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin.lossless.mode import Lossless, mode_of
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.scheduler import memory
from sparrow_sglang.plugin.scheduler.scheduler_hooks import graph_runner_class
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.schedules.options import RequestError
from sparrow_sglang.schedules.schedule import BudgetSchedule
from sparrow_sglang.sglang_compat.arguments import resolved

DRAFTS = {"speculative_algorithm": "SPARROW", "speculative_num_draft_tokens": 5}
SERVED = {"temperature": 0.7, "top_p": 0.9, "stop": ["a"], "logit_bias": {}, "ignore_eos": True}
REJECTED = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 2,
    "logit_bias": {"5": 1.0},
    "beam_width": 2,
    "watermark": {"kind": "green"},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "custom_logit_processor": "{}",
    "lora_id": "a",
    "return_hidden_states": True,
    "return_sampling_mask": True,
    "return_entropy": True,
}


@pytest.mark.parametrize("name", REJECTED)
def test_fields_that_a_round_cannot_honour_are_rejected(name: str) -> None:
    served = tokenized(**SERVED)
    Lossless().require_servable(served, None)
    if not hasattr(served, name) and not hasattr(served.sampling_params, name):
        pytest.skip("this version has no such field")
    with pytest.raises(RequestError, match=f"^{name}="):
        Lossless().require_servable(tokenized(**{name: REJECTED[name]}), None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj"]},
        {"lora_paths": ["adapter=path"]},
        {"sparrow_audit_rate": 0.1},
        {"pp_size": 2},
        {"enable_dp_attention": True, "tp_size": 2, "dp_size": 2},
        {"enable_deterministic_inference": True},
        {"enable_return_hidden_states": True},
        {"speculative_draft_model_path": "a/b"},
        {"speculative_num_draft_tokens": 1},
        {"speculative_eagle_topk": 4},
        {"enable_strict_thinking": True, "reasoning_parser": "qwen3"},
        {"speculative_algorithm": "NGRAM"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_it_does_not_run_with_are_rejected(
    make_args: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=next(iter(arguments))):
        make_args(**DRAFTS | arguments)


def test_its_arguments_are_rejected_without_it(make_args: Any) -> None:
    with pytest.raises(InputError, match="--speculative-algorithm SPARROW"):
        make_args(**DRAFTS | {"speculative_algorithm": None})


@pytest.mark.parametrize(("chunk", "fits"), [(64, False), (79, False), (80, True), (-1, False)])
def test_experts_of_a_round_must_fit_into_the_buffer_of_sglang(
    make_args: Any, chunk: int, fits: bool
) -> None:
    arguments = {"max_running_requests": 16, "chunked_prefill_size": chunk}
    make_args(**DRAFTS, **arguments)
    experts = {"enable_return_routed_experts": True}
    if fits:
        make_args(**DRAFTS, **arguments, **experts)
        return
    with pytest.raises(InputError, match=f"chunked_prefill_size={chunk}: .* 80 rows .*-size 80"):
        make_args(**DRAFTS, **arguments, **experts)


def test_it_says_that_nothing_is_drafted_without_cuda_graphs(make_args: Any) -> None:
    view = resolved(make_args(**DRAFTS))
    schedule, config = BudgetSchedule.fixed(512, 16), {"num_hidden_layers": 4}
    assert "nothing is drafted" in mode_of(view).describe(view, schedule, config)
    graphs = SimpleNamespace(decode=SimpleNamespace(backend="full"))
    on_gpu: Any = SimpleNamespace(device="cuda", cuda_graph_config=graphs, **DRAFTS)
    assert mode_of(on_gpu).describe(on_gpu, schedule, config).endswith("up to 4 drafts a round")
    graphs.decode.backend = "disabled"
    assert "nothing is drafted" in mode_of(on_gpu).describe(on_gpu, schedule, config)


def test_the_logits_of_a_round_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of fp32 for each token of each request, and as much twice for its probabilities."""
    requests, tokens = 7, 5
    model = {"hf_config": {}, "vocab_size": 0, "context_len": 512, "hidden_size": 64}
    kvc = kv_configurator({"max_running_requests": requests, **DRAFTS}, model)
    monkeypatch.setattr(PROCESS, "decoding", (Lossless(), None))
    for name in ("DecodeShape.of_model", "DecodeBuffers.__init__"):
        monkeypatch.setattr(f"sparrow_sglang.attention_backends.gpu_decode.{name}", lambda *_: None)
    monkeypatch.setattr(DecodeBuffers, "num_bytes", 0)
    parallel = SimpleNamespace(attn_dp_size=1, attn_tp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr(memory, "rows_of_graphs", lambda args, count: count)
    monkeypatch.setattr("sparrow_sglang.attention_backends.gpu_decode.EAGER_ROWS", 10**6)
    without = memory.reserve_decode_buffers(10**9, kvc, 0.0)
    kvc.model_config.vocab_size = 1000
    left = memory.reserve_decode_buffers(10**9, kvc, 0.0)
    assert without - left == 3 * 4 * 1000 * requests * tokens


def test_what_is_captured_is_known_before_the_backend_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang requests the class of graphs for its memory plan, too."""
    monkeypatch.setattr(PROCESS, "scheduler", None)
    runner: Any = SimpleNamespace(device="cuda")
    for mode in (Mode(), Lossless()):
        monkeypatch.setattr(PROCESS, "decoding", (mode, BudgetSchedule.drafts()))
        assert graph_runner_class(lambda _: object, runner) is mode.graph_runner()
    monkeypatch.setattr(PROCESS, "decoding", None)
    assert graph_runner_class(lambda _: object, runner) is object
