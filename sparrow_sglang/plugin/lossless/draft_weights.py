"""FP8 copies of a model's weights, which drafts use in place of the model's own.

Drafts may come from any distribution, so they may read half of the bytes: e4m3 values with a scale
per output channel, and activations with a scale per token. Verification, prefill and rounds without
drafts use the model's weights. After each update of those the copies are quantised again before the
next pass, so that they never go stale. N and K are the output and input channels of a layer on this
rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.layers.linear import LinearBase, ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import get_parallel

from sparrow_sglang.plugin.names import MODEL, WEIGHTS_FIELD
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.plugin.timing import least_seconds
from sparrow_sglang.schedules.names import AUTO

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

PAYS_BELOW = 0.75
"""`auto` makes copies if the layers then take at most this share of their time in 16 bits: FP8
costs up to 7 % of the tokens of a round, and only a part of a draft is spent in these layers."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs multiply FP8."""
_ROWS = 16  # with which `auto` times the layers
_MULTIPLE = 16  # of the channels, for the FP8 kernels
_MAX, _DTYPE = 448.0, torch.float8_e4m3fn


def quantize(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write `rows` [R, C] as e4m3 `values` [R, C] times fp32 `scales` [R, 1]."""
    if rows.is_cuda:
        from sgl_kernel import sgl_per_token_quant_fp8

        sgl_per_token_quant_fp8(rows, values, scales)
        return
    scales.copy_(rows.abs().amax(dim=1, keepdim=True) / _MAX)
    values.copy_((rows / scales.clamp(min=1e-12)).clamp(-_MAX, _MAX))


class Fp8Copy:
    """An FP8 copy of one weight [N, K], zero until its first update."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.values = torch.zeros(weight.shape, dtype=_DTYPE, device=weight.device)
        self.scales = torch.zeros(len(weight), 1, device=weight.device)

    def update(self) -> None:
        """Quantize the weight, in place: captured graphs read this memory."""
        quantize(self.weight.data, self.values, self.scales)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [..., K] times the transposed copy, plus `bias`: [..., N] in the dtype of `x`."""
        if x.is_cuda:
            from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear

            copy = self.values.t(), self.scales.t()
            return apply_fp8_linear(x, *copy, bias=bias, use_per_token_if_dynamic=True)
        rows = x.reshape(-1, x.shape[-1])
        values, scales = torch.empty_like(rows, dtype=_DTYPE), rows.new_empty(len(rows), 1)
        quantize(rows, values, scales)
        out = values.to(x.dtype) @ self.values.to(x.dtype).T * scales * self.scales.T.to(x.dtype)
        return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


class DraftWeights:
    """FP8 copies of some layers of a model: linear ones, and the output projection.
    `stale`: weights of the model have changed since the copies were made."""

    def __init__(self, model: torch.nn.Module, layers: Iterable[Any] = ()) -> None:
        self.stale, self._in_use = True, False
        self._model, self._layers = model, {layer: Fp8Copy(layer.weight) for layer in layers}

    @property
    def copies(self) -> list[Fp8Copy]:
        return list(self._layers.values())

    @property
    def num_bytes(self) -> int:
        return sum(copy.values.nbytes + copy.scales.nbytes for copy in self.copies)

    def install(self) -> None:
        """Have the model's passes compute with the copies while these are `in_use`."""
        for layer, copy in self._layers.items():
            if isinstance(layer, LinearBase):
                layer.quant_method = _DraftLinear(partial(self._chosen, copy))
        for module in self._model.modules():
            if isinstance(module, LogitsProcessor):
                module._compute_lm_head = partial(self._logits, module._compute_lm_head)

    def _chosen(self, copy: Fp8Copy) -> Fp8Copy | None:
        return copy if self._in_use else None

    def _logits(
        self,
        original: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._in_use and lm_head in self._layers:
            return self._layers[lm_head].apply(hidden_states)
        return original(hidden_states, lm_head, *args, **kwargs)

    @contextmanager
    def in_use(self, drafting: bool) -> Iterator[None]:
        """Within, passes use the copies if they are `drafting`."""
        self._in_use = drafting
        try:
            yield
        finally:
            self._in_use = False

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
    """A linear layer by its copy where `choose` returns one, else by its own weight."""

    def __init__(self, choose: Callable[[], Fp8Copy | None]) -> None:
        super().__init__()
        self._choose = choose

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        copy = self._choose()
        return super().apply(layer, x, bias) if copy is None else copy.apply(x, bias)


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
    if weight is None or weight.dim() != 2 or any(size % _MULTIPLE for size in weight.shape):
        return False
    dtypes = (torch.bfloat16, torch.float16, *(() if weight.is_cuda else (torch.float32,)))
    return weight.dtype in dtypes


def make_draft_weights(runner: "ModelRunner") -> DraftWeights:
    """Copies of the weights of a model just loaded, as its server's arguments require."""
    setting, none = getattr(runner.server_args, WEIGHTS_FIELD), DraftWeights(runner.model)
    on_gpu = runner.device == "cuda" and torch.cuda.get_device_capability() >= FP8_CAPABILITY
    if setting == MODEL or (setting == AUTO and not on_gpu):
        return none
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
        if float(share) > PAYS_BELOW:
            weights, line = none, f"drafts use the model's weights, not {size}"
        line += f": layers would take {float(share):.2f} of the time"
    weights.install()
    if parallel.tp_rank == 0:
        announce(line)
    return weights
