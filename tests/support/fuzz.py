"""Random wrong and odd inputs, each replayable by seed and number."""

import copy
import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

_CHARACTERS = string.printable + "\x00\x1b\x7f\x85\u2028\u202eé😀\ud800"
_SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 15, 16, 17, 47, 48, 49, 64, 100, 1024, 10**6),
    *(2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30, -(2**63), -(2**70)),
    *(0.0, -0.0, 0.5, 1.0, 16.0, 1.5, -0.5, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "16", "true", "null", "dense", "auto", "fixed-64", "fixed-96", "none"),
    *("qwen3-8b-0.86", "\n", "a\nb: error", "\x00", "\x1b[31mred", "\u202eabc", "é😀", "\ud800"),
    *("%s%n{}{0}", "../../etc/passwd", "a,b", "a:b", "self", "x" * 65, "y" * 2000, "z" * 100_000),
]
_KEYS = ("self", "cls", "fields", "schema", "copy", "model_config", "__class__", "__init__", "")


def cases(seed: int, kind: str, numbers: range) -> Iterator[tuple[str, random.Random]]:
    """Name and random generator of each case, which depend only on seed, kind and number."""
    for number in numbers:
        name = f"{seed} {kind} {number}"
        yield name, random.Random(name)


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """A random JSON value, most often an edge case."""
    kind = draw.random()
    if kind < 0.6 or depth > 3:
        return draw.choice(_SCALARS)
    if kind < 0.7:
        return draw.randint(-(2 ** draw.randint(1, 80)), 2 ** draw.randint(1, 80))
    if kind < 0.78:
        return draw.uniform(-1, 1) * 10 ** draw.randint(-5, 20)
    if kind < 0.86:
        return "".join(draw.choices(_CHARACTERS, k=draw.choice([1, 3, 10, 300])))
    if kind < 0.9:
        return [draw.choice(_SCALARS[:20])] * draw.choice([1, 2, 1100])
    if kind < 0.96:
        return [odd_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = [draw.choice([*_KEYS, "a", "report", "dense", "x\ny"]) for _ in range(draw.randrange(4))]
    return {key: odd_value(draw, depth + 1) for key in keys}


def changed(draw: random.Random, fields: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """A deep copy of `fields` with up to two of them changed.

    `known` are names that may be given a value although `fields` does not have them.
    """
    result = copy.deepcopy(dict(fields))
    for _ in range(draw.choice([0, 1, 1, 1, 1, 2])):
        kind, name = draw.random(), draw.choice(known)
        if kind < 0.07 and result:
            del result[draw.choice(list(result))]
        elif kind < 0.15:
            name = draw.choice([*_KEYS, name + "s", name[:-1], name.upper(), "a\nb", "k" * 3000])
            result[name] = draw.choice([1, "x", None])
        else:
            result[name] = odd_value(draw)
    return result


def damaged(draw: random.Random, content: bytes) -> bytes:
    """`content` with random damage: cut, or with bytes replaced, removed, repeated or inserted."""
    result = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        at = draw.randrange(len(result) + 1)
        what = draw.randrange(6)
        if what == 0:
            del result[at:]
        elif what == 1:
            result[at : at + 1] = bytes([draw.randrange(256)])
        elif what == 2:
            result[at:at] = draw.choice(
                [b"\xef\xbb\xbf", b"\x00", b"\xff", b"\n", b'"', b"}", b"1"]
            )
        elif what == 3:
            del result[at : at + draw.randint(1, 20)]
        elif what == 4:
            result[at:at] = bytes(result[at : at + draw.randint(1, 40)])
        else:
            bomb = draw.choice([b"[", b'{"a":', b"9", b"-", b"1e", b"\\u", b"[[", b"a = ["])
            result[at:at] = bomb * draw.choice([10, 5000, 100_000])
    return bytes(result)
