"""Hooks for SGLang on a machine without an accelerator."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from sparrow_sglang.sglang_compat.versions import last_locations_in_torch, ranks


class _WithoutPinnedMemory(TorchFunctionMode):
    """Pinned memory needs an accelerator; without one, ordinary memory does the same."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kept = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **kept)


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: LoRA allocates pinned memory unconditionally."""
    with _WithoutPinnedMemory():
        return original(*args, **kwargs)


def without_streams(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: up to 0.5.21, SGLang keeps what rounds relay for a stream, also on a CPU."""
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: None):
        return original(*args, **kwargs)


def without_accelerator(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: SGLang releases memory on the device that torch names; 2.14 names CUDA."""
    with mock.patch.object(torch, "get_device_module", lambda device=None: torch.cpu):
        return original(*args, **kwargs)


def no_triton(backend: str) -> bool:
    """REPLACE hook for SGLang up to 0.5.20, which decides on Triton by the backend's name."""
    return False


def last_locations(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """REPLACE hook: SGLang uses its torch version only for two backends, by name."""
    return last_locations_in_torch()(req_to_token, req_pool_indices, prefix_lens)


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """REPLACE hook: SGLang launches a Triton kernel to write the slots of a round."""
    spans = zip(start_offset.tolist(), end_offset.tolist(), strict=True)
    rows = torch.cat([torch.arange(start, end) for start, end in spans])
    requests = req_pool_indices.long().repeat_interleave(end_offset - start_offset)
    req_to_token[requests, rows] = out_cache_loc.to(req_to_token.dtype)


def without_copies(pool: Any) -> None:
    """REPLACE hook: SGLang warms up a Triton kernel for trees of drafts, which ours are not."""
    pool._kv_copy_config = None


def no_binding(*args: Any, **kwargs: Any) -> None:
    """REPLACE hook: SGLang requires one NUMA node per rank, to bind its AMX kernels."""


def prepare_rank(*, tp_size: int | None = None, **kwargs: Any) -> None:
    """REPLACE hook: SGLang calls kernels that only its CPU engine has, on Arm always. Also turns
    compilation off: SGLang would compile gpt-oss's experts and llguidance's mask whatever the
    platform says, which needs a C++ compiler, and up to half a minute at the first request."""
    torch.compiler.set_stance("force_eager")
    tp_size = tp_size or ranks(None).tp_size
    if tp_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // tp_size))


def without_nccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook for SGLang up to 0.5.20, whose groups take NCCL on devices unknown to it."""
    return args, kwargs | {"use_pynccl": False}
