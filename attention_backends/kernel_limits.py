"""Limits of the GPU kernels, checked so that a server is refused before it loads a model. The CPU
path has no such limits."""

from typing import TYPE_CHECKING

from sparrow_sglang.schedules.schedule import PAGE_SIZES
from sparrow_sglang.sglang_compat.arguments import attention_tp_size

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Tiles of 80 and 96 columns are padded to 128."""
MAX_GROUP = 16
"""A group of query heads is one operand of the tensor cores, whose smallest M is 16."""
MAX_PAGES = 32767
"""The compaction of selected pages packs two page counts into one int32, 15 bits for the upper."""
FP8_CAPABILITY = (8, 9)
"""From this compute capability on GPUs multiply e4m3, and Triton reads it."""


def kernel_problems(server_args: "ServerArgs", model_config: "ModelConfig") -> list[str]:
    """Reasons why a GPU cannot serve this model with these arguments, page size included."""
    model = "model " + " ".join(model_config.hf_config.architectures or ["of unknown kind"])
    other = "choose another --attention-backend for it"
    page_size = server_args.page_size
    attn_tp_size = attention_tp_size(server_args)
    num_q_heads = model_config.num_attention_heads // attn_tp_size
    group = num_q_heads // model_config.get_num_kv_heads(attn_tp_size)
    problems = []
    if model_config.head_dim not in HEAD_DIMS:
        built_for = ", ".join(map(str, HEAD_DIMS))
        problems.append(
            f"{model}: head_dim={model_config.head_dim}: the GPU kernels are built for {built_for};"
            f" {other}"
        )
    if group > MAX_GROUP:
        problems.append(
            f"{model}: {group} query heads for each KV head: the GPU kernels take up to"
            f" {MAX_GROUP}; {other}"
        )
    # A round of lossless decoding goes past the end of the context.
    longest = model_config.context_len + (server_args.speculative_num_draft_tokens or 0)
    most = MAX_PAGES * page_size
    if longest > most:
        larger = [size for size in PAGE_SIZES if longest <= MAX_PAGES * size]
        or_page = f", or --page-size {larger[0]} with a schedule made for it" if larger else ""
        problems.append(
            f"context length {model_config.context_len}: the GPU kernels address {most} tokens at"
            f" page size {page_size}; pass --context-length {most}{or_page}"
        )
    if str(model_config.dtype) == "torch.float32":
        problems.append("dtype float32: the GPU kernels need 16 bits; pass --dtype bfloat16")
    return problems


def fp8_problems(capability: tuple[int, int], used: str, instead: str) -> list[str]:
    """`used`: what is in FP8; `instead`: the flag that avoids it."""
    if capability >= FP8_CAPABILITY:
        return []
    major, minor = FP8_CAPABILITY
    return [
        f"{used} on a GPU of compute capability {capability[0]}.{capability[1]}: Triton reads"
        f" float8_e4m3fn from {major}.{minor} on; pass {instead}"
    ]
