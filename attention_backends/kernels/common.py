"""What the launchers share: checks of arguments, and tiles of a head.

Head dimensions of 80 and 96 are padded: Triton's ranges have lengths that are powers of two.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernel_limits import (
    INT4_LANDMARKS,
    MAX_GROUP,
    PAIRS_MULTIPLE,
)
from sparrow_sglang.attention_backends.landmarks import Landmarks, MeanLandmarks, landmark_dtype

FLOAT_DTYPES = (torch.bfloat16, torch.float16)
KV_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
INDEX_DTYPES = (torch.int32, torch.int64)
# SMs of an H200 or H100; used where the tensors are on the CPU (Triton's interpreter).
INTERPRETER_SM_COUNT = 132


def check_tensor(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]
) -> None:
    """Refuse a tensor of another shape (None = any size) or dtype, or with a strided last axis."""
    got = tensor.shape
    if len(got) != len(shape) or any(
        want is not None and have != want for have, want in zip(got, shape, strict=True)
    ):
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} has shape {tuple(got)}: expected {wanted}")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}: expected {allowed}")
    if got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} on its last axis: expected 1; "
            "pass a contiguous tensor"
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that the kernel would misread because it assumes dense strides."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: expected a contiguous tensor")


def check_member(name: str, got: int, allowed: Sequence[int]) -> None:
    """Refuse a number that the kernels are not built for."""
    if got not in allowed:
        raise ValueError(f"{name}={got} is not supported: expected one of {tuple(allowed)}")


def check_landmarks(
    landmarks: Landmarks, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Refuse landmarks that the kernels are not built for; keys are of `dtype`."""
    if isinstance(landmarks, MeanLandmarks):
        stored = landmark_dtype(dtype)
        check_tensor("landmarks", landmarks.means, (None, num_kv_heads, 1, head_dim), (stored,))
        check_contiguous("landmarks", landmarks.means)
        return
    pages, _, count, pairs = landmarks.codes.shape
    check_tensor("codes", landmarks.codes, (pages, num_kv_heads, None, None), (torch.uint8,))
    check_tensor("scales", landmarks.scales, (pages, num_kv_heads, count), (torch.float16,))
    check_tensor("pairs", landmarks.pairs, (num_kv_heads, pairs), (torch.int64,))
    for name, tensor in landmarks._asdict().items():
        check_contiguous(name, tensor)
    check_member("landmarks of a page", count, INT4_LANDMARKS)
    if pairs % PAIRS_MULTIPLE or not 0 < pairs <= head_dim // 2:
        raise ValueError(
            f"landmark_pairs={pairs} is not supported: expected a multiple of {PAIRS_MULTIPLE} up"
            f" to head_dim / 2 = {head_dim // 2}"
        )


def group_size(num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head, 1 to MAX_GROUP."""
    if num_q_heads % num_kv_heads or not 1 <= num_q_heads // num_kv_heads <= MAX_GROUP:
        raise ValueError(
            f"num_q_heads={num_q_heads} with num_kv_heads={num_kv_heads} is not supported: "
            f"expected 1 to {MAX_GROUP} query heads for each KV head"
        )
    return num_q_heads // num_kv_heads


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H200's count where the device is the CPU."""
    if device.type != "cuda":
        return INTERPRETER_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (compute capability 9 or more)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


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
