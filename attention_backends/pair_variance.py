"""How far each rotary pair tells the landmarks of a sequence apart: how much the pair's part of
query · landmark varies. A part that is the same for all landmarks does not rank pages."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LATEST = 256
"""How many of a request's latest queries count in a pass: queries of decode resemble these."""


def pair_variances(q: torch.Tensor, keys: torch.Tensor, landmark_tokens: int) -> torch.Tensor:
    """Variance over landmarks of each pair's part of query · landmark, summed over the queries and
    over the query heads of a group: [Hkv, D/2] in fp64. `q` [n, Hq, D] are queries of one sequence
    after RoPE, Hq a multiple of Hkv, `keys` [T, Hkv, D] its keys; each landmark is the mean of
    `landmark_tokens` of them, and the keys left over have none. Pair (i, j) has the part
    q_i k_i + q_j k_j, whose variance over landmarks k is
    q_i² Var(k_i) + q_j² Var(k_j) + 2 q_i q_j Cov(k_i, k_j)."""
    whole = len(keys) // landmark_tokens * landmark_tokens
    means = keys[:whole].unflatten(0, (-1, landmark_tokens)).mean(1, dtype=torch.float32)
    first, second = (means - means.mean(0)).chunk(2, dim=-1)
    var_first, var_second, covariance = (
        product.mean(0, dtype=torch.float64)
        for product in (first * first, second * second, first * second)
    )
    of_group = q.float().unflatten(1, (keys.shape[1], -1))
    q_first, q_second = of_group.chunk(2, dim=-1)
    moment_first, moment_second, mixed = (
        product.sum((0, 2), dtype=torch.float64)
        for product in (q_first * q_first, q_second * q_second, q_first * q_second)
    )
    return moment_first * var_first + moment_second * var_second + 2 * mixed * covariance


class PairVariances:
    """Sums of `pair_variances` over the prefill passes of a server. `sums` are [Hkv, D/2] fp64 by
    layer, of the KV heads on this rank."""

    def __init__(self, landmark_tokens: int, req_to_token: torch.Tensor) -> None:
        self._landmark_tokens = landmark_tokens
        self._req_to_token = req_to_token
        self.sums: dict[int, torch.Tensor] = {}

    def add(
        self, layer_id: int, q: torch.Tensor, k_buffer: torch.Tensor, batch: "ForwardBatch"
    ) -> None:
        """Add a prefill pass, with `q` [tokens, Hq, D] of its requests one after the other."""
        end = 0
        lengths = zip(batch.extend_seq_lens_cpu, batch.seq_lens_cpu.tolist(), strict=True)
        for row, (count, cached) in enumerate(lengths):
            end += count
            # Fewer than two landmarks have no variance.
            if cached < 2 * self._landmark_tokens:
                continue
            slots = self._req_to_token[batch.req_pool_indices[row], :cached].long()
            latest = q[end - min(count, LATEST) : end]
            variances = pair_variances(latest, k_buffer[slots], self._landmark_tokens)
            self.sums[layer_id] = self.sums.get(layer_id, 0) + variances
