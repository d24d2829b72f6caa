"""A verification of drafts is as many plain decode steps, whichever drafts are kept."""

import pytest
import torch
from pools import Pool, make_schedule

from sparrow_sglang.attention_backends.landmarks import allocate_landmarks, kept_pairs
from sparrow_sglang.attention_backends.metadata import BudgetTable, verification_rows
from sparrow_sglang.attention_backends.paged_decode import TorchPagedDecode
from sparrow_sglang.loaded_schedules import LoadedSchedules

PAGE, ROWS, HEADS, DIM = 16, 4, (6, 3), 16
# Budgets grow within the rows of a verification: at 8 and at 16 pages.
SCHEDULE = make_schedule(PAGE, 8, [4, 6, 7])
# The rows of a request fill a page, enter one, or neither.
LENGTHS = [46, 60, 127, 128, 250, 255]


@pytest.fixture
def step():
    """A decode step over a pool that holds ROWS more tokens than `LENGTHS`, and its landmarks."""
    pool = Pool([length + ROWS for length in LENGTHS], HEADS, DIM, PAGE, seed=3)
    budgets = BudgetTable(LoadedSchedules.of([SCHEDULE]), len(pool.req_to_token), "cpu")
    decode = TorchPagedDecode(budgets, pool.req_to_token)
    rule = SCHEDULE.selection
    pairs = kept_pairs(rule, 2, range(HEADS[1]), DIM, torch.device("cpu"))
    landmarks = allocate_landmarks(len(pool.k) // PAGE, PAGE, rule, pairs, torch.float32)
    lengths = torch.tensor(LENGTHS)
    decode.plan_extend(pool.rows, lengths, lengths)
    decode.update_landmarks(pool.k, landmarks)
    return pool, decode, landmarks


def verify(pool, decode, landmarks, q, k, committed) -> torch.Tensor:
    rows, lengths = verification_rows(pool.rows, committed, ROWS)
    decode.plan_decode(rows, lengths, committed + ROWS, rows_per_request=ROWS)
    return decode.decode(q.flatten(0, 1), k, pool.v, landmarks, 2, 0.25).unflatten(0, (-1, ROWS))


def plain(pool, decode, landmarks, q, k, committed, row) -> torch.Tensor:
    lengths = committed + row + 1
    decode.plan_decode(pool.rows, lengths, lengths)
    return decode.decode(q[:, row], k, pool.v, landmarks, 2, 0.25)


def test_each_row_is_a_plain_step(step):
    pool, decode, landmarks = step
    q = torch.randn(len(LENGTHS), ROWS, HEADS[0], DIM)
    before = landmarks.means.clone()
    together = verify(pool, decode, landmarks, q, pool.k, torch.tensor(LENGTHS))
    written = landmarks.means.clone()
    landmarks.means.copy_(before)
    for row in range(ROWS):
        alone = plain(pool, decode, landmarks, q, pool.k, torch.tensor(LENGTHS), row)
        torch.testing.assert_close(together[:, row], alone, atol=1e-6, rtol=0)
    assert torch.equal(written, landmarks.means) and not torch.equal(written, before)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_drafts_that_are_refused_leave_no_trace(step, kept):
    """Their keys fill pages, whose landmarks are never read until the right keys fill them."""
    pool, decode, landmarks = step
    committed = torch.tensor(LENGTHS)
    wrong = pool.k.clone()
    for slots in pool.slots:
        wrong[slots[len(slots) - ROWS + kept :]] = 100.0
    q = torch.randn(len(LENGTHS), ROWS, HEADS[0], DIM)
    verify(pool, decode, landmarks, q, wrong, committed)
    # The next verification writes the right keys, of which the pool holds too few for all rows.
    later = committed + kept
    for row in range(ROWS - kept):
        reread = plain(pool, decode, landmarks, q, pool.k, later, row)
        fresh = allocate_landmarks(
            len(pool.k) // PAGE,
            PAGE,
            SCHEDULE.selection,
            landmarks.pairs,
            torch.float32,
        )
        lengths = later + row + 1
        decode.plan_extend(pool.rows, lengths, lengths)
        decode.update_landmarks(pool.k, fresh)
        expected = plain(pool, decode, fresh, q, pool.k, later, row)
        torch.testing.assert_close(reread, expected, atol=1e-6, rtol=0)
