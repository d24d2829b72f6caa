"""SGLang's kernels that allocate KV in pages. By default they are compiled for each power of two of
a batch, 0.2 s each, while its requests wait."""

from typing import TYPE_CHECKING, Any

from sparrow_sglang.plugin.state import Hook

if TYPE_CHECKING:
    import torch

_LARGEST = 1024
"""Requests of a batch for which one variant serves; a program skips those behind its own."""


def one_bound(bound: int, *sizes: int) -> int:
    """AFTER hook of the power of two that bounds a batch, which the kernels take as a constant."""
    return max(bound, _LARGEST)


HOOKS = (Hook("sglang.srt.mem_cache.allocator.paged.next_power_of_2", "AFTER", one_bound),)
OF_ROUNDS = (Hook("sglang.srt.mem_cache.allocation.next_power_of_2", "AFTER", one_bound),)


def compile_kernels(allocator: Any, req_to_token: "torch.Tensor", rounds: bool) -> None:
    """Compile them for prefills, and for rounds of lossless decoding or else for decode steps. The
    pool is as large afterwards as before."""
    import torch

    on_host = torch.ones(1, dtype=torch.int64)
    one, nothing = on_host.to(req_to_token.device), req_to_token.new_full((1,), -1)

    def extend(dtype: "torch.dtype") -> None:
        host, device = on_host.to(dtype), one.to(dtype)
        lengths = device - 1, host - 1, device, host
        allocator.free(allocator.alloc_extend(*lengths, nothing.to(dtype), 1))

    extend(torch.int64)
    if not rounds:
        allocator.free(allocator.alloc_decode(one, on_host, nothing))
        return
    from sglang.srt.mem_cache import allocation

    extend(torch.int32)
    # Triton distinguishes these numbers of requests.
    for batch in (1, 2, 16):
        rows, lengths = one.new_zeros(batch), req_to_token.new_zeros(batch)
        allocation.get_last_loc(req_to_token, rows, lengths)
        # Writes nothing, as no request grows.
        allocation.assign_req_to_token_pool_func(rows, req_to_token, lengths, lengths, rows, batch)
