"""What `make demo` runs: a long prompt, decoded sparsely and densely, then three training steps.

In: nothing but the installed package. Out, on the terminal: both answers, how much of the KV cache
was read for the sparse one, decode speed both ways; reward, tail and time of each training step. No
accelerator and no network are needed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from sparrow_sglang import noise
from sparrow_sglang.command_line import at_least, exit_on_sigterm
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, embedded_model

# In plain torch, 32-bit arithmetic is the fast path of most CPUs, and so is a prompt in one chunk.
ENGINE = {
    "attention_backend": "sparrow",
    "sparrow_schedule": f"{EMBEDDED_MODEL_NAME}-0.86",
    "dtype": "float32",
    "page_size": 16,
    "chunked_prefill_size": 8192,
    "max_total_tokens": 9216,
    "log_level": "error",
}
TRAINING = Path(__file__).with_name("story_smollm2.toml")

# About 5,000 tokens of English that comes with every Python.
READING = ("import", "execmodel", "try", "while", "for", "with")
READING_CHARS = 20_000
QUESTION = (
    "Using the text above, explain the with statement to a beginner and give a small example."
)


@dataclass(frozen=True)
class Answer:
    """One streamed answer; times in seconds. `meta` is the engine's own report of it."""

    first_token_s: float
    decode_s: float
    meta: dict[str, Any]

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed between the first token and the last, so without the prompt."""
        return float(self.meta["completion_tokens"] - 1) / self.decode_s


def long_prompt() -> str:
    """A part of Python's own reference, and a question about it."""
    text = "\n\n".join(topics[topic].strip() for topic in READING)
    text = re.sub(r"\n{3,}", "\n\n", text)[-READING_CHARS:]
    return f"Here is a part of the Python language reference.\n\n{text}\n\n{QUESTION}"


def prepare_environment() -> None:
    """Have SGLang skip all models but the embedded one, which halves its start-up, and warnings and
    progress bars of its processes."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in folder.glob("*.py")} - {"__init__", "llama"})
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    os.environ |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


def ask(engine: Any, prompt: str, num_tokens: int, dense: bool) -> Answer:
    """Stream one answer of exactly `num_tokens`, and print it as it comes."""
    tokenizer = engine.tokenizer_manager.tokenizer
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    sampling = {
        "max_new_tokens": num_tokens,
        # The likeliest tokens, so that the answers can be compared; a model of this size repeats
        # itself without the penalty.
        "temperature": 0,
        "frequency_penalty": 0.4,
        "ignore_eos": True,
        "custom_params": {"sparrow": {"report": True, "dense": dense}},
    }
    asked, arrivals, printed = time.perf_counter(), [], 0
    for part in engine.generate(text, sampling, stream=True):
        arrivals.append(time.perf_counter())
        print(part["text"][printed:], end="", flush=True)
        printed = len(part["text"])
    print("\n")
    return Answer(arrivals[0] - asked, arrivals[-1] - arrivals[0], part["meta_info"])


def report(sparse: Answer, dense: Answer) -> None:
    """Print what was read and how fast it went."""
    kv = sparse.meta["sparrow"]
    cached, read = kv["kv_tokens_cached_mean"], kv["kv_tokens_read_mean"]
    gain = sparse.decode_tokens_per_s / dense.decode_tokens_per_s
    print(
        f"prompt            {sparse.meta['prompt_tokens']} tokens, read densely in"
        f" {sparse.first_token_s:.1f} s"
        f"\ngenerated         {sparse.meta['completion_tokens']} tokens"
        f"\nKV tokens cached  {cached:.0f} (mean over the generated tokens)"
        f"\nKV tokens read    {read:.0f} by a sparse layer ({read / cached:.0%})"
        f"\nsparse decode     {sparse.decode_tokens_per_s:.1f} tokens/s"
        f" (schedule {kv['schedule']}, calibrated)"
        f"\ndense decode      {dense.decode_tokens_per_s:.1f} tokens/s:"
        f" sparse is {gain:.2f}x as fast"
        "\n                  A small model on a CPU gains little; README.md has figures of GPUs"
    )


def generate(num_tokens: int) -> None:
    """Answer the prompt sparsely and densely, and compare."""
    prepare_environment()
    print("starting the engine, which takes about half a minute", flush=True)
    noise.leave_out()
    import sglang

    engine = sglang.Engine(model_path=str(embedded_model()), **ENGINE)
    try:
        prompt = long_prompt()
        print(f"\nprompt: {len(prompt)} characters of Python's reference, then:")
        print(f"  {QUESTION}\n\nsparse answer:\n")
        sparse = ask(engine, prompt, num_tokens, dense=False)
        print("dense answer:\n")
        dense = ask(engine, prompt, num_tokens, dense=True)
    finally:
        engine.shutdown()
    report(sparse, dense)


def train() -> int:
    """Print the lines of three steps of `sparrow train`, and return its exit code."""
    print(
        "\ntraining: three small steps of GRPO on the same model, from sparse rollouts; the task is"
        "\n  to use a given word in a story. The first line comes after about a minute",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="sparrow-demo-") as folder:
        settings, log = Path(folder, TRAINING.name), Path(folder, "train.log")
        ours = f'run_dir = "{folder}/run"'
        settings.write_text(re.sub(r"(?m)^run_dir = .*$", ours, TRAINING.read_text("utf-8")))
        command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(settings)]
        with log.open("w") as errors:
            trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in trainer.stdout or ():
                if line.startswith("step "):
                    print(line, end="", flush=True)
        finally:
            trainer.terminate()
            code = trainer.wait()
        if code != 0:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
    print(
        "p05 acceptance: the tail of the acceptance rate; 0.86 is considered safe. A budget of 48"
        "\n  tokens is far too small, and chosen so that responses this short leave something out"
    )
    return code


NEXT = """
where to go next
  .venv/bin/sparrow serve                               a server, to play with
  .venv/bin/sparrow serve --model-path Qwen/Qwen3-4B    your model, on a GPU
  .venv/bin/sparrow doctor --model-path MODEL           does MODEL work, and if not, why?
  .venv/bin/sparrow train examples/story_smollm2.toml   these training steps, kept in runs/story
  README.md                                             use from Python, verl and slime"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Sparse against dense decode, and sparse training."
    )
    parser.add_argument(
        "--tokens", type=at_least(2), default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument("--no-training", action="store_true", help="leave the training out")
    args = parser.parse_args(argv)
    exit_on_sigterm()
    try:
        print(
            "model: preparing SmolLM2-135M-Instruct (half a minute at the first time)", flush=True
        )
        embedded_model()
        generate(args.tokens)
        failed = 0 if args.no_training else train()
    except ModelError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    print(NEXT)
    return int(failed != 0)


if __name__ == "__main__":  # the engine's processes import this file
    sys.exit(main())
