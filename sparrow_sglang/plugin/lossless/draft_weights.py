"""FP8 copies of a model's weights, which drafts use in place of the model's own.

Drafts may come from any distribution, so they may read half of the bytes: e4m3 values with a scale
per output channel, and activations with a scale per token. Verification, prefill and rounds without
drafts use the model's weights. After each update of those the copies are quantized again before the
next pass, so that they never go stale. N and K are the output and input channels of a layer on this
rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase, ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang.attention_backends.kernel_limits import fp8_problems
from sparrow_sglang.plugin.lossless import fp8_kernels
from sparrow_sglang.plugin.lossless.fp8_kernels import LARGEST, Quantized
from sparrow_sglang.plugin.names import MODEL, WEIGHTS_FIELD, refuse
from sparrow_sglang.plugin.scheduler.timing import least_seconds
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.schedules.names import AUTO

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

# FP8 costs up to 7 % of the tokens of a round, and only a part of a draft is spent in the layers.
_PAYS_BELOW = 0.75  # of the layers' time in 16 bits, by `auto`
_ROWS = 16  # with which `auto` times the layers
_MULTIPLE = 16  # of the channels, for the FP8 kernels


def quantize(rows: torch.Tensor, out: Quantized) -> Quantized:
    """`rows` [R, C], written to `out`."""
    if rows.is_cuda:
        return fp8_kernels.quantize(rows, out)
    out.scales.copy_(rows.abs().amax(dim=1, keepdim=True) / LARGEST)
    scaled = rows / out.scales.clamp(min=1e-12)
    out.values.copy_(scaled.clamp(-LARGEST, LARGEST))
    return out


class Fp8Copy:
    """An FP8 copy of one weight [N, K], zero until its first update."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.copy = Quantized.empty_like(weight)
        self.copy.values.zero_()
        self.copy.scales.zero_()
        self._arrivals = fp8_kernels.arrival_counters(len(weight), weight.device)

    def update(self) -> None:
        """Quantize the weight, in place: captured graphs read this memory."""
        quantize(self.weight.data, self.copy)
        self._arrivals.zero_()

    def apply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantized: Quantized | None = None,
    ) -> torch.Tensor:
        """`x` [..., K] times the transposed copy, plus `bias`: [..., N] in the dtype of `x`.
        `quantized` is `x`, if it has been quantized already."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        rows = quantized or quantize(flat, Quantized.empty_like(x))
        (values, scales), weight, weight_scales = rows, *(part.t() for part in self.copy)
        if not x.is_cuda:
            out = (values.float() @ weight.float() * scales * weight_scales).to(x.dtype)
            out = out if bias is None else out + bias
        elif len(values) <= fp8_kernels.MAX_ROWS:
            out = fp8_kernels.multiply(rows, self.copy, self._arrivals, bias, x.dtype)
        else:
            from sgl_kernel import fp8_scaled_mm

            out = fp8_scaled_mm(values, weight, scales, weight_scales, x.dtype, bias)
        return out.view(*x.shape[:-1], -1)


class DraftWeights:
    """FP8 copies of some layers of a model: linear ones, and the output projection.
    `stale`: weights of the model have changed since the copies were made."""

    def __init__(self, model: torch.nn.Module, layers: Iterable[Any] = ()) -> None:
        self.stale, self._in_use = True, False
        # What was quantized where it was computed, for the layers that read it.
        self._latest: tuple[torch.Tensor, Quantized] | None = None
        self._model, self._layers = model, {layer: Fp8Copy(layer.weight) for layer in layers}

    @property
    def copies(self) -> list[Fp8Copy]:
        return list(self._layers.values())

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for each in self.copies for part in each.copy)

    def install(self) -> None:
        """Have the model's passes compute with the copies while these are `in_use`."""
        for layer, copy in self._layers.items():
            if isinstance(layer, LinearBase):
                layer.quant_method = _DraftLinear(partial(self._linear, copy))
        for module in self._model.modules() if self._layers else ():
            if isinstance(module, LogitsProcessor):
                module._compute_lm_head = partial(self._logits, module._compute_lm_head)
            elif self.copies[0].weight.is_cuda and type(module) in _QUANTIZING:
                fused = _QUANTIZING[type(module)]
                module.forward = partial(self._quantizing, partial(fused, module), module.forward)

    def _linear(
        self, copy: Fp8Copy, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """`x` through the copy, or None where it is not in use."""
        if not self._in_use:
            return None
        known = self._latest is not None and self._latest[0] is x
        return copy.apply(x, bias, self._latest[1] if self._latest and known else None)

    def _quantizing(
        self, fused: Callable[..., Any], original: Callable[..., Any], *args: Any
    ) -> Any:
        """A norm or activation that also quantizes its output, while copies are in use."""
        if not self._in_use or (computed := fused(*args)) is None:
            return original(*args)
        result, self._latest = computed
        return result

    def _logits(
        self,
        original: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        copy = self._layers.get(lm_head)
        logits = None if copy is None else self._linear(copy, hidden_states)
        return original(hidden_states, lm_head, *args, **kwargs) if logits is None else logits

    @contextmanager
    def in_use(self, drafting: bool) -> Iterator[None]:
        """Within, passes use the copies if they are `drafting`."""
        self._in_use = drafting
        try:
            yield
        finally:
            self._in_use, self._latest = False, None

    def refresh(self) -> None:
        """Quantize the model's weights if they have changed."""
        if self.stale:
            self.stale = False
            for copy in self.copies:
                copy.update()

    def relative_seconds(self) -> float:
        """Seconds of all layers by their copies, over those by the model's own weights."""
        own = [partial(torch.nn.functional.linear, weight=copy.weight) for copy in self.copies]
        return self._seconds([copy.apply for copy in self.copies]) / self._seconds(own)

    def _seconds(self, layers: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> float:
        inputs = [copy.weight.new_ones(_ROWS, copy.weight.shape[1]) for copy in self.copies]

        def run() -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return least_seconds(graph.replay)


class _DraftLinear(UnquantizedLinearMethod):
    """A linear layer by `linear`, or by its own weight where that returns None."""

    def __init__(self, linear: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self._linear = linear

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._linear(x, bias)
        return super().apply(layer, x, bias) if out is None else out


_Fused = tuple[Any, tuple[torch.Tensor, Quantized]]


def _norm(
    module: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None, addition: Any = None
) -> _Fused | None:
    plain = module.variance_size_override is None and not module.cast_x_before_out_mul
    if residual is None or addition is not None or not plain:
        return None
    if not (x.is_contiguous() and residual.is_contiguous()):
        return None
    quantized = fp8_kernels.add_norm(x, residual, module.weight.data, module.variance_epsilon)
    return (x, residual), (x, quantized)


def _silu(module: SiluAndMul, x: torch.Tensor) -> _Fused | None:
    if not x.is_contiguous():
        return None
    product, quantized = fp8_kernels.silu_and_multiply(x)
    return product, (product, quantized)


_QUANTIZING: dict[type, Callable[..., _Fused | None]] = {RMSNorm: _norm, SiluAndMul: _silu}


def _copied_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for layer in model.modules():
        # The router of experts is replicated: small, and with a large effect.
        linear = isinstance(layer, LinearBase) and not isinstance(layer, ReplicatedLinear)
        plain = linear and type(layer.quant_method) is UnquantizedLinearMethod
        if (plain or layer is getattr(model, "lm_head", None)) and _fits(
            getattr(layer, "weight", None)
        ):
            yield layer


def _fits(weight: torch.Tensor | None) -> bool:
    if weight is None or weight.dim() != 2 or not weight.is_contiguous():
        return False
    dtypes = (torch.bfloat16, torch.float16, *(() if weight.is_cuda else (torch.float32,)))
    return weight.dtype in dtypes and not any(size % _MULTIPLE for size in weight.shape)


def make_draft_weights(runner: "ModelRunner") -> DraftWeights:
    """Copies of the weights of a model just loaded, as its server's arguments require."""
    setting, none = getattr(runner.server_args, WEIGHTS_FIELD), DraftWeights(runner.model)
    on_gpu, instead = runner.device == "cuda", f"--sparrow-draft-weights {MODEL}"
    capability = torch.cuda.get_device_capability() if on_gpu else None
    problems = fp8_problems(capability, "FP8 drafts", instead) if capability else []
    if setting == MODEL or (setting == AUTO and (problems or not on_gpu)):
        return none
    refuse(problems)
    # Released and resumed together with the weights.
    with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS):
        weights = DraftWeights(runner.model, _copied_layers(runner.model))
    if not weights.copies:
        return none
    parallel = get_parallel()
    size = f"FP8 copies of {len(weights.copies)} weights, {weights.num_bytes / 2**30:.1f} GiB a GPU"
    line = f"drafts use {size}"
    if setting == AUTO:
        share = torch.tensor(weights.relative_seconds(), device=runner.device)
        if parallel.tp_size > 1:
            parallel.tp_group.broadcast(share, src=0)
        if float(share) > _PAYS_BELOW:
            weights, line = none, f"drafts use the model's weights, not {size}"
        line += f": layers would take {float(share):.2f} of the time"
    weights.install()
    if parallel.tp_rank == 0:
        announce(line)
    return weights
