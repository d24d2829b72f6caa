"""Which KV heads a rank has, against SGLang's own layer."""

from inspect import signature
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
    from sglang.srt.layers import linear

    from sparrow_sglang.attention_backends import backend

    # Until 0.5.17 the layer takes rank and size; later it asks its process group.
    explicit = "tp_rank" in signature(linear.QKVParallelLinear).parameters
    for rank in range(ranks):
        group: dict[str, Any] = {"tp_rank": rank, "tp_size": ranks}
        if not explicit:
            group = {"parallel_group": "replicated"}
            monkeypatch.setattr(linear, "get_group_rank_size", lambda _, rank=rank: (rank, ranks))
        layer = linear.QKVParallelLinear(
            hidden_size=GROUP * total * HEAD_DIM,
            head_size=HEAD_DIM,
            total_num_heads=GROUP * total,
            total_num_kv_heads=total,
            bias=False,
            **group,
        )
        parallel = SimpleNamespace(attn_tp_rank=rank, attn_tp_size=ranks)
        monkeypatch.setattr(backend, "get_parallel", lambda parallel=parallel: parallel)
        runner: Any = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(head_num=layer.num_kv_heads),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
        )
        first = rank // layer.num_kv_head_replicas * layer.num_kv_heads
        assert backend._kv_heads(runner) == range(first, first + layer.num_kv_heads)
