"""SGLang's kernels that allocate KV in pages. They are compiled for each power of two of a batch,
0.2 s each on a new machine: before the first request here, and not while it waits."""

from typing import Any

import torch

_LARGEST = 256
"""Requests of a batch up to which none is compiled later."""


def compile_kernels(allocator: Any, req_to_token: torch.Tensor, rounds: bool) -> None:
    """Compile them for prefills, and for rounds of lossless decoding or else for decode steps. The
    pool is as large afterwards as before."""
    # With sliding windows the pool of their layers is the smaller one.
    pages = allocator.available_size() // allocator.page_size
    most = min(_LARGEST, len(req_to_token), pages)
    for batch in (1 << power for power in range(most.bit_length())):
        rows = torch.zeros(batch, dtype=torch.int64, device=req_to_token.device)
        _extend(allocator, rows)
        if rounds:
            _start_round(allocator, req_to_token, rows)
        else:
            last = req_to_token.new_full((batch,), -1)
            allocator.free(allocator.alloc_decode(rows + 1, rows.cpu() + 1, last))


def _extend(allocator: Any, lengths: torch.Tensor) -> None:
    """Allocate the first token of each request, whose `lengths` [B] are 0, and free it."""
    before, after = (lengths, lengths.cpu()), (lengths + 1, lengths.cpu() + 1)
    allocator.free(allocator.alloc_extend(*before, *after, lengths - 1, len(lengths)))


def _start_round(allocator: Any, req_to_token: torch.Tensor, rows: torch.Tensor) -> None:
    from sglang.srt.mem_cache import allocation

    lengths = rows.to(req_to_token.dtype)
    _extend(allocator, lengths)
    allocation.get_last_loc(req_to_token, rows, lengths)
    # Writes nothing, as no request grows.
    batch = len(rows)
    allocation.assign_req_to_token_pool_func(rows, req_to_token, lengths, lengths, rows, batch)
