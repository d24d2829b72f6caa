"""Weights of a mixture of experts, by hand and by enumeration, and what each rank holds of them."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from shapes import qwen

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.cost_model import step_costs
from sparrow_sglang.planning.model_shape import Experts, ModelShape

# A layer of attention has 8 * 4 * 2 * (4 + 2) = 384 weights. The first layer is dense, 3 * 8 * 16 =
# 384, the second has a router of 8 * 3 = 24 and three experts of 3 * 8 * 2 = 48; the vocabulary
# projection 10 * 8 = 80. All but experts: 2 * 384 + 384 + 24 + 80 = 1256.
ROUTED = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2,
    "mlp_only_layers": [0],
}


class TestExperts:
    def test_weights_by_hand(self) -> None:
        shape = ModelShape.from_config(ROUTED)
        # A token is multiplied with two experts of the one layer, of which a step reads up to
        # three. Two tokens leave an expert out with probability 1 / 9: 8 / 3 experts are read.
        assert shape.parameters == 1256 + 2 * 48
        assert shape.weights_read(math.inf) == 1256 + 3 * 48
        assert shape.weights_read(1) == pytest.approx(1256 + 2 * 48)
        assert shape.weights_read(2) == pytest.approx(1256 + 8 / 3 * 48)

    @pytest.mark.parametrize(("number", "per_token", "batch"), [(3, 1, 4), (4, 2, 3), (5, 3, 3)])
    def test_expected_experts_are_the_mean_over_all_routings(
        self, number: int, per_token: int, batch: int
    ) -> None:
        routes = list(itertools.combinations(range(number), per_token))
        read = [len(set().union(*routing)) for routing in itertools.product(routes, repeat=batch)]
        experts = Experts(number, per_token, size=1, layers=1)
        assert experts.expected(batch) == pytest.approx(np.mean(read))

    def test_qwen3_30b_a3b(self) -> None:
        shape = qwen("30b-a3b")
        # As published (30.5 billion, 3.3 of them active), less the input embedding of 0.31.
        assert shape.weights_read(math.inf) / 1e9 == pytest.approx(30.2, abs=0.05)
        assert shape.parameters / 1e9 == pytest.approx(3.04, abs=0.01)
        # 1 - (15 / 16)^16 = 0.644 of the experts at batch 16, 0.984 at batch 64.
        assert shape.experts is not None
        assert shape.experts.expected(16) / 128 == pytest.approx(0.644, abs=1e-3)
        assert shape.experts.expected(64) / 128 == pytest.approx(0.984, abs=1e-3)

    def test_where_experts_are(self) -> None:
        def layers(**change: Any) -> int:
            experts = ModelShape.from_config(ROUTED | {"num_hidden_layers": 6} | change).experts
            return experts.layers if experts else 0

        assert layers(mlp_only_layers=[]) == 6
        # Layers 1, 3 and 5, and of these not 3.
        assert layers(mlp_only_layers=[], decoder_sparse_step=2) == 3
        assert layers(mlp_only_layers=[0, 3], decoder_sparse_step=2) == 2

    def test_mixtral_names_experts_otherwise(self) -> None:
        names = {"num_experts": None, "num_local_experts": 8, "moe_intermediate_size": None}
        shape = ModelShape.from_config(ROUTED | names)
        assert shape.experts == Experts(number=8, per_token=2, size=16, layers=1)

    def test_a_step_reads_more_experts_the_larger_its_batch(self) -> None:
        shape = qwen("30b-a3b")
        read = [
            batch * float(step_costs(shape, [100], batch).weight_bytes[0]) for batch in (1, 16, 64)
        ]
        assert read == pytest.approx([2 * shape.weights_read(batch) for batch in (1, 16, 64)])
        # 6 GB for one token, all but a sixtieth of 60.4 GB at 64.
        assert [round(size / 1e9, 1) for size in read] == [6.1, 39.8, 59.5]


class TestRanks:
    def test_two_ranks_hold_a_model_between_them(self) -> None:
        whole, half = qwen("30b-a3b"), qwen("30b-a3b").on_rank(2)
        # Every rank has the routers: 48 layers * 2048 * 128.
        routers = 48 * 2048 * 128
        for batch in (1.0, 16.0, math.inf):
            both = 2 * half.weights_read(batch)
            assert both == pytest.approx(whole.weights_read(batch) + routers)
        assert 2 * half.kv_width == whole.kv_width
        assert half.gqa_ratio == whole.gqa_ratio

    def test_kv_heads_are_repeated_on_more_ranks(self) -> None:
        # Four KV heads on eight ranks: one each, so that two ranks hold the same.
        assert 8 * qwen("30b-a3b").on_rank(8).kv_width == 2 * qwen("30b-a3b").kv_width

    def test_refuses_what_cannot_be_split(self) -> None:
        with pytest.raises(InputError, match="3 tensor-parallel ranks: 4 KV heads"):
            qwen("30b-a3b").on_rank(3)
        with pytest.raises(InputError, match="16 tensor-parallel ranks: a number of query heads"):
            qwen("14b").on_rank(16)
