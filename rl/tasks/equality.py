"""Whether two final answers are the same. `math-verify` judges, after rules about their form: an
answer is one value, evaluated, of the kind of the expected one."""

import re
from functools import lru_cache, partial
from typing import Any

from sparrow_sglang.rl.tasks.answers import last_box
from sparrow_sglang.rl.tasks.expressions import (
    INEQUALITY,
    is_operator,
    is_reduced,
    is_rounded,
    parsed,
    plain_numbers,
    verified,
)
from sparrow_sglang.rl.tasks.notation import cleaned, flat
from sparrow_sglang.rl.tasks.time_limit import holds_within

MAX_CHARACTERS = 2000
LIMIT_S = 10

_LETTER = re.compile(r"\(?([A-Z])\)?[.:]?")
_CHOICE = re.compile(r"(?:(?:option|choice|answer) *)?(?:\( *([A-Z]) *\)|([A-Z])(?:[.:)]|$))", re.I)
# "A" may be an article.
_OTHER_CHOICE = re.compile(r"(?<![\w\\])(?!A [a-z])[A-H](?!\w)")
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_NAME = re.compile(
    r"\|?[A-Za-z]+\|?|\\(?:[a-z]+|(?:angle|triangle) *[A-Z]+)|[A-Za-z]\([^()=]*\)"
    r"|\\?[A-Za-z]+_(?:\w|\{[^{}]*\})|\( *[a-z](?: *, *[a-z])+ *\)"
)
_EQUALS = re.compile(r"=|\\in(?![a-z])")
# Commands that are no symbols.
_COMMANDS = {rf"\{name}" for name in "frac sqrt pi infty log ln pm binom cup in le ge ne".split()}
_BASED = re.compile(r"\(?0*([0-9A-Fa-f]+)\)?_\{?(\w+)\}?")
_BRACKETS = re.compile(r"(\\\{|[(\[])[^()\[\]]*,[^()\[\]]*(\\\}|[)\]])")
_UNIT = re.compile(
    r"(.*(?:[\d)}\]]|\\pi|\\infty)) *"
    r"(%| (?!and |or )(?:[a-zA-Z]{2,}|[mshgLlNJWVA]\b)[a-zA-Z /.]*) ?(\^ ?\{?-?\d\}?)?"
)
_UNITS = dict(
    pair.split("=")
    for pair in (
        "centimeter=cm centimetre=cm meter=m metre=m kilometer=km kilometre=km millimeter=mm"
        " millimetre=mm inch=in inche=in foot=ft feet=ft mile=mi hour=h hr=h minute=min second=s"
        " sec=s gram=g kilogram=kg liter=l litre=l percent=% unit= dollar= degree= per=/ mph=mi/h"
    ).split()
)
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMERAL = re.compile(
    rf"[\s()\[\]{{}}\\]*[+-]? *\(?(?:{_NUMBER}|-? *{_NUMBER} */ *-? *{_NUMBER}"
    rf"|\\frac *\{{ *-? *{_NUMBER} *\}} *\{{ *-? *{_NUMBER} *\}})[\s()\[\]{{}}\\%]*"
)
_BETWEEN = re.compile(
    r"[,&<>=]|\\\\|\\(?:le|ge|ne|in|cup|pm)(?![a-z])|\\(?:begin|end) *\{\w+\}|\b(?:or|and)\b"
)
_MODULUS = re.compile(r" *\(? *\\?[bp]?mod(?:ulo)?(?![a-z]) *\{?(\w+)\}? *\)?$")
_TIME = re.compile(r"0?(\d{1,2})(?: ?: ?(\d\d))?(?: (am|pm))?")
_ROUNDED = re.compile(r"(.*\S) *\\approx *(-?\d+(?:\.\d+)?)")


@lru_cache(maxsize=4096)
def equal(expected: str, given: str) -> bool:
    """What is left to compute is an answer only if `expected` is written so. False after `LIMIT_S`,
    unless called outside the main thread."""
    return holds_within(LIMIT_S, partial(_equal, expected, given))


def _equal(expected: str, given: str) -> bool:
    # Expected answers may be whole solutions.
    box = last_box(expected)
    gold, answer = cleaned(box[0] if box else expected), cleaned(given)
    if not gold or not answer or max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    if flat(gold) == flat(answer) or _quantities(gold) == _quantities(answer):
        return True
    if rounded := _ROUNDED.fullmatch(answer):
        exact, decimal = rounded.groups()
        if is_rounded(exact.rpartition("=")[2], decimal):
            sides = (exact, decimal) if "." in gold else (exact,)
            return any(_equal(expected, side) for side in sides)
    (gold, *modulus), (answer, *given_modulus) = map(_MODULUS.split, (gold, answer))
    if modulus and given_modulus and modulus != given_modulus:
        return False
    if given_modulus:
        answer = answer.rpartition("=")[2]
    gold, answer = (text.replace(r"\approx", "=") for text in (gold, answer))
    if (time := _TIME.fullmatch(gold)) and (time[3] or time[2] == "00"):
        return _same_time(time, _TIME.fullmatch(answer))
    if not _is_text(gold):
        gold, answer = _without_names(gold, answer)
    if not answer or _is_text(gold):
        return _same_text(gold, answer)
    one, other = (_BASED.fullmatch(text.replace(" ", "")) for text in (gold, answer))
    if one or other:
        # A base may be added, but not left out.
        given_digits = other.groups() if other else ()
        return given_digits == one.groups() if one else given_digits[0] == gold.lstrip("0")
    (value, unit), (given_value, given_unit) = _without_unit(gold), _without_unit(answer)
    if unit and given_unit and unit != given_unit:
        return False
    value, given_value = plain_numbers(value), plain_numbers(given_value)
    if not _is_evaluated(value + unit, given_value):
        return False
    if _verified(value, given_value):
        return True
    # x % is x or x / 100.
    if {unit, given_unit} != {"", "%"}:
        return False
    hundredth = r"\frac{%s}{100}"
    return (
        _verified(hundredth % value, given_value)
        if unit
        else _verified(value, hundredth % given_value)
    )


def _is_text(gold: str) -> bool:
    return bool(
        _LETTER.fullmatch(gold)
        or gold.casefold() == "no"
        or _WORDS.fullmatch(gold)
        and (len(gold) > 2 or gold.isupper())
    )


def _same_text(gold: str, answer: str) -> bool:
    if letter := _LETTER.fullmatch(gold):
        choice = _CHOICE.match(answer)
        if choice is None or _OTHER_CHOICE.search(answer, choice.end()):
            return False
        return (choice[1] or choice[2]) == letter[1]
    one, other = (re.sub(r"[^\w+-]+", " ", text).casefold().strip() for text in (gold, answer))
    return one == other


def _same_time(gold: re.Match[str], answer: re.Match[str] | None) -> bool:
    """Whether hours and minutes are the same, and halves of the day if both have one."""
    if answer is None or gold[1] != answer[1] or (gold[2] or "00") != (answer[2] or "00"):
        return False
    return gold[3] == answer[3] or not (gold[3] and answer[3])


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    """Both without the names of their values, as x in "x = 3"; equations stay as they are. The
    answer is empty if it names something else, or says that unequal things are equal."""
    names, values = _named(gold, set())
    given_names, given_values = _named(answer, _symbols(" ".join(values)))
    wanted, found = set(filter(None, names)), set(filter(None, given_names))
    if not all(map(_NAME.fullmatch, wanted)):
        return gold, answer
    if not given_values or wanted and found and wanted != found:
        is_equation = given_values and any(map(_symbols, values))
        return gold, answer if is_equation else ""
    ordered = len({name.partition("_")[0] for name in wanted}) > 1 or gold.startswith("(")
    return _joined(names, values, ordered), _joined(given_names, given_values, ordered)


def _named(text: str, known: set[str]) -> tuple[list[str], list[str]]:
    """Names and values of a list such as "x = 1, y = 2", empty if sides are not equal. A value has
    `known` symbols only, if any side has; a name has symbols that its value has not."""
    names, values = [], []
    for part in _split(text):
        sides = [side.strip() for side in _EQUALS.split(part) if side.strip()] or [""]
        value = next((side for side in reversed(sides) if _symbols(side) <= known), sides[-1])
        named = [side for side in sides if not _symbols(side) <= _symbols(value)]
        if not all(side in named or _verified(value, side) for side in sides if side != value):
            return [], []
        names.append(named[0] if named else "")
        values.append(value)
    return names, values


def _split(text: str) -> list[str]:
    """The parts of a list; inequalities are one part."""
    if INEQUALITY.search(text):
        return [text]
    parts, depth = [""], 0
    for token in re.split(r"([()\[\]{},]|\b(?:or|and)\b)", text):
        depth = max(0, depth + (token in "([{" and token != "") - (token in ")]}" and token != ""))
        if depth == 0 and token in (",", "or", "and"):
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _joined(names: list[str], values: list[str], ordered: bool) -> str:
    if ordered and len(set(filter(None, names))) == len(values) > 1:
        values = [value for _, value in sorted(zip(names, values, strict=True))]
        return f"({', '.join(values)})"
    return ", ".join(values)


def _symbols(text: str) -> set[str]:
    return {*re.findall(r"\\[A-Za-z]+|[A-Za-z]", text)} - _COMMANDS


def _without_unit(text: str) -> tuple[str, str]:
    """The answer and its unit, empty if it has none."""
    found = _UNIT.fullmatch(text)
    if found is None:
        return text, ""
    words = re.findall(r"[a-zA-Z]+|[/%]|\d", found[2] + (found[3] or ""))
    names = [word if len(word) < 3 else word.lower().removesuffix("s") for word in words]
    return found[1], "".join(_UNITS.get(name, name) for name in names)


def _quantities(text: str) -> list[tuple[str, str]]:
    """Numbers and units of such as "1 hour and 30 minutes"."""
    return list(map(_without_unit, re.split(r"(?<=[A-Za-z])(?:,| and)? (?=\d)", text)))


def _is_evaluated(gold: str, answer: str) -> bool:
    """Whether the answer leaves nothing to compute that the expected one does not."""
    if not _free_symbols(answer) <= _free_symbols(gold):
        return False
    if not _is_simple(gold):
        return not any(map(is_operator, parsed(answer))) or any(map(is_operator, parsed(gold)))
    whole = not re.search(r"[a-zA-Z./%]", re.sub(r"\\(?:begin|end) *\{\w+\}", "", gold))
    return not (whole and re.search(r"/|\\frac", answer)) and _is_simple(answer)


def _free_symbols(text: str) -> set[Any]:
    return {symbol for value in parsed(text) for symbol in getattr(value, "free_symbols", ())}


def _is_simple(text: str) -> bool:
    """Whether numbers are numerals, and expressions leave no arithmetic to do."""
    for piece in _BETWEEN.split(text):
        shown = piece.strip(" ()[]{}\\%") and not re.search(
            r"[A-Za-z^]", piece.replace("\\frac", "")
        )
        if shown and not _NUMERAL.fullmatch(piece):
            return False
    # The library has evaluated what it reads as a number.
    return not re.search(r"\d \d", text) and all(
        is_reduced(one) and (_NUMERAL.fullmatch(text) or not getattr(one, "is_Rational", False))
        for one in parsed(text)
    )


def _verified(gold: str, answer: str) -> bool:
    brackets = [found.groups() for text in (gold, answer) if (found := _BRACKETS.fullmatch(text))]
    if len(set(brackets)) == 2 or ("matrix" in gold) != ("matrix" in answer):
        return False
    if INEQUALITY.search(gold) and INEQUALITY.search(answer):
        if _symbols(gold) != _symbols(answer):
            return False
    return verified(gold, answer)
