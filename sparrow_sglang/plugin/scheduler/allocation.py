"""SGLang's kernels that allocate KV in pages. They are compiled for each power of two of a batch,
0.2 s each on a new machine: before the first request here, and not while it waits."""

from typing import Any

import torch

_LARGEST = 256
"""Requests of a batch up to which none is compiled later."""


def compile_kernels(allocator: Any, req_to_token: torch.Tensor, rounds: bool) -> None:
    """Compile them for prefills, and for rounds of lossless decoding or else for decode steps. The
    pool is as large afterwards as before."""
    device = req_to_token.device
    # With sliding windows the pool of their layers is the smaller one.
    pages = allocator.available_size() // allocator.page_size
    batch = 1
    while batch <= min(_LARGEST, len(req_to_token), pages):
        on_host = torch.ones(batch, dtype=torch.int64)
        one, nothing = on_host.to(device), req_to_token.new_full((batch,), -1)

        def extend(dtype: torch.dtype, on_host: Any = on_host, nothing: Any = nothing) -> None:
            host, before = on_host.to(dtype), nothing.to(dtype)
            lengths = (before + 1, host - 1, before + 2, host)
            allocator.free(allocator.alloc_extend(*lengths, before, len(host)))

        extend(torch.int64)
        if rounds:
            from sglang.srt.mem_cache import allocation

            extend(torch.int32)
            rows, lengths = one - 1, req_to_token.new_zeros(batch)
            allocation.get_last_loc(req_to_token, rows, lengths)
            # Writes nothing, as no request grows.
            allocation.assign_req_to_token_pool_func(
                rows, req_to_token, lengths, lengths, rows, batch
            )
        else:
            allocator.free(allocator.alloc_decode(one, on_host, nothing))
        batch *= 2
