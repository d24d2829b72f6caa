"""Head dimensions in Triton's ranges, whose length is a power of two: 80 and 96 are padded."""

import triton
import triton.language as tl


@triton.jit
def head_columns(D: tl.constexpr) -> tl.tensor:
    """Columns of a tile that holds a head: D of them, and the padding behind them."""
    # Not triton.next_power_of_2, which SGLang replaces by a function that kernels cannot call.
    width: tl.constexpr = D if D & (D - 1) == 0 else 128
    return tl.arange(0, width)


@triton.jit
def head_mask(rows: tl.tensor, columns: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Mask of the elements of a tile that exist: `rows` [N, 1], in the columns below D.

    `rows` alone where there is no padding, so that powers of two cost no comparison.
    """
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
def pair_columns(PAIRS: tl.constexpr) -> tl.tensor:
    """Columns of a tile with a byte for each rotary pair kept, and the padding behind them."""
    width: tl.constexpr = (
        16 if PAIRS <= 16 else (32 if PAIRS <= 32 else (64 if PAIRS <= 64 else 128))
    )
    return tl.arange(0, width)
