"""Prompts of a calibration: from a JSONL file, or a built-in set that reaches every bin."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sparrow_sglang.calibration import CalibrationError
from sparrow_sglang.json_values import cut, read_text

Tokenize = Callable[[str | list[dict[str, Any]]], list[int]]
"""Token ids of a text, or of chat messages."""

# Tokens of the context that SGLang (0.5.17) does not allow for input; a sequence to score is input.
UNSCORED = 6
# The token from prefill, one decoded sparsely, and the one that SGLang keeps free when it scores.
NEEDED_ROOM = 3
MAX_PROMPTS = 2**16

QUESTIONS = (
    "Explain the most important rule of the text above to a beginner, with a small example.",
    "Write a short program that uses what the text above describes, then explain each line.",
    "Summarise the text above in a few paragraphs, in the order in which it says things.",
    "Which mistakes will a beginner make with what the text above describes, and why?",
    "Write an exam of five questions about the text above, each with its answer.",
    "What in the text above would surprise somebody who knows another language, and why?",
)


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `name` identifies the prompt in results and in the bootstrap."""

    name: str
    input_ids: tuple[int, ...]


def tokenizer_of(model_path: str) -> Tokenize:
    """The model's own tokenizer and chat template, loaded at the first use. A model without a
    template, such as a base model, continues the joined texts of the messages."""

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path)

    def tokenize(text: str | list[dict[str, Any]]) -> list[int]:
        if tokenizer().chat_template is None and not isinstance(text, str):
            text = "\n\n".join(str(message.get("content", "")) for message in text)
        if isinstance(text, str):
            # Without a warning about texts beyond the context, which are sliced or refused.
            return list(tokenizer()(text, verbose=False)["input_ids"])
        ids = tokenizer().apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        return list(ids)

    return tokenize


def read_prompts(path: Path, tokenize: Tokenize, context: int) -> list[Prompt]:
    """Prompts of a JSONL file, one `{"prompt": text}`, `{"messages": [...]}` or `{"input_ids":
    [...]}` a line. Lines with the same prompt share a name. Raises `CalibrationError`, naming the
    line, on an empty file, a line of another form and a prompt that leaves no room for a token in
    `context`."""
    # Not `splitlines`, which also splits at separators that JSON strings may contain.
    lines = read_text(path, "--prompts ").split("\n")
    prompts = []
    names: dict[tuple[int, ...], str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        content = _content(line)
        is_tokens = all(type(token) is int for token in content)
        try:
            ids = list(content) if is_tokens else tokenize(content)
        except Exception as error:  # templates raise anything on messages that they do not expect
            raise CalibrationError(
                f"{where}: cannot be tokenized ({type(error).__name__}: {cut(str(error))})"
            ) from None
        if not ids:
            raise CalibrationError(
                f'{where}: {line.strip()[:60]!r}: expected {{"prompt": text}}, {{"messages":'
                ' [...]} or {"input_ids": [numbers]}, of one token or more, without a response'
            )
        longest = context - NEEDED_ROOM - UNSCORED
        if len(ids) > longest:
            raise CalibrationError(
                f"{where}: the prompt has {len(ids)} tokens: expected at most {longest}, to"
                f" leave room in the model's context of {context}"
            )
        name = names.setdefault(tuple(ids), f"{number}-{_digest(ids)[:8]}")
        prompts.append(Prompt(name, tuple(ids)))
    if not prompts:
        raise CalibrationError(
            f'--prompts {path}: holds no prompts; expected one per line, e.g. {{"prompt": "..."}}'
        )
    return prompts


def _content(line: str) -> str | list[Any]:
    """Text, messages or token ids; empty for a line of another form."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    fields = row if isinstance(row, dict) and "response" not in row else {}
    text, messages, ids = (fields.get(key) for key in ("prompt", "messages", "input_ids"))
    if isinstance(text, str) and text:
        return text
    if isinstance(messages, list) and all(isinstance(entry, dict) for entry in messages):
        return messages
    if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids):
        return ids
    return ""


def builtin_prompts(
    tokenize: Tokenize,
    context: int,
    bin_tokens: int,
    new_tokens: int,
    per_bin: int,
    part: Literal["calibration", "check"],
    seed: int = 0,
) -> list[Prompt]:
    """Questions about slices of Python's reference, `per_bin` prompts for each bin of the context.
    Lengths are spread evenly over a bin, so that its first and its last positions are both
    measured. The two parts read different topics and hence share no text. Raises `CalibrationError`
    if the context is too short for a question."""
    corpus = _corpus(part)
    chars_per_token = len(corpus) / len(tokenize(corpus))
    draw = random.Random(f"{part}-{seed}")
    frame = len(tokenize(_messages("", QUESTIONS[0])))
    if (count := -(-context // bin_tokens) * per_bin) > MAX_PROMPTS:
        raise CalibrationError(
            f"{count} built-in prompts, {per_bin} per bin of {bin_tokens} of {context} tokens:"
            f" expected {MAX_PROMPTS} at most"
        )
    prompts = []
    for start in range(0, context, bin_tokens):
        first, end = max(start, frame + 1), min(start + bin_tokens, context - new_tokens)
        for i in range(per_bin if end > first else 0):
            length = first + (end - first) * i // per_bin
            chars = round((length - frame) * chars_per_token)
            ids = tokenize(_messages(_slice(corpus, chars, draw), draw.choice(QUESTIONS)))
            while len(ids) > end:
                chars = chars * end // (len(ids) + 16)
                ids = tokenize(_messages(_slice(corpus, chars, draw), draw.choice(QUESTIONS)))
            prompts.append(Prompt(f"builtin-{_digest(ids)[:12]}", tuple(ids)))
    if not prompts:
        raise CalibrationError(
            f"no built-in prompt fits into the model's context of {context} tokens: expected more"
            f" than {frame + new_tokens}, or --prompts, or more --prompts-per-bin"
        )
    return prompts


def _slice(corpus: str, chars: int, draw: random.Random) -> str:
    offset = draw.randrange(len(corpus))
    return (corpus * (2 + chars // len(corpus)))[offset : offset + chars]


def _messages(text: str, question: str) -> list[dict[str, Any]]:
    content = f"Here is a part of the Python language reference.\n\n{text}\n\n{question}"
    return [{"role": "user", "content": content}]


def _corpus(part: str) -> str:
    from pydoc_data.topics import topics

    remainder = ("calibration", "check").index(part)
    return "\n\n".join(topics[name].strip() for name in sorted(topics)[remainder::2])


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    content = json.dumps([[prompt.name, prompt.input_ids] for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()
