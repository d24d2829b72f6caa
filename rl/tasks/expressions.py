"""Expressions in LaTeX as `math-verify` reads and compares them, within bounds."""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from functools import cache, lru_cache, partial
from typing import Any

# Largest numbers that are evaluated, in bits, most terms that are multiplied out, and most factors
# or terms of a product or sum by an index.
MAX_BITS, MAX_TERMS, MAX_INDEX = 20_000, 2_000, 40_000

INEQUALITY = re.compile(r"[<>]|\\[lgn]e(?![a-z])")
_SCIENTIFIC = re.compile(
    r"(?<![\w.^}*)])(?:(\d+\.?\d*|\.\d+) *\* *)?10 *\^ *"
    r"(?:(-?\d{1,3})|\{ *(-?\d{1,3}) *\})(?! *[\d!^*/])"
)
_MIXED = re.compile(r"(?<![\d.^_/])(\d+) ?\\frac *\{ *(\d+) *\} *\{ *(\d+) *\}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline *\{ *(\d+) *\}")
# Unless it counts the terms of a sum.
_IMAGINARY = re.compile(r"(?<![A-Za-z\\_])i(?![A-Za-z_])")
_ERRORS = (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError)


def plain_numbers(text: str) -> str:
    """Mixed, repeating and scientific numbers as one fraction or decimal."""

    def fraction(found: re.Match[str]) -> str:
        whole, top, bottom = map(int, found.groups())
        return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"

    def decimal(found: re.Match[str]) -> str:
        digits, *exponent = found.groups()
        return f"{Decimal(f'{digits or 1}e{exponent[0] or exponent[1]}'):f}"

    def repeated(found: re.Match[str]) -> str:
        whole, once, again = found.groups()
        value = int(whole + once + again) - int(whole + once or 0)
        return rf"\frac{{{value}}}{{{'9' * len(again) + '0' * len(once)}}}"

    text = _REPEATING.sub(repeated, _MIXED.sub(fraction, text))
    return _SCIENTIFIC.sub(decimal, text)


@lru_cache(maxsize=256)
def parsed(text: str) -> tuple[Any, ...]:
    """What the library reads; empty if it reads nothing, or something too large. Inequalities of
    one variable are sets."""
    numbers = [int(number) for number in re.findall(r"\d{1,12}", text)]
    if "binom" in text and max(numbers, default=0) > MAX_BITS:
        # Computed while it is read.
        return ()
    if not re.search(r"\\(?:sum|prod)", text):
        text = _IMAGINARY.sub("{I}", text)
    if INEQUALITY.search(text) and (found := _solutions(text)) is not None:
        return (found,)
    try:
        found = library().parse(f"${text}$", parsing_timeout=None)
        values = tuple(one for one in found if not isinstance(one, str))
        return values if all(_bits(one) <= MAX_BITS for one in values) else ()
    except _ERRORS:
        return ()


def _solutions(text: str) -> Any:
    """The set that inequalities, joined by "and" or "or", describe; None if they are not solved."""
    import sympy

    if not re.search(r",|\b(?:and|or)\b", text):
        relations = library().parse(f"${text}$", parsing_timeout=None)[:1]
        solved = relations and not isinstance(relations[0], str) and _is_solved(relations[0])
        with suppress(NotImplementedError, *_ERRORS):
            return relations[0].as_set() if solved else None
        return None
    for word, join in ((r",|\bor\b", sympy.Union), (r"\band\b", sympy.Intersection)):
        if re.search(word, text):
            parts = [_solutions(part) for part in re.split(word, text)]
            return None if None in parts else join(*parts)
    return None


def _is_solved(relation: Any) -> bool:
    import sympy

    relations = relation.atoms(sympy.core.relational.Relational)
    return len(relation.free_symbols) == 1 and all(
        any(side.is_Symbol for side in one.args) and any(side.is_number for side in one.args)
        for one in relations
    )


def verified(gold: str, answer: str) -> bool:
    """Whether the library finds both equal: decimals to 15 places."""
    one, other = parsed(gold), parsed(answer)
    if not one or not other:
        return False
    if max(map(_terms, one + other)) > MAX_TERMS:
        return [*map(_evaluated, one)] == [*map(_evaluated, other)]
    verdict: bool = library().verify(
        list(one), list(other), float_rounding=15, timeout_seconds=None
    )
    return verdict


def is_rounded(exact: str, decimal: str) -> bool:
    """Whether a decimal has the first digits of a number, or is the number rounded to them."""
    unit = 10.0 ** -len(decimal.partition(".")[2])
    with suppress(*_ERRORS):
        return any(abs(float(value) - float(decimal)) < unit for value in parsed(exact)[:1])
    return False


def is_operator(value: Any) -> bool:
    """Whether an expression has an integral, sum, product, limit or derivative."""
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits

    kinds = ExprWithLimits | sympy.Derivative | sympy.Limit
    return isinstance(value, kinds) or any(map(is_operator, _arguments(value)))


def is_reduced(value: Any) -> bool:
    """Whether arithmetic makes nothing shorter of a parsed expression: no like terms in its sums,
    one number at most in its products, no function of numbers that has a simpler value, and no
    operator."""
    import sympy

    if is_operator(value) or not all(map(is_reduced, _arguments(value))):
        return False
    if isinstance(value, sympy.Add):
        terms = [_evaluated(term) for term in _operands(value, sympy.Add)]
        return len(sympy.Add.make_args(sympy.Add(*terms))) >= len(terms) - terms.count(0)
    if isinstance(value, sympy.Mul):
        numbers = [one for one in _operands(value, sympy.Mul) if isinstance(one, sympy.Rational)]
        if not value.free_symbols and sum(one.has(sympy.I) for one in value.args) > 1:
            return False
        return numbers.count(-1) < 2 and sum(abs(number) != 1 for number in numbers) < 2
    if isinstance(value, sympy.UnevaluatedExpr):
        # The library's percent is an unevaluated 1/100.
        return not value.args[0].is_Integer
    if not isinstance(value, sympy.Expr) or not value.args or value.free_symbols:
        return True
    simpler = _evaluated(value)
    if isinstance(value, sympy.Pow | sympy.exp):
        is_power = value.as_base_exp()[0].has(sympy.I)
        return not is_power and (not simpler.is_Rational or value.exp == -1)
    return bool(simpler.has(value.func))


def _operands(value: Any, kind: Any) -> Iterator[Any]:
    for one in value.args:
        if isinstance(one, kind):
            yield from _operands(one, kind)
        else:
            yield one


def _evaluated(value: Any) -> Any:
    return value.func(*map(_evaluated, value.args)) if value.args else value


def _arguments(value: Any) -> tuple[Any, ...]:
    import sympy

    return tuple(value) if isinstance(value, sympy.MatrixBase) else getattr(value, "args", ())


def _bits(value: Any) -> float:
    """An upper bound of the size in bits of all numbers in an expression, infinite if too large."""
    import sympy

    if isinstance(value, sympy.Rational):
        return float(max(value.p.bit_length(), value.q.bit_length()))
    sizes = [_bits(one) for one in _arguments(value)]
    largest = max(sizes, default=1.0)
    if largest > MAX_BITS:
        return float("inf")
    if isinstance(value, sympy.Pow):
        exponent = value.args[1]
        power = abs(float(exponent)) if exponent.is_number else 1.0
        return sizes[0] * max(power, 1.0)
    if isinstance(value, sympy.factorial | sympy.gamma):
        return float(value.args[0]) * 12 if value.args[0].is_number else largest
    if isinstance(value, sympy.Product | sympy.Sum):
        first, last = value.limits[0][1:]
        if first.is_number and last.is_number and abs(float(last - first)) > MAX_INDEX:
            return float("inf")
    return sum(sizes) if isinstance(value, sympy.Mul) else largest + len(sizes)


def _terms(value: Any) -> int:
    """An upper bound of the terms that multiplying an expression out makes."""
    import sympy

    counts = [_terms(one) for one in _arguments(value)]
    if isinstance(value, sympy.Mul):
        return math.prod(counts)
    if isinstance(value, sympy.Pow) and value.exp.is_Integer:
        power = abs(int(value.exp))
        return math.comb(power + counts[0] - 1, power)
    return sum(counts) if isinstance(value, sympy.Add) else max(counts, default=1)


@cache
def library() -> Any:
    import math_verify.parser
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    # It warns that it has no time limit: `holds_within` is one that lasts.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Its default reads R and r as one symbol.
    config = ConversionConfig(lowercase_symbols=False)
    math_verify.parser.latex2sympy = partial(latex2sympy, conversion_config=config)
    return math_verify
