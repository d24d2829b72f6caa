"""How much of its KV a finished request read, for a request that asks with {"report": true}.

In: the rule that a request was decoded by and its lengths. Out: `KvUsage`, which answers carry as
`meta_info["sparrow"]` (`Engine.generate`, `/generate`) or, one per choice, `metadata["sparrow"]`
(chat and text completions; while streaming, in a last chunk without choices).

Imports neither torch nor SGLang.
"""

from dataclasses import dataclass

import numpy as np

from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.requests import RequestOption
from sparrow_sglang.schedule import BudgetSchedule


@dataclass(frozen=True)
class KvUsage:
    """What the decode steps of one request read, per KV head of a sparse layer, in tokens.

    The first token comes out of prefill, so T tokens take T - 1 decode steps. Layers of the
    schedule's `dense_layers` read all that is held. A retraction, of which `meta_info` counts
    `num_retractions`, replaces one decode step by a prefill, which this leaves out of account.

    Attributes:
        schedule: name of the schedule that the request was decoded by; None if densely.
        kv_budget_tokens: the upper bound that the request asked for, if it did.
        decode_steps: number of steps.
        kv_tokens_held_mean: tokens in the KV cache, the current one included, mean over the steps;
            None without a step, as the following.
        kv_tokens_read_mean: those of them that were read, mean over the steps.
        kv_tokens_held_last: tokens in the KV cache at the last step.
        kv_tokens_read_last: those of them that the last step read.
    """

    schedule: str | None
    kv_budget_tokens: int | None
    decode_steps: int
    kv_tokens_held_mean: float | None = None
    kv_tokens_read_mean: float | None = None
    kv_tokens_held_last: int | None = None
    kv_tokens_read_last: int | None = None


@dataclass(frozen=True)
class KvRule:
    """How one request is decoded, as long as it runs.

    Attributes:
        schedule: None to read everything.
        kv_budget_tokens: upper bound of the budget, if any.
    """

    schedule: BudgetSchedule | None
    kv_budget_tokens: int | None = None

    @classmethod
    def of(cls, option: RequestOption, loaded: LoadedSchedules) -> "KvRule":
        """What `option` means under `loaded`; raises `ScheduleError` if its schedule is unknown."""
        if option.dense:
            return cls(None)
        schedule = loaded.in_force if option.schedule is None else loaded.get(option.schedule)
        return cls(schedule, option.kv_budget_tokens)

    def usage(self, prompt_tokens: int, completion_tokens: int) -> KvUsage:
        """Usage of a request that generated `completion_tokens` after `prompt_tokens`."""
        name = None if self.schedule is None else self.schedule.name
        steps = max(0, completion_tokens - 1)
        if not steps:
            return KvUsage(name, self.kv_budget_tokens, 0)
        held = prompt_tokens + np.arange(1, steps + 1)
        read = held
        if self.schedule is not None:
            read = self.schedule.tokens_read(held, self.kv_budget_tokens)
        return KvUsage(
            schedule=name,
            kv_budget_tokens=self.kv_budget_tokens,
            decode_steps=steps,
            kv_tokens_held_mean=float(held.mean()),
            kv_tokens_read_mean=float(read.mean()),
            kv_tokens_held_last=int(held[-1]),
            kv_tokens_read_last=int(read[-1]),
        )
