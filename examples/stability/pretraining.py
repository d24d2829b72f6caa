"""A small Qwen3 model that can do the task to some degree: supervised training from random weights.

In: settings. Out: a checkpoint with tokenizer that transformers, SGLang and `sparrow train` load,
and a record of how it was made. Graphs start with one node and double whenever the model has learnt
them; until they are those of the task, one edge leaves each node, with labels to copy. From such
examples the model soon learns to look something up, from the task itself hardly at all.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from graph_walk import (
    STEP_TOKENS,
    Walk,
    draw_walk,
    heldout_and_train,
    make_tokenizer,
    reward,
)
from study_settings import PretrainSettings, StudySettings

from sparrow_sglang.errors import InputError
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.types import Prompt

ROPE_THETA = 1e6
GRAD_CLIP = 1.0
LABELS_TO_COPY = 2
Batch = tuple[torch.Tensor, int]
"""Token ids [B, T] of prompts with a right response each, and where the responses start."""
# Share of the new value in the running mean of the loss that decides when graphs grow.
LOSS_WINDOW = 0.1


def pretrain(settings: StudySettings, folder: Path) -> dict[str, Any]:
    """Train until the held-out reward is reached, and save to `folder`; returns the record.

    Raises `InputError` if `pretrain.steps` do not suffice; nothing is saved then.
    """
    tokenizer = make_tokenizer(settings.walk)
    torch.manual_seed(settings.walk.seed)
    model = new_model(settings, tokenizer)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    history = []
    for row in training(model, tokenizer, settings):
        history.append(row | {"seconds": round(time.perf_counter() - began, 1)})
        print(
            f"pretraining: step {row['step']}, graphs of up to {row['nodes']} nodes, loss"
            f" {row['loss']:.4f}, reward {row['reward']:.3f}",
            flush=True,
        )
    reached = history[-1]["reward"]
    if reached < settings.pretrain.reward:
        raise InputError(
            f"pretrain.steps={settings.pretrain.steps}: the reward is {reached:.3f} after them,"
            f" with graphs of up to {history[-1]['nodes']} nodes; expected more steps, or a"
            f" pretrain.reward below {settings.pretrain.reward}"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, **provenance(), "history": history}


def new_model(settings: StudySettings, tokenizer: Any) -> Any:
    """A Qwen3 causal language model with random fp32 weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            max_position_embeddings=settings.context_tokens,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            # With this range a projection keeps the size of its input.
            initializer_range=settings.model["hidden_size"] ** -0.5,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
            **settings.model,
        )
    )


def training(model: Any, tokenizer: Any, settings: StudySettings) -> Iterator[dict[str, Any]]:
    """Train in place, and yield a row of progress now and then, the last one at the end.

    A row holds the steps taken, the largest graphs so far, the running loss in nats a response
    token, and the held-out reward, 0 until graphs are the task's.
    """
    options, plan = settings.walk, settings.pretrain
    walks = heldout_and_train(options.model_copy(update={"train": 0}))[: plan.evaluate_walks]
    draw = random.Random(options.seed + 1)
    optimizer = _optimizer(model, plan)
    nodes, is_task, loss = min(2, options.most_nodes), False, math.nan
    for step in range(1, plan.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * _rate(step, plan)
        batch = _batch(draw, tokenizer, settings, None if is_task else nodes)
        value = _train_on(model, optimizer, batch)
        loss = value if math.isnan(loss) else loss + LOSS_WINDOW * (value - loss)
        due = step % plan.evaluate_every == 0 or step == plan.steps
        reached = 0.0
        if due and is_task:
            reached = sampled_reward(model, tokenizer, walks, plan.evaluate_lines)
        grows = loss < plan.grow_below and not is_task
        if due or grows:
            yield {"step": step, "nodes": nodes, "loss": loss, "reward": reached}
        if grows:
            is_task = nodes == options.most_nodes
            nodes, loss = min(2 * nodes, options.most_nodes), math.nan
        if reached >= plan.reward:
            return


@torch.no_grad()
def sampled_reward(model: Any, tokenizer: Any, walks: Sequence[Walk], lines: int) -> float:
    """Mean reward of the first `lines` of one response to each of these walks, at temperature 1.

    The responses are sampled, because a model that can go on from right lines may not get that far.
    """
    device = next(model.parameters()).device
    prompts = [walk.prompt() for walk in walks]
    padded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(device)
    found = model.generate(
        input_ids=padded.input_ids,
        attention_mask=padded.attention_mask,
        max_new_tokens=STEP_TOKENS * lines - 1,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(found[:, padded.input_ids.shape[1] :], skip_special_tokens=True)
    asked = [Prompt("", "", (0,), walk.payload(lines)) for walk in walks]
    return fmean(map(reward, asked, texts))


def _train_on(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Take one optimizer step; returns the loss in nats a response token."""
    tokens, start = batch
    logits = _logits(model, tokens, start)
    targets = tokens[:, start:].to(logits.device)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _logits(model: Any, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Logits that predict the tokens [B, T] from `start` on: [B, T - start, V] fp32."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        output = model(
            input_ids=tokens[:, :-1].to(device),
            use_cache=False,
            logits_to_keep=tokens.shape[1] - start,
        )
    logits: torch.Tensor = output.logits.float()
    return logits


def _batch(
    draw: random.Random, tokenizer: Any, settings: StudySettings, nodes: int | None
) -> Batch:
    """Walks of one length: through graphs of at most so many nodes, or those of the task."""
    options, plan = settings.walk, settings.pretrain
    if nodes is None:
        size = draw.randint(options.least_nodes, options.most_nodes)
        degree, labels, steps = options.degree, 0, options.steps
    else:
        size = draw.randint(max(1, nodes // 2), nodes)
        degree, labels, steps = 1, LABELS_TO_COPY, size
    length = (STEP_TOKENS + labels) * (size * degree + steps)
    count = max(1, min(plan.walks_per_step, plan.tokens_per_step // length))
    walks = [draw_walk(draw, options, size, degree, steps, labels) for _ in range(count)]
    texts = [f"{walk.prompt()} {walk.response()}" for walk in walks]
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    return torch.tensor(ids), len(walks[0].prompt().split())


def _optimizer(model: Any, plan: PretrainSettings) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98), fused=parameters[0].is_cuda)


def _rate(step: int, plan: PretrainSettings) -> float:
    """Learning rate as a share of its peak."""
    return min(1.0, step / plan.warmup_steps, max(0.1, 1 - step / plan.steps))
