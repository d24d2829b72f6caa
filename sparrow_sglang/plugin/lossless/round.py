"""A round of lossless decoding: draft, verify, accept."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sparrow_sglang.planning.rounds import Plan
from sparrow_sglang.plugin.lossless.drafts import Drafts, Outcome, Requests, Written
from sparrow_sglang.plugin.lossless.kernels import KernelDrafts
from sparrow_sglang.plugin.lossless.lookups import Histories
from sparrow_sglang.plugin.scheduler import forward

if TYPE_CHECKING:
    from sparrow_sglang.plugin.lossless.passes import Passes


class Result(NamedTuple):
    """`passed` is the dense pass."""

    passed: Any
    outcome: Outcome
    written: Written


Accept = Callable[[Drafts, torch.Tensor], Outcome]


def run_round(
    passes: "Passes",
    histories: Histories | None,
    requests: Requests,
    plan: Plan,
    accept: Accept,
    before: Written | None = None,
) -> Result:
    """One round, after the one `before` if the host has not returned to SGLang since. KV of tokens
    past the accepted ones stays in slots that the requests own, and the next round overwrites it:
    it verifies as many rows from the new latest token on, and no pass reads past its own tokens."""
    rows, committed, known, latest, _, sources = requests
    drafts = (KernelDrafts if latest.is_cuda else Drafts)(requests, plan, passes)

    def step(number: int, dense: bool) -> Any:
        """The decode step after the latest token and `number` drafts."""
        lengths, on_host = committed + (number + 1), None if known is None else known + number + 1
        new = drafts.tokens[number], drafts.positions[number], drafts.slots[number]
        with passes.steps(dense):
            return forward.run(passes.runner, rows, lengths, on_host, *new)

    # Draft.
    for number in range(plan.drafts):
        # At once, as the next replay overwrites the logits. In place, so that all ranks verify the
        # same drafts.
        draft = drafts.sample(step(number, dense=False).logits_output.next_token_logits)
        passes.of_first_rank(draft)
    if histories is not None and sources is not None and plan.lookups:
        if plan.drafts:
            histories.record(sources.histories, committed, drafts.tokens[1 : plan.drafts + 1].T)
        histories.look_up(sources, plan.drafts, drafts.looked_up)

    # Verify.
    if plan.rows == 1:
        passed = step(0, dense=True)
    else:
        with passes.verification(plan.rows):
            passed = forward.run(passes.runner, rows, committed, known, *drafts.by_request())
    logits = passed.logits_output.next_token_logits.unflatten(0, (len(rows), -1))

    # Accept.
    outcome = Outcome(*map(passes.of_first_rank, accept(drafts, logits)))
    return Result(passed, outcome, drafts.end(outcome, histories, before))
