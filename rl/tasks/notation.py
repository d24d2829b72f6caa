"""One way to write each answer: LaTeX and plain text without differences that change nothing."""

import re

_CHARACTERS = str.maketrans(
    dict(zip("\u2212\u2013\uff05\u2009\u202f\u00a0~", "--%    ", strict=True))
    | dict.fromkeys("\u20ac\u00a3`", "")
    | {";": ", "}
    | dict.fromkeys("\u00d7\u00b7\u22c5\u2217", "*")
    | {"\u00f7": "/", "\u2248": r"\approx ", "\u03c0": r"\pi ", "\u221e": r"\infty "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u221a": r"\sqrt "}
    | {"\u00b0": r"^\circ ", "\u2227": r"\land ", "\u2228": r"\lor "}
    | {"\u2260": r"\ne ", "\u2208": r"\in ", "\u211d": r"\mathbb{R}"}
    | {"\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}"}
)
_ROW = "\u00a6"
_WRAPPER = re.compile(
    r"\\(?:(?:text)?color *\{\w+\}"
    r"|text\w*|math(?:rm|bf|it|sf)|[mh]box|operatorname|underline|bm|boldsymbol) *\{([^{}]*)\}"
)
_LISTED = re.compile(r",|\b(?:and|or)\b")
# In this order.
_SIMPLER = {
    re.compile(pattern): replacement
    for pattern, replacement in {
        r"\\\\ *(?:\[[^\]]*\])?|\\cr(?![a-z])": _ROW,
        r"\\mathbb *R": r"\\mathbb{R}",
        r"\\left *\\\{ *\\begin\{array\} *\{\w*\}(.*?)\\end\{array\} *\\right *\.": r" \1 ",
        r"\\(?:begin|end)\{(?:cases|aligned?|gathered|split)\}": " ",
        r"\\begin\{array\} *\{[^{}]*\}": r"\\begin{pmatrix}",
        r"\\end\{array\}": r"\\end{pmatrix}",
        r"\\(?:[dtcs]|nice)frac(?![a-z])": r"\\frac",
        r"\\frac *(\d) *(\d)": r"\\frac{\1}{\2}",
        r"\\([lgn])eq?(?:slant)?(?![a-z])": r"\\\1e",
        r"\\sqrt *(?:(\d{2,})|\(([^()]*)\))": r"\\sqrt{\1\2}",
        r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
        r"\\equiv(?![a-z])|(?<!\\)&(?= *=)": "=",
        r"\\(?:lor|vee)(?![a-z])": " or ",
        r"<=": r"\\le ",
        r">=": r"\\ge ",
        r"(?:\^ *(?:\\circ|\{ *\\circ *\})|\\degree) *(?:[CF]\b)?": "",
        r"(?<=\d) ?\^ *\{? *(?:st|nd|rd|th)\b *\}?": "",
        r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|[lL]arge|huge)(?![a-z])": "",
        r"\\! *|\\[()\[\]]|\\?\$": "",
        r"\\varnothing(?![a-z])": r"\\emptyset",
        r"\\%": "%",
        r"\*\*": "^",
        r"\\(?:times|cdot|ast)(?![a-z])": "*",
        r"\{([,:])\}": r"\1",
        r"\\q?quad\b": ",",
        r"\\[,;:> ]": " ",
        r"\s+": " ",
        r"(?<=\d) (?=\d{3}(?![\d/]))": "",
        r"^ ?\( ?(\w) ?, ?(\w) ?\) ?= ?\(([^(),]*),([^(),]*)\)[. ]*$": r"\1=\3, \2=\4",
        r"^ ?\\\{ ?\w(?: ?\\in ?\\mathbb\{R\})? ?(?::|\\mid(?![a-z])|\|)(.*)\\\} ?$": r"\1",
        # Thousands; with a space after the comma, or in brackets, numbers are a list.
        r"(?<![\d.,(\[{])(\d{1,3}),(\d{3})(?:,(\d{3}))?(?:,(\d{3}))?(?![\d,])": r"\1\2\3\4",
        r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?!\w)": r"\1*10^{\2}",
        r"(?<![\d.^_/])(\d+) (\d+)/(\d+)": r"\1\\frac{\2}{\3}",
        r"(?<=\d) ?[aA]\.? ?[mM]\b\.?": " am",
        r"(?<=\d) ?[pP]\.? ?[mM]\b\.?": " pm",
        r"(?<=\d)(?=(?:[cmk]m|[km]g|m[lL]|ft|mph|hrs?|mins?|lbs?)(?![A-Za-z(]))": " ",
        r"(?:square|sq\.?) (\w+)": r"\1^2",
        r"cubic (\w+)": r"\1^3",
        r"\](?=[^\[\]()]*,[^\[\]()]*[\[\])])": "(",
        r"(?<=[(\[])([^\[\]()]*,[^\[\]()]*)\[": r"\1)",
    }.items()
}


def cleaned(text: str) -> str:
    text = text.translate(_CHARACTERS)
    while text != (bare := _WRAPPER.sub(r" \1 ", text)):
        text = bare
    for pattern, replacement in _SIMPLER.items():
        text = pattern.sub(replacement, text)
    text = text.replace(_ROW, r"\\ " if "matrix}" in text else ",")
    text = text.strip(" ,=").removeprefix(r"\approx").rstrip(".").strip()
    sides = re.split(r" *(<|>|\\[lg]e(?![a-z])) *", text)
    if len(sides) > 1 and {*sides[1::2]} <= {">", r"\ge"} and not _LISTED.search(text):
        text = " ".join(sides[::-1]).replace(">", "<").replace(r"\ge", r"\le")
    return text


def flat(text: str) -> str:
    """The text without differences that change nothing in print."""
    text = re.sub(r"\\frac\{(\d+|\w)\}\{(\d+|\w)\}", r"\1/\2", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    return re.sub(r"(?<!\d)\s|\s(?!\d)", "", text)
