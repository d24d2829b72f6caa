"""Weights of experts and of linear attention, by hand, by enumeration and in transformers; and what
each rank holds of them."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from shapes import qwen
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from sparrow_sglang.planning.model_shape import Experts, ModelShape
from sparrow_sglang.schedules.schedule import BudgetSchedule

TINY = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
}
# A layer of attention has 8 * 4 * 2 * (4 + 2) = 384 weights. The first layer is dense, 3 * 8 * 16 =
# 384, the second has a router of 8 * 3 = 24 and three experts of 3 * 8 * 2 = 48; the vocabulary
# projection 10 * 8 = 80. All but experts: 2 * 384 + 384 + 24 + 80 = 1256.
ROUTED = TINY | {
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

    def test_mixtral_names_experts_otherwise(self) -> None:
        names = {"num_experts": None, "num_local_experts": 8, "moe_intermediate_size": None}
        shape = ModelShape.from_config(ROUTED | names)
        assert shape.experts == Experts(number=8, per_token=2, size=16, layers=1)


# Two layers, the first with linear attention: queries and keys of 2 heads * 3, values of 4 * 5 give
# 8 * (2 * 6 + 2 * 20 + 2 * 4) projections, 20 * 8 outputs, a convolution of 32 * 4: 768. Attention
# with gates has 8 * 4 * (2 * (4 + 2) + 4) = 512.
LINEAR = TINY | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}


class TestLinearAttention:
    def test_weights_and_states_by_hand(self) -> None:
        shape = ModelShape.from_config(LINEAR)
        assert shape.weights_read(1) == 768 + 512 + 2 * 384 + 80
        assert shape.linear is not None
        # 4 heads of 3 * 5 numbers of 4 bytes, and three inputs of the convolution, 32 * 2 bytes.
        assert shape.linear.state_bytes == 240 + 192
        # One layer has keys and values of 2 heads * 4.
        assert (shape.layer_kv_width, shape.whole_layers) == (16, 1)

    def test_dense_layers_are_those_with_the_whole_kv(self) -> None:
        schedule = BudgetSchedule.fixed(64)
        assert ModelShape.from_config(LINEAR).dense_layers(schedule) == 1

    @pytest.mark.parametrize(
        "config", [Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig, Qwen2MoeConfig]
    )
    def test_weights_are_those_of_transformers(self, config: Any) -> None:
        """The shapes are the defaults of transformers' configs, of up to 80 billion weights."""
        fields = config(tie_word_embeddings=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(fields)
        matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim > 1)
        shape = ModelShape.from_config(fields.to_dict())
        # Tokens are looked up in the input embedding, which is not read as a whole.
        assert shape.weights_read(math.inf) == matrices - fields.vocab_size * fields.hidden_size


class TestRanks:
    def test_two_ranks_hold_a_model_between_them(self) -> None:
        whole, half = qwen("30b-a3b"), qwen("30b-a3b").on_rank(2)
        # Every rank has the routers: 48 layers * 2048 * 128.
        routers = 48 * 2048 * 128
        for batch in (1.0, 16.0, math.inf):
            both = 2 * half.weights_read(batch)
            assert both == pytest.approx(whole.weights_read(batch) + routers)
        assert 2 * half.layer_kv_width == whole.layer_kv_width
