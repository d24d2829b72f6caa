"""The attention function that transformers calls for the policy: packed sequences, dense or sparse.

In: queries, keys and values of a micro-batch, the lengths of its sequences, and, if sparse, a rule.
The function is registered under the name `ATTENTION` when this module is imported.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparrow_sglang.rl.policy.packed_attention import causal_attention, like_lengths
from sparrow_sglang.rl.policy.sparse_policy import SparseRule, sparse_attention

ATTENTION = "sparrow_packed"


def _attend_within_sequences(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    sequence_lengths: Sequence[int],
    sparse_rule: SparseRule | None = None,
    runs_twice: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each sequence to itself over [1, heads, T, head_dim]: causal, or by the rule."""
    inputs, layer = (query, key, value), cast(int, module.layer_idx)
    spans = list(pairwise(accumulate(sequence_lengths, initial=0)))
    runs = like_lengths(sequence_lengths)
    if sparse_rule is None or layer in sparse_rule.schedule.dense_layers:
        parts = [causal_attention(*inputs, spans[slice(*run)], scaling) for run in runs]
    else:
        if query.device.type == "cpu":
            # On a CPU sequences run one by one, as padding them to one length would only add work.
            runs = [(index, index + 1) for index in range(len(spans))]
        parts = [
            sparse_attention(
                *inputs,
                spans[slice(*run)],
                sparse_rule.prompt_lengths[slice(*run)],
                sparse_rule,
                layer,
                scaling,
                runs_twice,
            )
            for run in runs
        ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend_within_sequences)
