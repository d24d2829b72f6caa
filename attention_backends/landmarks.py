"""Landmarks of one layer as they are stored, in 16 bits or more or as int4 codes with fp16 scales.
Both are indexed by physical page: a prefix-cache hit has the landmarks of its pages in place. M is
the number of int4 landmarks per page."""

from typing import NamedTuple

import torch

from sparrow_sglang.schedules.schedule import int4_landmark_tokens

FP8 = torch.float8_e4m3fn
"""The only dtype of a KV pool that has scales: a key is k_scale times what the pool holds."""


class MeanLandmarks(NamedTuple):
    """The published rule's landmarks, [pages, Hkv, 1, D] in the dtype of `landmark_dtype`."""

    means: torch.Tensor

    def at(self, pages: torch.Tensor) -> "MeanLandmarks":
        return MeanLandmarks(self.means[pages])

    def write(self, pages: torch.Tensor, landmarks: "MeanLandmarks") -> None:
        self.means[pages] = landmarks.means

    def values(self) -> torch.Tensor:
        """In fp32."""
        return self.means.float()


class Int4Landmarks(NamedTuple):
    """Landmarks as int4 codes, each with one scale: a value is scale * code, -7 <= code <= 7. Of
    `codes` [pages, Hkv, M, D/2] uint8, byte j holds 8 + code of channel j in its low four bits, and
    8 + code of channel j + D/2 in its high ones. `scales` are [pages, Hkv, M] fp16."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, means: torch.Tensor) -> "Int4Landmarks":
        """Quantize `means` [pages, Hkv, M, D] in fp32; codes are rounded half to even. The scale,
        max |mean| / 7, is rounded to fp16 first. A code is 0 where the scale is 0."""
        scales = (means.abs().amax(-1) / 7).half()
        codes = (means / scales.float()[..., None]).round().clamp(-7, 7)
        first, second = (codes.nan_to_num(0) + 8).to(torch.uint8).chunk(2, dim=-1)
        return cls(first | second << 4, scales)

    def at(self, pages: torch.Tensor) -> "Int4Landmarks":
        return Int4Landmarks(self.codes[pages], self.scales[pages])

    def write(self, pages: torch.Tensor, landmarks: "Int4Landmarks") -> None:
        self.codes[pages] = landmarks.codes
        self.scales[pages] = landmarks.scales

    def unpacked(self) -> torch.Tensor:
        """The codes, [pages, Hkv, M, D] in fp32."""
        return torch.cat([self.codes & 15, self.codes >> 4], dim=-1).float() - 8

    def values(self) -> torch.Tensor:
        """[pages, Hkv, M, D] in fp32."""
        return self.scales.float()[..., None] * self.unpacked()


Landmarks = MeanLandmarks | Int4Landmarks


def landmark_dtype(kv_dtype: torch.dtype) -> torch.dtype:
    """Dtype of mean landmarks: that of the KV pool, or bfloat16 where the pool is FP8. An FP8
    number has three mantissa bits; a mean rounded to so few would tie with those of other pages.
    Landmarks leave out the pool's scale: it is the same for all pages of a layer, so it does not
    change which pages are selected."""
    return torch.bfloat16 if kv_dtype == FP8 else kv_dtype


def allocate_landmarks(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    int4: bool,
) -> Landmarks:
    """Landmarks, all 0, for a KV pool of `num_pages` pages whose keys are of `dtype`."""
    if not int4:
        shape = (num_pages, num_kv_heads, 1, head_dim)
        return MeanLandmarks(torch.zeros(shape, dtype=landmark_dtype(dtype), device=device))
    rows = (num_pages, num_kv_heads, page_size // int4_landmark_tokens(page_size))
    return Int4Landmarks(
        torch.full((*rows, head_dim // 2), 8 << 4 | 8, dtype=torch.uint8, device=device),
        torch.zeros(rows, dtype=torch.float16, device=device),
    )
