"""No kernel of a lossless round, or of an allocation, is compiled while requests run: what a batch
changes is no constant of a kernel."""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frequencies import sampling
from sglang.srt.mem_cache import allocation as sglang_allocation
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sparrow_sglang.planning.rounds import plans
from sparrow_sglang.plugin.lossless import round as rounds
from sparrow_sglang.plugin.lossless import worker
from sparrow_sglang.plugin.lossless.drafts import Outcome, Requests
from sparrow_sglang.plugin.lossless.kernels import KernelDrafts
from sparrow_sglang.plugin.lossless.lookup_kernels import KernelHistories
from sparrow_sglang.plugin.lossless.lookups import Sources
from sparrow_sglang.plugin.scheduler import allocation

VOCABULARY, WIDTH, LONGEST = 15_194, 9, 600


def test_requests_meet_no_kernel_that_rounds_were_not_timed_with(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "Drafts", KernelDrafts)
    histories = KernelHistories(64, LONGEST, "cpu")
    table = torch.zeros(70, LONGEST, dtype=torch.int32)
    runner = SimpleNamespace(spec_algorithm=None, kv_index_translator=SimpleNamespace())
    runner.kv_index_translator.bind_own_plan = lambda _: None
    passes: Any = SimpleNamespace(runner=runner, vocab_size=VOCABULARY, context_len=500)
    passes.token_table, passes.of_first_rank = table, lambda tensor: tensor
    passes.steps = passes.verification = lambda _: nullcontext()

    def play(batch: int, info: Any, sources: Sources, first: int = 0, turns: int = 1) -> None:
        # Tensors that are parts of others are aligned otherwise.
        numbers = torch.zeros(4, 70, dtype=torch.int64)[:, first : first + batch]
        rows, committed, latest, accepted = numbers
        outcome = Outcome(accepted, latest)
        for plan in plans(WIDTH, looks_up=True):
            logits = torch.zeros(batch * plan.rows, VOCABULARY)
            runner.forward = lambda pass_, logits=logits: SimpleNamespace(
                logits_output=SimpleNamespace(next_token_logits=logits[: len(pass_.input_ids)])
            )
            requests = Requests(rows, committed, None, latest, info, sources)

            def accept(drafts: Any, dense: torch.Tensor, outcome: Outcome = outcome) -> Outcome:
                drafts.verify(dense)
                return outcome

            written = None
            for _ in range(turns):
                one = passes, histories, requests, plan, accept, written
                written = rounds.run_round(*one).written

    play(1, worker._greedy(1, "cpu"), histories.timed(1, 100))
    timed = sorted(compiled)
    assert set(timed) > {"begin_kernel", "_sample_kernel", "_accept_kernel", "end_kernel"}
    # By the powers of two of tokens, if at all.
    assert max(map(timed.count, timed)) <= 5
    for batch, siblings, first in ((1, 1, 1), (2, 2, 3), (7, 14, 0), (16, 16, 5), (33, 3, 2)):
        request = {}, {"temperature": 0.7}, {"top_k": 1}, {"top_p": 0.9}
        of_batch = torch.zeros(batch, 2 + siblings, dtype=torch.int32)
        sources = Sources(of_batch[:, 0], of_batch[:, 2:], of_batch[:, 1], 90 + batch)
        play(batch, sampling(*(request * batch)[:batch]), sources, first, turns=2)
        reqs = [
            SimpleNamespace(origin_input_ids=[1, 2], output_ids=[], rid=i) for i in range(batch)
        ]
        for req in reqs:
            req.extra_key = req.cache_salt = None
        histories.prefilled(reqs, torch.zeros(batch, dtype=torch.int32))
    assert sorted(compiled) == timed


def allocator_of(pages: int, kernels: bool) -> PagedTokenToKVPoolAllocator:
    allocator = PagedTokenToKVPoolAllocator(16 * pages, 16, torch.bfloat16, "cpu", None, False)
    allocator.use_triton_kernels = kernels
    return allocator


@pytest.mark.parametrize("in_rounds", [False, True])
def test_no_batch_meets_an_allocation_that_is_not_compiled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, in_rounds: bool
) -> None:
    monkeypatch.setattr(sglang_allocation, "attention_backends", lambda: ("sparrow", "sparrow"))
    monkeypatch.setattr(sglang_allocation, "_is_cpu", False)
    # SGLang's own, where another test has loaded our hooks for CPUs.
    for name in ("get_last_loc", "assign_req_to_token_pool_func"):
        own = inspect.unwrap(getattr(sglang_allocation, name))
        monkeypatch.setattr(sglang_allocation, name, own)
    allocator, table = allocator_of(999, kernels=True), torch.zeros(70, 50, dtype=torch.int32)
    allocation.compile_kernels(allocator, table, in_rounds)
    before = sorted(compiled)
    assert before
    for batch in (1, 2, 3, 16, 33, 64):
        rows = torch.zeros(batch, dtype=torch.int64)
        lengths = rows + 40
        allocator.alloc_extend(rows, rows, lengths, lengths, rows - 1, 40 * batch)
        if in_rounds:
            lengths, longer = lengths.int(), lengths.int() + 20
            last = sglang_allocation.get_last_loc(table, rows, lengths)
            new = allocator.alloc_extend(lengths, lengths, longer, longer, last, 20 * batch)
            sglang_allocation.assign_req_to_token_pool_func(
                rows, table, lengths, longer, new, batch
            )
        else:
            allocator.alloc_decode(lengths + 1, lengths + 1, table[rows, rows])
        allocator.clear()
    assert sorted(compiled) == before


@pytest.mark.parametrize("in_rounds", [False, True])
def test_what_is_allocated_to_compile_is_free_again(
    monkeypatch: pytest.MonkeyPatch, in_rounds: bool
) -> None:
    for name in ("get_last_loc", "assign_req_to_token_pool_func"):
        monkeypatch.setattr(sglang_allocation, name, lambda *_: None)
    allocator = allocator_of(4, kernels=False)
    allocator.alloc(16)
    allocation.compile_kernels(allocator, torch.zeros(70, 50, dtype=torch.int32), in_rounds)
    assert allocator.available_size() == 3 * 16
    assert allocator.free_pages.tolist() == [2, 3, 4]
