"""Masked attention of the trainer, around a fault of cuDNN.

cuDNN's attention gives NaN or wrong gradients under a mask (pytorch/pytorch#196678) where a row's
logsumexp is below -88.7; the trainer does not use cuDNN under masks.
"""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow_sglang.rl.policy import sparse_policy
from sparrow_sglang.schedule_names import load_schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def masked_case(rows: int, keys: int, shift: float) -> dict[str, Any]:
    """Gradients of masked attention of `rows` queries; `shift` is added to every logit."""
    torch.manual_seed(0)
    q_heads, kv_heads, dim = 9, 3, 64
    shapes = ((2, q_heads, rows, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim))
    tensors = [0.3 * torch.randn(shape, device="cuda") for shape in shapes]
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, shift * dim**0.5
    last = keys - rows + torch.arange(rows, device="cuda")
    token = torch.arange(keys, device="cuda")
    causal = token <= last[:, None]
    # Pages have 16 tokens. Every third page is kept, the first one included, and the last ones.
    page = token // 16
    kept = (page % 3 == 0) | (page >= last[:, None] // 16 - 1)
    mask = (causal & kept).expand(2, q_heads, rows, keys)
    grad = torch.randn(shapes[0], device="cuda")

    def gradients(dtype: torch.dtype, backends: list[SDPBackend]) -> list[torch.Tensor]:
        leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in tensors]
        query, key, value = leaves
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        out.backward(grad.bfloat16().to(dtype))
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    # All but cuDNN.
    chosen = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    found = gradients(torch.bfloat16, chosen)
    expected = gradients(torch.float64, [SDPBackend.MATH])
    return {
        "not_finite": [int((~grad.isfinite()).sum()) for grad in found],
        "error": [
            float((one - other).norm() / other.norm())
            for one, other in zip(found, expected, strict=True)
        ],
    }


@pytest.mark.parametrize("rows, keys", [(1, 192), (64, 192), (100, 320), (128, 448)])
@pytest.mark.parametrize("shift", [0.0, -120.0])
def test_masked_attention_of_the_trainer_has_finite_gradients(rows, keys, shift):
    found = masked_case(rows, keys, shift)
    assert found["not_finite"] == [0, 0, 0]
    assert max(found["error"]) < 0.05


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_random_packs_are_those_of_plain_torch(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(25):
        longest = draw.choice([150, 400, 1100])
        lengths = [draw.randint(longest // 2, longest) for _ in range(draw.randint(1, 4))]
        ends = list(accumulate(lengths, initial=0))
        prompts = tuple(draw.randint(1, length - 1) for length in lengths)
        schedule = load_schedule(f"fixed-{draw.choice([64, 128, 256])}", 16)
        rule = sparse_policy.SparseRule(schedule, prompts)
        scale = draw.choice([0.3, 1.0, 3.0])
        tensors = [
            (scale * torch.randn(1, heads, ends[-1], 64, device="cuda")).bfloat16()
            for heads in (9, 3, 3)
        ]
        grad = torch.randn(1, 9, ends[-1], 64, device="cuda").bfloat16()
        arguments = (tensors, grad, list(pairwise(ends)), prompts, rule)
        found = _sparse_gradients(*arguments)
        with patch.object(sparse_policy, "_by_rows", lambda rows: True):
            expected = _sparse_gradients(*arguments)
        for one, other in zip(found, expected, strict=True):
            assert one.isfinite().all()
            assert (one.float() - other.float()).norm() < 0.05 * other.float().norm()


def _sparse_gradients(
    tensors: Sequence[torch.Tensor], grad: torch.Tensor, *arguments: Any
) -> list[torch.Tensor]:
    query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    sparse_policy.sparse_attention(query, key, value, *arguments, 2, None).backward(grad)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]
