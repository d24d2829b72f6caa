"""Limits of the GPU kernels, checked so that a server is refused before it loads a model.

In: SGLang's ServerArgs and ModelConfig, a schedule. Out: one sentence per problem. The CPU path has
no such limits.
"""

from typing import TYPE_CHECKING

from sparrow_sglang.attention_backends.kernels.limits import (
    FP8_CAPABILITY,
    HEAD_DIMS,
    INT4_LANDMARKS,
    MAX_GROUP,
    MAX_PAGES,
    PAIRS_MULTIPLE,
)
from sparrow_sglang.schedule import PAGE_SIZES, BudgetSchedule
from sparrow_sglang.sglang_arguments import attention_tp_size

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs


def max_context(page_size: int) -> int:
    """Longest sequence that the kernels address, in tokens."""
    return MAX_PAGES * page_size


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
    if model_config.context_len > max_context(page_size):
        larger = [size for size in PAGE_SIZES if model_config.context_len <= max_context(size)]
        or_page = f", or --page-size {larger[0]} with a schedule made for it" if larger else ""
        problems.append(
            f"context length {model_config.context_len}: the GPU kernels address"
            f" {max_context(page_size)} tokens at page size {page_size} ({MAX_PAGES} pages); pass"
            f" --context-length {max_context(page_size)}{or_page}"
        )
    if str(model_config.dtype) == "torch.float32":
        problems.append("dtype float32: the GPU kernels need 16 bits; pass --dtype bfloat16")
    return problems


def fp8_problems(capability: tuple[int, int]) -> list[str]:
    """Why a GPU of this compute capability cannot serve an FP8 KV cache."""
    if capability >= FP8_CAPABILITY:
        return []
    major, minor = FP8_CAPABILITY
    return [
        f"FP8 KV cache on a GPU of compute capability {capability[0]}.{capability[1]}: Triton reads"
        f" float8_e4m3fn from {major}.{minor} on; pass --kv-cache-dtype bf16"
    ]


def rule_problems(schedule: BudgetSchedule) -> list[str]:
    """Reasons why a GPU cannot serve a schedule's selection rule."""
    rule, page_size = schedule.selection, schedule.page_size
    if rule.is_published_form(page_size):
        return []
    where = f"schedule {schedule.name}: selection"
    if rule.landmark_bits != 4:
        return [
            f"{where}.landmark_bits={rule.landmark_bits}: the GPU kernels take it only with"
            " landmark_tokens and landmark_pairs null and group_score 'mean_query'; set it to 4,"
            " or leave the others out"
        ]
    problems = []
    per_page = rule.landmarks_per_page(page_size)
    if per_page not in INT4_LANDMARKS:
        allowed = ", ".join(str(page_size // count) for count in INT4_LANDMARKS)
        problems.append(
            f"{where}.landmark_tokens={rule.landmark_tokens}: the GPU kernels take {allowed} at"
            f" page size {page_size}"
        )
    if rule.landmark_pairs is not None and (pairs := rule.pairs_kept(0)) % PAIRS_MULTIPLE:
        of_head = "" if isinstance(rule.landmark_pairs, int) else " of each KV head"
        problems.append(
            f"{where}.landmark_pairs={pairs}{of_head}: the GPU kernels take multiples of"
            f" {PAIRS_MULTIPLE}, or null for all"
        )
    return problems


def describe_fit(server_args: "ServerArgs", model_config: "ModelConfig") -> str:
    """One line on what the kernels will serve, for a model without `kernel_problems`."""
    page_size = server_args.page_size
    return (
        f"head_dim {model_config.head_dim}, context {model_config.context_len} of at most"
        f" {max_context(page_size)} tokens at page size {page_size}"
    )
