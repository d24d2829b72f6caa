"""Kernels that quantize activations where they are computed, one program a row. R is the number of
rows, C that of channels. Values are e4m3 with one fp32 scale a row, as SGLang's quantization has
them, of outputs rounded to the dtype of the model."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LARGEST = 448.0
"""The largest number in e4m3."""
DTYPE = torch.float8_e4m3fn
_MAX = tl.constexpr(LARGEST)


class Quantized(NamedTuple):
    """`values` [R, C] e4m3 times `scales` [R, 1] fp32."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty_like(cls, x: torch.Tensor) -> "Quantized":
        """Room for the rows of `x` [..., C]."""
        rows = x.numel() // x.shape[-1]
        values = torch.empty(rows, x.shape[-1], dtype=DTYPE, device=x.device)
        return cls(values, torch.empty(rows, 1, device=x.device))


@triton.jit
def _store_quantized(
    number: tl.tensor, mask: tl.tensor, at: tl.tensor, values: tl.tensor, scale: tl.tensor
) -> None:
    largest = tl.max(tl.abs(number), axis=0)
    factor = tl.where(largest > 0, _MAX / largest, 0.0)
    clamped = tl.minimum(tl.maximum(number * factor, -_MAX), _MAX)
    tl.store(values + at, clamped.to(values.dtype.element_ty), mask=mask)
    tl.store(scale, largest / _MAX)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row) adds `x` to the residual, and replaces it by the norm of the sum."""
    row, channel = tl.program_id(0), tl.arange(0, BLOCK)
    mask = channel < C
    at = row.to(tl.int64) * C + channel
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + at, total.to(residual.dtype.element_ty), mask=mask)
    root = tl.sqrt(tl.sum(total * total, axis=0) / C + eps)
    scaled = total / root * tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    out = scaled.to(x.dtype.element_ty)
    tl.store(x + at, out, mask=mask)
    _store_quantized(out.to(tl.float32), mask, at, values, scales + row)


@triton.jit
def _silu_kernel(
    x: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row) multiplies the SiLU of the first half of a row of `x` by the second."""
    row, channel = tl.program_id(0), tl.arange(0, BLOCK)
    mask = channel < C
    at = row.to(tl.int64) * C + channel
    gate = tl.load(x + at + row.to(tl.int64) * C, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + at + row.to(tl.int64) * C + C, mask=mask, other=0.0).to(tl.float32)
    product = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + at, product, mask=mask)
    _store_quantized(product.to(tl.float32), mask, at, values, scales + row)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Quantized:
    """Add `x` to `residual` and replace `x` by the RMS norm of the sum times `weight` [C], both in
    place and contiguous [..., C]; returns `x` quantized."""
    out, channels = Quantized.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(channels)
    _norm_kernel[(len(out.values),)](
        x, residual, weight, *out, eps, channels, block, num_warps=_warps(block)
    )
    return out


def silu_and_multiply(x: torch.Tensor) -> tuple[torch.Tensor, Quantized]:
    """SiLU of the first half of contiguous `x` [..., 2 C] times the second: [..., C], and the same
    quantized."""
    product = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    out, channels = Quantized.empty_like(product), product.shape[-1]
    block = triton.next_power_of_2(channels)
    _silu_kernel[(len(out.values),)](x, product, *out, channels, block, num_warps=_warps(block))
    return product, out


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))
