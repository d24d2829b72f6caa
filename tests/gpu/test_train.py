"""The trainer's sparse distribution on a GPU: its compiled kernel, and the server's samples."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from training import generate

from sparrow_sglang.calibration.prompts import builtin_prompts, tokenizer_of
from sparrow_sglang.models import embedded_model
from sparrow_sglang.rl.config import DistillConfig, ModelConfig, OptimizerConfig
from sparrow_sglang.rl.distill import ADAPTER, SparseAdapter, lora_arguments
from sparrow_sglang.rl.engines.local_engine import LocalEngine
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.selected_attention import attend_by_blocks, block_mask
from sparrow_sglang.rl.policy.sparse_policy import SparseRule, attend_by_rows, padding
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Prompt
from sparrow_sglang.schedules.schedule import BudgetSchedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCHEDULE = BudgetSchedule(
    name="grows", page_size=16, bin_tokens=512, budget_tokens=(128, 192, 256, 320)
)
NEW_TOKENS = 192
Late = tuple[tuple[int, int], ...]
SETTINGS = DistillConfig(enabled=True, delivery="lora", lr=1e-3)


# -- the kernel


def attend(kernel, tensors, late, dtype):
    """Output and gradients at the late positions (start, end) of sequences, in `dtype`. `kernel`
    computes the output from a selection of pages; padding rows of the output are 0."""
    query, key, value, direction = (x.to(dtype, copy=True) for x in tensors)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    positions = padding(late, query.device).source
    # Pages are selected from the original tensors, so that all dtypes read the same pages.
    rule = SparseRule(SCHEDULE, tuple(start for start, _ in late))
    chosen = rule.selected_pages(*tensors[:2], late)
    out = kernel(query, key, value, chosen, positions, SCHEDULE.page_size, None)
    used = torch.arange(positions.shape[1], device=out.device)
    used = used < torch.tensor([[end - start] for start, end in late], device=out.device)
    out = out * used[:, None, :, None]
    return [out, *torch.autograd.grad((out * direction).sum(), inputs)]


def by_blocks(query, key, value, selection, positions, page_size, scaling):
    group = query.shape[1] // key.shape[1]
    mask = block_mask(selection, positions, key.shape[2], page_size, group)
    return attend_by_blocks(query, key, value, mask, scaling)


def random_heads(heads: tuple[int, int, int], late: Late) -> list[torch.Tensor]:
    """Queries of the late positions, keys, values, and a direction by which gradients are taken."""
    query_heads, kv_heads, dim = heads
    rows, length = max(end - start for start, end in late), max(end for _, end in late)
    torch.manual_seed(length)
    shapes = [(query_heads, rows), (kv_heads, length), (kv_heads, length), (query_heads, rows)]
    return [torch.randn(len(late), *shape, dim, device="cuda") for shape in shapes]


@pytest.fixture
def compile_anew():
    """Reset torch.compile: the shapes of several models would add up to its recompile limit."""
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((16, 8, 128), torch.bfloat16),
        ((16, 8, 128), torch.float32),
        ((9, 3, 64), torch.bfloat16),
        ((9, 3, 64), torch.float32),
    ],
)
def test_the_compiled_kernel_is_plain_attention_over_the_pages(compile_anew, heads, dtype):
    for late in (
        ((300, 1100), (20, 700), (900, 901)),
        ((511, 2049),),
        ((128, 1024), (128, 1024)),
    ):
        tensors = random_heads(heads, late)
        exact = attend(attend_by_rows, tensors, late, torch.float64)
        plain = attend(attend_by_rows, tensors, late, dtype)
        found = attend(by_blocks, tensors, late, dtype)
        for expected, *others in zip(exact, plain, found, strict=True):
            rows, blocks = (float((x - expected).norm() / expected.norm()) for x in others)
            print(f"{heads} {dtype} {late}: by rows {rows:.1e}, by blocks {blocks:.1e}")
            # A mask that is off by a token, or a page that is not read, costs more than 1e-2.
            assert blocks < max(2 * rows, 1e-5)


def test_gradients_of_few_rows_are_finite_where_all_scores_are_low():
    """Where cuDNN gives NaN: a mask, a width of 64 beyond a multiple of 128, tiny normalisers."""
    heads, late = (9, 3, 64), ((640, 704),)
    tensors = [0.1 * tensor for tensor in random_heads(heads, late)]
    query, key, *_ = tensors
    query[..., 0], key[..., 0] = 1.0, -120 * 64**0.5
    exact = attend(attend_by_rows, tensors, late, torch.float64)
    found = attend(attend_by_rows, tensors, late, torch.bfloat16)
    assert all(tensor.isfinite().all() for tensor in found)
    for expected, other in zip(exact, found, strict=True):
        # The queries' gradient is a difference of large numbers, which bf16 cannot resolve.
        if expected is not exact[1]:
            assert (other - expected).norm() < 0.02 * expected.norm()


# -- the server


@pytest.fixture(scope="module")
def model() -> str:
    return str(embedded_model())


@pytest.fixture(scope="module")
def policy(model) -> DensePolicy:
    return DensePolicy.load(ModelConfig(path=model), OptimizerConfig(), "cuda")


@pytest.fixture(scope="module")
def prompts(model) -> list[Prompt]:
    """Prompts of real text, whose responses begin and end on both sides of page and bin edges."""
    builtin = builtin_prompts(tokenizer_of(model), 4096, 512, NEW_TOKENS, 1, "check")
    ids = [prompt.input_ids for prompt in builtin if len(prompt.input_ids) > 700]
    lengths = [127, 128, 129, 400, 510, 511, 512, 513, 700, *map(len, ids)]
    chosen = [ids[i % len(ids)][:length] for i, length in enumerate(lengths)]
    return [Prompt(f"{i}", "test", tuple(ids)) for i, ids in enumerate(chosen)]


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("schedule") / "grows.json"
    SCHEDULE.save(path)
    arguments = {
        "dtype": "bfloat16",
        "page_size": 16,
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.4,
        "enable_memory_saver": False,
        # Capturing prefill takes two minutes on a new machine and is not what is tested.
        "disable_prefill_cuda_graph": True,
        "random_seed": 0,
    }
    engine = LocalEngine(model, str(path), **arguments | lora_arguments(SETTINGS))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapter(policy, engine, prompts) -> SparseAdapter:
    """An adapter that is trained enough to change the distribution."""
    sequences, _ = rollouts(engine, prompts, Sampling(NEW_TOKENS))
    adapter = SparseAdapter(policy, SETTINGS)
    adapter.scale = 1.0
    for _ in range(8):
        adapter.step(sequences[::3], SCHEDULE)
    return adapter


def rollouts(engine, prompts, sampling):
    """Sequences and the log-probs that the server recorded, [N]."""
    groups = generate(engine, prompts, 2, sampling)
    responses = [rollout for group in groups for rollout in group.rollouts]
    recorded = np.concatenate([rollout.logprobs for rollout in responses])
    return [(rollout.prompt_ids, rollout.response_ids) for rollout in responses], recorded


@pytest.mark.parametrize("delivery", ["none", "lora", "merged"])
def test_the_server_samples_from_the_trainers_sparse_distribution(
    policy, engine, adapter, prompts, delivery
):
    weights = adapter.merged_weights() if delivery == "merged" else policy.named_weights()
    engine.update_weights(weights, delivery)
    name = ADAPTER if delivery == "lora" else None
    if name:
        engine.set_adapter(name, adapter.tensors(), adapter.lora_config())
    expected_adapter, other_adapter = (
        (nullcontext, adapter.enabled) if delivery == "none" else (adapter.enabled, nullcontext)
    )

    def distance(what, run, adapter_state, schedule, temperature=1.0):
        """Mean and 99th percentile of |recorded - trainer's|."""
        sequences, recorded = run
        with adapter_state():
            scores = torch.cat(policy.score(sequences, temperature, schedule)[0]).numpy()
        errors = np.abs(recorded - scores)
        mean, high = float(errors.mean()), float(np.percentile(errors, 99))
        print(f"{delivery}: {what:24} mean {mean:.4f}, 99th percentile {high:.4f}")
        return mean, high

    dense_run = rollouts(engine, prompts, Sampling(NEW_TOKENS, adapter=name, dense=True))
    sparse_run = rollouts(engine, prompts, Sampling(NEW_TOKENS, adapter=name))
    # The yardstick is the distance of the same engine and trainer when both are dense.
    noise, noise_high = distance("dense run, dense", dense_run, expected_adapter, None)
    mean, high = distance("sparse run, its own", sparse_run, expected_adapter, SCHEDULE)
    assert mean < 1.5 * noise and high < 2 * noise_high
    # The samples are not as near to any other distribution.
    assert (
        distance("sparse run, other adapter", sparse_run, other_adapter, SCHEDULE)[0] > 1.5 * mean
    )
    assert distance("sparse run, dense", sparse_run, expected_adapter, None)[0] > 1.5 * mean
    if delivery == "none":
        tempered = rollouts(engine, prompts, Sampling(NEW_TOKENS, 0.8))
        mean, high = distance("sparse run at 0.8", tempered, expected_adapter, SCHEDULE, 0.8)
        # Differences of logits are divided by the temperature.
        assert mean < 2 * noise and high < 3 * noise_high
        assert distance("scored at 1", tempered, expected_adapter, SCHEDULE)[0] > 1.5 * mean
