"""The dense policy against stock transformers models and plain autograd."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sparrow_sglang.rl.config import ModelConfig, OptimizerConfig
from sparrow_sglang.rl.policy import chunked_logprobs, optimizer
from sparrow_sglang.rl.policy.chunked_logprobs import token_logprobs
from sparrow_sglang.rl.policy.dense_policy import DensePolicy, pack

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
}


def model(kind: str = "qwen3") -> Any:
    torch.manual_seed(0)
    return MODELS[kind]()


def policy(kind: str = "qwen3", optimizer: OptimizerConfig | None = None, **config: Any) -> Any:
    return DensePolicy(
        model(kind), ModelConfig(**config), optimizer or OptimizerConfig(lr=1e-3), "cpu"
    )


def sequences(*lengths: tuple[int, int]) -> list[tuple[list[int], list[int]]]:
    draw = np.random.default_rng(sum(map(sum, lengths)))
    return [
        (draw.integers(0, VOCAB, p).tolist(), draw.integers(0, VOCAB, r).tolist())
        for p, r in lengths
    ]


BATCH = sequences((5, 9), (1, 1), (12, 3), (2, 30), (7, 7))


def stock_log_softmax(
    stock: Any, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[T, V] by the stock forward pass of one sequence and a log-softmax over all logits."""
    logits = stock(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=1)


def at(log_softmax: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return log_softmax.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


def masters(trained: DensePolicy) -> dict[str, torch.Tensor]:
    return {name: master for name, _, master in trained.named_parameters()}


class TestScore:
    @pytest.mark.parametrize(("kind", "temperature"), [("llama", 1.0), ("qwen3", 0.7)])
    def test_equals_a_stock_forward_of_each_sequence(self, kind: str, temperature: float) -> None:
        logprobs, entropies = policy(kind).score(BATCH, temperature)
        stock = model(kind).eval()
        for score, measured, (prompt, response) in zip(logprobs, entropies, BATCH, strict=True):
            assert score.dtype == torch.float32
            with torch.no_grad():
                full = stock_log_softmax(stock, prompt, response, temperature)
            torch.testing.assert_close(score, at(full, response), atol=3e-5, rtol=0)
            expected = [entropy(p) for p in full.double().exp().numpy()]
            np.testing.assert_allclose(measured, expected, atol=3e-5)


class TestGradient:
    @pytest.mark.parametrize(("kind", "checkpointing"), [("llama", True), ("qwen3", False)])
    def test_first_step_equals_stock_autograd_and_adamw(
        self, kind: str, checkpointing: bool
    ) -> None:
        settings = OptimizerConfig(lr=1e-3, grad_clip=0.5)
        dense = policy(kind, settings, gradient_checkpointing=checkpointing, micro_batch_tokens=25)
        scale = torch.linspace(-1, 2, sum(len(response) for _, response in BATCH))
        assert len(list(dense.micro_batches(BATCH))) > 1
        found = dense.loss_step(BATCH, lambda logprobs, where: (logprobs * scale[where]).sum())

        stock = model(kind)
        parts = [at(stock_log_softmax(stock, *one), one[1]) for one in BATCH]
        logprobs = torch.cat(parts)
        loss = (logprobs * scale).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
        decayed = [p for p in stock.parameters() if p.ndim > 1]
        others = [p for p in stock.parameters() if p.ndim == 1]
        torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3,
            betas=(0.9, 0.98),
            weight_decay=0.1,
        ).step()
        assert found == pytest.approx(norm.item(), rel=1e-4)
        expected = dict(stock.named_parameters())
        got = dict(dense.named_weights())
        assert got.keys() == expected.keys()
        for name, weight in got.items():
            # Adam's first step is lr times the gradient's sign where it is not near 0.
            close = (weight - expected[name]).abs() < 2e-5
            assert close.float().mean() > 0.995, name

    def test_bf16_weights_follow_an_fp32_copy(self) -> None:
        """A step far below bf16's resolution is kept, and shows once enough of them add up."""
        dense = policy(dtype="bfloat16", optimizer=OptimizerConfig(lr=2e-6, weight_decay=0))
        start = {name: weight.clone() for name, weight in dense.named_weights()}
        copies = masters(dense).values()
        assert {master.dtype for master in copies} == {torch.float32}
        before = [master.clone() for master in copies]
        dense.loss_step(BATCH, lambda logprobs, _: logprobs.sum())
        moved = [(a - b).abs().max() for a, b in zip(before, copies, strict=True)]
        assert all(1e-6 < step < 3e-6 for step in moved)
        unchanged = [torch.equal(start[name], weight) for name, weight in dense.named_weights()]
        assert sum(unchanged) > 0
        for master, (_, weight) in zip(copies, dense.named_weights(), strict=True):
            assert torch.equal(weight, master.bfloat16())

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_gradient_that_is_not_finite_is_skipped_with_a_warning(
        self, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        # The method is replaced because other tests may have changed handlers and levels.
        monkeypatch.setattr(optimizer.logger, "warning", lambda s, *a: said.append(s % a))
        dense, untouched = policy(dtype=dtype), policy(dtype=dtype)
        for _ in range(2):
            norm = dense.loss_step(BATCH, lambda logprobs, _: logprobs.sum() * float("nan"))
            assert np.isnan(norm)
        assert said == ["the policy's gradient norm is nan: no step was taken with it"] * 2
        assert dense.optimizer.skipped_in_a_row == 2
        # The next step is the same as without the skipped ones.
        for trained in (dense, untouched):
            assert np.isfinite(trained.loss_step(BATCH, lambda logprobs, _: logprobs.sum()))
        assert dense.optimizer.skipped_in_a_row == 0
        for name, master in masters(dense).items():
            assert torch.equal(master, masters(untouched)[name])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_step_that_raised_leaves_nothing_to_the_next_one(self, dtype: str) -> None:
        def fails(logprobs: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
            if 0 not in where:
                raise MemoryError
            return 9 * logprobs.sum()

        trained, untouched = (policy(dtype=dtype, micro_batch_tokens=1) for _ in range(2))
        with pytest.raises(MemoryError):
            trained.loss_step(BATCH[:2], fails)
        for dense in (trained, untouched):
            dense.loss_step(BATCH, lambda logprobs, _: logprobs.sum())
        for name, master in masters(trained).items():
            assert torch.equal(master, masters(untouched)[name])

    def test_bf16_gradients_of_many_micro_batches_add_up_as_in_float64(self) -> None:
        """A bf16 sum of 64 micro-batches is 0.8 % off, and 1.2 % in its worst tensor."""
        dense = policy(
            dtype="bfloat16",
            optimizer=OptimizerConfig(grad_clip=1e9, betas=(0.9, 0.98)),
            gradient_checkpointing=False,
            micro_batch_tokens=1,
        )
        many = sequences(*[(2, 1)] * 64)
        parameters = list(dense.model.parameters())
        expected = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for packed in dense.micro_batches(many):
            loss = token_logprobs(dense.hidden(packed), dense.head, packed.targets)[0].sum()
            for total, part in zip(expected, torch.autograd.grad(loss, parameters), strict=True):
                total += part.double()
        assert len(list(dense.micro_batches(many))) == 64
        dense.loss_step(many, lambda logprobs, _: logprobs.sum())
        # AdamW's first moment after one step from 0 is 0.1 times the gradient.
        moments = dense.state_dict()
        for (name, _), exact in zip(dense.named_weights(), expected, strict=True):
            gradient = moments[f"{name}.exp_avg"].double() * 10
            error = (gradient - exact).norm() / exact.norm()
            assert error < 1e-5, (name, float(error))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_offloaded_steps_are_those_that_the_device_takes(
        self, dtype: str, tmp_path: Path
    ) -> None:
        settings = {"dtype": dtype, "micro_batch_tokens": 20}
        kept = policy(optimizer=OptimizerConfig(lr=1e-3), **settings)
        offloaded = policy(optimizer=OptimizerConfig(lr=1e-3, offload=True), **settings)
        for step in range(3):
            for dense in (kept, offloaded):
                assert np.isfinite(dense.loss_step(BATCH[step:], lambda lp, _: -lp.sum()))
        weights = dict(offloaded.named_weights())
        for name, master in masters(offloaded).items():
            torch.testing.assert_close(master, masters(kept)[name], atol=1e-6, rtol=1e-5)
            # The offloaded copy is separate from the weights, which are rounded from it.
            assert master.device.type == "cpu" and master.dtype == torch.float32
            assert weights[name].data_ptr() != master.data_ptr()
            assert torch.equal(weights[name], master.to(weights[name].dtype))
        # A run may be resumed without offloading.
        torch.save(offloaded.state_dict(), tmp_path / "state.pt")
        kept.load_state_dict(torch.load(tmp_path / "state.pt"))
        for left, right in zip(kept.score(BATCH)[0], offloaded.score(BATCH)[0], strict=True):
            assert torch.equal(left, right)


class TestChunkedLogprobs:
    @pytest.mark.parametrize("chunk", [1, 3 * VOCAB, 10**9])
    @pytest.mark.parametrize("temperature", [0.01, 1.0, 1.6])
    def test_equals_autograd_through_all_logits(
        self, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunked_logprobs, "CHUNK_ELEMENTS", chunk)
        torch.manual_seed(1)
        hidden = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(VOCAB, 16, dtype=torch.float64, requires_grad=True)
        tokens = torch.randint(0, VOCAB, (10,))
        slope = torch.randn(10, dtype=torch.float64)
        full = torch.log_softmax(hidden @ weight.t() / temperature, 1)
        expected = at(full, tokens.tolist())
        correct = torch.autograd.grad(expected, [hidden, weight], slope, retain_graph=True)
        for wanted in (False, True):
            values, entropies = token_logprobs(hidden, weight, tokens, temperature, wanted)
            torch.testing.assert_close(values, expected, atol=1e-11, rtol=0)
            found = torch.autograd.grad(values, [hidden, weight], slope)
            for left, right in zip(found, correct, strict=True):
                torch.testing.assert_close(left, right, atol=1e-11, rtol=1e-10)
        assert not entropies.requires_grad
        probabilities = full.detach().exp().numpy()
        np.testing.assert_allclose(entropies, [entropy(p) for p in probabilities], atol=1e-12)


def test_packs_are_full_and_hold_everything_once() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 100, 200).tolist()
    packs = pack([*lengths, 500], 128)
    assert sorted(index for members in packs for index in members) == list(range(201))
    assert [200] in packs
    for members in packs:
        assert members == [200] or sum(lengths[i] for i in members) <= 128
    assert len(packs) - 1 <= 11 / 9 * -(-sum(lengths) // 128) + 1


def test_steps_drop_nothing_out() -> None:
    """The loss takes ratios to the log-probs of `score`, which a model with dropout would miss."""
    stock = model()
    stock.model.norm = torch.nn.Sequential(stock.model.norm, torch.nn.Dropout(0.5))
    dense = DensePolicy(stock, ModelConfig(), OptimizerConfig(lr=1e-3), "cpu")
    scored, seen = torch.cat(dense.score(BATCH)[0]), torch.zeros(50)

    def loss(logprobs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        seen[indices] = logprobs.detach()
        return -logprobs.mean()

    dense.loss_step(BATCH, loss)
    torch.testing.assert_close(seen, scored)
