"""What `make demo` runs: a long prompt, decoded sparsely and densely, then three training steps."""

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from sparrow_sglang.command_line import at_least
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, embedded_model
from sparrow_sglang.processes import exit_on_sigterm

TRAINING = Path(__file__).with_name("story_smollm2.toml")
SCHEDULE = f"{EMBEDDED_MODEL_NAME}-0.86"
# In plain torch, a prompt in one chunk is the fast path of most CPUs.
ENGINE = {"page_size": 16, "chunked_prefill_size": 8192, "max_total_tokens": 9216}

# About 5,000 tokens of English that comes with every Python.
READING = ("import", "execmodel", "try", "while", "for", "with")
READING_CHARS = 20_000
NO_DRAFTS = "drafts nothing, as its rounds are timed with CUDA graphs only"
QUESTION = (
    "Using the text above, explain the with statement to a beginner and give a small example."
)


@dataclass(frozen=True)
class Answer:
    """One streamed answer; `meta` is the engine's own report of it."""

    text: str
    first_token_s: float
    meta: dict[str, Any]


def long_prompt() -> str:
    text = "\n\n".join(topics[topic].strip() for topic in READING)
    text = re.sub(r"\n{3,}", "\n\n", text)[-READING_CHARS:]
    return f"Here is a part of the Python language reference.\n\n{text}\n\n{QUESTION}"


def prepare_environment() -> None:
    """Have SGLang skip all models but the embedded one, which halves its start-up; silence it."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in folder.glob("*.py")} - {"__init__", "llama"})
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)
    os.environ |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    warnings.simplefilter("ignore")


def ask(engine: Any, prompt: str, num_tokens: int, dense: bool) -> Answer:
    """Stream one answer of exactly `num_tokens`, and print it as it comes."""
    tokenizer = engine.tokenizer_manager.tokenizer
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    sampling = {
        "max_new_tokens": num_tokens,
        "temperature": 0,
        # A model of this size repeats itself without.
        "frequency_penalty": 0.4,
        "ignore_eos": True,
        "custom_params": {"sparrow": {"report": True, "dense": dense}},
    }
    start, first_token_s, written = time.perf_counter(), 0.0, ""
    for part in engine.generate(text, sampling, stream=True):
        first_token_s = first_token_s or time.perf_counter() - start
        print(part["text"][len(written) :], end="", flush=True)
        written = part["text"]
    print("\n")
    return Answer(written, first_token_s, part["meta_info"])


def report(sparse: Answer, dense: Answer) -> None:
    kv = sparse.meta["sparrow"]
    cached, read = kv["kv_tokens_cached_mean"], kv["kv_tokens_read_mean"]
    same = len(os.path.commonprefix([sparse.text, dense.text]))
    drafts = "drafts where rounds are measured to pay" if torch.cuda.is_available() else NO_DRAFTS
    print(
        f"prompt            {sparse.meta['prompt_tokens']} tokens, read densely in"
        f" {sparse.first_token_s:.1f} s"
        f"\ngenerated         {sparse.meta['completion_tokens']} tokens, twice; both answers begin"
        f" with the same {same} characters"
        f"\nKV tokens cached  {cached:.0f} (mean over the generated tokens)"
        f"\nKV tokens read    {read:.0f} by a sparse layer ({read / cached:.0%}; schedule"
        f" {kv['schedule']}, calibrated)"
        f"\nlossless          --speculative-algorithm SPARROW answers as dense decode does; here it"
        f"\n                  {drafts}"
        "\nspeed             README.md has figures of GPUs; on a CPU a small model gains nothing"
    )


def demonstrate(folder: str, num_tokens: int, training: bool) -> None:
    """Open a training run in `folder`; generate with its engine, then take its steps."""
    from sparrow_sglang.client.control import set_schedule
    from sparrow_sglang.rl.config import TrainConfig
    from sparrow_sglang.rl.runs.log import Clock
    from sparrow_sglang.rl.runs.run import open_run
    from sparrow_sglang.rl.runs.setup import check
    from sparrow_sglang.rl.trainer import roll_out, train_step

    overrides = [f"engine.server_args.{name}={value}" for name, value in ENGINE.items()]
    config = TrainConfig.load(TRAINING, [f"run_dir={folder}/run", *overrides])
    with open_run(config, check(config), resume=False) as run:
        engine = run.engine.engine
        set_schedule(engine, SCHEDULE)
        prompt = long_prompt()
        print(f"\nprompt: {len(prompt)} characters of Python's reference, then:")
        print(f"  {QUESTION}\n\nsparse answer:\n")
        sparse = ask(engine, prompt, num_tokens, dense=False)
        print("dense answer:\n")
        report(sparse, ask(engine, prompt, num_tokens, dense=True))
        if training:
            print("\ntraining: three steps of GRPO; use a given word in a story", flush=True)
            set_schedule(engine, config.engine.schedule)
            for step in range(config.steps):
                clock = Clock(run.log.progress)
                train_step(run, step, roll_out(run, step, clock), clock)
            print(
                "p05 acceptance: the tail of the acceptance rate; the Sparrow paper found training"
                "\n  stable above 0.86. A budget of 48 tokens is below that, so that such short"
                "\n  responses leave something out"
            )
        # No checkpoint is written.
        run.saved = run.state.step


NEXT = """
where to go next
  .venv/bin/sparrow serve                               a server, to play with
  .venv/bin/sparrow serve --model-path Qwen/Qwen3-4B    your model, on a GPU
  .venv/bin/sparrow doctor --model-path MODEL           does MODEL work, and if not, why?
  .venv/bin/sparrow train examples/story_smollm2.toml   these training steps, kept in runs/story
  README.md                                             use from Python, verl and slime"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Sparse against dense decode, and training.")
    parser.add_argument("--tokens", type=at_least(2), default=64, help="to generate (default 64)")
    parser.add_argument("--no-training", action="store_true", help="leave the training out")
    args = parser.parse_args(argv)
    exit_on_sigterm()
    prepare_environment()
    try:
        print("model: SmolLM2-135M-Instruct (half a minute at the first time)", flush=True)
        embedded_model()
        print("starting the engine, which takes half a minute or more", flush=True)
        with tempfile.TemporaryDirectory(prefix="sparrow-demo-") as folder:
            demonstrate(folder, args.tokens, not args.no_training)
    except ModelError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    print(NEXT)
    return 0


if __name__ == "__main__":  # the engine's processes import this file
    sys.exit(main())
