"""The embedded model gives the same answers on a GPU as on the CPU path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 48
# Start and length in characters, about four per token. The passages are few and short, as the CPU
# path would take minutes for more.
PASSAGES = ((0, 3200), (3000, 3600), (6500, 2800))
# Twice the log-prob noise of bf16 between two implementations of the same dense model.
ROUNDING = 0.25


def prompts() -> list[str]:
    """Texts to repeat: the next token can be copied from the prompt and is seldom in doubt."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    passages = [text[start : start + size] for start, size in PASSAGES]
    return [f"{passage}\n\nThe same text again:\n\n{passage[:300]}" for passage in passages]


def answer(model: str) -> list[list[tuple[int, float]]]:
    """Greedy tokens of every prompt, each with its lead over the runner-up in log-prob."""
    import sglang

    with sglang.Engine(
        model_path=model,
        attention_backend="sparrow",
        # In plain torch on a CPU, bf16 takes minutes.
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        chunked_prefill_size=1024,
        # Capturing prefill takes two minutes on a new machine and is not what is tested.
        disable_prefill_cuda_graph=True,
        max_total_tokens=32768,
        log_level="error",
    ) as engine:
        outputs = engine.generate(
            prompts(),
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=2,
        )
    return [
        [
            (token, best[0] - second[0])
            for (_, token, _), (best, second) in zip(
                output["meta_info"]["output_token_logprobs"],
                output["meta_info"]["output_top_logprobs"],
                strict=True,
            )
        ]
        for output in outputs
    ]


def test_greedy_text_equals_the_cpu_path_wherever_the_choice_is_clear():
    from sparrow_sglang.models import embedded_model

    model = str(embedded_model())
    run = subprocess.run(
        [sys.executable, __file__, model],
        # With more threads, they would only wait for each other.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "8"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    on_cpu = json.loads(run.stdout.splitlines()[-1])
    compared = 0
    for cpu, gpu in zip(on_cpu, answer(model), strict=True):
        for (token, lead), (other, _) in zip(cpu, gpu, strict=True):
            if lead < ROUNDING:
                break  # After a close call the two continuations may rightly differ.
            assert other == token
            compared += 1
    assert compared >= NEW_TOKENS // 2


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1])))
