"""What `make demo` runs: a long prompt, decoded sparsely and densely, then three training steps.

In: nothing but the installed package. Out, on the terminal: the generated text, how much of the KV
cache was read for it, decode speed both ways; reward, tail and time of each training step. No
accelerator and no network are needed.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import openai

from sparrow_sglang.benchmarks.options import exit_on_sigterm
from sparrow_sglang.benchmarks.processes import (
    ProcessFailed,
    Server,
    free_port,
    log_end,
    logged_process,
    stop,
    until_healthy,
)
from sparrow_sglang.command_line import at_least
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, embedded_model

START_LIMIT_S = 240
SPARROW = [sys.executable, "-m", "sparrow_sglang.commands.cli"]
# In plain torch, 32-bit arithmetic is the fast path of most CPUs, and so is a prompt in one chunk.
# The long prompt warms the server up well enough. The server that waits for its turn must not spin.
SERVER_FLAGS = (
    "--dtype float32 --page-size 16 --chunked-prefill-size 8192 --max-total-tokens 9216"
    " --log-level warning --skip-server-warmup --sleep-on-idle"
).split()
SCHEDULE = f"{EMBEDDED_MODEL_NAME}-0.86"
SPARSE_FLAGS = ["--attention-backend", "sparrow", "--sparrow-schedule", SCHEDULE]
DENSE_FLAGS = ["--attention-backend", "torch_native"]

TRAINING = Path(__file__).with_name("story_smollm2.toml")

# About 5,000 tokens of English that comes with every Python.
READING = ("import", "execmodel", "try", "while", "for", "with")
READING_CHARS = 20_000
QUESTION = (
    "Using the text above, explain the with statement to a beginner and give a small example."
)


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Answer:
    """One streamed completion; times in seconds, lengths in tokens.

    `kv` is the server's own report of what a sparse layer found cached and read; None if dense.
    """

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    decode_s: float
    kv: dict[str, Any] | None

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed between the first token and the last, so without the prompt."""
        return (self.completion_tokens - 1) / self.decode_s


def long_prompt() -> str:
    """A part of Python's own reference, and a question about it."""
    text = "\n\n".join(topics[topic].strip() for topic in READING)
    text = re.sub(r"\n{3,}", "\n\n", text)[-READING_CHARS:]
    return f"Here is a part of the Python language reference.\n\n{text}\n\n{QUESTION}"


def environment() -> dict[str, str]:
    """This process's environment, in which SGLang skips all models but the embedded one.

    Loading the others takes half of its start-up.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError("SGLang is not installed; run make demo, which installs it")
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in folder.glob("*.py")} - {"__init__", "llama"})
    return os.environ | {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others)}


@contextmanager
def running_servers(flags: Iterable[list[str]]) -> Iterator[list[str]]:
    """Base URLs of servers, one for each list of flags; all are stopped afterwards in any case.

    They start side by side, on one core each, since most of a start is importing.
    """
    with tempfile.TemporaryDirectory(prefix="sparrow-demo-") as folder, ExitStack() as stack:
        servers = []
        for number, more in enumerate(flags):
            port, log = free_port(), Path(folder) / f"server-{number}.log"
            serve = [*SPARROW, "serve", *more, *SERVER_FLAGS, "--port", str(port)]
            process = stack.enter_context(logged_process(serve, log, environment()))
            servers.append(Server(process, f"http://127.0.0.1:{port}", log))
        _wait_until_healthy(servers)
        try:
            yield [f"{server.url}/v1" for server in servers]
        except openai.APIError as error:
            logs = "\n".join(log_end(server.log) for server in servers)
            raise DemoError(f"a server failed ({error}):\n{logs}") from error


def _wait_until_healthy(servers: list[Server]) -> None:
    what = "the server" if len(servers) == 1 else f"{len(servers)} servers, sparse and dense"
    print(f"starting {what}, which takes about a minute", end="", flush=True)
    waited = 0.0
    for waited in until_healthy(servers, START_LIMIT_S):
        if sys.stdout.isatty():
            print(f"\rstarting {what}: {waited:.0f} s of about a minute ", end="", flush=True)
    print(f"\rstarted {what}, in {waited:.0f} s" + " " * 24, flush=True)


def ask(base_url: str, prompt: str, num_tokens: int, sparse: bool) -> Answer:
    """Stream one chat completion of exactly `num_tokens`; print it as it comes if `sparse`."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=600, max_retries=0)
    asked = time.perf_counter()
    arrivals: list[float] = []
    usage: Any = None
    options = {"custom_params": {"sparrow": {"report": True}}} if sparse else {}
    stream = client.chat.completions.create(
        model=EMBEDDED_MODEL_NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        temperature=0,
        # A model of this size repeats itself otherwise.
        frequency_penalty=0.4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True} | options,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            arrivals.append(time.perf_counter())
            if sparse:
                print(piece, end="", flush=True)
    if usage is None or len(arrivals) < 2:
        raise DemoError("the server's answer has fewer than two tokens")
    return Answer(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=arrivals[0] - asked,
        decode_s=arrivals[-1] - arrivals[0],
        # The last chunk of a stream carries the report, in a field that is not OpenAI's.
        kv=chunk.metadata["sparrow"][0] if sparse else None,  # type: ignore[attr-defined]
    )


def report(sparse: Answer, dense: Answer | None) -> None:
    """Print what was read and how fast it went."""
    kv = sparse.kv or {}
    cached, read = kv["kv_tokens_cached_mean"], kv["kv_tokens_read_mean"]
    print(
        f"\nprompt            {sparse.prompt_tokens} tokens, read densely in"
        f" {sparse.first_token_s:.1f} s"
        f"\ngenerated         {sparse.completion_tokens} tokens"
        f"\nKV tokens cached  {cached:.0f} (mean over the generated tokens)"
        f"\nKV tokens read    {read:.0f} by a sparse layer ({read / cached:.0%})"
        f"\nsparse decode     {sparse.decode_tokens_per_s:.1f} tokens/s"
        f" (schedule {kv['schedule']}, calibrated)"
    )
    if dense is not None:
        gain = sparse.decode_tokens_per_s / dense.decode_tokens_per_s
        print(
            f"dense decode      {dense.decode_tokens_per_s:.1f} tokens/s (stock torch_native,"
            f" the same prompt): sparse is {gain:.2f}x as fast"
            "\n                  A small model on a CPU gains little; README.md has figures of GPUs"
        )


def train() -> None:
    """Three steps of GRPO from sparse rollouts; prints the line of `sparrow train` for each."""
    print(
        "\ntraining: three small steps of GRPO on the same model, from sparse rollouts; the task is"
        "\n  to use a given word in a story. The first line comes after about a minute",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="sparrow-demo-") as temporary:
        folder = Path(temporary)
        settings, log_path = folder / TRAINING.name, folder / "train.log"
        ours = f'run_dir = "{folder / "run"}"'
        text = re.sub(r"(?m)^run_dir = .*$", ours, TRAINING.read_text("utf-8"))
        settings.write_text(text, "utf-8")
        with open(log_path, "wb") as log:
            trainer = subprocess.Popen(
                [*SPARROW, "train", str(settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=environment(),
            )
        try:
            for line in trainer.stdout or ():
                if line.startswith("step "):
                    print(line, end="", flush=True)
            if trainer.wait() != 0:
                raise DemoError(f"training failed:\n{log_end(log_path)}")
        finally:
            stop(trainer)
    print(
        "p05 acceptance: the tail of the acceptance rate; 0.86 is considered safe. A budget of 48"
        "\n  tokens is far too small, and chosen so that responses this short leave something out"
    )


NEXT = """
where to go next
  .venv/bin/sparrow serve                               this server, to play with
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
    parser.add_argument(
        "--sparse-only", action="store_true", help="leave the dense run and training out"
    )
    args = parser.parse_args(argv)
    exit_on_sigterm()
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        print(
            "model: preparing SmolLM2-135M-Instruct (half a minute at the first time)", flush=True
        )
        embedded_model()
        prompt = long_prompt()
        flags = [SPARSE_FLAGS] if args.sparse_only else [SPARSE_FLAGS, DENSE_FLAGS]
        with running_servers(flags) as urls:
            print(
                f"\nprompt: {len(prompt)} characters of Python's reference, then:\n  {QUESTION}\n"
            )
            sparse = ask(urls[0], prompt, args.tokens, sparse=True)
            print("\n")
            dense = None if args.sparse_only else ask(urls[1], prompt, args.tokens, sparse=False)
        report(sparse, dense)
        if not args.sparse_only:
            train()
        print(NEXT)
    except (DemoError, ProcessFailed, ModelError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
