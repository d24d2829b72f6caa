"""How a launch of `decode` is cut into programs, and the scratch that they write their parts to."""

from typing import NamedTuple

import torch
import triton

from sparrow_sglang.attention_backends.kernels.checks import sm_count

MAX_SPLITS = 64
# Numbers of splits that a kernel merges at most. One kernel is compiled for each of these, and a
# launch takes the smallest that is large enough.
SPLIT_PADS = (4, 16, 32, MAX_SPLITS)
# Below this a program's start-up (page ids, then the first tiles) costs more than its tokens.
_MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_SM = 4
# This many programs of FP8 tiles fit in the shared memory of an SM, unless head_dim is 256.
_FP8_PROGRAMS_PER_SM = 7


class DecodeScratch(NamedTuple):
    """partial_out: [programs · group, D] fp32 and partial_lse: [programs · group] fp32, any
    content; arrivals: [rows] int32, zero between launches."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor


class DecodeLaunch(NamedTuple):
    """Launch shape, fixed at capture.

    splits: programs that share one (request, KV head); block_tokens: tokens a tile; stages: tiles
    in flight.
    """

    splits: int
    block_tokens: int = 32
    num_warps: int = 1
    stages: int = 5


def decode_launch(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_selected_tokens: int,
    device: torch.device,
    kv_itemsize: int,
) -> DecodeLaunch:
    """One wave of one-warp programs of at least _MIN_SPLIT_TOKENS tokens each.

    Small tiles and many independent programs keep more loads in flight than wide tiles do.

    Args:
        kv_itemsize: bytes of a number in the KV pool, 2 or 1.
    """
    fp8 = kv_itemsize == 1 and head_dim <= 128
    programs_per_sm = _FP8_PROGRAMS_PER_SM if fp8 else _PROGRAMS_PER_SM
    wanted = programs_per_sm * sm_count(device) // (batch * num_kv_heads)
    useful = triton.cdiv(max_selected_tokens, _MIN_SPLIT_TOKENS)
    return DecodeLaunch(
        splits=max(1, min(wanted, useful, MAX_SPLITS)),
        block_tokens=max(16, 4096 // triton.next_power_of_2(head_dim)),
    )


def allocate_decode_scratch(
    parts: int, rows: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch that all layers and batch sizes may share.

    Args:
        parts: largest bs·Hq·splits of the launches that will use it.
        rows: largest bs·Hkv.
    """
    return DecodeScratch(
        partial_out=torch.empty(parts, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(parts, dtype=torch.float32, device=device),
        arrivals=torch.zeros(rows, dtype=torch.int32, device=device),
    )


def check_scratch(scratch: DecodeScratch, rows: int, group: int, splits: int) -> None:
    """Raise `ValueError` if `scratch` has no room for this launch."""
    parts = rows * group * splits
    if splits > 1 and scratch.partial_lse.shape[0] < parts:
        raise ValueError(
            f"scratch holds {scratch.partial_lse.shape[0]} partial rows: expected at least "
            f"bs·Hq·splits={parts}; allocate it with more parts"
        )
    if splits > 1 and scratch.arrivals.shape[0] < rows:
        raise ValueError(
            f"scratch holds {scratch.arrivals.shape[0]} rows: expected at least bs·Hkv={rows}; "
            "allocate it with more rows"
        )
