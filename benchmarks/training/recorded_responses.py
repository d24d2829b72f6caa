"""Prompts with recorded responses, for benchmarks that evaluate along them without an engine.

In: a JSONL file, or the built-in prompts of a calibration. Out: token ids of prompts and responses;
a response that is missing in the file is sampled from the model.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.prompts import Prompt, builtin_prompts, read_prompts, tokenizer_of

SAMPLED_AT_ONCE = {"cpu": 16, "cuda": 128}
"""Responses that are sampled in one batch; a GPU takes hardly longer for a large batch."""


def with_responses(prompts: Sequence[Prompt], folder: str, new_tokens: int) -> list[Prompt]:
    """The prompts with responses, sampled by dense decode if a prompt has none.

    A sampled response has exactly `new_tokens` tokens: the end-of-text token is not drawn.
    """
    waiting = [prompt for prompt in prompts if not prompt.response_ids]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)
    torch.manual_seed(0)
    sampled: list[list[int]] = []
    at_once = SAMPLED_AT_ONCE[device]
    for first in range(0, len(waiting), at_once):
        group = waiting[first : first + at_once]
        width = max(len(prompt.input_ids) for prompt in group)
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(group):
            ids[row, width - len(prompt.input_ids) :] = torch.tensor(prompt.input_ids)
            mask[row, width - len(prompt.input_ids) :] = 1
        out = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        sampled += out[:, width:].tolist()
    responses = iter(sampled)
    return [
        prompt if prompt.response_ids else replace(prompt, response_ids=tuple(next(responses)))
        for prompt in prompts
    ]


def prompts_for(
    options: argparse.Namespace, folder: str, wanted: int, wanted_by: str
) -> list[Prompt]:
    """Prompts with responses: held-out ones first, then `wanted` others to train on.

    Raises `CalibrationError` if there are too few; its message names `wanted_by`, the options that
    ask for the training responses.
    """
    tokenize = tokenizer_of(folder)
    if options.prompts:
        found = read_prompts(options.prompts, tokenize, options.context)
        heldout = found[: options.heldout]
        names = {prompt.name for prompt in heldout}
        given = heldout + [prompt for prompt in found if prompt.name not in names]
        if len(given) < options.heldout + wanted:
            raise CalibrationError(
                f"--prompts {options.prompts}: has {len(given)} prompts; expected"
                f" {options.heldout + wanted} or more, for --heldout {options.heldout} and"
                f" {wanted_by}, besides lines that repeat a held-out prompt"
            )
        return with_responses(given[: options.heldout + wanted], folder, options.new_tokens)

    def draw(part: Literal["check", "calibration"], number: int) -> list[Prompt]:
        # Take the longer half, as the shortest prompts have no room for a question.
        drawn = builtin_prompts(
            tokenize, options.context, options.context, options.new_tokens, 2 * number, part
        )[-number:]
        # Shuffled, so that each step learns from all lengths.
        random.Random(0).shuffle(drawn)
        return drawn

    found = draw("check", options.heldout) + draw("calibration", wanted)
    return with_responses(found, folder, options.new_tokens)
