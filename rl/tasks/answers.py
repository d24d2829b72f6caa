"""The answer in a response: the part after its thinking, and in it the last box or program."""

import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise

THINKING_MARK = re.compile(r"</?think(?:ing)?>")
_END_OF_THINKING = re.compile(r"</think(?:ing)?>")
_THINKING = re.compile(r"<think(?:ing)?>")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# What may separate boxes that form one answer, as in "$\boxed{1}$ and $\boxed{2}$".
_GAP = r"(?:[\s$]|\\q?quad\b|\\[()])*"
_NOTHING = re.compile(_GAP)
_TOGETHER = re.compile(
    rf"{_GAP}(?:,|;|,?\s*\b(?:and|or)\b|\\text\{{\s*(?:and|or)\s*\}}){_GAP}"
    r"(?:[a-zA-Z](?:_\w|_\{\w+\})?\s*=\s*)?"
)
# An opening fence, also in a list, with its label.
_FENCE = re.compile(
    r"^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE
)
_PYTHON = re.compile(r"[{.\s]*(?:python|pypy|py)[\d.]*(?!\w)", re.IGNORECASE)


def conclusion(text: str, finish_reason: str = "stop", thinking: bool = False) -> str | None:
    """The part of a response after its thinking, which the prompt may have opened (`thinking`);
    None if it was cut or is still thinking."""
    *before, last = _END_OF_THINKING.split(text)
    if finish_reason == "length" or _THINKING.search(last) or (thinking and not before):
        return None
    return last


def last_box(text: str) -> tuple[str, str] | None:
    r"""Content of the last `\boxed` or `\fbox`, and the text after it; None if there is no box.

    Without one, an `<answer>` tag is a box. Boxes that only a comma, "and" or "or" separates are
    one answer, joined by commas, as are three or more that nothing separates: the last of two is a
    correction. The content of an unclosed box is empty.
    """
    boxes = list(_boxes(text)) or [(tag.start(), tag.end(), tag[1]) for tag in _TAG.finditer(text)]
    if not boxes:
        return None
    start, end, content = boxes.pop()
    rest = text[end:]
    joined = [content]
    apart = [text[one[1] : other[0]] for one, other in pairwise([*boxes, (start, end, content)])]
    listed = len(apart) > 1 and all(map(_NOTHING.fullmatch, apart[-2:]))
    while boxes and (_TOGETHER.fullmatch(gap := apart.pop()) or listed and _NOTHING.fullmatch(gap)):
        joined.insert(0, boxes.pop()[2])
    return ", ".join(joined), rest


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each outermost box."""
    position = 0
    while opening := _BOX.search(text, position):
        position = opening.end()
        if not text.startswith("{", position):
            # TeX takes one character, but authors mean the number or word.
            word = re.compile(r"-?[\w.]*\w").match(text, position)
            position = word.end() if word else position
            yield opening.start(), position, word.group() if word else ""
            continue
        end = _closing(text, position)
        content = text[position + 1 : end] if end is not None else ""
        inner = last_box(content)
        position = len(text) if end is None else end + 1
        yield opening.start(), position, inner[0] if inner else content


def _closing(text: str, start: int) -> int | None:
    """The index of the brace that closes the one at `start`."""
    depth = 0
    # Braces after a backslash are printed characters, and do not group.
    for token in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            return start + token.start()
    return None


def last_program(text: str, is_whole: Callable[[str], bool]) -> str | None:
    """The last fenced block labelled as Python, or else the last without a label; whole programs by
    `is_whole` come first. Without any fence the whole text if it is Python."""
    blocks = list(_blocks(text))
    if not blocks:
        return text if _is_python(text) else None
    labelled = [body for label, body in blocks if _PYTHON.match(label)]
    programs = labelled or [body for label, body in blocks if not label]
    whole = [body for body in programs if is_whole(body)]
    candidates = whole or programs
    return candidates[-1] if candidates else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Label and content of each fenced block; an unclosed one ends with the text."""
    position = 0
    while opening := _FENCE.search(text, position):
        fence = opening[1]
        closing = re.compile(rf"^[ \t]*{fence[0]}{{{len(fence)},}}[ \t\r]*$", re.MULTILINE)
        end = closing.search(text, opening.end())
        body = text[opening.end() + 1 : end.start() if end else len(text)]
        yield opening[2].strip(), textwrap.dedent(body)
        position = end.end() if end else len(text)


def _is_python(text: str) -> bool:
    try:
        compile(text, "response", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())
