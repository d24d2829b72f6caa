"""The attention function that transformers calls for the policy: packed sequences, dense or sparse.

In: queries, keys and values of a micro-batch, the lengths of its sequences, and, if sparse, a rule.
The function is registered under the name `ATTENTION` when this module is imported.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparrow_sglang.rl.policy.packed_attention import causal_attention, like_lengths
from sparrow_sglang.rl.policy.sparse_policy import Selections, SparseRule, sparse_attention

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
    selections: Selections | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each sequence to itself over [1, heads, T, head_dim]: causal, or by the rule."""
    ends = np.cumsum([0, *sequence_lengths]).tolist()
    spans = list(pairwise(ends))
    if sparse_rule is not None and module.layer_idx in sparse_rule.schedule.dense_layers:
        sparse_rule = None
    runs = like_lengths(sequence_lengths)
    if sparse_rule is not None and query.device.type == "cpu":
        # On a CPU sequences run one by one, as padding them to one length would only add work.
        runs = [(index, index + 1) for index in range(len(spans))]
    parts = []
    for first, last in runs:
        run = spans[first:last]
        if sparse_rule is None:
            parts.append(causal_attention(query, key, value, run, scaling))
        else:
            prompts = sparse_rule.prompt_lengths[first:last]
            layer = module.layer_idx
            inputs = (query, key, value, run, prompts, sparse_rule, layer, scaling)
            if selections is None:
                parts.append(sparse_attention(*inputs))
            else:
                once = partial(selections.once, (layer, first))
                parts.append(sparse_attention(*inputs, once))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend_within_sequences)
