"""SGLang's dense attention in plain torch, with attention sinks and a KV pool for windows."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class TorchDenseBackend(TorchNativeAttnBackend):
    """`torch_native`, which takes no sinks, and reads wrong slots where windows have a pool."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        window = layer.sliding_window_size
        translates = self.use_sliding_window_kv_pool and window > -1
        if mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            new_tokens, lengths = torch.full_like(lengths, width), lengths + width
        elif sinks is None and not translates:
            stock = super().forward_decode if mode.is_decode() else super().forward_extend
            return stock(q, k, v, layer, forward_batch, save_kv_cache)
        else:
            decodes = mode.is_decode()
            new_tokens = torch.ones_like(lengths) if decodes else forward_batch.extend_seq_lens
        pool: Any = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            locations = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, locations, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim).split(new_tokens.tolist())
        outputs = []
        for rows, request, length in zip(
            queries, forward_batch.req_pool_indices, lengths.tolist(), strict=True
        ):
            slots = self.req_to_token_pool.req_to_token[request, :length].long()
            if translates:
                # Tokens that no window reaches any more translate to slot 0, and are masked.
                slots = pool.translate_loc_from_full_to_swa(slots)
            outputs.append(
                causal_attention(rows, keys[slots], values[slots], sinks, layer.scaling, window)
            )
        return torch.cat(outputs).flatten(1)

    forward_decode = forward_extend


def causal_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    sm_scale: float,
    window: int = -1,
) -> torch.Tensor:
    """Causal attention of the last T of L tokens: [T, Hq, D] in q's dtype, computed in fp32, of `q`
    [T, Hq, D] and `keys` and `values` [L, Hkv, D]. `sinks` [Hq] are one more logit of each query
    head, whose value is 0; `sm_scale` is a factor of the others. A query attends to `window` tokens
    before its own; -1 for all."""
    group = q.shape[1] // keys.shape[1]
    repeated = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
    logits = torch.einsum("thd,lhd->htl", q.float(), repeated[0]) * sm_scale
    positions = torch.arange(len(keys) - len(q), len(keys), device=q.device)
    behind = positions[:, None] - torch.arange(len(keys), device=q.device)
    hidden = (behind < 0) | ((behind > window) if window > -1 else False)
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("htl,lhd->thd", weights, repeated[1]).to(q.dtype)
