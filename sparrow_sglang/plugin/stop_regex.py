"""`stop_regex` by RE2 (https://github.com/google/re2), in time linear in the text. SGLang searches
the response after each step, in the process that serves everybody, by `re`, which may take
exponential time. Patterns have the syntax and the meaning that they have for `re`."""

import re
import re._parser as _parser  # type: ignore[import-untyped]
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import re2  # type: ignore[import-untyped]

MAX_SIZE = 1000
"""Largest number of RE2's instructions for the patterns of a request: a step may take so many
times the length of the text."""
UNSUPPORTED = (re.error, re2.error, RecursionError)
"""Errors of `compiled`."""
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}
_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
_ANCHORS = {
    "AT_BEGINNING": "^",
    "AT_BEGINNING_STRING": r"\A",
    # RE2's own does not match before a last newline.
    "AT_END": r"(?:\n?\z)",
    "AT_END_STRING": r"\z",
    "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}


def compiled(patterns: Sequence[str]) -> re2._Regexp:
    r"""An expression whose `search` finds what `re` finds of any of `patterns`, in UTF-8. Except
    that a boundary of words (`\b`) is one of ASCII words, and that nothing is found after `$`.
    Raises one of `UNSUPPORTED`."""
    trees = [_parser.parse(pattern) for pattern in patterns]
    # Unicode's classes have a thousand instructions each, of which few are run.
    size = _compile(trees, re.ASCII).programsize
    if size > MAX_SIZE:
        raise re.error(f"{size} instructions, expected {MAX_SIZE} at most, of all patterns")
    return _compile(trees, re.NOFLAG)


def _compile(trees: list[Any], flags: re.RegexFlag) -> re2._Regexp:
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, 2**20
    source = "|".join(_group(tree, tree.state.flags | flags) for tree in trees)
    return re2.compile(source, options)


def _group(parts: Any, flags: int) -> str:
    """A parsed expression in RE2's syntax."""
    on = "".join(letter for letter, flag in _FLAGS.items() if flags & flag)
    off = "".join(letter for letter in _FLAGS if letter not in on)
    body = "".join(_part(str(kind), argument, flags) for kind, argument in parts)
    return f"(?{on}{off and '-' + off}:{body})"


def _part(kind: str, argument: Any, flags: int) -> str:
    match kind:
        case "ANY":
            return "."
        case "LITERAL" | "NOT_LITERAL" | "IN":
            items = argument if kind == "IN" else [(kind, argument)]
            return f"[{''.join(_item(str(name), value, flags) for name, value in items)}]"
        case "AT" if str(argument) == "AT_END" and flags & re.MULTILINE:
            return "$"
        case "AT":
            return _ANCHORS[str(argument)]
        case "BRANCH":
            return f"(?:{'|'.join(_group(branch, flags) for branch in argument[1])})"
        case "SUBPATTERN":
            _, added, removed, parts = argument
            return _group(parts, (flags | added) & ~removed)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, parts = argument
            return f"{_group(parts, flags)}{{{least},{'' if most is _parser.MAXREPEAT else most}}}"
    raise re.error("look-around, back-reference, atomic group or possessive repeat: expected none")


def _item(kind: str, value: Any, flags: int) -> str:
    """An item of a class of characters."""
    match kind:
        case "NEGATE":
            return "^"
        case "NOT_LITERAL":
            return rf"^\x{{{value:x}}}"
        case "CATEGORY":
            return _category(str(value).removeprefix("CATEGORY_"), bool(flags & re.ASCII))
    first, last = value if kind == "RANGE" else (value, value)
    return rf"\x{{{first:x}}}-\x{{{last:x}}}"


@cache
def _category(name: str, is_ascii: bool) -> str:
    """The ranges of characters that `re` has in this category."""
    letter = _CATEGORIES[name.removeprefix("NOT_")]
    wanted = letter.upper() if name.startswith("NOT_") else letter
    characters = np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    found = re.finditer(f"{wanted}+", characters, re.ASCII if is_ascii else re.NOFLAG)
    return "".join(rf"\x{{{each.start():x}}}-\x{{{each.end() - 1:x}}}" for each in found)
