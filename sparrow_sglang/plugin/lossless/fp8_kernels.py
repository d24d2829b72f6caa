"""Kernels of FP8 drafts: activations are quantized where they are computed, and few rows are
multiplied by weights at the speed of reading these. R is the number of rows, C that of channels, N
and K those of a weight's outputs and inputs. Values are e4m3 with one fp32 scale a row, as SGLang's
quantization has them, of outputs rounded to the dtype of the model.

Each kernel lets the next one start at once, and waits for its predecessor before it first reads
that kernel's output."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparrow_sglang.attention_backends.kernels.common import (
    INTERPRETED,
    assert_dense,
    dependent_launch,
    launch_early,
    sm_count,
)

MAX_ROWS = 16
"""Of `multiply`: the smallest N of the tensor cores, beyond which SGLang's kernel is faster."""
# Outputs and inputs of a tile of a weight, and tiles in flight. On Hopper two programs an SM fit
# into shared memory.
_OUTPUTS, _INPUTS, _STAGES = 64, 256, 4
_PROGRAMS_PER_SM = 2
_LINE = 128  # bytes of L2
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
def _follow(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _row_of(
    C: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The program's row, the channels of a block, which of them exist, and their offsets."""
    row, channel = tl.program_id(0), tl.arange(0, BLOCK)
    return row, channel, channel < C, row.to(tl.int64) * C + channel


@triton.jit
def _quantize_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, channel, mask, at = _row_of(C, BLOCK)
    _follow(EARLY)
    number = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    _store_quantized(number, mask, at, values, scales + row)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row) adds `x` to the residual, and replaces it by the norm of the sum."""
    row, channel, mask, at = _row_of(C, BLOCK)
    _follow(EARLY)
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
    EARLY: tl.constexpr,
) -> None:
    """Program (row) multiplies the SiLU of the first half of a row of `x` by the second."""
    row, channel, mask, at = _row_of(C, BLOCK)
    _follow(EARLY)
    gate = tl.load(x + at + row.to(tl.int64) * C, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + at + row.to(tl.int64) * C + C, mask=mask, other=0.0).to(tl.float32)
    product = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + at, product, mask=mask)
    _store_quantized(product.to(tl.float32), mask, at, values, scales + row)


@triton.jit
def _prefetch(lines: tl.tensor) -> None:
    """Have L2 read the lines at these addresses."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# If the numbers of rows were constants, a kernel would be compiled for each batch size.
@triton.jit(do_not_specialize=["R"])
def _multiply_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    R: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (tile of outputs, split) sums its share of the inputs, and the last one to finish
    adds the shares up. Weights are the tensor cores' M, of which they take 64, and rows the N.
    WHOLE: whether tiles divide N and K."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    share = tl.cdiv(K, SPLITS * INPUTS) * INPUTS
    first = split * share
    end = tl.minimum(first + share, K)
    of_output = weight + output.to(tl.int64)[:, None] * K
    if EARLY:
        # Weights do not depend on the kernel before this one.
        line = tl.minimum(first + tl.arange(0, LINES) * (INPUTS * 2 // LINES), K - 1)
        _prefetch(weight + tl.minimum(output, N - 1).to(tl.int64)[:, None] * K + line[None, :])
    _follow(EARLY)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(first, end, INPUTS, num_stages=STAGES):
        k = start + tl.arange(0, INPUTS)
        if WHOLE:
            tile_of_weight = tl.load(of_output + k[None, :])
        else:
            mask = (output < N)[:, None] & (k < K)[None, :]
            tile_of_weight = tl.load(of_output + k[None, :], mask=mask, other=0.0)
        mask = (row < R)[None, :] & (k < K)[:, None]
        x = tl.load(values + row[None, :] * K + k[:, None], mask=mask, other=0.0)
        total = tl.dot(tile_of_weight, x, total)
    product = tl.trans(total)
    inside = (row < R)[:, None] & (output < N)[None, :]
    at = row[:, None] * N + output[None, :]
    last = True
    if SPLITS > 1:
        tl.store(sums + split * R * N + at, product, mask=inside)
        # All threads have stored their sums before the program reports its arrival.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            # Reset the counter for the next replay of a graph.
            tl.store(arrivals + tile, 0)
            product = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for other in tl.static_range(SPLITS):
                place = sums + other * R * N + at
                product += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        product *= tl.load(scales + row, mask=row < R, other=0.0)[:, None]
        product *= tl.load(weight_scales + output, mask=output < N, other=0.0)[None, :]
        if BIAS:
            added = tl.load(bias + output, mask=output < N, other=0.0)
            product += added.to(tl.float32)[None, :]
        tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


def _launch(device: torch.device) -> dict[str, Any]:
    early = dependent_launch(device)
    return {"EARLY": early, **launch_early(early)}


def _by_row(kernel: Any, out: Quantized, *arguments: Any) -> Quantized:
    """Launch `kernel`, which writes a row of `out` a program."""
    rows, channels = out.values.shape
    block = triton.next_power_of_2(channels)
    warps = min(16, max(4, block // 512))
    launch = _launch(out.values.device)
    kernel[(rows,)](*arguments, *out, channels, block, num_warps=warps, **launch)
    return out


def quantize(x: torch.Tensor, out: Quantized | None = None) -> Quantized:
    """Contiguous `x` [..., C] quantized, in `out` if that is given."""
    assert_dense(x)
    return _by_row(_quantize_kernel, out or Quantized.empty_like(x), x)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Quantized:
    """Add `x` to `residual` and replace `x` by the RMS norm of the sum times `weight` [C], both in
    place and contiguous [..., C]; returns `x` quantized."""
    return _by_row(_norm_kernel, Quantized.empty_like(x), x, residual, weight, eps)


def silu_and_multiply(x: torch.Tensor) -> tuple[torch.Tensor, Quantized]:
    """SiLU of the first half of contiguous `x` [..., 2 C] times the second: [..., C], and the same
    quantized."""
    product = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return product, _by_row(_silu_kernel, Quantized.empty_like(product), x, product)


def arrival_counters(outputs: int, device: torch.device) -> torch.Tensor:
    """Zeros that `multiply` needs, one set a weight, and leaves as they are."""
    return torch.zeros(triton.cdiv(outputs, _OUTPUTS), dtype=torch.int32, device=device)


def multiply(
    x: Quantized,
    weight: Quantized,
    arrivals: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`x`, up to MAX_ROWS rows [R, K], times the transposed `weight` [N, K], plus `bias` [N]:
    [R, N] in `dtype`. `arrivals` are the weight's `arrival_counters`."""
    (rows, inputs), outputs = x.values.shape, len(weight.values)
    assert rows <= MAX_ROWS
    assert_dense(*x, *weight, bias)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.values.device)
    tiles, depth, sms = len(arrivals), triton.cdiv(inputs, _INPUTS), sm_count(out.device)
    # Where two thirds of the SMs have a tile, adding shares up takes longer than it saves. A share
    # has two tiles of inputs or more.
    splits = min(_PROGRAMS_PER_SM * sms // tiles, depth // 2) if 3 * tiles <= 2 * sms else 1
    splits = triton.cdiv(depth, triton.cdiv(depth, max(splits, 1)))
    sums = out.new_empty(splits, rows, outputs, dtype=torch.float32) if splits > 1 else out
    _multiply_kernel[(tiles, splits)](
        *x,
        *weight,
        out if bias is None else bias,
        out,
        sums,
        arrivals,
        rows,
        outputs,
        inputs,
        BIAS=bias is not None,
        WHOLE=outputs % _OUTPUTS == 0 and inputs % _INPUTS == 0,
        ROWS=MAX_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        LINES=_INPUTS * 2 // _LINE,
        SPLITS=splits,
        STAGES=_STAGES,
        num_warps=4,
        **_launch(out.device),
    )
    return out
