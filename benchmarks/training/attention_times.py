"""Times of attention over packed sequences of similar length, forward and backward: as the policy
computes it, by padding to the longest, and with PyTorch's kernel for packed sequences.

In: the heads of a model and the tokens of a pack. Out: seconds on the GPU.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparrow_sglang.benchmarks.gpu_times import median_s
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.rl.policy.attention import ATTENTION

SEQUENCES = 8
REPEATS = 10

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
"""(queries [1, Hq, T, D], keys and values [1, Hkv, T, D], lengths) -> [1, T, Hq, D]"""


def like_lengths(tokens: int) -> list[int]:
    """`SEQUENCES` lengths with a sum of `tokens`, the longest about twice the shortest."""
    weights = [1 + index / (SEQUENCES - 1) for index in range(SEQUENCES)]
    lengths = [int(tokens * weight / sum(weights)) for weight in weights]
    return [*lengths[:-1], tokens - sum(lengths[:-1])]


def by_padding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    out: torch.Tensor = attend(None, query, key, value, None, sequence_lengths=lengths)[0]
    return out


def by_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Attention by `torch.nn.attention.varlen`, which needs a GPU and 16-bit tensors."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device, torch.int32)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(lengths)
    # This window is causal: all tokens before, none after.
    window = (-1, 0)
    out = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=window)
    assert isinstance(out, torch.Tensor), "no more than the output was asked for"
    return out[None]


def attention_times(shape: ModelShape, tokens: int) -> dict[str, float | None]:
    """Seconds of one layer in bfloat16 by either kernel; None if PyTorch lacks the kernel."""
    lengths = like_lengths(tokens)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
    inputs = [
        torch.randn(1, count, tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for count in heads
    ]
    for tensor in inputs:
        tensor.requires_grad_()

    def seconds(attend: Attention) -> float:
        def both_ways() -> object:
            out = attend(inputs[0], inputs[1], inputs[2], lengths)
            return torch.autograd.grad(out.sum(), inputs)

        return median_s(both_ways, REPEATS)

    has_varlen = find_spec("torch.nn.attention.varlen") is not None
    return {
        "padded_s": seconds(by_padding),
        "varlen_s": seconds(by_varlen) if has_varlen else None,
    }
