"""Speculative sampling gives the dense distribution whatever drafts are sampled from."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frequencies import REQUESTS, drafts_of, p_value, sampled_from, sampling

from sparrow_sglang.errors import InputError
from sparrow_sglang.planning.rounds import DENSE, Plan
from sparrow_sglang.plugin.lossless import drafts as reference
from sparrow_sglang.plugin.lossless.draft_weights import make_draft_weights
from sparrow_sglang.plugin.server_log import describe_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule


def test_distributions_are_those_that_requests_ask_for() -> None:
    logits = torch.randn(len(REQUESTS), 3, 50, generator=torch.Generator().manual_seed(0)) * 2
    probs = reference.distribution(logits, sampling(*REQUESTS))
    for request, rows, result in zip(REQUESTS, logits.tolist(), probs, strict=True):
        for row, got in zip(rows, result, strict=True):
            np.testing.assert_allclose(got, sampled_from(row, **request), atol=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 64, 65, 1000])
def test_candidates_are_the_best_of_groups_that_cover_the_vocabulary(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_GROUPS", 64)
    for best in range(vocabulary):
        logits = torch.full((1, vocabulary), -torch.inf)
        logits[0, best] = 1
        values, ids = reference.candidates(logits)
        assert ids.unique().numel() == ids.numel() == min(64, vocabulary)
        assert (values == logits.gather(1, ids)).all()
        assert best in ids


def rounds(info: Any, dense: torch.Tensor, sparse: torch.Tensor, plan: Plan, count: int) -> Any:
    """Tokens of `count` rounds over a vocabulary whose logits depend on the latest token."""
    drafts = drafts_of(reference.Drafts, info, plan, sparse.shape[1])
    previous = drafts.tokens[0]
    for _ in range(plan.drafts):
        previous = drafts.sample(sparse[previous])
    for row in drafts.looked_up:
        # What is likely, or what is not.
        row[:] = dense[previous].argmax(-1) if count % 2 else dense[previous].argmin(-1)
        previous = row
    outcome = drafts.verify(dense[drafts.tokens.T])
    return outcome, drafts.end(outcome, None).tokens, drafts.tokens[1:].T


# Fewer drafts than the round verifies, drafts of both kinds, and tokens looked up alone.
@pytest.mark.parametrize(
    ("plan", "restricted", "likely"),
    [
        ((3, 0, 5), False, False),
        ((3, 0, 5), True, False),
        ((1, 2, 4), True, True),
        ((0, 3, 4), False, False),
    ],
)
@pytest.mark.parametrize("request_", REQUESTS[:6])
def test_rounds_follow_the_dense_distribution(
    request_: dict[str, float],
    restricted: bool,
    plan: tuple[int, int, int],
    likely: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two tokens: of a round where it has two, else followed by one drawn densely."""
    monkeypatch.setattr(reference, "MAX_GROUPS", 3 if restricted else 64)
    torch.manual_seed(1)
    vocabulary, count = 7, 20_000 + likely
    dense = torch.randn(vocabulary, vocabulary) * 1.5
    sparse = dense + torch.randn(vocabulary, vocabulary)
    info = sampling(*[request_] * count)
    outcome, output, drafts = rounds(info, dense, sparse, Plan(*plan), count)
    then = reference.sample(reference.distribution(dense[output[:, 0]], info))
    second = torch.where(outcome.accepted > 0, output[:, 1], then)
    p = [sampled_from(row, **request_) for row in dense.tolist()]
    exact = {(a, b): p[0][a] * p[a][b] for a, b in itertools.product(range(vocabulary), repeat=2)}
    drawn = list(zip(output[:, 0].tolist(), second.tolist(), strict=True))
    assert p_value(drawn, exact) > 1e-4
    # The control: drafts themselves do not follow it.
    assert p_value(map(tuple, drafts[:, :2].tolist()), exact) < 1e-12
    # Unless q is restricted, the first draft is accepted at the rate that the audit measures.
    if plan[0] and not restricted:
        q = sampled_from(sparse[0].tolist(), **request_)
        share = float((outcome.accepted > 0).float().mean())
        assert share == pytest.approx(np.minimum(p[0], q).sum(), abs=0.02)


def test_greedy_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    info = sampling(*[{"top_k": 1}] * 3)
    drafts = drafts_of(reference.Drafts, info, Plan(2, 0, 3), 5)
    for tokens in ([3, 3, 1], [2, 0, 2]):
        drafts.sample(torch.nn.functional.one_hot(torch.tensor(tokens), 5).float())
    best = torch.tensor([[3, 2, 4], [3, 1, 2], [3, 2, 2]])
    outcome = drafts.verify(torch.nn.functional.one_hot(best, 5).float())
    assert outcome.accepted.tolist() == [2, 1, 0]
    assert outcome.bonus.tolist() == [4, 1, 3]


def test_a_round_without_drafts_samples_a_token() -> None:
    drafts = drafts_of(reference.Drafts, sampling({}, {}), DENSE, 3)
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1], [1, 0, 0]]), 3).log()
    outcome = drafts.verify(logits)
    assert outcome.accepted.tolist() == [0, 0]
    assert outcome.bonus.tolist() == [2, 1]
    assert drafts.end(outcome, None).tokens.tolist() == [[2], [1]]


def test_a_rejection_without_residual_draws_from_the_dense_distribution() -> None:
    """p = q up to rounding: nothing of p is left, and no token of probability 0 may appear."""
    p = torch.tensor([[[0.5, 0.5, 0.0]] * 2])
    tokens, ids = torch.tensor([[2]]), torch.arange(3)[None, None]
    q = torch.tensor([[[0.5, 0.5, 1e-9]]])
    for _ in range(50):
        assert reference.accept(tokens, ids, q, p).bonus.item() != 2


def test_schedules_of_drafts_need_no_calibration() -> None:
    drafts = BudgetSchedule.drafts()
    assert "NOT calibrated" in describe_schedule(drafts, {})
    assert "NOT calibrated" not in describe_schedule(drafts, {}, needs_calibration=False)


def test_fp8_drafts_are_rejected_on_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))

    def make(setting: str) -> Any:
        fields = SimpleNamespace(sparrow_draft_weights=setting)
        return make_draft_weights(
            SimpleNamespace(device="cuda", model=torch.nn.Linear(16, 16), server_args=fields)
        )

    assert not make("auto").copies and not make("model").copies
    with pytest.raises(InputError, match=r"FP8 drafts .* 8\.6: .*--sparrow-draft-weights model"):
        make("fp8")
