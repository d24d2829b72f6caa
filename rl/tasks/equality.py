"""Whether two final answers are the same: `math-verify` judges, between rules of our own."""

import logging
import re
import threading
from functools import cache, lru_cache
from typing import Any

from sparrow_sglang.rl.tasks.answers import last_box

# Largest numbers that are evaluated, in bits, and largest powers of sums that are expanded.
MAX_BITS, MAX_DEGREE = 20_000, 200
MAX_CHARACTERS = 2000
# Of each call of the library.
LIMIT_S = 5

_CHARACTERS = str.maketrans(
    dict(zip("\u2212\u2013\uff05\u2009\u202f\u00a0~", "--%    ", strict=True))
    | dict.fromkeys("\u00b0\u20ac\u00a3", "")
    | {"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u221a": r"\sqrt "}
    | {"\u00b2": "^2", "\u00b3": "^3"}
)
# In this order.
_SIMPLER = {
    re.compile(pattern): replacement
    for pattern, replacement in {
        r"\\[dtc]frac(?![a-z])": r"\\frac",
        r"\\frac *(\d)(\d)": r"\\frac{\1}{\2}",
        r"\\([lg])eq(?![a-z])": r"\\\1e",
        r"\^ *(?:\\circ|\{ *\\circ *\}) *(?:[CF]\b)?": "",
        r"\\(?:left|right|displaystyle)(?![a-z])|\\! *|\\[()\[\]]|\\?\$": "",
        r"\\varnothing(?![a-z])": r"\\emptyset",
        r"\\%": "%",
        r"\*\*": "^",
        r"\{,\}": ",",
        r"\\[,;:> ]|\\q?quad\b": " ",
        r"\\(?:text\w*|math(?:rm|bf|it)|mbox|operatorname) *\{([^{}]*)\}": r" \1 ",
        r"\s+": " ",
        r"(?<=\d) (?=\d{3}(?![\d/]))": "",
        r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?!\w)": r"\1\\cdot 10^{\2}",
        r"(?<![\d.^_/])(\d+) (\d+)/(\d+)": r"\1\\frac{\2}{\3}",
    }.items()
}
_LETTER = re.compile(r"\(?([A-Z])\)?[.:]?")
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer) *)?(?:\( *([A-Z]) *\).*|([A-Z])(?:[.:)].*)?)", re.S | re.I
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_NAMED = re.compile(r" *(?:\|?[A-Za-z]+\|?|[A-Za-z]\([^()=]*\)|[A-Za-z]_\{?\w\}?) *(?:=|\\in\b)")
_BASED = re.compile(r"\(?0*([0-9A-Fa-f]+)\)?_\{?(\w+)\}?")
_BRACKETS = re.compile(r"(\\\{|[(\[])[^()\[\]]*,[^()\[\]]*(\\\}|[)\]])")
_UNIT = re.compile(
    r"(.*(?:[\d)}\]]|\\pi|\\infty)) *"
    r"(%| (?!and |or )(?:[a-zA-Z]{2,}|[ap]\.|[mshgLlNJWVA]\b)[a-zA-Z /.]*) ?(\^ ?\{?-?\d\}?)?"
)
_UNITS = dict(
    pair.split("=")
    for pair in (
        "centimeter=cm centimetre=cm meter=m metre=m kilometer=km kilometre=km millimeter=mm"
        " millimetre=mm inch=in inche=in foot=ft feet=ft mile=mi hour=h hr=h minute=min second=s"
        " sec=s gram=g kilogram=kg liter=l litre=l percent=% unit= dollar= degree="
    ).split()
)
_SCIENTIFIC = re.compile(r"(?:[\d.]+ *(?:\\times|\\cdot|\*) *)?10 *\^ *(?:\d|\{-?\d+\})")
_FRACTION = re.compile(r"\\frac *\{ *-?[\d.,]+ *\} *\{ *-?[\d.,]+ *\}|[\d.,]+ */ *-?[\d.,]+")
# Operators, a minus between two operands, and functions.
_OPERATION = re.compile(
    r"[*/^!]|(?<=[\w)}])[+-]|\\(?!(?:in|le|ge|pm|infty|cup|emptyset|begin|end)(?![a-z]))[a-zA-Z]+"
)
# Integrals, sums and derivatives, which the library evaluates.
_LARGE = re.compile(
    r"\\(?:i+nt|oint|sum|prod|lim)(?![a-z])"
    r"|\\frac *\{ *(?:d|\\partial)[^{}]*\} *\{ *(?:d|\\partial)"
)
_FORM = re.compile(r"\b(?:factori[sz]e|factored|expand(?:ed)?|factor(?! of| by))\b", re.IGNORECASE)


@lru_cache(maxsize=4096)
def equal(expected: str, given: str, question: str = "") -> bool:
    """What the question shows, or what is left to compute, is an answer only if it is `expected`
    so."""
    # Expected answers may be whole solutions.
    box = last_box(expected)
    gold, answer = _cleaned(box[0] if box else expected), _cleaned(given)
    if not gold or not answer or max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    if _flat(gold) == _flat(answer):
        return True
    if not (_NAMED.match(gold) and _NAMED.match(answer)):
        gold, answer = (_NAMED.sub("", text, count=1).strip() for text in (gold, answer))
    if _LETTER.fullmatch(gold) or _WORDS.fullmatch(gold) and (len(gold) > 2 or gold.isupper()):
        return _same_text(gold, answer)
    one, other = (_BASED.fullmatch(text.replace(" ", "")) for text in (gold, answer))
    if one or other:
        # A base may be added, but not left out.
        given_digits = other.groups() if other else ()
        return given_digits == one.groups() if one else given_digits[0] == gold.lstrip("0")
    if "=" not in gold and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", answer):
        *sides, answer = answer.split("=")
        if not all(_verified(gold, side) for side in sides):
            return False
    (value, unit), (given_value, given_unit) = _without_unit(gold), _without_unit(answer)
    if unit and given_unit and unit != given_unit:
        return False
    if _is_copied(given_value, question) or not _is_evaluated(
        gold if unit == "%" else value, given_value
    ):
        return False
    same_form = bool(_FORM.search(question) and _operations(value))
    if _verified(value, given_value, same_form):
        return True
    # x % is x or x / 100.
    return unit != given_unit and "%" in (unit, given_unit) and _verified(gold, answer)


def _cleaned(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SIMPLER.items():
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;").strip()


def _flat(text: str) -> str:
    """The text without differences that change nothing in print."""
    return re.sub(r"\s", "", _plain(text))


def _plain(text: str) -> str:
    text = re.sub(r"\\frac\{(\d+|\w)\}\{(\d+|\w)\}", r"\1/\2", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", re.sub(r"\\times|\\cdot", "*", text))


def _same_text(gold: str, answer: str) -> bool:
    if letter := _LETTER.fullmatch(gold):
        choice = _CHOICE.fullmatch(answer)
        return choice is not None and (choice[1] or choice[2]) == letter[1]
    one, other = (re.sub(r"[^\w+-]+", " ", text).casefold().strip() for text in (gold, answer))
    return one == other


def _without_unit(text: str) -> tuple[str, str]:
    """The answer and its unit, empty if it has none."""
    found = _UNIT.fullmatch(text)
    if found is None:
        return text, ""
    words = re.findall(r"[a-zA-Z]+|[/%]|\d", found[2] + (found[3] or ""))
    names = [word if len(word) < 3 else word.lower().removesuffix("s") for word in words]
    return found[1], "".join(_UNITS.get(name, name) for name in names)


def _is_copied(answer: str, question: str) -> bool:
    """Whether the question shows this answer, which is more than a number."""
    if not question or not re.search(r"[A-Za-z+*/^!]|(?<=\w) *-", answer):
        return False
    symbols = map(re.escape, re.findall(r"\\?[A-Za-z]+|\d+|\S", _flat(answer)))
    shown = _plain(_cleaned(question))
    return bool(re.search(rf"(?<![\w.^_]){' ?'.join(symbols)}(?![\w^_]|\.\d)", shown))


def _is_evaluated(gold: str, answer: str) -> bool:
    """Whether the answer leaves nothing to compute that the expected one does not."""
    left, more = _operations(gold), _operations(answer)
    if left or re.search("[A-Za-z]", gold):
        return set(_LARGE.findall(answer)) <= set(_LARGE.findall(gold))
    return not more and not (re.fullmatch(r"-?\d+", gold) and _FRACTION.search(answer))


def _operations(text: str) -> set[str]:
    text = _FRACTION.sub("0", _SCIENTIFIC.sub("0", text))
    return set(_OPERATION.findall(re.sub(r" *([+-])", r"\1", text)))


def _verified(gold: str, answer: str, same_form: bool = False) -> bool:
    """`math-verify`, which compares decimals to 15 places."""
    brackets = [found.groups() for text in (gold, answer) if (found := _BRACKETS.fullmatch(text))]
    if len(set(brackets)) == 2:
        return False
    parsed = [_parsed(_signs(text)) for text in (gold, answer)]
    if not all(parsed) or same_form and len({_form(one[0]) for one in parsed}) == 2:
        return False
    # An inequality is the interval that it describes.
    verdict: bool = library().verify(
        *parsed, float_rounding=15, timeout_seconds=_limit(), allow_set_relation_comp=True
    )
    return verdict


def _signs(text: str) -> str:
    """Both values of an expression with one plus-minus sign, outside of brackets."""
    if text.count("\\pm") != 1 or re.search(r"[(\[,]", text):
        return text
    return ", ".join(text.replace("\\pm", sign) for sign in "+-")


def _parsed(text: str) -> list[Any]:
    numbers = [int(number) for number in re.findall(r"\d{1,12}", text)]
    if "binom" in text and max(numbers, default=0) > MAX_BITS:
        # Computed while it is read.
        return []
    found = library().parse(f"${text}$", parsing_timeout=_limit())
    values = [one for one in found if not isinstance(one, str)]
    try:
        return values if all(_bits(one) <= MAX_BITS for one in values) else []
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return []


def _bits(value: Any) -> float:
    """An upper bound of the size in bits of all numbers in an expression, infinite if too large."""
    import sympy

    if isinstance(value, sympy.Rational):
        return float(max(value.p.bit_length(), value.q.bit_length()))
    arguments = tuple(value) if isinstance(value, sympy.MatrixBase) else getattr(value, "args", ())
    sizes = [_bits(one) for one in arguments]
    largest = max(sizes, default=1.0)
    if largest > MAX_BITS:
        return float("inf")
    if isinstance(value, sympy.Pow):
        base, exponent = value.args
        power = abs(float(exponent)) if exponent.is_number else 1.0
        too_large = base.free_symbols and power > MAX_DEGREE
        return float("inf") if too_large else sizes[0] * max(power, 1.0)
    if isinstance(value, sympy.factorial | sympy.gamma):
        return float(value.args[0]) * 12 if value.args[0].is_number else largest
    if isinstance(value, sympy.Product | sympy.Sum):
        first, last = value.limits[0][1:]
        if first.is_number and last.is_number and abs(float(last - first)) > MAX_DEGREE**2:
            return float("inf")
    return sum(sizes) if isinstance(value, sympy.Mul) else largest + len(sizes)


def _form(value: Any) -> tuple[int, int]:
    """Numbers of terms and of factors; a sum is one factor."""
    import sympy

    def factors(one: Any) -> int:
        if isinstance(one, sympy.Mul):
            return sum(map(factors, one.args))
        if isinstance(one, sympy.Pow) and one.exp.is_Integer:
            return factors(one.base) * abs(int(one.exp))
        return int(one not in (1, -1))

    return len(sympy.Add.make_args(value)), factors(value)


def _limit() -> int | None:
    """Seconds for one call of the library, whose alarms work in the main thread only."""
    return LIMIT_S if threading.current_thread() is threading.main_thread() else None


@cache
def library() -> Any:
    import math_verify

    # It warns of each time-out, and once that there are none.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify
