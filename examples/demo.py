"""What `make demo` runs: a long prompt, decoded sparsely and densely, then three training steps.

In: nothing but the installed package. Out, on the terminal: both answers, how much of the KV cache
was read for the sparse one, decode speed both ways; reward, tail and time of each training step. No
accelerator and no network are needed.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import openai

from sparrow_sglang.command_line import at_least
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, ModelError, embedded_model

START_LIMIT_S, STOP_LIMIT_S = 240, 30
SPARROW = [sys.executable, "-m", "sparrow_sglang.commands.cli"]
SCHEDULE = f"{EMBEDDED_MODEL_NAME}-0.86"
# In plain torch, 32-bit arithmetic is the fast path of most CPUs, and so is a prompt in one chunk.
# The long prompt warms the server up well enough.
SERVE = [*SPARROW, "serve", "--attention-backend", "sparrow", "--sparrow-schedule", SCHEDULE]
SERVE += (
    "--dtype float32 --page-size 16 --chunked-prefill-size 8192 --max-total-tokens 9216"
    " --log-level warning --skip-server-warmup"
).split()
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

    `kv` is the server's own report of what a sparse layer found cached and read.
    """

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    decode_s: float
    kv: dict[str, Any]

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
def started(command: Sequence[str], log: Path, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, which is ended afterwards in any case."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            **{"stdout": file, "stderr": file} | streams,
            text=True,
            start_new_session=True,
            env=environment(),
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Base URL of the server, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    began = time.monotonic()
    print("starting the server, which takes about half a minute", flush=True)
    with started([*SERVE, "--port", str(port)], log) as process:
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                raise DemoError(f"the server did not start:\n{log_end(log)}")
            time.sleep(0.5)
        print(f"started in {time.monotonic() - began:.0f} s", flush=True)
        try:
            yield f"{url}/v1"
        except openai.APIError as error:
            raise DemoError(f"the server failed ({error}):\n{log_end(log)}") from error


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False  # not listening yet


def log_end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def ask(base_url: str, prompt: str, num_tokens: int, dense: bool) -> Answer:
    """Stream one chat completion of exactly `num_tokens`, and print it as it comes."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=600, max_retries=0)
    asked = time.perf_counter()
    arrivals: list[float] = []
    usage: Any = None
    ours = {"report": True} | ({"dense": True} if dense else {})
    stream = client.chat.completions.create(
        model=EMBEDDED_MODEL_NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        # The likeliest tokens, so that the answers can be compared; a model of this size repeats
        # itself without the penalty.
        temperature=0,
        frequency_penalty=0.4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "custom_params": {"sparrow": ours}},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            arrivals.append(time.perf_counter())
            print(piece, end="", flush=True)
    print("\n")
    if usage is None or len(arrivals) < 2:
        raise DemoError("the server's answer has fewer than two tokens")
    return Answer(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=arrivals[0] - asked,
        decode_s=arrivals[-1] - arrivals[0],
        # The last chunk of a stream carries the report, in a field that is not OpenAI's.
        kv=chunk.metadata["sparrow"][0],  # type: ignore[attr-defined]
    )


def report(sparse: Answer, dense: Answer) -> None:
    """Print what was read and how fast it went."""
    cached, read = sparse.kv["kv_tokens_cached_mean"], sparse.kv["kv_tokens_read_mean"]
    gain = sparse.decode_tokens_per_s / dense.decode_tokens_per_s
    print(
        f"prompt            {sparse.prompt_tokens} tokens, read densely in"
        f" {sparse.first_token_s:.1f} s"
        f"\ngenerated         {sparse.completion_tokens} tokens"
        f"\nKV tokens cached  {cached:.0f} (mean over the generated tokens)"
        f"\nKV tokens read    {read:.0f} by a sparse layer ({read / cached:.0%})"
        f"\nsparse decode     {sparse.decode_tokens_per_s:.1f} tokens/s"
        f" (schedule {sparse.kv['schedule']}, calibrated)"
        f"\ndense decode      {dense.decode_tokens_per_s:.1f} tokens/s:"
        f" sparse is {gain:.2f}x as fast"
        "\n                  A small model on a CPU gains little; README.md has figures of GPUs"
    )
    if read >= cached:
        print("                  Nothing was sparse here: the sequence lies within the budget")


def train(folder: Path) -> None:
    """Three steps of GRPO from sparse rollouts; prints the line of `sparrow train` for each."""
    print(
        "\ntraining: three small steps of GRPO on the same model, from sparse rollouts; the task is"
        "\n  to use a given word in a story. The first line comes after about a minute",
        flush=True,
    )
    settings, log = folder / TRAINING.name, folder / "train.log"
    ours = f'run_dir = "{folder / "run"}"'
    text = re.sub(r"(?m)^run_dir = .*$", ours, TRAINING.read_text("utf-8"))
    settings.write_text(text, "utf-8")
    command = [*SPARROW, "train", str(settings)]
    with started(command, log, stdout=subprocess.PIPE) as trainer:
        for line in trainer.stdout or ():
            if line.startswith("step "):
                print(line, end="", flush=True)
        if trainer.wait() != 0:
            raise DemoError(f"training failed:\n{log_end(log)}")
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
    parser.add_argument("--no-training", action="store_true", help="leave the training out")
    args = parser.parse_args(argv)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    try:
        print(
            "model: preparing SmolLM2-135M-Instruct (half a minute at the first time)", flush=True
        )
        embedded_model()
        prompt = long_prompt()
        with tempfile.TemporaryDirectory(prefix="sparrow-demo-") as temporary:
            folder = Path(temporary)
            with running_server(folder) as url:
                print(f"\nprompt: {len(prompt)} characters of Python's reference, then:")
                print(f"  {QUESTION}\n\nsparse answer:\n")
                sparse = ask(url, prompt, args.tokens, dense=False)
                print("dense answer:\n")
                dense = ask(url, prompt, args.tokens, dense=True)
            report(sparse, dense)
            if not args.no_training:
                train(folder)
        print(NEXT)
    except (DemoError, ModelError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
