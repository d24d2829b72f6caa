"""Expected answers of a server with the sparrow backend, from transformers and the contract's loop.
The oracle is a transformers model in float64. Its attention is dense for the prompt and follows
`contract.py` for every later position, except in layers with a sliding window, which always attend
to their window. It shares nothing with the backend but the checkpoint."""

from typing import Any

import numpy as np
import torch
from contract import decode_one, step_budget
from transformers import AttentionInterface, AutoModelForCausalLM

from sparrow_sglang.schedules.schedule import BudgetSchedule

FP32 = 2e-4
"""|difference| of a log-prob between SGLang in fp32 and transformers in float64."""


def logprobs_of(answer: dict[str, Any]) -> torch.Tensor:
    """The log-probs of the new tokens that an engine recorded."""
    return torch.tensor([value for value, *_ in answer["meta_info"]["output_token_logprobs"]])


def _seen(length: int, window: int) -> torch.Tensor:
    """Which keys each position attends to, [length, length]: its own and the window - 1 before."""
    behind = torch.arange(length)[:, None] - torch.arange(length)
    return (behind >= 0) & (behind < window)


class ContractModel:
    """Teacher-forced log-probs under dense prefill and sparse decode.

    Args:
        path: a checkpoint folder.
        schedule: supplies numbers only (page size, bins, budgets, pages that are always kept, the
            selection rule); None attends densely throughout.
        cap: upper bound of the budget in tokens, as a request may ask for.
        kv_dtype: dtype to which keys and values are rounded before attention; None does not round.
            Landmarks of an FP8 pool are in bf16, all others in fp32.
        kv_scales: divisors of keys and values before they are rounded, powers of two.
    """

    def __init__(
        self,
        path: str,
        schedule: BudgetSchedule | None = None,
        cap: int | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._schedule, self._cap = schedule, cap
        self._kv_dtype, self._kv_scales = kv_dtype, kv_scales
        landmark_dtype = torch.bfloat16 if kv_dtype == torch.float8_e4m3fn else torch.float32
        self._store = lambda mean: torch.from_numpy(mean).to(landmark_dtype).double().numpy()
        self._prompt_len = 0
        name = f"contract_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float64,
            attn_implementation=name,
            # Experts run one after the other: the faster implementations do not support float64.
            experts_implementation="eager",
        ).eval()

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        if self._kv_dtype is not None:
            key, value = (
                (x / scale).float().to(self._kv_dtype).double() * scale
                for x, scale in zip((key, value), self._kv_scales, strict=True)
            )
        queries, keys, values = (t[0].transpose(0, 1).numpy() for t in (query, key, value))
        total, num_q_heads, head_dim = queries.shape
        group = num_q_heads // keys.shape[1]
        window = getattr(module, "sliding_window", None)
        logits = query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2) * scaling
        logits = logits.masked_fill(~_seen(total, window or total), -torch.inf)
        if s_aux is not None:
            sinks = s_aux.to(logits)[:, None, None].expand(-1, total, 1)
            logits = torch.cat([logits, sinks], -1)
        weights = logits.softmax(-1)[..., :total]
        out = (weights @ value[0].repeat_interleave(group, 0)).transpose(0, 1).clone()
        schedule = self._schedule
        dense_layers = () if schedule is None else schedule.dense_layers
        if schedule is not None and window is None and module.layer_idx not in dense_layers:
            landmarks: dict[tuple[int, int], np.ndarray] = {}
            for position in range(self._prompt_len, total):
                length = position + 1
                row, _ = decode_one(
                    queries[position],
                    keys[:length],
                    values[:length],
                    step_budget(schedule, length, self._cap),
                    schedule.page_size,
                    scaling,
                    schedule.sink_pages,
                    schedule.recent_pages,
                    store=self._store,
                    rule=schedule.selection,
                    logit_sinks=None if s_aux is None else s_aux.double().numpy(),
                    known=landmarks,
                )
                out[position] = torch.from_numpy(row)
        return out[None], None

    @torch.inference_mode()
    def log_probs(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Log-probs of the whole vocabulary before each response token, [len(response), V]."""
        self._prompt_len = len(prompt)
        logits = self._model(torch.tensor([prompt + response[:-1]])).logits[0]
        return logits[len(prompt) - 1 :].log_softmax(-1)

    def errors(self, prompt: list[int], answer: dict[str, Any]) -> torch.Tensor:
        """|difference| between an engine's log-prob of each new token and ours, [new tokens]."""
        return self._compared(prompt, answer)[0]

    def _compared(self, prompt: list[int], answer: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        values, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        rows = self.log_probs(prompt, list(ids))
        expected = rows.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        errors = (torch.tensor(values, dtype=torch.float64) - expected).abs()
        return errors, rows.max(-1).values - expected

    def assert_greedy(self, prompt: list[int], answer: dict[str, Any]) -> None:
        """The answer is our greedy choice, with our log-probs."""
        errors, gaps = self._compared(prompt, answer)
        assert errors.max() < FP32, errors
        # Near-ties may fall either way.
        assert gaps.max() < 2 * FP32, gaps
