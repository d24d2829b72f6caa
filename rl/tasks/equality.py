r"""Whether two final answers are the same: `math-verify`, and rules for what it gets wrong.

In: an expected answer and a given one, in LaTeX or plain notation. Out: equal or not. The rules:
decimals count to 15 places, so that 0.33 is not 1/3; x % is x or x / 100; words and letters of
choices are compared as texts; a unit may be left out, but not be another one; lists have no order,
tuples do; `x = 5` is 5; digits with a base are compared as written; what would take too long is not
equal.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

from sparrow_sglang.rl.tasks.answers import last_box

# Largest numbers that are evaluated, in bits, and largest powers of sums that are expanded.
MAX_BITS, MAX_DEGREE = 20_000, 200
MAX_CHARACTERS = 2000

_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_SPACES = re.compile(r"\\[,;:!>]|\\ |\\q?quad\b|~|\u2009|\u202f|\u00a0")
_REPLACED = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u03c0": r"\pi ",
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ",
    "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3", "\u221a": r"\sqrt ", "\uff05": "%",
    "\u20ac": "", "\u00a3": "", r"\$": "", "$": "", r"\%": "%", r"\left": "", r"\right": "",
    r"\displaystyle": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
    r"\(": "", r"\)": "", r"\[": "", r"\]": "", "{,}": ",", r"\lbrace": r"\{", r"\rbrace": r"\}",
    r"\leq": r"\le", r"\geq": r"\ge", r"\varnothing": r"\emptyset", "**": "^",
}  # fmt: skip
_NAMES = re.compile(
    "|".join(
        re.escape(name) + (r"(?![a-z])" if name[-1].isalpha() and name[0] == "\\" else "")
        for name in sorted(_REPLACED, key=len, reverse=True)
    )
)
_GROUPED = re.compile(r"(?<![\d.,])-?\d{1,3}(?:,\d{3})+(?![\d,])")
_MIXED = re.compile(
    r"(?<![\d.^_/])(\d+) *(?:\\frac *\{(\d+)\} *\{(\d+)\}|\\frac(\d)(\d)| (\d+)/(\d+))"
)
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?!\w)")
_DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\}) *(?:[CF]\b)?")
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(?:\{(\w+)\}|(\w+))")
_BASES = dict(
    zip("two three four five six seven eight nine ten".split(), range(2, 11), strict=True)
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(([A-Z])\)(?:.*)|([A-Z])(?:[.:)].*)?)", re.S | re.I
)
_NAME = re.compile(
    r"\|[A-Z]+\||(?!\\(?:frac|sqrt))\\?[A-Za-z]+(?:_\{?\w+\}?|'|\([^()=]*\)| *[A-Za-z]+)*"
)
_UNIT = re.compile(
    r"(.*?(?:[\d)}\]!%]|\\pi|\\infty))\s*@([^@]*)@((?:\s*\^\s*\{?-?\d\}?)?)\s*", re.S
)
_PLAIN_UNIT = re.compile(
    r"(.*?[\d)}\]])\s+((?!and\b|or\b)[a-zA-Z]{2,}(?:[ /][a-zA-Z]+)*(?:\^\d)?)", re.S
)
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km",
    "kilometre": "km", "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in",
    "feet": "ft", "foot": "ft", "mile": "mi", "hour": "h", "hr": "h", "minute": "min",
    "second": "s", "sec": "s", "gram": "g", "kilogram": "kg", "liter": "l", "litre": "l",
    "square": "sq", "unit": "", "dollar": "", "degree": "", "percent": "%",
}  # fmt: skip


@lru_cache(maxsize=4096)
def equal(expected: str, given: str) -> bool:
    """Whether `given` is the answer `expected`.

    May take long on an expression that `math-verify` cannot simplify: the caller must set a time
    limit, as the library's own alarms work in main threads only and do not interrupt C code.
    """
    gold, answer = (_cleaned(text) for text in (expected, given))
    if not gold or not answer or max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    if _marked(gold) == _marked(answer):
        return True
    if _is_text(expected, gold):
        return _same_text(gold, answer)
    golds, answers = _parts(gold), _parts(answer)
    if len(golds) == 1 == len(answers):
        return _same(golds[0], answers[0])
    return _same_parts(golds, answers)


def _cleaned(text: str) -> str:
    r"""The answer without formatting; texts of LaTeX stand between @, as `5 @cm@`."""
    # Expected answers may be whole solutions.
    box = last_box(text)
    text = _NAMES.sub(lambda found: _REPLACED[found.group()], box[0] if box else text)
    text = re.sub(r",\\!\s*", ",", text)
    text = re.sub(r"(?<=\d)(?:\\[,;:!>]|\\ |~|\u2009|\u202f|\u00a0)+(?=\d{3}(?!\d))", "", text)
    text = _SPACES.sub(" ", text)
    while (simpler := _TEXT.sub(r"@\1@", text)) != text:
        text = simpler
    text = re.sub(r"@\s*(and|or)\s*@", r" \1 ", text)
    text = text.replace("\\\n", " ").strip().rstrip(".,;").strip()
    return " ".join(text.split())


def _marked(text: str) -> str:
    return re.sub(r"[\s@]", "", text)


def _is_text(expected: str, gold: str) -> bool:
    """Whether the expected answer is one or several words, or the letter of a choice."""
    words = gold.replace("@", " ").strip()
    if _CHOICE.fullmatch(words) and re.fullmatch(r"\(?[A-Z]\)?[.:]?", words):
        return True
    if re.fullmatch(r"@[^@]*@", gold) and not re.search(r"\d", gold):
        return True
    return bool(_WORDS.fullmatch(words)) and (len(words) > 2 or words.isupper())


def _same_text(gold: str, answer: str) -> bool:
    gold, answer = (text.replace("@", " ").strip() for text in (gold, answer))
    if re.fullmatch(r"\(?[A-Z]\)?[.:]?", gold):
        letter, choice = re.sub(r"\W", "", gold), _CHOICE.fullmatch(answer)
        return choice is not None and (choice[1] or choice[2]) == letter
    return _words(gold) == _words(answer)


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w+-]", " ", text).casefold().split())


def _parts(text: str) -> list[str]:
    """The elements of a list without brackets, in which `a \\pm b` is two."""
    text = (
        _GROUPED.sub(lambda found: found.group().replace(",", ""), text) if _is_flat(text) else text
    )
    whole = re.fullmatch(r"\\\{(.*)\\\}|\{.*\}", text, re.S)
    if text.startswith("{") and whole:
        # Braces that TeX would not print.
        text = rf"\{{{text[1:-1]}\}}"
    elements = [text] if whole else _split(text)
    if len(elements) == 1 and re.match(r"[A-Za-z]\s*=[^=]*$", elements[0]):
        # A name before the first element of a list of values.
        elements = _split(text)
    signed = [sign for part in elements for sign in _signs(part)]
    # An element that is written twice is one.
    return list({re.sub(r"\s", "", part): part.strip() for part in signed if part.strip()}.values())


def _is_flat(text: str) -> bool:
    return not re.search(r"[(\[]|\\\{", text)


def _split(text: str, separators: str = r",|;|\band\b|\bor\b") -> list[str]:
    """The parts of a text between separators outside brackets."""
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"\\[{{}}]|\\begin|\\end|[([{{\])}}]|{separators}", text):
        mark = token.group()
        if mark in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif mark in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part for part in [*parts, text[start:]] if part.strip()]


def _signs(part: str) -> Iterator[str]:
    if part.count("\\pm") == 1 and not re.search(r"[(\[]", part):
        yield from (part.replace("\\pm", sign) for sign in "+-")
    else:
        yield part


def _same_parts(golds: Sequence[str], answers: Sequence[str]) -> bool:
    """Whether two lists are the same in any order; a set is a list, too."""
    golds, answers = (_elements(parts) for parts in (golds, answers))
    named = [all(_assignment(part)[0] for part in parts) for parts in (golds, answers)]
    if len(golds) == 1 and named[1]:
        golds = _of_tuple(golds[0])
    elif len(answers) == 1 and named[0]:
        answers = _of_tuple(answers[0])
    if len(golds) != len(answers):
        return False
    if named[0] != named[1]:
        # Values without their names are in the order of the names.
        return all(_same(one, other) for one, other in zip(golds, answers, strict=True))
    left = list(answers)
    for gold in golds:
        found = next((answer for answer in left if _same(gold, answer, True)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _elements(parts: Sequence[str]) -> list[str]:
    if len(parts) == 1:
        name, value = _assignment(parts[0])
        braced = re.fullmatch(r"\\\{(.*)\\\}", value, re.S) if name or value else None
        if braced:
            return _split(braced[1])
        tuple_ = re.fullmatch(r"\((.*)\)", value, re.S)
        if tuple_ and len(_split(tuple_[1])) > 1 and _split(tuple_[1])[0] != value:
            return list(parts)
    return list(parts)


def _of_tuple(text: str) -> list[str]:
    """The elements of a tuple, which are those of named values in their order."""
    found = re.fullmatch(r"\((.*)\)", text.strip(), re.S)
    return _split(found[1]) if found else [text]


def _assignment(text: str) -> tuple[str, str]:
    """The name and value of `x = 5` or `x \\in [1, 2]`; the name is empty for any other text."""
    member = re.fullmatch(r"\s*([A-Za-z])\s*\\in\s*(.*)", text, re.S)
    if member:
        return member[1], member[2]
    sides = _split(text, "=")
    name = sides[0].replace("@", "").strip() if sides else ""
    if len(sides) == 2 and _NAME.fullmatch(name):
        return name, sides[1].strip()
    return "", text


def _same(gold: str, answer: str, in_list: bool = False) -> bool:
    """Whether two answers that are no lists are the same."""
    answer_value = _end_of_chain(answer)
    if answer_value is None:
        return False
    (gold_name, gold_value), (answer_name, answer_value) = map(_assignment, (gold, answer_value))
    if gold_name and answer_name and gold_name != answer_name:
        function = any(re.search(r"[(]", name) for name in (gold_name, answer_name))
        if in_list or not function:
            return False
    if gold_name and not answer_name and "=" in answer_value or "<" in answer_value + gold_value:
        return _verified(gold, answer)
    if answer_name and not gold_name and "=" in gold_value:
        return _verified(gold, answer)
    if (based := _same_digits(gold_value, answer_value)) is not None:
        return based
    gold_value, gold_unit = _unit(gold_value)
    answer_value, answer_unit = _unit(answer_value)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    return any(_verified(one, other) for one, other in _percent_readings(gold_value, answer_value))


def _end_of_chain(text: str) -> str | None:
    """The last side of `x = 2 + 2 = 4`; None if its sides differ; other texts as they are."""
    sides = [side.strip() for side in _split(text, "=")]
    if len(sides) < 2 or re.search(r"\\[lgn]e\b|[<>!]", text):
        return text
    named = bool(_NAME.fullmatch(sides[0].replace("@", "")))
    values = sides[1:] if named else sides
    if named and len(values) == 1:
        return text
    if any(re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", side) for side in values):
        return text
    if all(_verified(values[-1], side) for side in values[:-1]):
        return values[-1]
    return None


def _same_digits(gold: str, answer: str) -> bool | None:
    """Whether two numbers with bases are written alike; None if the expected one has no base."""
    expected, given = (
        _BASED.fullmatch(text.replace(" ", "").replace("@", "")) for text in (gold, answer)
    )
    if expected is None and given is None:
        return None
    if expected is None or given is None:
        digits = given[1] if given else ""
        return bool(digits) and digits.lstrip("0") == gold.strip().lstrip("0")
    bases = [_BASES.get(found[2] or found[3], found[2] or found[3]) for found in (expected, given)]
    return str(bases[0]) == str(bases[1]) and expected[1].lstrip("0") == given[1].lstrip("0")


def _unit(text: str) -> tuple[str, str]:
    """The answer and its unit, which is empty if it has none."""
    text = _DEGREES.sub("", text).strip()
    found = _UNIT.fullmatch(text)
    if found is None and "@" not in text:
        found = _PLAIN_UNIT.fullmatch(text)
    if found is None:
        return text.replace("@", ""), ""
    power = re.sub(r"\D", "", found[3]) if found.re is _UNIT else ""
    words = re.findall(r"[a-zA-Z]+|/|\d", found[2] + power)
    names = [word if len(word) < 3 else word.lower().removesuffix("s") for word in words]
    unit = "".join(_UNITS.get(name, name) for name in names)
    if unit == "%":
        return f"{found[1]}%", ""
    return found[1].strip(), unit


def _percent_readings(gold: str, answer: str) -> Iterator[tuple[str, str]]:
    """Pairs of numbers, one of which must be equal: x % is x or x / 100."""
    signed = [text.endswith("%") for text in (gold, answer)]
    one, other = gold.rstrip("% "), answer.rstrip("% ")
    yield one, other
    if signed == [True, False]:
        yield rf"\frac{{{one}}}{{100}}", other
    if signed == [False, True]:
        yield one, rf"\frac{{{other}}}{{100}}"


def _verified(gold: str, answer: str) -> bool:
    """The judgement of `math-verify`, which compares decimals to 15 places."""
    if re.sub(r"\s", "", gold) == re.sub(r"\s", "", answer):
        return True
    # Letters without spaces are a word, in whatever order; to the library they are a product.
    if any(re.fullmatch(r"[A-Za-z]{3,}", text.strip()) for text in (gold, answer)):
        return gold.strip() == answer.strip()
    parsed = [_parsed(_exact(text)) for text in (gold, answer)]
    if not all(parsed) or not all(map(_is_bounded, parsed)):
        return False
    kinds = [_bracket(text) for text in (gold, answer)]
    if all(kinds) and kinds[0] != kinds[1]:
        return False
    # An inequality is the interval that it describes.
    verdict: bool = _library().verify(
        *parsed, float_rounding=15, timeout_seconds=None, allow_set_relation_comp=True
    )
    return verdict


def _bracket(text: str) -> str:
    found = re.fullmatch(r"(\\\{|[(\[])[^()\[\]]*,[^()\[\]]*(\\\}|[)\]])", text.strip())
    return found[1] + found[2] if found else ""


def _exact(text: str) -> str:
    text = text.replace("@", "")
    text = _SCIENTIFIC.sub(lambda found: rf"{found[1]}\cdot 10^{{{int(found[2])}}}", text)
    return _MIXED.sub(_sum, text)


def _sum(found: re.Match[str]) -> str:
    whole, *parts = (group for group in found.groups() if group is not None)
    above, below = map(int, parts)
    if not 0 < above < below:
        return found.group()
    return rf"\frac{{{int(whole) * below + above}}}{{{below}}}"


def _parsed(text: str) -> list[Any]:
    """What `math-verify` reads in an expression; empty if it reads nothing."""
    numbers = [int(number) for number in re.findall(r"\d{1,12}", text)]
    if "binom" in text and max(numbers, default=0) > MAX_BITS:
        # The library computes these while it reads.
        return []
    found: list[Any] = _library().parse(f"${text}$", parsing_timeout=None)
    return [one for one in found if not isinstance(one, str)]


def _is_bounded(parsed: list[Any]) -> bool:
    try:
        return all(_bits(one) <= MAX_BITS for one in parsed)
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return False


def _bits(value: Any) -> float:
    """An upper bound of the size in bits of all numbers in an expression, infinite if too large."""
    import sympy

    if isinstance(value, sympy.Integer | sympy.Rational):
        return float(max(value.p.bit_length(), value.q.bit_length()))
    arguments = getattr(value, "args", ())
    if isinstance(value, sympy.MatrixBase):
        arguments = tuple(value)
    sizes = [_bits(one) for one in arguments]
    largest = max(sizes, default=1.0)
    if largest > MAX_BITS:
        return float("inf")
    if isinstance(value, sympy.Pow):
        base, exponent = value.args
        power = abs(float(exponent)) if exponent.is_number else 1.0
        if base.free_symbols and power > MAX_DEGREE:
            return float("inf")
        return _bits(base) * max(power, 1.0)
    if isinstance(value, sympy.factorial | sympy.gamma):
        number = value.args[0]
        return float(number) * 12 if number.is_number else largest
    if isinstance(value, sympy.Product | sympy.Sum):
        first, last = value.limits[0][1:]
        if first.is_number and last.is_number and abs(float(last - first)) > MAX_DEGREE**2:
            return float("inf")
    return sum(sizes) if isinstance(value, sympy.Mul) else largest + len(sizes)


@cache
def _library() -> Any:
    import math_verify

    # The library warns once per process that its time-outs are off, which is intended here.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify
