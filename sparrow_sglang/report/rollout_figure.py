"""The figure of a rollout: sequences still running against seconds, by side."""

from collections.abc import Sequence

import numpy as np

from sparrow_sglang.report.page import INK, RULE, drawing, scale, series
from sparrow_sglang.report.sources import Row

# A page that shows the file as an image gives it no style, and may be white or black.
_ANYWHERE = {INK: "#7a828c", RULE: "#8b949e; stroke-opacity: 0.35"}


def rollout_figure(rows: Sequence[Row]) -> str:
    """An SVG file of rows that `sparrow bench rollout` writes, with their `device`: of the largest
    number of sequences the fastest side of stock SGLang, and each of sparrow, or NGRAM alone. Of
    several sets of prompts the first one is shown."""
    most = max(row["sequences"] for row in rows)
    rows = [row for row in rows if row["sequences"] == most]
    dense = [row for row in rows if not (row["schedule"] or row.get("side") == "ngram")]
    dense.sort(key=lambda row: -float(row["tokens_per_s"]))
    shown = [*dense[:1], *(row for row in rows if row["schedule"])] or rows
    longest, device = max(row["longest"] for row in shown), shown[0]["device"]
    title = f"{shown[0]['model']}, {most} sequences of up to {longest:,} tokens, {device}"
    with drawing(title, "seconds", "sequences still running", (7, 3)) as (axes, svg):
        axes.set_title(title, fontsize=10)
        for index, row in enumerate(shown):
            ends = np.sort(np.atleast_2d(row["finished_s"])[0])
            label = f"{_side(row)}, {ends[-1]:,.1f} s"
            running = np.arange(len(ends), -1, -1)
            axes.step([0, *ends], running, where="post", **series(index, label))
        scale(axes, from_zero=True)
        axes.set_xlim(left=0)
    text = svg.getvalue()
    for colour, anywhere in _ANYWHERE.items():
        text = text.replace(colour, anywhere)
    return text


def _side(row: Row) -> str:
    if not row["schedule"]:
        return f"stock SGLang ({row['backend']})"
    return "lossless" if row.get("drafts") else f"sparse ({row['schedule']})"
