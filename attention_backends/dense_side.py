"""The dense side: prefill, and decode in models with windows, by a backend of SGLang. It is
corrected where its result is not what the model defines."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from sparrow_sglang.hf_config import window_layers
from sparrow_sglang.sglang_compat.arguments import stock_attention_backend

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

DENSE_FIELD = "sparrow_dense_backend"
DENSE_BACKENDS = ("fa3", "flashinfer", "triton")
"""Backends of SGLang that the GPU tests have run as the dense side."""
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""Head dimensions that FlashInfer's prefill computes correctly. It accepts 80 and 96 silently, but
loads 64 columns at a time and leaves the others out (github.com/flashinfer-ai/flashinfer, 4299)."""
_FA3_GENERATIONS = (8, 9)


def dense_backend(server_args: "ServerArgs", model_config: "ModelConfig") -> str:
    """Name of SGLang's attention backend that computes dense passes on this machine's GPU. It is
    the one that --sparrow-dense-backend names, else SGLang's own choice, or Triton where that
    choice cannot compute the model's heads."""
    requested: str | None = getattr(server_args, DENSE_FIELD)
    if requested is not None:
        return requested
    chosen = stock_attention_backend(server_args, model_config)
    return "triton" if chosen == "flashinfer" and _flashinfer_problem(model_config) else chosen


def dense_problems(server_args: "ServerArgs", model_config: "ModelConfig") -> list[str]:
    """Reasons why this machine's GPU cannot compute dense passes of the model, one or none."""
    requested: str | None = getattr(server_args, DENSE_FIELD)
    name = dense_backend(server_args, model_config)
    fitting = [other for other in DENSE_BACKENDS if not _dense_problem(other, model_config)]
    if name not in DENSE_BACKENDS:
        problem = "sparrow-sglang has not been tried with this backend for prefill"
    else:
        problem = _dense_problem(name, model_config)
    if not problem:
        return []
    subject = f"{DENSE_FIELD}="
    if requested is None:
        subject = "SGLang's attention backend for this model and GPU is "
    return [f"{subject}{name!r}: {problem}; pass --sparrow-dense-backend {' or '.join(fitting)}"]


def _dense_problem(name: str, model_config: "ModelConfig") -> str:
    import torch

    if name == "flashinfer":
        return _flashinfer_problem(model_config)
    generation = torch.cuda.get_device_capability()[0]
    if name == "fa3" and generation not in _FA3_GENERATIONS:
        return f"it needs a GPU of compute capability 8 or 9, not {generation}"
    return ""


def _flashinfer_problem(model_config: "ModelConfig") -> str:
    if model_config.has_attention_sinks:
        return "it takes no attention sinks"
    if model_config.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it computes heads of {model_config.head_dim} wrongly"
    return ""


def build_dense_side(
    model_runner: "ModelRunner",
) -> tuple["AttentionBackend", AbstractContextManager[object]]:
    """The backend for a model that has its KV pool, and a context in which to plan its passes."""
    if model_runner.device != "cuda":
        from sparrow_sglang.attention_backends.torch_dense import TorchDenseBackend

        return TorchDenseBackend(model_runner), nullcontext()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import RadixAttention

    name = dense_backend(model_runner.server_args, model_runner.model_config)
    backend: AttentionBackend = ATTENTION_BACKENDS[name](model_runner)
    has_windows = bool(window_layers(model_runner.model_config.hf_config))
    if name == "triton" and has_windows:
        # Prefill attends to the latest `sliding_window_size` tokens and to the new one, decode to
        # one fewer.
        backend.sliding_window_size += 1
    if name != "flashinfer":
        return backend, nullcontext()
    layers = (each for each in model_runner.model.modules() if isinstance(each, RadixAttention))
    if has_windows or any(kv_scales(layer) != (1.0, 1.0) for layer in layers):
        # Read KV from the pool. Otherwise new tokens without a prefix would attend past their
        # window, and new tokens with a prefix would read the prefix without its scales.
        backend.use_paged = True
    return backend, PlanGuard()


class PlanGuard:
    """Waits until FlashInfer's previous plan has been copied to the GPU, before the next is made.
    FlashInfer writes a plan to pinned memory of its wrapper and enqueues the copy to the device
    behind the work already there. SGLang plans a step while the previous one runs. If another
    process occupies the device meanwhile, the copy may not have begun when the next plan overwrites
    that memory."""

    def __init__(self) -> None:
        import torch

        self._copied = torch.cuda.Event()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *error: object) -> None:
        self._copied.record()


def kv_scales(layer: "RadixAttention") -> tuple[float, float]:
    """Factors by which the layer's keys and values in the pool are to be multiplied. The layer's
    scales are None unless its checkpoint has scales for an FP8 cache; with another cache, scales
    other than 1 are refused."""
    return layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
