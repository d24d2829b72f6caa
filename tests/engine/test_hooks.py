"""Memory that hooks set aside for landmarks in SGLang's KV pools."""

from types import SimpleNamespace
from typing import Any

import pytest
from configs import kv_configurator

from sparrow_sglang.plugin.arguments.server_args import prepare_model
from sparrow_sglang.plugin.scheduler import memory


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))


def configurator(backend: str, start: int, end: int, page_size: int, hf_config: object) -> Any:
    heads = {"head_dim": 64, "get_num_kv_heads": lambda tp_size: 8 // tp_size}
    return kv_configurator(
        {"attention_backend": backend, "page_size": page_size},
        {"hf_config": hf_config, **heads},
        layer_info=SimpleNamespace(start_layer=start, end_layer=end),
    )


def reserved(backend: str, start: int, end: int, page_size: int) -> int | None:
    kvc = configurator(backend, start, end, page_size, {"num_hidden_layers": 20})
    prepare_model(None, kvc)
    return memory.reserve_landmarks(100_000, None, kvc, end - start)


def test_bytes_per_token():
    # A landmark is 4 heads x 64 x 2 bytes = 512 bytes per page and layer, 32 per token.
    assert reserved("sparrow", 0, 10, 16) == 100_000 + 8 * 32
    # A later pipeline stage has no dense layers; at page size 64 a landmark serves 64 tokens.
    assert reserved("sparrow", 10, 20, 16) == 100_000 + 10 * 32
    assert reserved("sparrow", 0, 10, 64) == 100_000 + 8 * 8
    assert reserved("flashinfer", 0, 10, 16) is None


@pytest.mark.parametrize(("backend", "fits"), [("sparrow", True), ("flashinfer", False)])
def test_with_a_pool_for_windows(backend, fits):
    """Six layers, three with a window; layer 1 is dense, 3 and 5 have landmarks."""
    from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

    kinds = ["sliding_attention", "full_attention"] * 3
    config = SimpleNamespace(num_hidden_layers=6, layer_types=kinds)
    pools = object.__new__(HybridSWAPoolConfigurator)
    per_token = 4 * (64 + 64) * 2
    pools._full_layers_num = pools._swa_layers_num = 3
    pools._full_per_token = pools._swa_per_token = per_token
    pools._swa_full_tokens_ratio, pools._cell_size = 0.5, 1.5 * 3 * per_token
    pools._sliding_window_size, pools._page_size = 24, 16
    # An attribute of SGLang 0.5.23.
    pools._enable_unified_memory = False
    kvc = configurator(backend, 0, 6, 16, config)
    prepare_model(None, kvc)
    memory.reserve_landmarks_beside_windows(None, pools, kvc)
    sizes = pools.calculate_pool_sizes(10_000_000, 16)
    full, windows = sizes.full_max_total_num_tokens, sizes.swa_max_total_num_tokens
    landmarks = 2 * full // 16 * 4 * 64 * 2
    used = 3 * per_token * (full + windows) + landmarks
    assert (used <= 10_000_000) == fits
    assert abs(used - 10_000_000) < 200_000
