"""What the kernels share: numbers of the device, and tiles of a head. Head dimensions of 80 and 96
are padded: Triton's ranges have lengths that are powers of two."""

from functools import cache

import torch
import triton
import triton.language as tl

# The interpreter has no inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# SMs of an H200 or H100; used where the tensors are on the CPU (Triton's interpreter).
INTERPRETER_SM_COUNT = 132


def assert_dense(*tensors: torch.Tensor | None) -> None:
    """The kernels read tensors without strides."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)


@cache
def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (compute capability 9 or more)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_early(early: bool) -> dict[str, bool]:
    """Arguments of a launch that may start `early`; Triton's interpreter takes none."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def head_columns(D: tl.constexpr) -> tl.tensor:
    """Columns of a tile that holds a head: D of them, and the padding behind them."""
    # Not triton.next_power_of_2, which SGLang replaces by a function that kernels cannot call.
    width: tl.constexpr = D if D & (D - 1) == 0 else 128
    return tl.arange(0, width)


@triton.jit
def head_mask(rows: tl.tensor, columns: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Mask of the elements of a tile that exist: `rows` [N, 1], in the columns below D. `rows`
    alone where there is no padding, so that powers of two cost no comparison."""
    if columns.shape[0] == D:
        return rows
    else:
        return rows & (columns[None, :] < D)


@triton.jit
def store_head(target: tl.tensor, columns: tl.tensor, values: tl.tensor, D: tl.constexpr) -> None:
    """Write the D columns of a head to `target`, in the dtype of `target`."""
    values = values.to(target.dtype.element_ty)
    if columns.shape[0] == D:
        tl.store(target + columns, values)
    else:
        tl.store(target + columns, values, mask=columns < D)


@triton.jit
def pair_columns(D: tl.constexpr) -> tl.tensor:
    """Columns of a tile with a byte for each pair of a head's channels, and the padding behind
    them."""
    width: tl.constexpr = D // 2 if D & (D - 1) == 0 else 64
    return tl.arange(0, width)
