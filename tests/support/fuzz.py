"""Wrong and odd inputs, as Hypothesis strategies: JSON values, changed fields, damaged files."""

import copy
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

_EDGES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 15, 16, 17, 47, 48, 49, 64, 100, 1024, 10**6),
    *(2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30, -(2**63), -(2**70)),
    *(0.0, -0.0, 0.5, 1.0, 16.0, 1.5, -0.5, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "16", "true", "null", "dense", "auto", "fixed-64", "fixed-96", "none"),
    *("qwen3-8b-0.86", "\n", "a\nb: error", "\x00", "\x1b[31mred", "\u202eabc", "é😀", "\ud800"),
    *("%s%n{}{0}", "../../etc/passwd", "a,b", "a:b", "self", "x" * 65, "y" * 2000, "z" * 100_000),
    *([None] * 1100, [1] * 1100),
]
_KEYS = ["self", "cls", "fields", "schema", "copy", "model_config", "__class__", "__init__", ""]
_BOMBS = [piece * 50_000 for piece in (b"[", b'{"a":', b"9", b"-", b"1e", b"\\u", b"[[", b"a = [")]

odd_values = st.recursive(
    st.sampled_from(_EDGES)
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(), max_size=300),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*_KEYS, "a", "report", "dense", "x\ny"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, fields: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """A copy of `fields` with up to two of them removed, misnamed or given another value, or one of
    the names `known` added."""
    result = copy.deepcopy(dict(fields))
    for _ in range(draw(st.integers(0, 2))):
        kind, name = draw(st.integers(0, 9)), draw(st.sampled_from(known))
        if kind == 9 and result:
            del result[draw(st.sampled_from(sorted(result)))]
        elif kind == 8:
            names = [*_KEYS, name + "s", name[:-1], name.upper(), "a\nb", "k" * 3000]
            result[draw(st.sampled_from(names))] = draw(st.sampled_from([1, "x", None]))
        else:
            result[name] = draw(odd_values)
    return result


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with a few of its bytes replaced by others."""
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.sampled_from([start, start + 1, start + 20, len(content)]))
        inserted = draw(st.binary(max_size=4) | st.sampled_from([b"\xef\xbb\xbf", *_BOMBS]))
        content = content[:start] + inserted + content[end:]
    return content
