"""The kernels of lossless decoding against the torch definition, with the same random numbers. On a
CPU they run in Triton's interpreter, see `test_interpreted.py`."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from frequencies import REQUESTS, drafts_of, p_value, sampled_from, sampling
from kernel_step import DEVICES, INTERPRETED, rounding_of_a_gpu  # noqa: F401
from scipy import stats

from sparrow_sglang.planning.rounds import DENSE, Plan
from sparrow_sglang.plugin.lossless import drafts as reference
from sparrow_sglang.plugin.lossless import fp8_kernels, kernels, lookup_kernels, lookups

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


@triton.jit
def _random_kernel(
    seed: tl.tensor, clocks: tl.tensor, coins: tl.tensor, BLOCK: tl.constexpr
) -> None:
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(clocks + offset, kernels.exponential(seed, offset))
    tl.store(coins + offset, tl.rand(seed, offset))


def random_numbers(seed: int, *shape: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Clocks and coins of the offsets from 0 on."""
    count = torch.Size(shape).numel()
    clocks, coins = torch.empty(2, -(-count // 4096) * 4096, device=device)
    _random_kernel[(len(clocks) // 4096,)](seed, clocks, coins, BLOCK=4096)
    return clocks[:count].view(shape), coins[:count].view(shape)


def drawn_logits(*shape: int, device: str) -> torch.Tensor:
    """With tokens that are impossible, and rows that are not adjacent in memory."""
    logits = (torch.randn(*shape[:-1], shape[-1] + 3) * 3).to(device)
    logits[torch.rand_like(logits) < 0.1] = -torch.inf
    logits[..., 0] = 0
    return logits[..., : shape[-1]]


ONE = Plan(1, 0, 2)


def kernel_drafts(info: Any, plan: Plan, vocabulary: int) -> Any:
    return drafts_of(kernels.KernelDrafts, info, plan, vocabulary)


def test_clocks_are_exponential(device: str) -> None:
    clocks, others = (
        random_numbers(seed, 1 << 16, device=device)[0].cpu() for seed in (1 << 62, (1 << 62) + 1)
    )
    assert (clocks > 0).all() and clocks.isfinite().all()
    assert abs(float(torch.corrcoef(torch.stack([clocks, others]))[0, 1])) < 0.02
    assert stats.kstest(clocks.numpy(), "expon").pvalue > 1e-4
    # The first of many clocks decides.
    first = clocks.view(-1, 64).amin(1) * 64
    assert stats.kstest(first.numpy(), "expon").pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 70, 4096, 4097, 10_000])
def test_candidates(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    # With ties.
    logits = drawn_logits(3, vocabulary, device=device).round(decimals=1).to(dtype)
    info = sampling({}, {"top_k": 1}, {"temperature": 0.8}, device=device)
    drafts = kernel_drafts(info, Plan(2, 0, 3), vocabulary)
    tokens = drafts.sample(logits)
    best, ids = reference.candidates(logits.cpu())
    assert torch.equal(drafts.ids[:, 0].cpu(), ids.int())
    for row, temperature in ((0, 1), (2, 0.8)):
        q = (best[row].float() / temperature).softmax(0)
        torch.testing.assert_close(drafts.q[row, 0].cpu(), q, rtol=1e-5, atol=1e-7)
    # The first of the best tokens, as in the dense step.
    assert tokens[1] == logits[1].cpu().argmax()
    assert (drafts.q[1, 0].cpu() == (ids[1] == tokens[1].cpu())).all()


SAMPLED = ({}, {"temperature": 0.7}, {"top_k": 1}, {"temperature": 1.3}, {"temperature": 0.1})


@pytest.mark.parametrize("plan", [(4, 0, 6), (2, 3, 6), (0, 3, 4)])
@pytest.mark.parametrize(
    ("vocabulary", "groups", "chunk", "requests"),
    [
        (7, 64, 64, SAMPLED * 4),
        (64, 64, 64, ({"top_k": 1},) * 3),
        (300, 64, 128, SAMPLED * 4),
        (300, 64, 128, REQUESTS * 4),
        (20_000, 4096, 8192, SAMPLED),
    ],
)
def test_a_round(
    device: str,
    vocabulary: int,
    groups: int,
    chunk: int,
    requests: Any,
    plan: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sparse drafts, tokens looked up, and rows after them."""
    monkeypatch.setattr(reference, "MAX_GROUPS", groups)
    monkeypatch.setattr(kernels, "_CHUNK", chunk)
    batch, (k, lookups, rows) = len(requests), plan
    count = k + lookups
    info = sampling(*requests, device=device)
    drafts = kernel_drafts(info, Plan(*plan), vocabulary)
    sparse = drawn_logits(batch, count, vocabulary, device=device)
    width = triton.next_power_of_2(drafts.q.shape[2])
    clocks = random_numbers(drafts.seed, max(k, 1), batch, width, device=device)[0]
    for number in range(k):
        tokens = drafts.sample(sparse[:, number])
        best, ids = reference.candidates(sparse[:, number])
        q = reference.distribution(best, info)
        torch.testing.assert_close(drafts.q[:, number], q, rtol=1e-5, atol=1e-7)
        race = drafts.q[:, number] / clocks[number, :, : q.shape[1]]
        assert torch.equal(tokens, ids.gather(1, race.argmax(-1, keepdim=True))[:, 0])

    dense = torch.randn(batch, rows, vocabulary, device=device)
    dense[:, :count] += sparse
    # p = q as far as candidates go.
    dense[:, 1] = sparse[:, 1]
    # The best of several tokens is the first.
    dense[:, 2] = dense[:, 2].round()
    # Half of what is looked up is likely.
    best = dense[:, k:count].argmax(-1).T
    drafts.looked_up[:] = torch.where(torch.rand(best.shape, device=device) < 0.5, best, 0)
    outcome = drafts.verify(dense)

    coins = random_numbers(drafts.seed + 1, batch, count + 1, device=device)[1][:, :count]
    clocks = random_numbers(drafts.seed + 2, batch, vocabulary, device=device)[0]
    monkeypatch.setattr(torch, "rand_like", lambda _: coins)
    monkeypatch.setattr(reference, "sample", lambda probs: (probs / clocks).argmax(-1))
    expected = reference.accept(
        drafts.tokens[1 : count + 1].T,
        drafts.ids.long(),
        drafts.q,
        reference.distribution(dense[:, : count + 1], info),
    )
    assert torch.equal(outcome.accepted, expected.accepted)
    assert torch.equal(outcome.bonus, expected.bonus)


def test_a_rejection_without_residual_draws_from_the_dense_distribution(device: str) -> None:
    """p = q up to rounding: nothing of p is left, and no token of probability 0 may appear."""
    batch = 20
    logits = torch.tensor([0.0, 0.0, -torch.inf], device=device).expand(batch, 2, -1)
    drafts = kernel_drafts(sampling(*[{}] * batch, device=device), ONE, 3)
    drafts.sample(logits[:, 0])
    drafts.tokens[1], drafts.q[:, 0, 2] = 2, 1e-9
    outcome = drafts.verify(logits)
    assert not outcome.accepted.any()
    assert set(outcome.bonus.tolist()) == {0, 1}


def test_a_round_without_drafts_samples_a_token(device: str) -> None:
    drafts = kernel_drafts(sampling({}, {}, device=device), DENSE, 3)
    best = torch.tensor([[2, 0, 1], [1, 0, 0]], device=device)
    logits = torch.nn.functional.one_hot(best, 3).log()
    outcome = drafts.verify(logits)
    assert outcome.accepted.tolist() == [0, 0]
    assert outcome.bonus.tolist() == [2, 1]


def test_logits_of_nan_give_tokens_of_the_vocabulary(device: str) -> None:
    """A token outside of it would end the server with an illegal access."""
    drafts = kernel_drafts(sampling({}, {"top_k": 1}, device=device), ONE, 9)
    logits = torch.full((2, 2, 9), torch.nan, device=device)
    drafts.sample(logits[:, 0])
    outcome = drafts.verify(logits)
    for tokens in (drafts.tokens, outcome.bonus, drafts.ids):
        assert (tokens >= 0).all() and (tokens < 9).all()


def test_tokens_looked_up_follow_the_dense_distribution(device: str) -> None:
    """Behind a sparse draft of its own distribution, and alone; likely ones and unlikely ones."""
    count = 150 if INTERPRETED else 50_000
    dense = torch.randn(6, device=device)
    exact = dict(enumerate(sampled_from(dense.tolist(), 0.8)))
    for token in (int(dense.argmax()), int(dense.argmin())):
        for plan in (Plan(0, 1, 2), Plan(1, 1, 3)):
            drafts = kernel_drafts(
                sampling(*[{"temperature": 0.8}] * count, device=device), plan, 6
            )
            if plan.drafts:
                drafts.sample(dense.expand(count, -1))
            drafts.looked_up[:] = token
            outcome = drafts.verify(dense.expand(count, plan.rows, -1))
            # A sparse draft from the dense distribution is always accepted.
            assert (outcome.accepted >= plan.drafts).all()
            tokens = drafts.end(outcome, None).tokens[:, plan.drafts]
            assert p_value(tokens.tolist(), exact) > 1e-4
            share = float((outcome.accepted > plan.drafts).float().mean())
            assert share == pytest.approx(exact[token], abs=0.12 if INTERPRETED else 0.01)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("plan", [DENSE, Plan(0, 3, 5), Plan(2, 2, 5)])
def test_the_begin_and_the_end_of_a_round(device: str, plan: Plan, batch: int) -> None:
    """What it reads, and what it leaves in the histories and for the next one."""
    info = sampling(*SAMPLED[:batch], device=device)
    rows, committed = torch.tensor([4, 0, 2])[:batch], torch.tensor([7, 0, 12])[:batch]
    table, latest = torch.arange(100, dtype=torch.int32).view(5, 20), torch.tensor([5, 8, 9])
    others = torch.tensor([[3, -1], [0, 3], [1, -1]], dtype=torch.int32)
    results = []
    for drafting, looking, where in (
        (kernels.KernelDrafts, lookup_kernels.KernelHistories, device),
        (reference.Drafts, lookups.Histories, "cpu"),
    ):
        passes: Any = SimpleNamespace(vocab_size=9, context_len=14, token_table=table.to(where))
        # A column, as in the table of a batch.
        of_batch = others.to(where)[:batch]
        sources = lookups.Sources(of_batch[:, 0], of_batch, of_batch[:, 0], 20)
        histories = looking(4, 20, where)
        one = rows.to(where), committed.to(where), None, latest[:batch].to(where), info, sources
        drafts = drafting(reference.Requests(*one), plan, passes)
        new = drafts.tokens, drafts.positions, drafts.slots
        begun = [part.clone() for part in new]
        # Steps read their row as it is.
        steps = plan.drafts or plan.rows == 1
        assert all(row.is_contiguous() for part in new for row in part[:steps])
        # As sampled and looked up.
        drafts.tokens[1:] = torch.arange(20, 20 + batch * (plan.rows - 1)).view(-1, batch)
        accepted = torch.tensor([4, 0, 1])[:batch].clamp(max=plan.drafts + plan.lookups)
        bonus = torch.tensor([30, 31, 32])[:batch]
        outcome = reference.Outcome(accepted.to(where), bonus.to(where))
        written = drafts.end(outcome, histories)
        assert torch.equal(drafts.end(outcome, None).tokens, written.tokens)
        # Behind a round before it.
        counts = torch.tensor([plan.rows, 1, 2], dtype=torch.int32)[:batch].clamp(max=plan.rows)
        tokens = torch.arange(40, 40 + batch * plan.rows).view(batch, -1)
        before = reference.Written(tokens.to(where), counts.to(where), written.lengths)
        written = *written, *drafts.end(outcome, histories, before)
        text = histories.tokens, histories.lengths
        results.append([part.cpu() for part in (*begun, *drafts.by_request(), *written, *text)])
    for kernel, torch_result in zip(*results, strict=True):
        assert kernel.dtype == torch_result.dtype and torch.equal(kernel, torch_result)


@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("alphabet", [2, 50])
def test_lookups(device: str, alphabet: int, further: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, sources of different lengths, requests that search none but their own."""
    monkeypatch.setattr(lookup_kernels, "_BLOCK", 16)
    kernel = lookup_kernels.KernelHistories(4, 90, device)
    kernel.tokens.random_(alphabet)
    kernel.lengths[:5] = torch.tensor([70, 33, 5, 1, 61])
    table = torch.tensor(
        [[0, 9, 0, 1, 4], [2, 4, 2, -1, -1], [3, 1, 3, 0, 1], [4, 60, 4, 0, 2]],
        dtype=torch.int32,
        device=device,
    )
    sources = lookups.Sources(table[:, 0], table[:, 2:], table[:, 1], 70)
    torch_histories = lookups.Histories(4, 90, "cpu")
    on_cpu = [part.cpu() if isinstance(part, torch.Tensor) else part for part in sources]
    for count in (1, 3, 8):
        torch_histories.tokens, torch_histories.lengths = kernel.tokens.cpu(), kernel.lengths.cpu()
        expected, out = (torch.full((count, 4), -1, device=where) for where in ("cpu", device))
        kernel.look_up(sources, further, out)
        torch_histories.look_up(lookups.Sources(*on_cpu), further, expected)
        assert torch.equal(out.cpu(), expected)
        # As after a round, and as behind sparse drafts.
        written = kernel.lengths[table[:, 0].long()].long() - 1
        accepted = torch.tensor([0, 1, 0, 1], device=device) if count > 1 else None
        for histories, where in ((kernel, device), (torch_histories, "cpu")):
            arguments = table[:, 0], written, out.T, accepted
            histories.record(*(a if a is None else a.to(where) for a in arguments))
        assert torch.equal(kernel.tokens.cpu(), torch_histories.tokens)
        assert torch.equal(kernel.lengths.cpu(), torch_histories.lengths)


def test_first_tokens_follow_the_dense_distribution(device: str) -> None:
    count = 150 if INTERPRETED else 50_000
    dense = torch.randn(6, device=device)
    sparse = 2 * dense.flip(0)
    drafts = kernel_drafts(sampling(*[{"temperature": 0.8}] * count, device=device), ONE, 6)
    tokens = drafts.sample(sparse.expand(count, -1))
    outcome = drafts.verify(dense.expand(count, 2, -1))
    exact = dict(enumerate(sampled_from(dense.tolist(), 0.8)))
    first = drafts.end(outcome, None).tokens[:, 0]
    assert p_value(first.tolist(), exact) > 1e-4
    # The control: drafts do not follow it.
    assert p_value(tokens.tolist(), exact) < 1e-9


def require_quantized(quantized: fp8_kernels.Quantized, out: torch.Tensor) -> None:
    """A scale is a 448th of the largest number of a row, and e4m3 rounds to 3 bits or steps of
    2^-9."""
    rows = out.double().reshape(-1, out.shape[-1]).cpu()
    values, scales = (part.double().cpu() for part in quantized)
    torch.testing.assert_close(scales, rows.abs().amax(1, keepdim=True) / 448, rtol=1e-6, atol=0)
    allowed = torch.maximum(rows.abs() / 16, scales / 2**10) * 1.001
    right = (values * scales - rows).abs() <= allowed
    # The interpreter loses the carry where a number is rounded up to a power of two.
    assert right.double().mean() >= (0.95 if INTERPRETED else 1)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("channels", [64, 176, 1536])
def test_a_norm_is_quantized(device: str, rows: int, channels: int) -> None:
    dtype = torch.bfloat16
    x, residual = (torch.randn(2, rows, channels) * 3).to(device, dtype)
    # A row of zeros has a scale of 0.
    x[0], residual[0] = 0, 0
    weight, total = torch.randn(channels).to(device, dtype), x.double() + residual.double()
    root = (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    quantized = fp8_kernels.add_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual.double(), total, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(x.double(), total / root * weight, rtol=2**-7, atol=1e-6)
    require_quantized(quantized, x)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("channels", [64, 176, 1536])
def test_an_activation_is_quantized(device: str, rows: int, channels: int) -> None:
    x = (torch.randn(rows, 2 * channels) * 3).to(device, torch.bfloat16)
    gate, up = x.double().chunk(2, -1)
    product, quantized = fp8_kernels.silu_and_multiply(x)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(product.double(), expected, rtol=2**-7, atol=1e-6)
    require_quantized(quantized, product)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    [
        (64, 512, torch.bfloat16),
        (80, 176, torch.bfloat16),
        (192, 2064, torch.bfloat16),
        (128, 2048, torch.float16),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_are_multiplied(
    device: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight = (torch.randn(n, inputs).to(device, dtype) for n in (rows, outputs))
    quantized, copy = fp8_kernels.quantize(x), fp8_kernels.quantize(weight)
    require_quantized(quantized, x)
    bias = torch.randn(outputs).to(device, dtype) if with_bias else None
    arrivals = fp8_kernels.arrival_counters(outputs, x.device)
    exact_x, exact_weight = (part.values.double() * part.scales for part in (quantized, copy))
    expected = exact_x @ exact_weight.T + (bias if bias is not None else 0)
    # Twice, as a graph is replayed.
    for _ in range(2):
        out = fp8_kernels.multiply(quantized, copy, arrivals, bias, x.dtype)
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=0.05)
    assert not arrivals.any()


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA graph")
def test_kernels_that_start_early_wait_for_what_they_read(device: str) -> None:
    """A replayed graph, in which kernels overlap, equals one kernel after another."""
    batches = torch.randn(200, 4, 1024).to(device, torch.bfloat16)
    first, second = (torch.randn(n, 1024).to(device, torch.bfloat16) for n in (2048, 1024))
    copies = [fp8_kernels.quantize(weight) for weight in (first, second)]
    counters = [fp8_kernels.arrival_counters(len(copy.values), batches.device) for copy in copies]
    x, residual = batches[0].clone(), torch.ones_like(batches[0])

    def layer(wait: Any) -> torch.Tensor:
        total = wait(residual.clone())
        quantized = wait(fp8_kernels.quantize(x))
        gates = wait(fp8_kernels.multiply(quantized, copies[0], counters[0], None, x.dtype))
        _, quantized = wait(fp8_kernels.silu_and_multiply(gates))
        out = wait(fp8_kernels.multiply(quantized, copies[1], counters[1], None, x.dtype))
        wait(fp8_kernels.add_norm(out, total, first[0], 1e-6))
        return out

    def when_done(result: Any) -> Any:
        torch.cuda.synchronize()
        return result

    layer(when_done)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapping = layer(lambda result: result)
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        assert torch.equal(overlapping, layer(when_done))
