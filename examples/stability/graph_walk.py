"""The task: walk through a directed graph.

The prompt lists the edges in random order and a node to start from. Each line of the response is
one of these edges, word for word, from the node that the line before has led to. Any edge from
there may be taken, but each has to be found far back among all the others. The reward is the share
of right lines; a wrong line costs itself only, as the next one goes on from where it says to lead.
A walk has no end: it is cut at the length that the task asks for.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.tasks.base import Options, Render, Task, parse_options
from sparrow_sglang.rl.types import Prompt

SEPARATOR, START, STOP = ";", "start", "stop"
LABELS = 8
# Tokens of a step without labels: from, to, separator.
STEP_TOKENS = 3
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class WalkOptions(Options):
    """Settings of the task."""

    degree: int = Field(ge=1)
    """Edges that leave each node."""
    least_nodes: int = Field(ge=2)
    """Nodes of the smallest graph."""
    most_nodes: int = Field(ge=2)
    """Nodes of the largest graph."""
    names: int = Field(ge=2)
    """Words that nodes are named by, each at most once in a graph."""
    steps: int = Field(ge=2)
    """Lines of a response."""
    train: int = Field(default=4096, ge=1)
    """Training prompts."""
    heldout: int = Field(default=256, ge=1)
    """Held-out prompts."""
    seed: int = 0
    """Seed of the graphs."""

    @field_validator("least_nodes", "most_nodes", "names")
    @classmethod
    def _enough(cls, value: int, info: ValidationInfo) -> int:
        lower = {"least_nodes": "degree", "most_nodes": "least_nodes", "names": "most_nodes"}
        name = lower[str(info.field_name)]
        # An invalid field is missing from `info.data`. A node has no edge to itself.
        least = info.data.get(name, 0) + (name == "degree")
        if value < least:
            raise ValueError(f"expected at least {least}, because of {name}")
        return value

    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return STEP_TOKENS * self.most_nodes * self.degree + 2

    def response_tokens(self) -> int:
        """Tokens of every right response."""
        return STEP_TOKENS * self.steps - 1


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


def draw_walk(
    draw: random.Random, options: WalkOptions, nodes: int, degree: int, steps: int, labels: int = 0
) -> Walk:
    """A random graph of so many nodes with `degree` edges from each, and a random walk."""
    names = [f"n{i}" for i in draw.sample(range(options.names), nodes)]
    # Each distance makes every node the start and the end of one edge; 1 is one round of them all.
    distances = [1, *draw.sample(range(2, nodes), degree - 1)]
    edges = [
        (
            name,
            names[(i + distance) % nodes],
            *(f"p{draw.randrange(LABELS)}" for _ in range(labels)),
        )
        for i, name in enumerate(names)
        for distance in distances
    ]
    leaving: dict[str, list[tuple[str, ...]]] = {}
    for edge in edges:
        leaving.setdefault(edge[0], []).append(edge)
    lines = [draw.choice(edges)]
    while len(lines) < steps:
        lines.append(draw.choice(leaving[lines[-1][1]]))
    return Walk(tuple(draw.sample(edges, len(edges))), tuple(lines))


def load(config: TaskConfig, render: Render) -> Task:
    """Walks drawn by `task.options`, the same ones for the same options."""
    options = parse_options(WalkOptions, config)
    prompts = []
    for index, walk in enumerate(heldout_and_train(options)):
        ids = render([{"role": "user", "content": walk.prompt()}])
        payload = walk.payload(options.steps)
        prompts.append(Prompt(f"walk-{index}", config.name, ids, payload))
    return Task(tuple(prompts[options.heldout :]), tuple(prompts[: options.heldout]), reward)


def heldout_and_train(options: WalkOptions) -> list[Walk]:
    """Held-out walks first, so that they stay the same whatever the number of training walks."""
    draw = random.Random(options.seed)
    walks = []
    for _ in range(options.heldout + options.train):
        nodes = draw.randint(options.least_nodes, options.most_nodes)
        walks.append(draw_walk(draw, options, nodes, options.degree, options.steps))
    return walks


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


def make_tokenizer(options: WalkOptions) -> Any:
    """A transformers tokenizer with one token per word, and a chat template that adds nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [SEPARATOR, START, STOP, *(f"p{i}" for i in range(LABELS))]
    words += [f"n{i}" for i in range(options.names)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, STOP))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=STOP)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_prompts(path: Path, options: WalkOptions, count: int, seed: int) -> None:
    """Write prompts as `sparrow calibrate` reads them, of graphs as large as those trained on."""
    others = options.model_copy(update={"seed": seed, "heldout": count, "train": 0})
    rows = [json.dumps({"prompt": walk.prompt()}) + "\n" for walk in heldout_and_train(others)]
    path.write_text("".join(rows), "utf-8")


def _words(lines: Sequence[tuple[str, ...]]) -> list[str]:
    return [word for line in lines for word in (*line, SEPARATOR)]
