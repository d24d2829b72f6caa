"""Which KV heads a rank has, against SGLang's own layer."""

from types import SimpleNamespace
from typing import Any

import pytest

GROUP, HEAD_DIM = 8, 16


@pytest.mark.parametrize(
    ("total", "ranks"), [(8, 1), (8, 2), (8, 8), (3, 3), (2, 8), (1, 4), (4, 16)]
)
def test_a_rank_has_the_kv_heads_whose_weights_sglang_loads(
    total: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `weight_loader` loads shard rank // replicas; a shard has the heads of one rank."""
    from sglang.srt.layers.linear import QKVParallelLinear

    from sparrow_sglang.attention_backends import backend

    for rank in range(ranks):
        layer = QKVParallelLinear(
            hidden_size=GROUP * total * HEAD_DIM,
            head_size=HEAD_DIM,
            total_num_heads=GROUP * total,
            total_num_kv_heads=total,
            bias=False,
            tp_rank=rank,
            tp_size=ranks,
        )
        parallel = SimpleNamespace(attn_tp_rank=rank, attn_tp_size=ranks)
        monkeypatch.setattr(backend, "get_parallel", lambda parallel=parallel: parallel)
        runner: Any = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(head_num=layer.num_kv_heads),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
        )
        first = rank // layer.num_kv_head_replicas * layer.num_kv_heads
        assert backend._kv_heads(runner) == range(first, first + layer.num_kv_heads)
