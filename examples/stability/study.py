"""Where does reinforcement learning from sparse rollouts stay stable, and where not?

A small Qwen3 model learns a task from random weights, is calibrated by `sparrow calibrate`, and is
then trained by `sparrow train` from the same checkpoint under dense rollouts, calibrated schedules,
fixed budgets and DistillSparse. `sparrow report` makes a page of all runs. Settings: study.toml.

    python examples/stability/study.py                        one GPU; what is complete is skipped
    python examples/stability/study.py --arms dense fixed-64 --seeds 0 1 --parallel 4

This module is also the runs' task, `study:load`: walk through a directed graph. The prompt lists
the edges in random order and a node to start from. Each line of the response is one of these edges,
word for word, from the node that the line before has led to. The reward is the share of right
lines; a wrong line costs itself only, as the next one goes on from where it says to lead.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sparrow_sglang.rl.config import TaskSource
from sparrow_sglang.rl.tasks.base import Render, Task
from sparrow_sglang.rl.types import Prompt

SETTINGS = Path(__file__).with_name("study.toml")
SPARROW = [sys.executable, "-m", "sparrow_sglang.commands.cli"]
SEPARATOR, START, STOP = ";", "start", "stop"
LABELS = 8
CALIBRATION_SEED = 1_000_003
"""Seed of graphs that no run trains on or is evaluated on."""


# -- the task


@dataclass(frozen=True)
class Walk:
    """A graph, and one of the right responses to it.

    `edges` are (from, to, *labels) in the order of the prompt; labels, none in the task itself, are
    copied along. `lines` are edges, each from where the one before leads to.
    """

    edges: tuple[tuple[str, ...], ...]
    lines: tuple[tuple[str, ...], ...]

    def prompt(self) -> str:
        return " ".join([*_words(self.edges), START, self.lines[0][0]])

    def response(self) -> str:
        """The lines without the first node, which ends the prompt."""
        return " ".join(_words(self.lines)[1:])

    def payload(self, steps: int) -> dict[str, Any]:
        """What `reward` needs to score a response of so many lines."""
        return {"edges": self.edges, "start": self.lines[0][0], "steps": steps}


def _words(lines: Sequence[tuple[str, ...]]) -> list[str]:
    return [word for line in lines for word in (*line, SEPARATOR)]


def draw_walk(draw: random.Random, names: int, nodes: int, steps: int, labels: int = 0) -> Walk:
    """A random cycle through `nodes` nodes, named by some of `names` words, and a walk on it."""
    named = [f"n{i}" for i in draw.sample(range(names), nodes)]
    edges = [
        (node, named[(i + 1) % nodes], *(f"p{draw.randrange(LABELS)}" for _ in range(labels)))
        for i, node in enumerate(named)
    ]
    first = draw.randrange(nodes)
    lines = [edges[(first + i) % nodes] for i in range(steps)]
    return Walk(tuple(draw.sample(edges, nodes)), tuple(lines))


def draw_walks(options: Mapping[str, Any], count: int, seed: int) -> list[Walk]:
    """Walks of the task, the same ones for the same arguments."""
    draw = random.Random(seed)
    least, most = options["least_nodes"], options["most_nodes"]
    return [
        draw_walk(draw, options["names"], draw.randint(least, most), options["steps"])
        for _ in range(count)
    ]


def load(config: TaskSource, render: Render) -> Task:
    """Walks drawn by `task.options`; held-out ones come first, whatever the number of others."""
    options = config.options
    heldout = options["heldout"]
    prompts = []
    walks = draw_walks(options, heldout + options["train"], options["seed"])
    for index, walk in enumerate(walks):
        ids = render([{"role": "user", "content": walk.prompt()}])
        prompts.append(Prompt(f"walk-{index}", config.name, ids, walk.payload(options["steps"])))
    return Task(tuple(prompts[heldout:]), tuple(prompts[:heldout]), reward)


def reward(prompt: Prompt, text: str) -> float:
    """Share of right lines among those asked for; missing ones are wrong.

    A line, between separators, is right if it is an edge of the graph from where the one before
    says to lead.
    """
    edges = {tuple(edge) for edge in prompt.payload["edges"]}
    at, steps, right = prompt.payload["start"], prompt.payload["steps"], 0
    for line in f"{at} {text}".split(SEPARATOR)[:steps]:
        words = line.split()
        right += tuple(words) in edges and words[0] == at
        at = words[-1] if words else at
    return right / steps


# -- the model


def make_tokenizer(names: int) -> Any:
    """A transformers tokenizer with one token per word, and a chat template that adds nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [SEPARATOR, START, STOP, *(f"p{i}" for i in range(LABELS))]
    words += [f"n{i}" for i in range(names)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, STOP))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP)
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return wrapped


def pretrain(settings: Mapping[str, Any], folder: Path) -> None:
    """Train a model from random weights until the held-out reward is reached; save it.

    Graphs start with two nodes and double whenever the model has learnt them; until they are those
    of the task, edges have labels to copy. From such examples the model soon learns to look
    something up, from the task itself hardly at all.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    plan, options = settings["pretrain"], settings["train"]["task"]["options"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer(options["names"])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        # With this range a projection keeps the size of its input.
        initializer_range=settings["model"]["hidden_size"] ** -0.5,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **settings["model"],
    )
    model = Qwen3ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan["lr"], betas=(0.9, 0.98))
    heldout = draw_walks(options, plan["evaluate_walks"], options["seed"])
    draw, nodes, is_task, loss = random.Random(1), 2, False, 5.0
    for step in range(1, plan["steps"] + 1):
        rate = min(1.0, step / plan["warmup_steps"], max(0.1, 1 - step / plan["steps"]))
        for group in optimizer.param_groups:
            group["lr"] = plan["lr"] * rate
        ids, start = _batch(draw, tokenizer, options, plan["tokens_per_step"], nodes, is_task)
        ids = ids.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(ids[:, :-1], logits_to_keep=ids.shape[1] - start).logits.float()
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten())
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss += 0.1 * (float(value) - loss)
        if not is_task and loss < plan["grow_below"]:
            is_task = nodes == options["most_nodes"]
            nodes, loss = min(2 * nodes, options["most_nodes"]), 5.0
        if is_task and step % plan["evaluate_every"] == 0:
            reached = measure_reward(model, tokenizer, heldout, plan["evaluate_lines"])
            print(f"pretraining: step {step}, loss {loss:.3f}, reward {reached:.3f}", flush=True)
            if reached >= plan["reward"]:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                return
    sys.exit(f"pretraining: the reward of {plan['reward']} was not reached in {step} steps")


def _batch(
    draw: random.Random,
    tokenizer: Any,
    options: Mapping[str, Any],
    tokens: int,
    nodes: int,
    is_task: bool,
) -> tuple[Any, int]:
    """Token ids [B, T] of prompts and right responses, of one length, and where responses start."""
    import torch

    size = draw.randint(options["least_nodes"] if is_task else nodes // 2 + 1, nodes)
    labels, steps = (0, options["steps"]) if is_task else (2, size)
    count = max(1, tokens // ((3 + labels) * (size + steps)))
    walks = [draw_walk(draw, options["names"], size, steps, labels) for _ in range(count)]
    texts = [f"{walk.prompt()} {walk.response()}" for walk in walks]
    return torch.tensor(tokenizer(texts).input_ids), len(walks[0].prompt().split())


def measure_reward(model: Any, tokenizer: Any, walks: Sequence[Walk], lines: int) -> float:
    """Mean reward of the first lines of sampled responses."""
    prompts = [walk.prompt() for walk in walks]
    padded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    found = model.generate(
        **padded.to(model.device), max_new_tokens=3 * lines - 1, do_sample=True, top_k=0, top_p=1.0
    )
    texts = tokenizer.batch_decode(found[:, padded.input_ids.shape[1] :], skip_special_tokens=True)
    asked = [Prompt("", "", (0,), walk.payload(lines)) for walk in walks]
    return fmean(map(reward, asked, texts))


# -- the study


def calibrate(settings: Mapping[str, Any], out: Path) -> None:
    """`sparrow calibrate`, once for all targets: OUT/schedules/walk-<target>.json."""
    plan, options = settings["calibrate"], settings["train"]["task"]["options"]
    prompts = out / "calibration.jsonl"
    walks = draw_walks(options, plan["prompts"], CALIBRATION_SEED)
    prompts.write_text("".join(json.dumps({"prompt": walk.prompt()}) + "\n" for walk in walks))
    words = ["--model-path", out / "model", "--prompts", prompts, "--target", *plan["targets"]]
    words += ["--out", out / "schedules" / "walk.json", "--work", out / "calibration"]
    words += ["--rule", "published", "--budgets", *plan["budgets"]]
    words += ["--bin-tokens", plan["bin_tokens"]]
    words += ["--min-tokens", plan["min_tokens"], "--new-tokens", 3 * options["steps"] - 1]
    words += ["--engine-args", json.dumps(settings["train"]["engine"]["server_args"])]
    (out / "schedules").mkdir(exist_ok=True)
    subprocess.run([*SPARROW, "calibrate", *map(str, words)], check=True)


def run_settings(settings: Mapping[str, Any], arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Settings of `sparrow train`, flat and by dotted keys, for one arm and seed."""
    schedule = settings["arms"][arm]["engine.schedule"]
    own = out / "schedules" / f"{schedule}.json"
    return dict(_flat(settings["train"])) | {
        **settings["arms"][arm],
        "engine.schedule": str(own) if schedule.startswith("walk-") else schedule,
        "run_dir": str(out / "runs" / f"{arm}-seed{seed}"),
        "model.path": str(out / "model"),
        "seed": seed,
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def train(settings: Mapping[str, Any], arm: str, seed: int, out: Path) -> int:
    """`sparrow train --resume` of one run; returns its exit code. A complete run ends at once."""
    values = run_settings(settings, arm, seed, out)
    file = Path(values["run_dir"] + ".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    # Reward workers import this module by its name.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    print(f"{arm}, seed {seed}: {file}", flush=True)
    with file.with_suffix(".log").open("a") as log:
        command = [*SPARROW, "train", str(file), "--resume"]
        return subprocess.run(command, stdout=log, stderr=log, env=environment).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """All stages; the exit code is 1 if a run failed."""
    settings = tomllib.loads(SETTINGS.read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/stability"), help="folder (default: %(default)s)")
    add("--arms", nargs="+", choices=settings["arms"], default=list(settings["arms"]))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--parallel", type=int, default=8, help="runs at a time on the GPU (default: %(default)s)")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    if not (out / "model").exists():
        out.mkdir(parents=True, exist_ok=True)
        pretrain(settings, out / "model")
    if not (out / "schedules").exists():
        calibrate(settings, out)
    runs = [(settings, arm, seed, out) for seed in args.seeds for arm in args.arms]
    with ThreadPoolExecutor(args.parallel) as pool:
        codes = list(pool.map(lambda run: train(*run), runs))
    report = [*SPARROW, "report", str(out / "runs"), "--out", str(out / "report.html")]
    return int(any(codes) or subprocess.run(report).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
